"""Compares every exported format with the checkpoint; a bundle that differs is not published."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.runners import Output, Runner, TranscribingRunner
from sbkit.recipe.report import listed
from sbkit.score.rates import ErrorRates
from sbkit.system import disk
from sbkit.system.console import table

CHECKPOINT = "checkpoint"
_ROUNDING = 0.1  # largest difference of an output that rounding can cause
_TIE = 1e-4  # labels whose log-probabilities differ by no more than this count as equal
TOLERANCE = 1e-3  # largest difference of an output, for formats that compute in fp32
#: Allowed increase of the WER by 8-bit weights: in points, or relative to the WER if that is more.
POINTS, SHARE = 1.0, 0.1
#: Share of the clips (at least one) whose words may change in a program that modifies the waveform first.
_MAX_CHANGED_SHARE = 0.02


@dataclass
class ParityResult:
    """The result of comparing one format."""

    format: str
    bytes: int | None
    """Size of its files; None for the checkpoint, and for an imported model's original code."""
    difference: float | None
    """Largest absolute difference from the checkpoint's outputs; None for a program that outputs only words."""
    batch_difference: float | None
    """Largest absolute difference in a batch of uneven lengths; None for a format that takes no batches."""
    words_changed: int
    """Number of clips whose words differ from the checkpoint's, not counting ties that rounding decides and joined
    words."""
    wer: float | None
    """WER against the transcripts, per cent; None without transcripts."""
    wer_of_checkpoint: float
    """WER against the checkpoint's words, per cent."""
    rtf: float
    """Real-time factor: seconds of computing per second of audio."""
    where: str = ""
    """The clip, output and frame in which it differs most."""
    changed: Sequence[str] = ()
    """The names of the clips whose words differ."""
    words_joined: int = 0
    """Number of clips in which a program that decodes by itself joins words, because for it no pause ends a word."""


