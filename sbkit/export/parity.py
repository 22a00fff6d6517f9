"""Runs every exported format on clips, and records how its outputs and words differ from the checkpoint's.

``gate`` decides by these results what may be published, and ``parity_report`` shows them.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.clips import Clip, ComparisonClips
from sbkit.export.measures import TOLERANCE, Difference, OutputMeasure, locate
from sbkit.export.runners import Output, Runner, TranscribingRunner
from sbkit.score.rates import ErrorRates

CHECKPOINT = "checkpoint"
#: Share of the clips (at least one) whose words may change in a program that modifies the waveform first.
_MAX_CHANGED_SHARE = 0.02


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
class WordRules:
    """How outputs become words, and which differences of words count."""

    text: Callable[[Any], str]
    """Turns a format's output into text."""
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

    def are_same(self, text: str, other: str) -> bool:
        """Whether two texts have the same words."""
        if self.spaced:
            return text.split() == other.split()
        return "".join(text.split()) == "".join(other.split())


@dataclass(kw_only=True)
class ParityResult:
    """What one format, or the reference itself, did on the clips."""

    format: str
    bytes: int | None = None
    """Size of its files; None for the checkpoint, and for an imported model's original code."""
    difference: Difference | None = None
    """The largest difference from the reference's outputs; None for a program that outputs only words."""
    batch_difference: Difference | None = None
    """The same in a batch of uneven lengths; None for a format that takes no batches."""
    wer: float | None = None
    """WER against the transcripts, per cent; None without transcripts."""
    wer_of_checkpoint: float = 0.0
    """WER against the reference's words, per cent."""
    rtf: float = 0.0
    """Real-time factor: seconds of computing per second of audio."""
    changed: Sequence[str] = ()
    """The names of the clips whose words differ, not counting ties that rounding decides and joined words."""
    words_joined: int = 0
    """Number of clips in which a program that decodes by itself joins words, because for it no pause ends a word."""
    max_changed: float = 0
    """Number of clips in which its words may differ."""

    @property
    def words_changed(self) -> int:
        return len(self.changed)

    @property
    def worst(self) -> Difference | None:
        """The larger of both differences."""
        alone, in_batch = self.difference, self.batch_difference
        if alone is None or in_batch is None or in_batch.size <= alone.size:  # false for NaN
            return alone
        return Difference(in_batch.size, f"{in_batch.where}, in a batch")


@dataclass(frozen=True)
class CompanionMode:
    """A comparison of a further graph, in one mode of running it, such as with chunks of one size."""

    graph: str
    mode: str
    comparison: Comparison

    @property
    def title(self) -> str:
        return f"{self.graph}, {self.mode}"


