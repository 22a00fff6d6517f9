"""Recipes that tests write: of their own, the small one with other words, and those based on it."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from types import ModuleType

from torch import Tensor, nn

SMALL = Path(__file__).with_name("small.yaml")
#: The first line of a recipe based on the small one; what follows, indented, changes it.
BASED = f"recipe: !include:{SMALL}\n"


def write(folder: Path, text: str) -> Path:
    """A recipe's file with this text."""
    path = folder / "recipe.yaml"
    path.write_text(text, encoding="utf-8")
    return path


def changed(folder: Path, instead: dict[str, str]) -> Path:
    """The small recipe with other words."""
    text = SMALL.read_text(encoding="utf-8")
    for written, other in instead.items():
        assert written in text, written
        text = text.replace(written, other)
    return write(folder, text)


class Head(nn.Linear):
    """A head in place of the small recipe's, with the names that SpeechBrain has for its arguments."""

    def __init__(self, input_size, n_neurons):
        super().__init__(input_size, n_neurons)


def described(obj, seen):
    """An object as text: its class, what is in it, and which of its parts are the same object.

    seen : the names of objects by id, for the caller to begin with an empty one
    """
    if obj is None or isinstance(obj, (bool, int, float, str, bytes, date, type, ModuleType)):
        return repr(obj)
    if isinstance(obj, tuple):  # has no identity that anybody could see
        return f"({', '.join(described(each, seen) for each in obj)})"
    if (name := seen.get(id(obj))) is not None:
        return name
    seen[id(obj)] = f"{type(obj).__name__} {len(seen)}"
    if isinstance(obj, list):
        inside = [described(each, seen) for each in obj]
    elif isinstance(obj, Mapping):
        inside = [f"{key!r}: {described(each, seen)}" for key, each in obj.items()]
    elif isinstance(obj, functools.partial):
        inside = [described(each, seen) for each in (obj.func, obj.args, obj.keywords)]
    elif isinstance(obj, Tensor):
        values = hashlib.sha256(obj.detach().contiguous().numpy().tobytes()).hexdigest()
        inside = [f"{obj.dtype} {tuple(obj.shape)} {obj.requires_grad} {values}"]
    elif hasattr(obj, "__qualname__"):
        inside = [obj.__qualname__]
    else:
        fields = {key: each for key, each in getattr(obj, "__dict__", {}).items() if "hooks" not in key}
        inside = [described(each, seen) for each in fields.items()]  # hooks have numbers of their own
    return f"{seen[id(obj)]}({', '.join(inside)})"
