"""A command's options for a beam search: a language model and its weights, hot words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.decode.file_errors import unreadable
from sbkit.decode.hotwords import DEFAULT_BOOST, check_no_text, normalise_phrase
from sbkit.errors import SbkitError


def hot_words(options: Sequence[str]) -> dict[str, float]:
    """Parse phrases with their boosts, from ``PHRASE``, ``PHRASE=BOOST`` and ``@FILE`` with such lines."""
    check_no_text(options)
    lines = []
    for option in options:
        if not option.startswith("@"):
            lines.append(option)
            continue
        path = option[1:]
        try:
            lines += filter(str.strip, Path(path).read_text(encoding="utf-8").splitlines())
        except (OSError, UnicodeDecodeError) as error:
            raise unreadable(path, error) from error

    boosts: dict[str, float] = {}
    for line in lines:
        phrase, equals, value = line.rpartition("=")
        if not equals:
            boosts[normalise_phrase(line)] = DEFAULT_BOOST
            continue
        try:
            boost = float(value)
        except ValueError:
            raise SbkitError("bad-hot-word", f"hot word {line!r}: the boost {value!r} is not a number",
                             hint="as in: Ada Lovelace=6", value=line) from None
        boosts[normalise_phrase(phrase)] = boost
    return boosts


def check_weight(options: Mapping[str, Any]) -> None:
    """Raise if a language model's weight is given without the model."""
    if options.get("lm_weight") is not None and not options.get("lm"):
        raise SbkitError("conflicting-options", "a weight is given for a language model, but no language model",
                         hint="name one, such as --lm FILE.arpa (see sbkit lm), or leave out its weight",
                         key="lm_weight")


@dataclass(frozen=True, kw_only=True)
class SearchRequest:
    """The beam search that a command's options request; none without any of them.

    lm, lm_weight, word_score, beam : options of a search with a language model
    hot_words : phrases to prefer, each optionally followed by ``=BOOST``; ``@FILE`` has one per line
    """

    lm: str | None = None
    lm_weight: float | None = None
    word_score: float | None = None
    beam: int | None = None
    hot_words: Sequence[str] = ()

    @property
    def search(self) -> dict[str, Any] | None:
        """The options of the requested search; None without one."""
        options: dict[str, Any] = {"lm": self.lm, "lm_weight": self.lm_weight, "word_score": self.word_score,
                                   "beam": self.beam}
        requested = {name: value for name, value in options.items() if value is not None}
        check_weight(requested)
        if self.hot_words:
            requested["hot_words"] = hot_words(self.hot_words)
        return requested or None
