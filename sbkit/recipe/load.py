"""Reads a recipe: a HyperPyYAML file and overrides become objects, or one plain error."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hyperpyyaml import load_hyperpyyaml
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import check_known


def read_plain(path: Path) -> dict[str, Any]:
    """The YAML as a tree with its tags, nothing imported and nothing built."""
    try:
        tree = YAML().load(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SbkitError(f"{path}{where}: {error.problem or error.context}") from error
    except UnicodeDecodeError as error:
        raise SbkitError(f"{path} is not UTF-8 text: {error}") from error
    if not isinstance(tree, dict):
        raise SbkitError(f"{path} holds no key: value pairs")
    return tree


def load(path: Path, overrides: dict[str, Any]) -> dict[str, Any]:
    """Build the recipe's objects; whatever goes wrong is told with the file's name."""
    check_known(overrides, list(read_plain(path)), path)
    try:
        with open(path, encoding="utf-8") as stream:
            return load_hyperpyyaml(stream, overrides)
    except SbkitError:
        raise
    except Exception as error:
        cause = str(error).strip().splitlines()
        raise SbkitError(f"{path} cannot be loaded: {type(error).__name__}: {cause[0] if cause else ''}") from error


def require(hparams: dict[str, Any], path: Path, *keys: str) -> None:
    """The keys that a stage cannot do without."""
    missing = [key for key in keys if key not in hparams]
    if missing:
        raise SbkitError(f"{path} lacks {', '.join(missing)}", hint="hparams/ctc.yaml shows a complete recipe")
