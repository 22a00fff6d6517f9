"""From samples to a transcript, chunk by chunk through the batcher, with the words so far on the way."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from concurrent.futures import Future

import numpy as np

from sbkit.decode.spans import Word
from sbkit.infer.chunks import Chunk, cut
from sbkit.infer.heard import Heard, transcript, words
from sbkit.infer.transcript import Transcript
from sbkit.serve.job import Job
from sbkit.serve.registry import Served

_AHEAD = 4  # chunks of one recording that are asked for at once: long ones must not fill all batches


def recognise(served: Served, blocks: Iterable[np.ndarray], job: Job,
              told: Callable[[str], None] | None = None) -> Transcript:
    """The transcript of a recording given as blocks [S].

    Arguments
    ---------
    job : cancels it
    told : hears more of the text whenever there is more; all that it heard, joined, is the transcript's text
    """
    heard, tell = Heard(), None if told is None else _Telling(served, told)
    waiting: deque[tuple[int, Chunk, Future]] = deque()

    def take() -> None:
        number, chunk, future = waiting.popleft()
        heard.add(number, chunk, job.result(future), served.frame_samples, served.decoder)
        if tell is not None:
            tell.more(heard)

    number = 0
    for chunk in cut(blocks, served.config.sample_rate, served.frame_samples, served.chunk_seconds):
        job.check()
        waiting.append((number, chunk, job.watch(served.batcher.submit(chunk.signal))))
        number += 1
        if len(waiting) >= _AHEAD:
            take()
    while waiting:
        take()
    heard.expected = number
    found = served.decoder.tokens([heard.stretches])[0]
    done = transcript("", heard, found, served.vocabulary)
    if tell is not None:
        tell.rest(done.text)
    return done


class _Telling:
    """Tells the text as it grows; what was told never changes."""

    def __init__(self, served: Served, told: Callable[[str], None]):
        self._served, self._told = served, told
        self._text = ""
        self._stretches = 0
        self._before: list[Word] = []

    def more(self, heard: Heard) -> None:
        """After another chunk."""
        new, self._stretches = heard.stretches[self._stretches :], len(heard.stretches)
        if not new:
            return
        decoder, vocabulary = self._served.decoder, self._served.vocabulary
        if decoder.joins:  # the last word may go on
            found = words(decoder.tokens([heard.stretches])[0], vocabulary)[:-1]
            self.rest(vocabulary.text(found))
        else:
            self._before += words(decoder.tokens([new])[0], vocabulary)
            self.rest(vocabulary.text(self._before))

    def rest(self, text: str) -> None:
        """Tell what of the text was not told yet."""
        if len(text) > len(self._text):
            self._told(text[len(self._text) :])
            self._text = text
