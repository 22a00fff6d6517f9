"""Transcribes a recording: it is cut into chunks, some of which wait for the model while others are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, NamedTuple

import numpy as np

from sbkit.infer.assembly import Assembly, StableWords, make_transcript
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.transcript import Transcript
from sbkit.serve.backlog import Work
from sbkit.serve.job import Job
from sbkit.serve.served_kinds import ServedRecogniser

#: Chunks of one recording that are computed at once: a long one must not fill all batches.
_MAX_IN_FLIGHT = 4


def recognise(served: ServedRecogniser, blocks: Iterable[np.ndarray], job: Job, work: Work,
              progress: Callable[[str], None] | None = None) -> Transcript:
    """Transcribe a recording given as blocks [S].

    job : cancels it
    work : is updated with the audio that is done
    progress : called with each new piece of text; all pieces joined are the transcript's text
    """
    recording = _Recording(served, job, work, progress or (lambda text: None))
    chunks = cut(blocks, served.config.sample_rate, served.frame_samples, served.chunk_seconds, served.detector)
    for number, chunk in enumerate(chunks):
        job.check()
        recording.submit(number, chunk)
    return recording.end()


class _InFlight(NamedTuple):
    """A chunk that was submitted."""

    number: int
    chunk: Chunk
    future: Future[Any] | None  # of the model's output; None: the chunk is silent and needs no model


class _Recording:
    """A recording that is being transcribed; see ``recognise``."""

    def __init__(self, served: ServedRecogniser, job: Job, work: Work, progress: Callable[[str], None]):
        self._served = served
        self._job = job
        self._work = work
        self._progress = progress
        self._in_flight: deque[_InFlight] = deque()
        self._assembly = Assembly()
        self._stable = StableWords(served.decoder, served.vocabulary)
        self._reported_words = 0

    def submit(self, number: int, chunk: Chunk) -> None:
        """Let the model compute a chunk, and take the oldest result if enough are being computed."""
        future = None
        if not chunk.silent:
            future = self._job.watch(self._served.batcher.submit(chunk.signal, self._job.client, self._work))
        self._in_flight.append(_InFlight(number, chunk, future))
        if len(self._in_flight) >= _MAX_IN_FLIGHT:
            self._add_oldest()

    def end(self) -> Transcript:
        """Wait for the rest, and return the transcript."""
        while self._in_flight:
            self._add_oldest()
        self._stable.end()
        self._report()
        return make_transcript("", self._assembly, self._stable.words, self._served.vocabulary)

    def _add_oldest(self) -> None:
        """Wait for the oldest chunk's output, and report the words that no later chunk can change."""
        number, chunk, future = self._in_flight.popleft()
        config = self._served.config
        log_probs = None if future is None else self._job.result(future)
        output = chunk.output(log_probs, config.blank_id, config.width)
        self._assembly.add(number, chunk, output, self._served.frame_samples, self._served.decoder)
        self._work.done(self._assembly.samples / config.sample_rate)

        new_stretches = self._assembly.stretches
        self._assembly.stretches = []
        self._stable.add(new_stretches)
        self._report()

    def _report(self) -> None:
        vocabulary = self._served.vocabulary
        new_words = self._stable.words[self._reported_words:]
        if new_words:
            space = vocabulary.space if self._reported_words else ""
            self._progress(space + vocabulary.text(new_words))
            self._reported_words += len(new_words)
