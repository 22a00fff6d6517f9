"""Transcribes samples chunk by chunk through the batcher, reporting words on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any

import numpy as np

from sbkit.infer.assembly import Assembly, StableWords, transcript
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.transcript import Transcript
from sbkit.serve.backlog import Work
from sbkit.serve.job import Job
from sbkit.serve.registry import ServedModel

_AHEAD = 4  # chunks of one recording in flight: a long recording must not fill all batches


def recognise(served: ServedModel, blocks: Iterable[np.ndarray], job: Job, audio: Work,
              progress: Callable[[str], None] | None = None) -> Transcript:
    """Transcribe a recording given as blocks [S].

    Arguments
    ---------
    job : cancels it
    audio : learns how much was heard
    progress : called with each new piece of text; all pieces joined are the transcript's text
    """
    heard, settling = Assembly(), StableWords(served.decoder, served.vocabulary)
    reported = 0  # words
    waiting: deque[tuple[int, Chunk, Future[Any]]] = deque()

    def take() -> None:
        number, chunk, future = waiting.popleft()
        heard.add(number, chunk, job.result(future), served.frame_samples, served.decoder)
        audio.done(heard.samples / served.config.sample_rate)
        new, heard.stretches = heard.stretches, []
        settling.more(new)
        report()

    def report() -> None:
        nonlocal reported
        new = settling.words[reported:]
        if new and progress is not None:
            progress((served.vocabulary.space if reported else "") + served.vocabulary.text(new))
            reported += len(new)

    chunks = cut(blocks, served.config.sample_rate, served.frame_samples, served.chunk_seconds)
    for number, chunk in enumerate(chunks):
        job.check()
        waiting.append((number, chunk, job.watch(served.batcher.submit(chunk.signal, job.client))))
        if len(waiting) >= _AHEAD:
            take()
    while waiting:
        take()
    settling.end()
    report()
    return transcript("", heard, settling.words, served.vocabulary)
