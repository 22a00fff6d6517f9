"""Codes of a codec: ids that are in their codebooks, and shards of them on disk."""

from sbkit.codes.books import Books, InvalidCode
from sbkit.codes.shards import CodedUtterance, Codes, check_place, writing
from sbkit.system.renamed import renamed

__all__ = ["Books", "CodedUtterance", "Codes", "InvalidCode", "check_place", "writing"]

__getattr__ = renamed(__name__, Utterance="CodedUtterance")
