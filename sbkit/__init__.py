"""sbkit: train speech models from YAML recipes, with checks, speed and crash safety, and ship them.

    import sbkit
    class ASR(sbkit.Brain): ...          # a drop-in replacement for speechbrain.Brain

A script of SpeechBrain may also be moved by one import, ``import sbkit as sb``.
"""

from __future__ import annotations

import os
import sys
from typing import Any

__version__ = "0.1.0"

# ONNX Runtime from 1.32 on reports to its maker as soon as it is imported. Nobody has asked for that, and a process
# that is forked while its thread looks a name up can't look up any.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

# Resolved on first use, so that `import sbkit` costs nothing, and inference never imports training code.
_LAZY = {
    "Brain": "sbkit.compat.brain",
    "Loss": "sbkit.train.loss",
    "Checkpointer": "sbkit.train.checkpoint",
    "Stage": "speechbrain.core",
    "SbkitError": "sbkit.errors",
    **dict.fromkeys(("parse_arguments", "create_experiment_directory", "augment", "dataio", "decoders", "inference",
                     "lobes", "nnet", "processing", "tokenizers", "utils"), "speechbrain"),
}


def __getattr__(name: str) -> Any:  # one of these, each of a type of its own
    if name == "core":  # SpeechBrain's recipes derive from sb.Brain and sb.core.Brain, which are one
        return sys.modules[__name__]
    import importlib

    if name == "export":  # a package that is a function, too
        return importlib.import_module("sbkit.export")
    if name not in _LAZY:
        raise AttributeError(f"module 'sbkit' has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
