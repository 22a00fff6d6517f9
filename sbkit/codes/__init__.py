"""Codes of a codec: ids that are in their codebooks, shards of them on disk, and sampling that can give no others."""

from sbkit.codes.books import Books, InvalidCode
from sbkit.codes.shards import CodedUtterance, Codes, check_place, writing
from sbkit.codes.slots import NoChoice, Sampled, Sequences, Slots, SlotState, Special
from sbkit.system.renamed import renamed

__all__ = ["Books", "CodedUtterance", "Codes", "InvalidCode", "NoChoice", "Sampled", "Sequences", "SlotState", "Slots",
           "Special", "check_place", "writing"]

__getattr__ = renamed(__name__, State="SlotState", Utterance="CodedUtterance")
