"""Weights that a run starts from: found, matched with the model by the recipe's names, listed in a table, and loaded.

The source is a run, a checkpoint, a bundle, a folder for SpeechBrain's ``EncoderASR`` or a file of tensors. Only
tensors are read, and recipes as text: nothing in them is built or run. Once a run has a checkpoint, the source isn't
needed.
"""

from sbkit.runs.initial.loading import (
    MeanWithSource,
    check,
    check_start,
    checkpoints_of,
    filled,
    fresh,
    load,
    open_source,
    source_of,
)

__all__ = ["MeanWithSource", "check", "check_start", "checkpoints_of", "filled", "fresh", "load", "open_source",
           "source_of"]
