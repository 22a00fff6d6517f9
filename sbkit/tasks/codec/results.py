"""Results of a codec's test: intelligibility, WER of a recogniser, use of the codebooks, and sample clips."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import numpy as np

from sbkit.score.results import Table
from sbkit.system.console import counted
from sbkit.tasks.generation import SoundResults, means, measure_of


class CodecRow(NamedTuple):
    """An utterance; None: not measured."""

    id: str
    reference: str
    samples: int
    mel_distance: float  # decibels
    codes: np.ndarray  # [T, Q] int32
    seconds: float | None = None  # of computing
    stoi: float | None = None
    pesq: float | None = None
    recording_transcript: str | None = None
    output_transcript: str | None = None
    sound: np.ndarray | None = None  # [S] int16, of the sample clips


#: Clips in the table of the worst.
WORST = 12


@dataclass(frozen=True)
class CodecFacts:
    """The properties of a codec that its results depend on."""

    sizes: tuple[int, ...]
    bit_rate: float
    sample_rate: int


def measures(rows: Sequence[CodecRow], books: CodecFacts) -> dict[str, float]:
    """Compute the means of all measures, and the perplexity of the codes, a mean over books.

    The mel distance is a mean over code frames, others over clips.
    """
    frames = np.array([len(row.codes) for row in rows])
    found = {"mel_distance": float(np.average([row.mel_distance for row in rows], weights=frames)),
             "perplexity": float(np.mean([perplexity(counts) for counts in used(rows, books)]))} if rows else {}
    return found | means(rows, STOI="stoi", PESQ="pesq")


def used(rows: Sequence[CodecRow], books: CodecFacts) -> list[np.ndarray]:
    """Count how often each entry of each book is used: an array [K] for each."""
    codes = np.concatenate([row.codes for row in rows]) if rows else np.zeros((0, len(books.sizes)), np.int32)
    return [np.bincount(codes[:, i], minlength=size) for i, size in enumerate(books.sizes)]


def entropy(counts: np.ndarray) -> float:
    """Compute the entropy of codes in bits, from how often each is used."""
    shares = counts[counts > 0] / max(1, counts.sum())
    return float(-(shares * np.log2(shares)).sum())


def perplexity(counts: np.ndarray) -> float:
    """Compute the number of entries that would have the same entropy if all were used equally often."""
    return 2 ** entropy(counts)


@dataclass
class CodecResults(SoundResults):
    """Rows of a test, their statistics, and a recogniser's error rates on those that have a text."""

    rows: Sequence[CodecRow] = ()
    books: CodecFacts = field(kw_only=True)
    maker: ClassVar[str] = "codec"

    @classmethod
    def of(cls, rows: Sequence[CodecRow], loss: float, unread: Mapping[str, str], books: CodecFacts) -> CodecResults:
        """Compute the results of a test from its rows."""
        found = cls({"loss": loss, **measures(rows, books)}, len(rows), dict(unread), sample_rate=books.sample_rate,
                    rows=rows, books=books)
        found.add_word_rates()
        computing = sum(row.seconds or 0.0 for row in rows)
        seconds = sum(row.samples for row in rows) / books.sample_rate
        found.stats |= {"bit_rate": books.bit_rate,
                        "coding_real_time_factor": computing / seconds if seconds else math.nan}
        codebooks = Table("The codebooks", ["book", "entries", "used in the test", "perplexity", "bits"], [
            [i, len(counts), f"{int((counts > 0).sum())} ({(counts > 0).mean():.0%})", f"{perplexity(counts):.0f}",
             f"{entropy(counts):.2f} of {math.log2(len(counts)):.2f}"]
            for i, counts in enumerate(used(rows, books), 1)])
        found.tables = [found._measured(), codebooks, found._worst()]
        return found

    def headline(self) -> str:
        parts = [f"mel distance {self.stats['mel_distance']:.2f} dB"]
        parts += [f"{name} {self.stats[name]:.3f}" for name in ("STOI", "PESQ") if name in self.stats]
        if "WER" in self.stats:
            parts.append(f"WER {self.stats['WER']:.2f} % (recordings {self.stats['WER_of_recordings']:.2f} %)")
        return ", ".join([*parts, f"{self.books.bit_rate:.0f} bit/s", counted(self.utterances, "utterance")])

    def facts(self) -> dict[str, Any]:
        return {**self.stats, "codebooks": [
            {"entries": len(counts), "used": int((counts > 0).sum()), "perplexity": perplexity(counts),
             "entropy_bits": entropy(counts)} for counts in used(self.rows, self.books)], **self.intervals()}

    def columns(self) -> list[tuple[str, Any]]:
        names = [name for name in self.stats if name not in ("loss", "coding_real_time_factor")]
        return [(name.replace("_", " ").replace("WER", "WER %"),
                 f"{self.stats[name]:{'.2f' if 'WER' in name else '.4g'}}") for name in names]

    def remark(self, row: CodecRow) -> str:
        stoi = [] if row.stoi is None else [f"STOI {row.stoi:.3f}"]
        transcript = [] if row.output_transcript is None else [f"transcript: {row.output_transcript}"]
        return " · ".join([*stoi, f"mel distance {row.mel_distance:.1f} dB", *transcript, row.id])

    # ------------------------------------------------------------ tables

    def _measured(self) -> Table:
        """Make the table of all measures."""
        stats, rows = self.stats, []
        if "STOI" in stats:
            least = min(row.stoi for row in self.rows if row.stoi is not None)
            rows.append(["STOI", f"{stats['STOI']:.3f}", f"intelligibility, at most 1; worst clip {least:.3f}"])
        if "PESQ" in stats:
            rows.append(["PESQ", f"{stats['PESQ']:.2f}", "quality, 1 to 4.6"])
        rows.append(["mel distance", f"{stats.get('mel_distance', math.nan):.2f} dB", "between spectra; 0: identical"])
        bits = sum(math.log2(size) for size in self.books.sizes)
        coded = self.books.bit_rate * sum(map(entropy, used(self.rows, self.books))) / bits
        rows += [*self.error_rate_rows(),
                 ["bit rate", f"{self.books.bit_rate:.0f} bit/s", f"{coded:.0f} with entropy coding"],
                 ["real-time factor", f"{stats['coding_real_time_factor']:.4f}", "of coding and decoding together"]]
        return Table("How it sounds", ["measure", "value", "note"], rows)

    def _worst(self) -> Table:
        """Make the table of the worst clips: by STOI, or by the mel distance where STOI was not measured."""
        rows = sorted(self.rows, key=lambda row: (1.0 if row.stoi is None else row.stoi, -row.mel_distance))[:WORST]
        transcribed = self.after is not None
        transcripts = ["transcript of the recording", "of the codec's output"] if transcribed else []
        return Table(
            "The worst clips", ["clip", "STOI", "mel distance", *transcripts],
            [[row.id, "" if row.stoi is None else f"{row.stoi:.3f}", f"{row.mel_distance:.2f}",
              *([row.recording_transcript, row.output_transcript] if transcribed else [])] for row in rows])


#: Rates at which PESQ is defined, and the names of its two kinds.
_PESQ = {8_000: "nb", 16_000: "wb"}


def pesq(reference: np.ndarray, output: np.ndarray, sample_rate: int) -> float | None:
    """Compute the perceptual evaluation of speech quality, 1 to 4.64; None for a clip without speech, at other sample
    rates than PESQ's, and if pesq is not installed."""
    measure = measure_of("pesq", "pesq")
    if measure is None or sample_rate not in _PESQ:
        return None
    score = measure(sample_rate, reference, output, _PESQ[sample_rate], on_error=1)
    return float(score) if score > 0 else None  # -1: no speech was found
