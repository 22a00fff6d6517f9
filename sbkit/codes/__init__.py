"""Codes of a codec: ids that are in their codebooks, shards of them on disk, and sampling that can give no others."""

from sbkit.codes.books import Books, InvalidCode
from sbkit.codes.shards import Codes, Utterance, check_place, writing
from sbkit.codes.slots import NoChoice, Sampled, Sequences, Slots, Special, State

__all__ = ["Books", "Codes", "InvalidCode", "NoChoice", "Sampled", "Sequences", "Slots", "Special", "State",
           "Utterance", "check_place", "writing"]
