"""Pronunciations of single words by espeak-ng, in IPA symbols."""

from __future__ import annotations

import functools
import re
import threading
import unicodedata
from collections.abc import Iterable

from sbkit.errors import SbkitError

#: Valid names of a voice; they become part of a path.
NAME = re.compile(r"[a-z]{2,3}(-[a-z0-9]{1,10})*(\+[A-Za-z0-9]{1,20})?")
_MAX_WORDS = 50_000  # cached
_LONGEST = 64  # characters that espeak-ng gets at once
_SWITCH = re.compile(r"\([a-z-]+\)")  # a switch to another language, for a foreign word, and back
_LIAISON = "-"
#: espeak-ng has static variables: one thread at a time.
_LOCK = threading.Lock()


class Pronunciation:
    """The pronunciation of words by a voice of espeak-ng, with a cache; threads may share it.

    voice : such as ``en-us``
    """

    def __init__(self, voice: str):
        self.voice = voice
        self._known: dict[str, str] = {}

    def learn(self, words: Iterable[str]) -> None:
        """Look up words, all at once, and cache them."""
        from sbkit.data import demo_voice  # needs numpy, which code that only checks names need not load

        with _LOCK:
            missing = sorted({word for word in words if word} - self._known.keys())
            if not missing:
                return
            if len(self._known) + len(missing) > _MAX_WORDS:
                self._known = {}
            # espeak-ng gets long words in parts.
            parts_of_words = [[word[at:at + _LONGEST] for at in range(0, len(word), _LONGEST)] for word in missing]
            all_parts = [part for parts in parts_of_words for part in parts]
            sounds = (unicodedata.normalize("NFC", _SWITCH.sub("", sound)).replace(_LIAISON, "").strip()
                      for sound in demo_voice.pronounce(all_parts, self.voice))
            for word, parts in zip(missing, parts_of_words, strict=True):
                self._known[word] = "".join(next(sounds) for _ in parts)

    def __call__(self, word: str) -> str:
        """Return the symbols of a word; empty if espeak-ng doesn't pronounce it."""
        symbols = self._known.get(word)
        if symbols is None:
            self.learn([word])
            symbols = self._known.get(word, "")
        return symbols


@functools.cache
def pronunciation(voice: str) -> Pronunciation:
    """Return a voice's pronunciation, cached; raises if there is no such voice, or no espeak-ng."""
    if not NAME.fullmatch(voice):
        raise SbkitError("unknown-voice", f"espeak-ng has no voice {voice!r}",
                         hint="voices have names such as en-us or fr", value=voice)
    pronounce = Pronunciation(voice)
    pronounce.learn(["a"])  # raises if there is no such voice
    return pronounce


def split_punctuation(word: str) -> tuple[str, str, str]:
    """Split a word into the marks before it, what is pronounced, and the marks behind it."""
    spoken = [at for at, character in enumerate(word) if unicodedata.category(character)[0] in "LMN"]
    if not spoken:
        return word, "", ""
    begin = spoken[0]
    end = spoken[-1] + 1
    return word[:begin], word[begin:end], word[end:]


def symbol_weights(symbols: str) -> list[float]:
    """Return 1 for each symbol with a duration, and 0 for marks of stress and length; 1 for all if all are marks."""
    weights = [0.0 if unicodedata.category(symbol) in ("Lm", "Mn", "Sk") else 1.0 for symbol in symbols]
    return weights if any(weights) else [1.0] * len(weights)
