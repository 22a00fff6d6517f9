"""Exports trained models as bundles.

The package itself is a function, too: a script calls ``sbkit.export(brain, to="bundle")`` when it has trained.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

#: What exports a script's Brain, and what opens the bundle to try it: both are above this package.
_SCRIPT, _BUNDLES = "sbkit.tasks.ctc.script", "sbkit.infer.bundles"


class _Callable(types.ModuleType):
    """A package that can be called."""

    def __call__(self, brain: object, to: str | Path, test_set: object = None, **options: Any) -> None:
        """Export the CTC recogniser of a script's ``sbkit.Brain``, with the weights that it has, as a bundle.

        to : the folder to create
        test_set : recordings to compare on, a dataset or a loader; None: those of the latest test or validation
        options : formats, force, tolerance and clips, as the command ``sbkit export`` takes them
        """
        bundles = importlib.import_module(_BUNDLES).BundleLoader()
        importlib.import_module(_SCRIPT).export_brain(brain, to, test_set, bundles=bundles, **options)


sys.modules[__name__].__class__ = _Callable
