"""Reads a recipe: a HyperPyYAML file and overrides become objects, or one plain error.

A recipe may rest on another one and hold only what differs:

    recipe: !include:../ctc.yaml
        d_model: 512

HyperPyYAML puts the included tree under the key ``recipe``. Here its keys become the recipe's own, and
overrides reach the file they belong to.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hyperpyyaml import load_hyperpyyaml

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import check_known
from sbkit.recipe.includes import Files, chain, keys, place, read_plain
from sbkit.recipe.merging import merged
from sbkit.recipe.source import BASE

__all__ = ["chain", "check_overrides", "flatten", "load", "merged", "place", "read_plain", "require"]


def check_overrides(path: Path, overrides: Mapping[str, Any]) -> Files:
    """Refuse an override of a key that no file of the chain has; gives the chain."""
    files = chain(path)
    check_known(dict(overrides), [key for _, tree in files for key in keys(tree)], path)
    return files


def load(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Build the recipe's objects; whatever goes wrong is told with the file's name."""
    check_overrides(path, overrides)
    try:
        hparams = load_hyperpyyaml(merged(path, overrides))
    except SbkitError:
        raise
    except OSError as error:
        raise SbkitError(f"cannot use {error.filename or path}: {error.strerror}",
                         hint="choose another place with --output_folder") from error
    except Exception as error:
        cause = str(error).strip().splitlines()
        raise SbkitError(f"{path} cannot be loaded: {type(error).__name__}: {cause[0] if cause else ''}") from error
    return flatten(hparams)


def flatten(hparams: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the included recipes and the recipe's own, the latter winning."""
    own = dict(hparams)
    base = own.get(BASE)
    if not isinstance(base, Mapping):
        return own
    del own[BASE]
    return flatten(base) | own


def require(hparams: Mapping[str, Any], path: Path, *keys: str) -> None:
    """The keys that a stage cannot do without."""
    missing = [key for key in keys if key not in hparams]
    if missing:
        raise SbkitError(f"{path} lacks {', '.join(missing)}", hint="hparams/ctc.yaml shows a complete recipe")
