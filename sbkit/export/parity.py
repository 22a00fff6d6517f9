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
_MAX_NAMED = 3  # clips with other words in a message
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
    max_changed: float = 0
    """Number of clips in which its words may differ."""


@dataclass(frozen=True)
class Reference:
    """What the formats are compared with.

    run : maps a waveform [S] to its output
    name : of its row in tables and in parity.json
    title : in sentences
    """

    run: Callable[[np.ndarray], Output]
    name: str = CHECKPOINT
    title: str = "the checkpoint"


@dataclass(frozen=True, kw_only=True)
class ComparisonSettings:
    """What is compared, and what may differ."""

    what: str = "outputs"
    """What the outputs are, for messages."""
    outputs: Sequence[str] = ()
    """The outputs' names if there are several; each clip then has a tuple of arrays."""
    thresholds: Sequence[float] | None = None
    """The scores from which labels are results, of a model that gives a recording several."""
    text: Callable[[Any], str] | None = None
    """Turns an output into text; None for outputs without words."""
    reference_text: Callable[[Any], str] | None = None
    """Turns the reference's output into text, if not by ``text``."""
    joined_text: Callable[[Any], str] | None = None
    """What a program writes of the reference's output if no pause ends a word for it: only such programs may join
    words. It must have the letters of the reference's text, apart from half characters."""
    spaced: bool = True
    """Whether spaces separate words, so that texts with other spaces differ."""
    rate: str = "WER"
    """What the share of wrong texts is called."""
    max_changed_clips: int = 0
    """Number of clips whose words may differ from the reference's, not counting ties."""


@dataclass(frozen=True)
class Difference:
    """The largest difference of outputs from the reference's, and the clip, output and frame that has it."""

    size: float
    where: str


