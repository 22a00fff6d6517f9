"""From samples to a transcript, chunk by chunk through the batcher, with the words so far on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np

from sbkit.decode.spans import Word
from sbkit.infer.assembly import Assembly, transcript
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.stable_words import StableWords
from sbkit.infer.transcript import Transcript
from sbkit.serve.job import Job
from sbkit.serve.registry import ServedModel

_AHEAD = 4  # chunks of one recording that are asked for at once: long ones must not fill all batches


def recognise(served: ServedModel, blocks: Iterable[np.ndarray], job: Job,
              told: Callable[[str], None] | None = None) -> Transcript:
    """The transcript of a recording given as blocks [S].

    Arguments
    ---------
    job : cancels it
    told : hears more of the text whenever there is more; all that it heard, joined, is the transcript's text
    """
    heard, settling = Assembly(), StableWords(served.decoder, served.vocabulary)
    tell = None if told is None else _Telling(served, told)
    waiting: deque[tuple[int, Chunk, Future[Any]]] = deque()

    def take() -> None:
        number, chunk, future = waiting.popleft()
        heard.add(number, chunk, job.result(future), served.frame_samples, served.decoder)
        new, heard.stretches = heard.stretches, []
        settling.more(new)
        if tell is not None:
            tell.more(settling.words)

    chunks = cut(blocks, served.config.sample_rate, served.frame_samples, served.chunk_seconds)
    for number, chunk in enumerate(chunks):
        job.check()
        waiting.append((number, chunk, job.watch(served.batcher.submit(chunk.signal))))
        if len(waiting) >= _AHEAD:
            take()
    while waiting:
        take()
    settling.end()
    if tell is not None:
        tell.more(settling.words)
    return transcript("", heard, settling.words, served.vocabulary)


class _Telling:
    """Tells the text of settled words as they come."""

    def __init__(self, served: ServedModel, told: Callable[[str], None]):
        self._vocabulary, self._told = served.vocabulary, told
        self._count = 0

    def more(self, words: Sequence[Word]) -> None:
        """What of the words was not told yet."""
        new = words[self._count :]
        if new:
            text = self._vocabulary.text(new)
            self._told(self._vocabulary.space + text if self._count else text)
            self._count += len(new)
