"""Recipes that tests write: of their own, the small one with other words, and those based on it."""

from __future__ import annotations

from pathlib import Path

from torch import nn

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
