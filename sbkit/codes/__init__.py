"""Codes of a codec: codebooks, checks that ids are in them, and shards on disk."""

from sbkit.codes.books import Books, InvalidCode
from sbkit.codes.shards import CodedUtterance, Codes, check_place, writing

__all__ = ["Books", "CodedUtterance", "Codes", "InvalidCode", "check_place", "writing"]
