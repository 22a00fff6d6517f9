"""Command-line options of a search: a language model and its weights, hot words."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError


def hot_words(given: Sequence[str], boost: float = 5.0) -> dict[str, float]:
    """Parse phrases with their boosts, from ``PHRASE``, ``PHRASE=BOOST`` and ``@FILE`` with such lines."""
    phrases: dict[str, float] = {}
    for each in given:
        lines = [each]
        if each.startswith("@"):
            try:
                lines = Path(each[1:]).read_text(encoding="utf-8").splitlines()
            except (OSError, UnicodeDecodeError) as error:
                raise SbkitError(f"{each[1:]} cannot be read: {error}") from error
        for line in filter(str.strip, lines):
            phrase, equals, value = line.rpartition("=")
            try:
                phrases[(phrase if equals else line).strip()] = float(value) if equals else boost
            except ValueError:
                raise SbkitError(f"hot word {line!r}: the boost {value!r} is not a number",
                                 hint="as in: Ada Lovelace=6") \
                    from None
    return phrases


def search(lm: str | None, lm_weight: float | None, word_score: float | None, beam: int | None,
           phrases: Sequence[str]) -> dict[str, Any] | None:
    """Collect the options of a search; None if none was given."""
    options: dict[str, Any] = {"lm": lm, "lm_weight": lm_weight, "word_score": word_score, "beam": beam}
    given = {name: value for name, value in options.items() if value is not None}
    if phrases:
        given["hot_words"] = hot_words(phrases)
    return given or None
