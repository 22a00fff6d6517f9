"""Which corrections a run can be trained and judged with: those in its letters that are not of its own dev and test."""

from __future__ import annotations

import json
import math
import sys
import unicodedata
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.data.manifest import Manifest
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.recipe.report import listed
from sbkit.system.console import atomic_write

#: A line of a file of corrections: a text, the path of its recording, and what else its author wrote.
Correction = dict[str, Any]  # values of several types
#: Seconds by which the durations of two codings of one recording may differ.
_SAME_LENGTH = 0.06
#: With fewer, there would be none to train on, to validate and to test.
_MIN_SENTENCES = 3


def write_usable(source: Path, manifests: Path, out: Path) -> None:
    """Write the corrections that the run can be trained and judged with, and warn of the others, by reason.

    manifests : the folder with those of the run
    """
    texts = _RunTexts.of(manifests)
    usable = []
    left_out: dict[str, list[str]] = {}
    for correction in _corrections(source):
        why = texts.why_unusable(correction)
        if why:
            left_out.setdefault(why, []).append(str(correction.get("id", correction["audio_filepath"])))
        else:
            path = source.parent / correction["audio_filepath"]
            usable.append(correction | {"audio_filepath": str(path.resolve())})

    reasons = [f"{len(names)} {why}: {', '.join(names[:3])}" for why, names in left_out.items()]
    sentences = len({_letters(correction["text"]) for correction in usable})
    if sentences < _MIN_SENTENCES:
        raise SbkitError("too-few-corrections", f"{source} has {len(usable)} usable corrections of {sentences} "
                         f"sentence{'s' * (sentences != 1)}" + "".join(f"; {reason}" for reason in reasons),
                         hint="correct recordings of more sentences: a tenth of them is the test, and a tenth the dev",
                         file=source)
    if reasons:
        print("corrections left out:", *reasons, sep="\n  ", file=sys.stderr)

    lines = "".join(json.dumps(correction, ensure_ascii=False) + "\n" for correction in usable)
    # A file that would be the same stays, so that a run that is resumed knows it.
    if not out.is_file() or out.read_text(encoding="utf-8") != lines:
        with atomic_write(out) as file:
            file.write(lines)


def _corrections(source: Path) -> list[Correction]:
    """Read a file of corrections; each has a text and the path of its recording."""
    corrections = []
    lines = source.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            correction = json.loads(line)
            _letters(correction["text"])
            source.parent / correction["audio_filepath"]  # raises if it is no path
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):  # without its end: a server is writing it, or was killed meanwhile
                continue
            raise SbkitError("bad-correction", f"{source}, line {number} is no correction: {error!r}", hint=(
                'write {"audio_filepath": ..., "text": ...}, as sbkit serve --corrections does'),
                             file=source, line=number) from None
        corrections.append(correction)
    return corrections


def _letters(text: str) -> str:
    """A text without case, spaces and punctuation."""
    return "".join(letter for letter in unicodedata.normalize("NFC", text.casefold()) if letter.isalnum())


@dataclass(frozen=True)
class _RunTexts:
    """The texts of a run, as ``_letters``."""

    letters: set[str]
    """Those of its training set."""
    held_out: dict[str, list[float]]
    """The durations of the recordings of each text of dev and test."""

    @classmethod
    def of(cls, manifests: Path) -> _RunTexts:
        texts = cls(set(), {})
        for split in SPLITS:
            file = manifests / f"{split}.csv"
            if not file.is_file():
                continue
            manifest = Manifest.read(file)
            for text, seconds in zip(manifest.texts, manifest.durations, strict=True):
                if split == "train":
                    texts.letters.update(_letters(text))
                else:
                    texts.held_out.setdefault(_letters(text), []).append(float(seconds))
        return texts

    def why_unusable(self, correction: Correction) -> str:
        """Why the run can't be trained and judged with a correction; empty if it can."""
        text = _letters(correction["text"])
        if not text:
            return "without words"
        if sum(letter in self.letters for letter in text) < len(text) / 2:
            return "in another script than the run's texts"
        foreign = set(text) - self.letters
        if foreign:
            return f"with letters that the run's texts lack ({listed(sorted(foreign)[:5])}): write what is spoken"
        # A recording that the server wrote anew has another name and other bytes, but its words and, except for the
        # coding's padding, its length.
        seconds = correction.get("duration", math.inf)
        if any(abs(seconds - length) < _SAME_LENGTH for length in self.held_out.get(text, [])):
            return "recordings of the run's own dev or test, which has to stay unseen"
        return ""