class Comparison:
    """Runs formats on the clips and compares their outputs with the reference's.

    A subclass that measures differences otherwise overrides ``max_difference``, ``threshold``, ``undecided``, ``tied``
    and ``shown``.
    """

    def __init__(self, clips: ComparisonClips, reference: Reference, sample_rate: float,
                 settings: ComparisonSettings):
        self.clips, self.reference, self.sample_rate, self.settings = clips, reference, sample_rate, settings
        self.companions: dict[str, Mapping[str, Comparison]] = {}
        """Comparisons of further graphs, by their names and by modes of running them."""
        self.left_out: Mapping[str, str] = {}
        """The reason of each format that isn't published."""
        self.hint: str | None = None
        """What to do about them."""

        self.expected, seconds = _timed(lambda clip: reference.run(clip.signal), clips.alone)
        reference_text = settings.reference_text or self._text
        self.texts = [reference_text(output) for output in self.expected]
        self._joined_texts = self._texts_with_joined_words()
        self.results = [ParityResult(reference.name, None, 0.0, None, 0, self._wer(self.texts), 0.0,
                                     self._rtf(seconds))]

    @property
    def has_words(self) -> bool:
        return self.settings.text is not None

    def _text(self, output: Output) -> str:
        return "" if self.settings.text is None else self.settings.text(output)

    def _texts_with_joined_words(self) -> list[str] | None:
        """What a program may write of each clip instead; raises if it has other letters than the reference's text."""
        if self.settings.joined_text is None:
            return None
        joined_texts = [self.settings.joined_text(output) for output in self.expected]
        for clip, text, joined in zip(self.clips.alone, self.texts, joined_texts, strict=True):
            has_half_characters = "\ufffd" in text + joined
            if not has_half_characters and "".join(text.split()) != "".join(joined.split()):
                raise SbkitError(f"the model's own tokenizer writes {joined!r} for {clip.name}, but the bundle would "
                                 f"write {text!r}", hint="please report it, with the recipe's tokenizer")
        return joined_texts

    # ---------------------------------------------------------------------- what a subclass may measure otherwise

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
        thresholds = self.settings.thresholds
        if thresholds is not None:
            changed = (expected >= thresholds) != (found >= thresholds)
            return bool((np.abs(expected - thresholds)[changed] <= _TIE).all())

        expected_labels = expected.argmax(-1)
        exported_labels = found.argmax(-1)
        if (expected_labels == exported_labels).all():
            return False
        best = np.take_along_axis(expected, expected_labels[..., None], -1)
        instead = np.take_along_axis(expected, exported_labels[..., None], -1)
        return bool((best - instead <= _TIE).all())

    def shown(self, difference: float) -> str:
        """Format a difference, for tables and messages."""
        return f"{difference:.2g}"

    # ---------------------------------------------------------------------- running formats

    def add(self, name: str, run: Runner, size: int | None, batches: bool = True) -> ParityResult:
        """Run a format on the clips and record how it differs; :meth:`failures` judges."""
        outputs, seconds = _timed(lambda clip: run([clip.signal])[0], self.clips.alone)
        decoded = [self._text(output) for output in outputs]
        texts = decoded
        joined: set[int] = set()
        if isinstance(run, TranscribingRunner):
            texts = [run.transcribe(clip.signal) for clip in self.clips.alone]
            joined = self._joined(texts)

        alone = self._difference(self.clips.alone, self.expected, outputs)
        in_batch = self._difference_in_batch(run) if batches else None
        worst = alone
        if in_batch is not None and not in_batch.size <= alone.size:  # also true for NaN
            worst = Difference(in_batch.size, f"{in_batch.where}, in a batch")

        # A program's own words may be joined, but its outputs have to make the right ones by our rule.
        right = [self.texts[place] == decoded[place] and (place in joined or self._same(self.texts[place], text))
                 for place, text in enumerate(texts)]
        changed = [clip.name for place, clip in enumerate(self.clips.alone)
                   if not right[place] and not self.tied(self.expected[place], outputs[place])]
        result = ParityResult(
            name, size, alone.size, None if in_batch is None else in_batch.size, len(changed), self._wer(texts),
            self._wer_of(texts), self._rtf(seconds), worst.where, changed, len(joined), self.settings.max_changed_clips)
        self.results.append(result)
        return result

    def add_words(self, name: str, transcribe: Callable[[np.ndarray], str], size: int,
                  same_waveform: bool = False) -> ParityResult:
        """Run a program that outputs only words on the clips and record how they differ.

        same_waveform : whether the reference got the waveforms as the program changes them: then no words may differ,
            except in clips with a tie that rounding decides
        """
        texts, seconds = _timed(lambda clip: transcribe(clip.signal), self.clips.alone)
        joined = self._joined(texts)
        other = [place for place, (expected, text) in enumerate(zip(self.texts, texts, strict=True))
                 if place not in joined and not self._same(expected, text)]
        if same_waveform:
            other = [place for place in other if not self.undecided(self.expected[place])]
        changed = [self.clips.alone[place].name for place in other]
        max_changed = 0 if same_waveform else max(1, _MAX_CHANGED_SHARE * len(self.texts))
        result = ParityResult(name, size, None, None, len(changed), self._wer(texts), self._wer_of(texts),
                              self._rtf(seconds), changed=changed, words_joined=len(joined), max_changed=max_changed)
        self.results.append(result)
        return result

    def _same(self, one: str, other: str) -> bool:
        """Whether two texts have the same words."""
        return one.split() == other.split() if self.settings.spaced else "".join(one.split()) == "".join(other.split())

    def _joined(self, texts: Sequence[str]) -> set[int]:
        """Return the places of a program's texts that differ only because no pause ends a word for it."""
        if self._joined_texts is None:
            return set()
        return {place for place, (expected, joined, text)
                in enumerate(zip(self.texts, self._joined_texts, texts, strict=True))
                if not self._same(expected, text) and self._same(joined, text)}

    def _difference(self, clips: Sequence[Clip], expected: list[Output], outputs: list[Output]) -> Difference:
        return Difference(self.max_difference(expected, outputs), self._where(clips, expected, outputs))

    def _difference_in_batch(self, run: Runner) -> Difference:
        """Run a batch of uneven lengths."""
        clips = self.clips.uneven
        expected = [self.expected[self.clips.alone.index(clip)] for clip in clips]
        return self._difference(clips, expected, run([clip.signal for clip in clips]))

    def _where(self, clips: Sequence[Clip], expected: Sequence[Output], outputs: Sequence[Output]) -> str:
        """Say in which clip, output and frame outputs differ most, or the first that can't be compared."""
        names = self.settings.outputs
        worst, where = 0.0, ""
        for clip, *pair in zip(clips, expected, outputs, strict=True):
            for number, (reference, output) in enumerate(zip(*map(_parts, pair), strict=True)):
                what = f"{clip.name}, {names[number]}" if names else clip.name
                incomparable = self._incomparable(reference, output)
                if incomparable is not None:
                    return f"{what}: {incomparable}"

                differences = np.abs(np.subtract(reference, output, dtype=np.float64))
                if differences.size and differences.max() > worst:
                    worst = float(differences.max())
                    index = np.unravel_index(differences.argmax(), differences.shape)
                    frame = f", frame {index[0]} of {len(reference)}" if index else ""
                    where = (f"{what}{frame}: {output[index]:.4g} where {self.reference.title} has "
                             f"{reference[index]:.4g}")
        return where

    def _incomparable(self, reference: np.ndarray, output: np.ndarray) -> str | None:
        """Say why two arrays can't be compared: by their shapes, or by values that aren't finite."""
        if reference.shape != output.shape:
            return f"{list(output.shape)} where {self.reference.title} has {list(reference.shape)}"
        for whose, values in (("", np.atleast_1d(output)), (f"{self.reference.title}'s is ", np.atleast_1d(reference))):
            not_finite = np.argwhere(~np.isfinite(values))
            if len(not_finite):
                first = tuple(not_finite[0])
                kind = "not a number (NaN)" if np.isnan(values[first]) else "infinite"
                return f"{whose}{kind} from frame {first[0]} of {len(values)} on"
        return None

    # ---------------------------------------------------------------------- judging

    def batchable(self, tolerance: float = TOLERANCE) -> bool:
        """Whether utterances have the same outputs in a batch as alone; some layers use the padding."""
        return all(result.batch_difference is None or result.batch_difference <= self.threshold(tolerance)
                   for result in self.results if result.format != layout.INT8)

    def failures(self, tolerance: float = TOLERANCE, batching: bool = True, of: str | None = None) -> list[str]:
        """Return, for each format that may not be published, the reason.

        batching : whether the graph is run in batches, as all further graphs are
        of : the format to judge, without naming a clip, which the reason may be published without; None: all
        """
        wrong = [f"{name}, {mode}, {failure}" for name, mode, comparison in self._companion_modes()
                 for failure in comparison.failures(tolerance, of=of)]
        for result in self.results[1:]:
            if of not in (None, result.format):
                continue
            if result.format == layout.INT8:
                wrong += self._failures_of_int8(result)
            elif result.difference is None:
                wrong += self._failures_of_words(result, names_clips=of is None)
            else:
                wrong += self._failures_of_outputs(result, tolerance, batching, names_clip=of is None)
                wrong += self._failures_of_words(result, names_clips=of is None)
        return wrong

    def _failures_of_int8(self, result: ParityResult) -> list[str]:
        """8-bit weights change outputs, so the words are judged: by transcripts if there are some."""
        base_wer, wer = self.results[0].wer, result.wer
        if base_wer is None or wer is None:
            base_wer, wer = 0.0, result.wer_of_checkpoint
        if wer - base_wer <= max(POINTS, SHARE * base_wer):  # false for NaN
            return []
        return [f"{result.format}: {self.settings.rate} {wer:.2f} % where {self.reference.title} has {base_wer:.2f} %"]

    def _failures_of_outputs(self, result: ParityResult, tolerance: float, batching: bool, names_clip: bool
                             ) -> list[str]:
        assert result.difference is not None, "of outputs"
        worst = max(result.difference, result.batch_difference or 0.0) if batching else result.difference
        limit = self.threshold(tolerance)
        if worst <= limit:  # false for NaN
            return []
        clip = f" ({result.where})" if names_clip else ""
        return [f"{result.format}: {self.settings.what} differ by {self.shown(worst)}, but only "
                f"{self.shown(limit)} is allowed{clip}"]

    def _failures_of_words(self, result: ParityResult, names_clips: bool) -> list[str]:
        if result.words_changed <= result.max_changed:
            return []
        failure = f"{result.format}: {result.words_changed} of {len(self.texts)} clips have different words"
        if not names_clips:
            return [failure]
        names = ", ".join(result.changed[:_MAX_NAMED])
        if len(result.changed) > _MAX_NAMED:
            names += ", ..."
        return [f"{failure} ({names})"]

    def _companion_modes(self) -> list[tuple[str, str, Comparison]]:
        """The comparisons of further graphs, each with the graph's name and its mode."""
        return [(name, mode, comparison) for name, modes in self.companions.items()
                for mode, comparison in modes.items()]

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Drop the results of formats that aren't published."""
        self.hint = self._hint()
        for comparison in (self, *(comparison for _, _, comparison in self._companion_modes())):
            comparison.results = [result for result in comparison.results if result.format not in reasons]
        self.left_out = reasons

    def raise_if_any(self, failures: list[str]) -> None:
        """Print the table and raise ``SbkitError`` with the failures, if there are any."""
        if failures:
            print(f"compared on {self.clips}:\n{self.table()}", flush=True)
            raise SbkitError(f"the bundle does not match {self.reference.title}, so nothing was published:\n  "
                             + "\n  ".join(failures), hint=self._hint())

    def _hint(self) -> str | None:
        """Suggest better clips than noise, or a tolerance if the words are the same and outputs differ a little."""
        if self.clips.hint:
            return self.clips.hint
        results = [result for result in self.results if result.format != layout.INT8]
        worst = max(max(result.difference or 0.0, result.batch_difference or 0.0) for result in results)
        same_words = self.has_words and not any(result.words_changed for result in results)
        if same_words and TOLERANCE < worst <= _ROUNDING:
            return f"all words are the same, so --tolerance {2 * worst:.2g} may be good enough"
        return None

    # ---------------------------------------------------------------------- reporting

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
        unpublished = "format", "where", "changed", "max_changed"
        return {result.format: {key: value for key, value in asdict(result).items() if key not in unpublished}
                for result in self.results}

    def clip_names(self) -> str:
        """A line for each format whose words differ, with the names of these clips.

        A bundle doesn't hold them: it may be published where its test set may not.
        """
        return "".join(f"{name}: other words in {listed(result.changed, 5)}\n" for name, result in self._named_results()
                       if result.changed)

    def joining(self) -> str:
        """Name the programs whose words were joined; empty if there are none."""
        programs = [f"{name} in {result.words_joined} of {len(self.texts)} clips"
                    for name, result in self._named_results() if result.words_joined]
        if not programs:
            return ""
        return ("joined: for a program that decodes by itself no pause ends a word, so it writes two as one if the "
                f"model doesn't mark the second's start: {', '.join(programs)}\n")

    def _named_results(self) -> list[tuple[str, ParityResult]]:
        """All results with the names of their formats, graphs and modes."""
        named = [(result.format, result) for result in self.results]
        for name, mode, comparison in self._companion_modes():
            named += [(f"{name}, {mode}, {result.format}", result) for result in comparison.results]
        return named

    def table(self) -> str:
        rows = self._rows()
        for name, mode, comparison in self._companion_modes():
            rows += comparison._rows(f"{name}, {mode}, ")
        of_words = "clips changed", f"{self.settings.rate} %"
        columns = ["format", "size", "max difference", *of_words, "real-time factor"]
        shown = [i for i, name in enumerate(columns) if self.has_words or name not in of_words]
        return table([columns[i] for i in shown], [[row[i] for i in shown] for row in rows])

    def _rows(self, before: str = "") -> list[list[object]]:
        rows: list[list[object]] = []
        batchable = self.batchable()
        for result in self.results:
            worst = None if result is self.results[0] else result.difference
            if worst is not None and batchable:
                worst = max(worst, result.batch_difference or 0.0)
            changed = f"{result.words_changed} ({result.words_joined} joined)"
            rows.append([
                before + result.format,
                None if result.bytes is None else disk.size(result.bytes),
                None if worst is None else self.shown(worst),
                changed if result.words_joined else result.words_changed,
                result.wer,
                f"{result.rtf:.4f}",
            ])
        return rows

    # ---------------------------------------------------------------------- figures of one format

    def _wer(self, texts: list[str]) -> float | None:
        """Compute the WER against the clips' transcripts, if there are some."""
        rows = [(clip.name, clip.text, text) for clip, text in zip(self.clips.alone, texts, strict=True)
                if clip.text and clip.text.split()]
        if not rows or not self.has_words:
            return None
        rates = ErrorRates("word")
        rates.add(*zip(*rows, strict=True))
        return rates.rate

    def _wer_of(self, texts: list[str]) -> float:
        """Compute the WER against the checkpoint's words."""
        rates = ErrorRates("word")
        pairs = [(reference, output) for reference, output in zip(self.texts, texts, strict=True) if reference.split()]
        if not pairs:
            return 0.0
        rates.add([str(i) for i in range(len(pairs))], *zip(*pairs, strict=True))
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
