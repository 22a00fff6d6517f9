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
from ruamel.yaml import YAML
from ruamel.yaml.error import MarkedYAMLError, YAMLError

from sbkit.errors import SbkitError
from sbkit.recipe.arguments import check_known
from sbkit.recipe.source import ShallowComposer

BASE = "recipe"
_INCLUDE = "!include:"


def read_plain(path: Path) -> dict[str, Any]:
    """The YAML as a tree with its tags, nothing imported and nothing built."""
    try:
        yaml = YAML()
        yaml.Composer = ShallowComposer
        tree = yaml.load(path.read_text(encoding="utf-8"))
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f":{mark.line + 1}:{mark.column + 1}" if mark else ""
        raise SbkitError(f"{path}{where}: {error.problem or error.context}") from error
    except UnicodeDecodeError as error:
        raise SbkitError(f"{path} is not UTF-8 text: {error}") from error
    except YAMLError as error:
        raise SbkitError(f"{path} is no YAML: {str(error).splitlines()[0]}") from error
    except OSError as error:
        raise SbkitError(f"cannot read {path}: {error.strerror}") from error
    if not isinstance(tree, dict):
        raise SbkitError(f"{path} holds no key: value pairs")
    return tree


def chain(path: Path) -> list[tuple[Path, dict[str, Any]]]:
    """The recipe and those it rests on, each with its tree."""
    found: list[tuple[Path, dict[str, Any]]] = []
    while path is not None:
        if any(path.resolve() == known.resolve() for known, _ in found):
            raise SbkitError(f"{path} includes itself")
        tree = read_plain(path)
        found.append((path, tree))
        tag = str(getattr(getattr(tree.get(BASE), "tag", None), "value", None) or "")
        path = path.parent / tag[len(_INCLUDE) :] if tag.startswith(_INCLUDE) else None
    return found


def place(overrides: Mapping[str, Any], files: list[tuple[Path, dict[str, Any]]]) -> dict[str, Any]:
    """Overrides as a tree that reaches, through the includes, the file that defines each key."""
    placed: dict[str, Any] = {}
    for key, value in overrides.items():
        depth = max((i for i, (_, tree) in enumerate(files) if key in tree), default=0)
        node = placed
        for _ in range(depth):
            node = node.setdefault(BASE, {})
        node[key] = value
    return placed


def check_overrides(path: Path, overrides: Mapping[str, Any]) -> list[tuple[Path, dict[str, Any]]]:
    """Refuse an override of a key that no file of the chain has; gives the chain."""
    files = chain(path)
    check_known(dict(overrides), [key for _, tree in files for key in tree], path)
    return files


def load(path: Path, overrides: Mapping[str, Any]) -> dict[str, Any]:
    """Build the recipe's objects; whatever goes wrong is told with the file's name."""
    files = check_overrides(path, overrides)
    try:
        with open(path, encoding="utf-8") as stream:
            hparams = load_hyperpyyaml(stream, place(overrides, files))
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