class Comparison:
    """Runs formats on the clips and compares their outputs with the checkpoint's.

    reference : runs the checkpoint on one waveform [S]
    text : turns an output into text; None for outputs without words
    reference_text : turns the checkpoint's output into text, if not by ``text``
    outputs : the outputs' names if there are several; each clip then has a tuple of arrays
    rate : what the share of wrong texts is called
    """

    def __init__(self, clips: ComparisonClips, reference: Callable[[np.ndarray], Output], sample_rate: float,
                 text: Callable[[Any], str] | None = None, reference_text: Callable[[Any], str] | None = None,
                 outputs: Sequence[str] = (), rate: str = "WER"):
        self.rate = rate
        self.clips, self.sample_rate, self.text = clips, sample_rate, text or (lambda output: "")
        self.has_words, self.outputs = text is not None, outputs
        self.expected, seconds = _timed(lambda clip: reference(clip.signal), clips.alone)
        self.texts = [(reference_text or self.text)(each) for each in self.expected]
        self.results = [ParityResult(CHECKPOINT, None, 0.0, None, 0, self._wer(self.texts), 0.0, self._rtf(seconds))]
        self.companions: dict[str, Mapping[str, Comparison]] = {}
        """Comparisons of further graphs, by their names and by modes of running them."""

    what = "outputs"
    """What the outputs are, for messages."""
    compared_with = "the checkpoint"
    """What the expected outputs come from, for messages."""
    max_changed_share = _MAX_CHANGED_SHARE
    """Share of the clips, at least one, whose words may change in a program that outputs only words. 0: only those of
    clips with a tie that rounding decides."""

    thresholds: Sequence[float] | None = None
    """The scores from which labels are results, of a model that gives a recording several."""
    left_out: Mapping[str, str] = {}
    """The reason of each format that isn't published."""
    hint: str | None = None
    """What to do about them."""

    max_changed_clips = 0
    """Number of clips whose words may differ from the checkpoint's, not counting ties."""

    joined_texts: Sequence[str] | None = None
    """What a program writes of each clip's expected output if no pause ends a word for it."""
    spaced = True
    """Whether spaces separate words, so that texts with other spaces differ."""

    def take_joined_texts(self, texts: Sequence[str], spaced: bool) -> None:
        """Take what the checkpoint's tokenizer writes of the expected outputs; raises if it has other letters than
        the texts to compare with, apart from half characters."""
        self.joined_texts, self.spaced = texts, spaced
        for clip, text, joined in zip(self.clips.alone, self.texts, texts, strict=True):
            if "\ufffd" not in text + joined and "".join(text.split()) != "".join(joined.split()):
                raise SbkitError(f"the model's own tokenizer writes {joined!r} for {clip.name}, but the bundle would "
                                 f"write {text!r}", hint="please report it, with the recipe's tokenizer")

    def _same(self, one: str, other: str) -> bool:
        """Whether two texts have the same words."""
        return one.split() == other.split() if self.spaced else "".join(one.split()) == "".join(other.split())

    def max_difference(self, expected: list[Output], found: list[Output]) -> float:
        """Return the largest difference from the expected outputs; infinity for other shapes or non-finite values."""
        worst = 0.0
        for pair in zip(expected, found, strict=True):
            for reference, output in zip(*map(_parts, pair), strict=True):
                if reference.shape != output.shape or not (np.isfinite(reference).all() and np.isfinite(output).all()):
                    return float("inf")
                if reference.size:
                    worst = max(worst, float(np.abs(reference - output).max()))
        return worst

    def threshold(self, tolerance: float) -> float:
        """Return the largest difference allowed, if ``tolerance`` was requested."""
        return tolerance

    def undecided(self, expected: np.ndarray) -> bool:
        """Whether the two best labels of some frame of [T, V] score almost equally, within the tolerance."""
        best = np.partition(expected, -2)[:, -2:]
        return bool((best[:, 1] - best[:, 0] <= TOLERANCE).any())

    def tied(self, expected: np.ndarray, found: np.ndarray) -> bool:
        """Whether the best labels [T] of these outputs differ, but only where the checkpoint scores both nearly alike.

        Other words of the same labels have another cause.
        With thresholds: whether labels [N] differ only where the checkpoint's score is almost the threshold.
        """
        expected, found = _parts(expected)[0], _parts(found)[0]
        if expected.shape != found.shape:
            return False
        if self.thresholds is not None:
            changed = (expected >= self.thresholds) != (found >= self.thresholds)
            return bool((np.abs(expected - self.thresholds)[changed] <= _TIE).all())
        if (expected.argmax(-1) == found.argmax(-1)).all():
            return False
        reference, output = (np.take_along_axis(expected, each.argmax(-1)[..., None], -1) for each in (expected, found))
        return bool((reference - output <= _TIE).all())

    def shown(self, difference: float) -> str:
        """Format a difference, for tables and messages."""
        return f"{difference:.2g}"

    def add(self, name: str, run: Runner, size: int | None, batches: bool = True) -> ParityResult:
        """Run a format on the clips and record how it differs; :meth:`failures` judges."""
        found, seconds = _timed(lambda clip: run([clip.signal])[0], self.clips.alone)
        decoded = texts = [self.text(each) for each in found]
        joined = set[int]()
        if isinstance(run, TranscribingRunner):
            texts = [run.transcribe(clip.signal) for clip in self.clips.alone]
            joined = self._joined(texts)
        batch_difference = None
        if batches:
            uneven = self.clips.uneven
            expected = [self.expected[self.clips.alone.index(clip)] for clip in uneven]
            batched = run([clip.signal for clip in uneven])
            batch_difference = self.max_difference(expected, batched)
        changed = []
        for place, clip in enumerate(self.clips.alone):
            # A program's own words may be joined, but its outputs have to make the right ones by our rule.
            right = self.texts[place] == decoded[place] and (
                place in joined or self._same(self.texts[place], texts[place]))
            if not right and not self.tied(self.expected[place], found[place]):
                changed.append(clip.name)
        difference = self.max_difference(self.expected, found)
        where = self._where(self.clips.alone, self.expected, found)
        if batch_difference is not None and not batch_difference <= difference:
            where = f"{self._where(uneven, expected, batched)}, in a batch"
        self.results.append(ParityResult(name, size, difference, batch_difference, len(changed), self._wer(texts),
                                         self._wer_of(texts), self._rtf(seconds), where, changed, len(joined)))
        return self.results[-1]

    def _joined(self, texts: Sequence[str]) -> set[int]:
        """Return the places of a program's texts that differ only because no pause ends a word for it."""
        if self.joined_texts is None:
            return set()
        return {place for place, (expected, joined, text)
                in enumerate(zip(self.texts, self.joined_texts, texts, strict=True))
                if not self._same(expected, text) and self._same(joined, text)}

    def _where(self, clips: Sequence[Clip], expected: Sequence[Output], found: Sequence[Output]) -> str:
        """Say in which clip, output and frame outputs differ most, or the first that can't be compared."""
        worst, where = 0.0, ""
        for clip, *pair in zip(clips, expected, found, strict=True):
            for i, (reference, output) in enumerate(zip(*map(_parts, pair), strict=True)):
                what = f"{clip.name}{f', {self.outputs[i]}' if self.outputs else ''}"
                if reference.shape != output.shape:
                    return f"{what}: {list(output.shape)} where {self.compared_with} has {list(reference.shape)}"
                for whose, values in (("", output), (f"{self.compared_with}'s is ", reference)):
                    if len(bad := np.argwhere(~np.isfinite(np.atleast_1d(values)))):
                        value = np.atleast_1d(values)[tuple(bad[0])]
                        kind = "not a number (NaN)" if np.isnan(value) else "infinite"
                        return f"{what}: {whose}{kind} from frame {bad[0][0]} of {len(np.atleast_1d(values))} on"
                differences = np.abs(np.subtract(reference, output, dtype=np.float64))
                if differences.size and differences.max() > worst:
                    index = np.unravel_index(differences.argmax(), differences.shape)
                    frame = f", frame {index[0]} of {len(reference)}" if index else ""
                    worst = float(differences.max())
                    where = f"{what}{frame}: {output[index]:.4g} where {self.compared_with} has {reference[index]:.4g}"
        return where

    def add_words(self, name: str, transcribe: Callable[[np.ndarray], str], size: int) -> ParityResult:
        """Run a program that outputs only words on the clips and record how they differ."""
        texts, seconds = _timed(lambda clip: transcribe(clip.signal), self.clips.alone)
        joined = self._joined(texts)
        changed = [clip.name for place, (clip, reference, output, scores)
                   in enumerate(zip(self.clips.alone, self.texts, texts, self.expected, strict=True))
                   if place not in joined and not self._same(reference, output)
                   and (self.max_changed_share > 0 or not self.undecided(scores))]
        self.results.append(ParityResult(name, size, None, None, len(changed), self._wer(texts), self._wer_of(texts),
                                         self._rtf(seconds), changed=changed, words_joined=len(joined)))
        return self.results[-1]

    def _wer_of(self, texts: list[str]) -> float:
        """Compute the WER against the checkpoint's words."""
        rates = ErrorRates("word")
        pairs = [(reference, output) for reference, output in zip(self.texts, texts, strict=True) if reference.split()]
        if not pairs:
            return 0.0
        rates.add([str(i) for i in range(len(pairs))], *zip(*pairs, strict=True))
        return rates.rate

    def batchable(self, tolerance: float = TOLERANCE) -> bool:
        """Whether utterances have the same outputs in a batch as alone; some layers use the padding."""
        return all(each.batch_difference is None or each.batch_difference <= self.threshold(tolerance)
                   for each in self.results if each.format != layout.INT8)

    def failures(self, tolerance: float = TOLERANCE, batching: bool = True, of: str | None = None) -> list[str]:
        """Return, for each format that may not be published, the reason.

        batching : whether the graph is run in batches, as all further graphs are
        of : the format to judge, without naming a clip, which the reason may be published without; None: all
        """
        wrong = [f"{name}, {mode}, {failure}" for name, modes in self.companions.items()
                 for mode, comparison in modes.items() for failure in comparison.failures(tolerance, of=of)]
        reference = self.results[0]
        for result in self.results[1:]:
            if of not in (None, result.format):
                continue
            if result.format == layout.INT8:
                base_wer, wer = reference.wer, result.wer
                if base_wer is None or wer is None:
                    base_wer, wer = 0.0, result.wer_of_checkpoint
                if not wer - base_wer <= max(POINTS, SHARE * base_wer):
                    wrong.append(f"{result.format}: {self.rate} {wer:.2f} % where {self.compared_with} has "
                                 f"{base_wer:.2f} %")
                continue
            if result.difference is None:
                share = self.max_changed_share
                if result.words_changed > (max(1, share * len(self.texts)) if share else 0):
                    wrong.append(self._changed(result))
                continue
            worst = max(result.difference, result.batch_difference or 0.0) if batching else result.difference
            if not worst <= (limit := self.threshold(tolerance)):  # also true for NaN
                wrong.append(f"{result.format}: {self.what} differ by {self.shown(worst)}, but only "
                             f"{self.shown(limit)} is allowed{f' ({result.where})' if of is None else ''}")
            if result.words_changed > self.max_changed_clips:
                wrong.append(self._changed(result))
        return wrong

    def _changed(self, result: ParityResult) -> str:
        return f"{result.format}: {result.words_changed} of {len(self.texts)} clips have different words"

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Drop the results of formats that aren't published."""
        self.hint = self._hint()
        for comparison in (self, *(each for modes in self.companions.values() for each in modes.values())):
            comparison.results = [each for each in comparison.results if each.format not in reasons]
        self.left_out = reasons

    def raise_if_any(self, failures: list[str]) -> None:
        """Print the table and raise ``SbkitError`` with the failures, if there are any."""
        if failures:
            print(f"compared on {self.clips.origin}:\n{self.table()}", flush=True)
            raise SbkitError(f"the bundle does not match {self.compared_with}, so nothing was published:\n  "
                             + "\n  ".join(failures), hint=self._hint())

    def _hint(self) -> str | None:
        """Suggest better clips than noise, or a tolerance if the words are the same and outputs differ a little."""
        if self.clips.hint:
            return self.clips.hint
        differences = [max(each.difference or 0.0, each.batch_difference or 0.0) for each in self.results
                 if each.format != layout.INT8]
        same = not any(each.words_changed for each in self.results if each.format != layout.INT8)
        return f"all words are the same, so --tolerance {2 * max(differences):.2g} may be good enough" \
            if self.has_words and same and TOLERANCE < max(differences) <= _ROUNDING else None

    def facts(self) -> dict[str, Any]:
        """Return the contents of parity.json."""
        lengths = sorted(len(clip.signal) / self.sample_rate for clip in self.clips.alone)
        companions = {name: {mode: comparison.formats() for mode, comparison in modes.items()}
                      for name, modes in self.companions.items()}
        return {
            "clips": {"origin": self.clips.origin, "count": len(lengths), "seconds": round(sum(lengths), 2),
                      "shortest": round(lengths[0], 3), "longest": round(lengths[-1], 2),
                      "longest_in_training": round(self.clips.longest, 2)},
            "formats": self.formats(), **companions,
        }

    def formats(self) -> dict[str, dict[str, Any]]:
        unpublished = "format", "where", "changed"
        return {result.format: {key: value for key, value in asdict(result).items() if key not in unpublished}
                for result in self.results}

    def clip_names(self) -> str:
        """A line for each format whose words differ, with the names of these clips.

        A bundle doesn't hold them: it may be published where its test set may not.
        """
        named = [(f"{name}, {mode}, {each.format}", each) for name, modes in self.companions.items()
                 for mode, comparison in modes.items() for each in comparison.results]
        named[:0] = [(each.format, each) for each in self.results]
        return "".join(f"{name}: other words in {listed(each.changed, 5)}\n" for name, each in named if each.changed)

    def joining(self) -> str:
        """Name the programs whose words were joined; empty if there are none."""
        results = [(each.format, each) for each in self.results]
        results += [(f"{name}, {mode}, {each.format}", each) for name, modes in self.companions.items()
                    for mode, comparison in modes.items() for each in comparison.results]
        named = [f"{name} in {each.words_joined} of {len(self.texts)} clips" for name, each in results
                 if each.words_joined]
        return "joined: for a program that decodes by itself no pause ends a word, so it writes two as one if the " \
               f"model doesn't mark the second's start: {', '.join(named)}\n" if named else ""

    def table(self) -> str:
        rows = self._rows()
        for name, modes in self.companions.items():
            for mode, comparison in modes.items():
                rows += comparison._rows(f"{name}, {mode}, ")
        of_words = "clips changed", f"{self.rate} %"
        columns = ["format", "size", "max difference", *of_words, "real-time factor"]
        shown = [i for i, name in enumerate(columns) if self.has_words or name not in of_words]
        return table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])

    def _rows(self, before: str = "") -> list[list[object]]:
        rows: list[list[object]] = []
        for each in self.results:
            worst = None if each is self.results[0] else each.difference
            if worst is not None and self.batchable():
                worst = max(worst, each.batch_difference or 0.0)
            rows.append([
                before + each.format, None if each.bytes is None else disk.size(each.bytes),
                None if worst is None else self.shown(worst),
                each.words_changed if not each.words_joined else f"{each.words_changed} ({each.words_joined} joined)",
                each.wer, f"{each.rtf:.4f}",
            ])
        return rows

    def _wer(self, texts: list[str]) -> float | None:
        rows = [(clip.name, clip.text, text) for clip, text in zip(self.clips.alone, texts, strict=True)
                if clip.text and clip.text.split()]
        if not rows or not self.has_words:
            return None
        rates = ErrorRates("word")
        rates.add(*zip(*rows, strict=True))
        return rates.rate

    def _rtf(self, seconds: float) -> float:
        return seconds / (sum(len(clip.signal) for clip in self.clips.alone) / self.sample_rate)


def _timed(run: Callable[[Clip], Any], clips: list[Clip]) -> tuple[list[Any], float]:
    """Run all clips, after a first run that isn't timed; returns the outputs and the seconds."""
    run(clips[-1])
    start = time.perf_counter()
    return [run(clip) for clip in clips], time.perf_counter() - start


def _parts(output: Output) -> tuple[np.ndarray, ...]:
    return output if isinstance(output, tuple) else (output,)