class Comparison:
    """Runs formats on the clips and compares what they output with the reference.

    sample_rate : of the clips' signals, so that times are in seconds
    measure : how outputs differ
    words : how they become words; None for outputs without words
    """

    def __init__(self, clips: ComparisonClips, reference: Reference, sample_rate: float,
                 measure: OutputMeasure | None = None, words: WordRules | None = None):
        self.clips = clips
        self.reference = reference
        self.sample_rate = sample_rate
        self.measure = measure or OutputMeasure()
        self.words = words
        self.results: list[ParityResult] = []
        """One for each format that was run."""
        self.companions: dict[str, Mapping[str, Comparison]] = {}
        """Comparisons of further graphs, by their names and by modes of running them."""

        self.expected, seconds = _timed(lambda clip: reference.run(clip.signal), clips.alone)
        self.texts = [self._reference_text(output) for output in self.expected]
        self._joined_texts = self._texts_with_joined_words()
        self.of_reference = ParityResult(format=reference.name, difference=Difference(0.0, ""),
                                         wer=self._wer(self.texts), rtf=self._rtf(seconds))
        self.left_out: Mapping[str, str] = {}
        """The reason of each format that isn't published."""

    @property
    def companion_modes(self) -> list[CompanionMode]:
        """The comparisons of all further graphs in all of their modes."""
        return [CompanionMode(graph, mode, comparison) for graph, modes in self.companions.items()
                for mode, comparison in modes.items()]

    # ---------------------------------------------------------------------- running formats

    def add(self, name: str, run: Runner, size: int | None, batches: bool = True) -> ParityResult:
        """Run a format on the clips, one by one and in a batch, and record how it differs.

        size : bytes of its files
        batches : whether the format takes batches
        """
        clips = self.clips.alone
        outputs, seconds = _timed(lambda clip: run([clip.signal])[0], clips)
        decoded = [self._text(output) for output in outputs]
        texts = decoded
        joined: set[int] = set()
        if isinstance(run, TranscribingRunner):
            texts = [run.transcribe(clip.signal) for clip in clips]
            joined = self._places_with_joined_words(texts)

        changed = []
        for place, clip in enumerate(clips):
            # A program's own words may be joined, but its outputs have to make the right ones by our rule.
            outputs_agree = decoded[place] == self.texts[place]
            words_agree = place in joined or self._are_same(self.texts[place], texts[place])
            if outputs_agree and words_agree:
                continue
            if not self.measure.is_tied(self.expected[place], outputs[place]):
                changed.append(clip.name)

        result = ParityResult(
            format=name,
            bytes=size,
            difference=self._difference(clips, outputs),
            batch_difference=self._difference_in_batch(run) if batches else None,
            wer=self._wer(texts),
            wer_of_checkpoint=self._wer_of_reference(texts),
            rtf=self._rtf(seconds),
            changed=changed,
            words_joined=len(joined),
            max_changed=0 if self.words is None else self.words.max_changed_clips)
        self.results.append(result)
        return result

    def add_words(self, name: str, transcribe: Callable[[np.ndarray], str], size: int,
                  same_waveform: bool = False) -> ParityResult:
        """Run a program that outputs only words on the clips, and record how they differ.

        same_waveform : whether the reference got the waveforms as the program changes them: then no words may differ,
            except in clips with a tie that rounding decides
        """
        clips = self.clips.alone
        texts, seconds = _timed(lambda clip: transcribe(clip.signal), clips)
        joined = self._places_with_joined_words(texts)

        changed = []
        for place, clip in enumerate(clips):
            if place in joined or self._are_same(self.texts[place], texts[place]):
                continue
            if not same_waveform or not self.measure.is_undecided(self.expected[place]):
                changed.append(clip.name)

        result = ParityResult(
            format=name,
            bytes=size,
            wer=self._wer(texts),
            wer_of_checkpoint=self._wer_of_reference(texts),
            rtf=self._rtf(seconds),
            changed=changed,
            words_joined=len(joined),
            max_changed=0 if same_waveform else max(1, _MAX_CHANGED_SHARE * len(clips)))
        self.results.append(result)
        return result

    def leave_out(self, reasons: Mapping[str, str]) -> None:
        """Drop the results of formats that aren't published, each with its reason."""
        self.left_out = reasons
        for comparison in (self, *(companion.comparison for companion in self.companion_modes)):
            comparison.results = [result for result in comparison.results if result.format not in reasons]

    # ---------------------------------------------------------------------- differences of outputs

    def is_batchable(self, tolerance: float = TOLERANCE) -> bool:
        """Whether utterances have the same outputs in a batch as alone; some layers use the padding.

        8-bit weights change outputs anyway, so that format doesn't count.
        """
        allowed = self.measure.allowed(tolerance)
        differences = [result.batch_difference for result in self.results if result.format != layout.INT8]
        return all(difference is None or difference.size <= allowed for difference in differences)

    def _difference(self, clips: Sequence[Clip], outputs: Sequence[Output]) -> Difference:
        """Compare the outputs of these clips, which are some of the comparison's."""
        expected = [self.expected[self.clips.alone.index(clip)] for clip in clips]
        where = locate(clips, expected, outputs, self.measure.names, self.reference.title)
        return Difference(self.measure.largest(expected, outputs), where)

    def _difference_in_batch(self, run: Runner) -> Difference:
        """Run a batch of uneven lengths."""
        clips = self.clips.uneven
        return self._difference(clips, run([clip.signal for clip in clips]))

    # ---------------------------------------------------------------------- words

    def _text(self, output: Output) -> str:
        return "" if self.words is None else self.words.text(output)

    def _reference_text(self, output: Output) -> str:
        if self.words is None or self.words.reference_text is None:
            return self._text(output)
        return self.words.reference_text(output)

    def _are_same(self, text: str, other: str) -> bool:
        return self.words is None or self.words.are_same(text, other)

    def _texts_with_joined_words(self) -> list[str] | None:
        """What a program may write of each clip instead; raises if it has other letters than the reference's text."""
        if self.words is None or self.words.joined_text is None:
            return None
        joined_texts = [self.words.joined_text(output) for output in self.expected]
        for clip, text, joined in zip(self.clips.alone, self.texts, joined_texts, strict=True):
            has_half_characters = "\ufffd" in text + joined
            if not has_half_characters and "".join(text.split()) != "".join(joined.split()):
                raise SbkitError("tokenizer-differs", f"the model's own tokenizer writes {joined!r} for {clip.name}, "
                                 f"but the bundle would write {text!r}",
                                 hint="please report it, with the recipe's tokenizer")
        return joined_texts

    def _places_with_joined_words(self, texts: Sequence[str]) -> set[int]:
        """Return the places of a program's texts that differ only because no pause ends a word for it."""
        if self._joined_texts is None:
            return set()
        places = set()
        for place, (text, expected, joined) in enumerate(zip(texts, self.texts, self._joined_texts, strict=True)):
            if not self._are_same(expected, text) and self._are_same(joined, text):
                places.add(place)
        return places

    # ---------------------------------------------------------------------- rates

    def _wer(self, texts: Sequence[str]) -> float | None:
        """Compute the WER against the clips' transcripts, if there are some."""
        if self.words is None:
            return None
        return _error_rate([(clip.name, clip.text, text)
                            for clip, text in zip(self.clips.alone, texts, strict=True) if clip.text])

    def _wer_of_reference(self, texts: Sequence[str]) -> float:
        """Compute the WER against the reference's words; 0 if it has none."""
        return _error_rate([(str(place), expected, text)
                            for place, (expected, text) in enumerate(zip(self.texts, texts, strict=True))]) or 0.0

    def _rtf(self, seconds: float) -> float:
        return seconds / (sum(len(clip.signal) for clip in self.clips.alone) / self.sample_rate)


def _error_rate(rows: Sequence[tuple[str, str, str]]) -> float | None:
    """Compute the WER, per cent, of names, references and texts; None if no reference has words."""
    with_words = [row for row in rows if row[1].split()]
    if not with_words:
        return None
    names, references, texts = zip(*with_words, strict=True)
    rates = ErrorRates("word")
    rates.add(names, references, texts)
    return rates.rate


def _timed(run: Callable[[Clip], Any], clips: Sequence[Clip]) -> tuple[list[Any], float]:  # Any: a clip's result
    """Run all clips, after a first run that isn't timed; returns their results and the seconds."""
    run(clips[-1])
    start = time.perf_counter()
    results = [run(clip) for clip in clips]
    return results, time.perf_counter() - start
