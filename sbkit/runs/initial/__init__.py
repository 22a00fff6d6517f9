"""Weights that a run starts from: found, matched with its own by the recipe's names, told in a table, and loaded.

A run, a checkpoint, a bundle, a folder for SpeechBrain's ``EncoderASR`` or a file of tensors will do. Only tensors are
read, and recipes as text: nothing of them is built or run. Once a run has a checkpoint of its own it needs the source
no more.
"""

from sbkit.runs.initial.loading import MeanWithSource, check, check_start, filled, fresh, load, open_source, source_of

__all__ = ["MeanWithSource", "check", "check_start", "filled", "fresh", "load", "open_source", "source_of"]
