"""The transcripts of a validation or test, their error rates, and the results of a test of a recogniser."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.score import utterances
from sbkit.score.latency import LiveTranscript
from sbkit.score.rates import ErrorRates
from sbkit.score.results import Results
from sbkit.score.significance import MIN_UTTERANCES, interval, interval_in_text
from sbkit.system.console import atomic_write, counted

logger = logging.getLogger(__name__)

NBEST = "nbest.jsonl"


class NBestEntry(NamedTuple):
    """One hypothesis of a search, with its score and the acoustic part of it, both natural logarithms."""

    text: str
    score: float
    acoustic: float


def nbest_entries(hypotheses: Sequence[Any]) -> tuple[NBestEntry, ...]:
    """Convert a search's hypotheses of an utterance for its row."""
    return tuple(NBestEntry(one.text, one.score, one.acoustic) for one in hypotheses)


class TranscribedUtterance(NamedTuple):
    """One transcribed utterance of a validation or test."""

    id: str
    reference: str
    hypothesis: str
    confidence: float | None = None  # 0 to 1; None for an empty hypothesis, or if the task has none
    nbest: Sequence[NBestEntry] = ()  # best first; empty without a search
    live: Sequence[LiveTranscript] = ()  # its live transcripts, for each chunk size of an evaluation


def score(rows: Sequence[TranscribedUtterance]) -> tuple[ErrorRates, ErrorRates]:
    """Compute word and character error rates; utterances without a reference are left out with a warning."""
    empty = [row.id for row in rows if not row.reference.split()]
    if empty:
        logger.warning("%d utterances have no reference and are not scored: %s", len(empty), ", ".join(empty[:5]))
    scored = [(row.id, row.reference, row.hypothesis) for row in rows if row.reference.split()]
    words, characters = ErrorRates("word"), ErrorRates("character")
    if scored:
        words.add(*zip(*scored, strict=True))
        characters.add(*zip(*scored, strict=True))
    return words, characters


def rates_by_name(rows: Sequence[TranscribedUtterance]) -> dict[str, float]:
    """Compute the statistics of a validation: WER and CER in per cent."""
    words, characters = score(rows)
    return {"WER": words.rate, "CER": characters.rate}


def write_nbest(path: Path, rows: Sequence[TranscribedUtterance]) -> None:
    """Write each utterance's hypotheses as a line of JSON."""
    with atomic_write(path) as out:
        for row in rows:
            line = {"id": row.id, "reference": row.reference, "hypotheses": [one._asdict() for one in row.nbest]}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


@dataclass
class ASRResults(Results):
    """Rows of a test, and the error rates of those that have a reference."""

    rows: Sequence[TranscribedUtterance] = ()
    words: ErrorRates = field(kw_only=True)
    characters: ErrorRates = field(kw_only=True)
    remark: str | None = field(default=None, kw_only=True)
    """A line below the rates."""

    @classmethod
    def of(cls, rows: Sequence[TranscribedUtterance], loss: float, unread: Mapping[str, str]) -> ASRResults:
        """Compute the results of a test from its rows."""
        words, characters = score(rows)
        return cls({"loss": loss, "WER": words.rate, "CER": characters.rate}, len(rows), dict(unread), rows=rows,
                   words=words, characters=characters)

    def headline(self) -> str:
        return (f"WER {self.words.rate:.2f} % (95 % interval {interval_in_text(self.words)}), "
                f"CER {self.characters.rate:.2f} %, {counted(len(self.words), 'utterance')}")

    def lines(self) -> list[str]:
        """Show one utterance as an example, and the remark."""
        words = self.words
        return [f"{words.ids[0]}\n  reference   {' '.join(words.references[0])}\n"
                f"  hypothesis  {' '.join(words.hypotheses[0])}", *([self.remark] if self.remark else [])]

    def check(self) -> None:
        """Raise if no utterance has a reference."""
        if not len(self.words):
            raise SbkitError("no-transcripts", f"none of the {self.utterances} utterances has a reference, so there is "
                             "nothing to score", hint="score on a corpus with transcripts")

    def facts(self) -> dict[str, Any]:
        summary = self.words.summary()
        counts = {name: summary[name]
                  for name in ("SER", "insertions", "deletions", "substitutions", "num_scored_tokens")}
        return {"WER": self.words.rate, "WER_interval": interval(self.words), "CER": self.characters.rate,
                "CER_interval": interval(self.characters), **counts,
                "without_reference": [row.id for row in self.rows if not row.reference.split()]}

    def columns(self) -> list[tuple[str, Any]]:
        columns: list[tuple[str, Any]] = []
        for name, rates in (("WER %", self.words), ("CER %", self.characters)):
            # The number of utterances, which is why it is unknown, is in the same line.
            bounds = interval_in_text(rates) if len(rates) >= MIN_UTTERANCES else "unknown"
            columns += [(name, rates.rate), ("95 % interval", bounds)]
        return columns

    def files(self, of: str = "") -> list[str]:
        line = "_" if of else ""
        return [f"wer{line}{of}.txt", f"cer{line}{of}.txt", f"{of}{line}utterances.jsonl"]

    def where(self, folder: Path, of: str = "") -> str:
        return f"every alignment: {folder / self.files(of)[0]}"

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Write all alignments, all utterances with their transcripts, and a search's other hypotheses."""
        words, characters, transcripts = (folder / name for name in self.files(of))
        self.words.write(words)
        self.characters.write(characters)
        utterances.write(transcripts, utterances.join(self.rows, manifest))
        if not of and any(row.nbest for row in self.rows):
            write_nbest(folder / NBEST, self.rows)
