"""Live speech with a model for whole recordings: the end of it whose words may change is decoded again and again."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from sbkit.decode.spans import PAUSE_SECONDS, Word, at_pauses
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.assembly import join_tokens
from sbkit.infer.chunks import CONTEXT_SECONDS
from sbkit.infer.decoding import Decoder
from sbkit.infer.engine import Engine
from sbkit.infer.lines import TranscriptLine
from sbkit.infer.samples import Resampler, as_floats, check_samples

#: Decode again after this much new audio, and after this share of the tail: repeated decoding costs at most 1 / SHARE
#: times what decoding once would cost.
EVERY_SECONDS, SHARE = 0.3, 0.1
#: Seconds kept if no word was recognised: one may be starting.
_KEPT_SECONDS = 1.0
#: A pause is cut at most this many seconds after its word, so that the next word keeps its start.
_AFTER_WORD_SECONDS = 0.5


class Tail:
    """The unsettled samples of a live recording, at the model's rate.

    rate, frame_samples : as in the model; a frame is one of its output
    longest : seconds decoded at once; beyond that, words are settled without a pause
    """

    def __init__(self, rate: int, frame_samples: int, longest: float):
        self._rate = rate
        self._frame = frame_samples
        self._longest = int(longest * rate)
        self._context = min(-(-int(CONTEXT_SECONDS * rate) // frame_samples),
                            self._longest // frame_samples // 4)  # frames
        self._signal = np.zeros(0, dtype=np.float32)
        self._new: list[np.ndarray] = []
        self.start = 0
        """Samples before the tail."""
        self._skip = 0  # frames at its beginning that were settled before
        self._received = 0
        self._decoded = 0

    @property
    def length(self) -> int:
        return self._received - self.start

    @property
    def undecoded_seconds(self) -> float:
        """The seconds received since the last decoding."""
        return (self._received - self._decoded) / self._rate

    @property
    def due(self) -> bool:
        return self.wanted <= 0

    @property
    def wanted(self) -> float:
        """How many more samples are needed until the tail is decoded."""
        return max(EVERY_SECONDS * self._rate, SHARE * self.length) - (self._received - self._decoded)

    def add(self, signal: np.ndarray) -> None:
        if len(signal):
            self._new.append(signal)
            self._received += len(signal)

    def window(self) -> tuple[np.ndarray, int]:
        """Return the samples [S] to decode now, and how many frames of the output to skip."""
        self._signal = np.concatenate([self._signal, *self._new])
        self._new = []
        signal = self._signal[: self._longest]
        self._decoded = self.start + len(signal)
        return signal, self._skip

    def finalise(self, words: Sequence[Word], samples: int, skip: int, end: bool = False,
                 ) -> tuple[list[Word], list[Word], float]:
        """Settle words decoded from the first ``samples``; their times count from frame ``skip``.

        Returns the final words, those that may change, and the end of the decoded audio in seconds.
        """
        first = (self.start + skip * self._frame) / self._rate
        words = [replace(word, start=word.start + first, end=word.end + first) for word in words]
        until = (self.start + samples) / self._rate
        if end:
            self._drop(until)
            return words, [], until
        if not words:
            self._drop(until - _KEPT_SECONDS)
            return [], [], until

        # Words before the last pause are final.
        next_starts = [*(word.start for word in words[1:]), until]
        gaps = [start - word.end for word, start in zip(words, next_starts, strict=True)]
        pauses = [number for number, gap in enumerate(gaps) if gap >= PAUSE_SECONDS]
        if pauses:
            last = pauses[-1]
            count = last + 1
            self._drop(words[last].end + min(gaps[last] / 2, _AFTER_WORD_SECONDS))
        elif samples >= self._longest:
            count, cut = _cut_through_speech(words, gaps, (first + until) / 2, until)
            self._drop(cut, context=True)
        else:
            count = 0
        return words[:count], words[count:], until

    def _drop(self, until: float, context: bool = False) -> None:
        """Drop samples before ``until`` seconds, in whole frames; with ``context``, some before it stay."""
        frames = int(until * self._rate) // self._frame
        context_frames = min(self._context, frames) if context else 0
        start = max((frames - context_frames) * self._frame, self.start)
        if frames * self._frame <= self.start + self._skip * self._frame:
            return
        # A copy: a view would keep the whole old array in memory.
        self._signal = self._signal[start - self.start :].copy()
        self.start = start
        self._skip = frames - start // self._frame


def _cut_through_speech(words: Sequence[Word], gaps: Sequence[float], middle: float, until: float
                        ) -> tuple[int, float]:
    """Return how many words to settle without a pause, and where to cut, in seconds: at the widest gap, preferably
    after ``middle``. A single word goes to its own side.

    gaps : the seconds after each word
    until : the end of the last gap
    """
    if len(words) == 1:
        return (1, until) if words[0].start < middle else (0, middle)
    counts = range(1, len(words))
    late_counts = [count for count in counts if words[count - 1].end >= middle]
    count = max(late_counts or counts, key=lambda count: (gaps[count - 1], count))
    return count, (words[count - 1].end + words[count].start) / 2


def tail_words(log_probs: np.ndarray, decoder: Decoder[Any], vocabulary: Vocabulary) -> list[Word]:
    """Decode the log-probabilities [T, V] of a tail, without the frames to skip."""
    return join_tokens(decoder.tokens([[decoder.keep(log_probs.copy())]])[0], vocabulary)


def tail_lines(final: Sequence[Word], partial: list[Word]) -> list[TranscriptLine]:
    """Return the lines of words as from :meth:`Tail.finalise`: those that are complete, and the current one."""
    return [*(TranscriptLine(line, [], True) for line in at_pauses(final)), TranscriptLine([], partial, False)]


#: Seconds of new audio to wait for, for each second that the last decoding took: a slow machine decodes less often.
_WAIT_SHARE = 2.0


class TailStream:
    """Transcribes one stream with a model for whole recordings; ``Stream`` does it with a streaming graph.

    engine : runs the model
    decoder : decodes its output
    rate : the samples per second that it is fed; None: the model's
    """

    def __init__(self, engine: Engine, decoder: Decoder[Any], rate: int | None = None):
        self._engine = engine
        self._decoder = decoder
        config = engine.config
        self._resampler = Resampler(config.sample_rate if rate is None else rate, config.sample_rate)
        self._tail = Tail(config.sample_rate, config.hop_samples * config.subsampling, config.chunk(None))
        self._samples = 0
        self._last_took = 0.0  # seconds

    @property
    def rate(self) -> int:
        return self._resampler.rate

    @property
    def seconds(self) -> float:
        """The seconds that were fed."""
        return self._samples / self.rate

    def feed(self, samples: np.ndarray) -> list[TranscriptLine]:
        """Transcribe the next samples [N], floats from -1 to 1 or int16; return the lines that may have changed."""
        samples = check_samples(samples)
        self._samples += len(samples)
        self._tail.add(self._resampler(as_floats(samples)))
        lines: list[TranscriptLine] = []
        while self._tail.due and self._tail.undecoded_seconds >= _WAIT_SHARE * self._last_took:
            lines += self._decode()
        return lines

    def finish(self) -> list[TranscriptLine]:
        """Transcribe the rest: the stream ends here."""
        self._tail.add(self._resampler(np.zeros(0, np.float32), last=True))
        lines: list[TranscriptLine] = []
        while self._tail.length:
            lines += self._decode(ended=True)
            if not self._tail.undecoded_seconds:  # what is left, if anything, is a part of a frame
                break
        return lines

    def _decode(self, ended: bool = False) -> list[TranscriptLine]:
        began = time.monotonic()
        signal, skip = self._tail.window()
        last = ended and not self._tail.undecoded_seconds
        [log_probs] = self._engine.run([signal])
        tail = tail_words(log_probs[skip:], self._decoder, self._engine.vocabulary)
        final, partial, _ = self._tail.finalise(tail, len(signal), skip, last)
        self._last_took = time.monotonic() - began
        return tail_lines(final, partial)
