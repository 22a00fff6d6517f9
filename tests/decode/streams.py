"""Streams cut into pieces, and what a listener of one has in the end."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from hypothesis import strategies as st

#: Pieces with spaces before, behind and amid them, alone, and bytes; 1 is silent.
MARKED = ["<blk>", "<s>", "▁", "a", "b", "▁a", "b▁", "a▁b", "▁▁", "<0xC3>", "<0xA4>"]


class Listened(NamedTuple):
    """All that is settled, what may change, and where lines ended: (words settled by then, seconds)."""

    settled: list
    partial: list
    lines: list


def listen(search, pieces, finish=False):
    """Feed pieces, see that what was said keeps its promises, and gather it."""
    settled, partial, lines = [], [], []
    for log_probs in pieces:
        said = search.feed(log_probs)
        assert said and not any(each.partial for each in said[:-1]) and all(each.endpoint for each in said[:-1])
        for each in said:
            settled += each.settled
            lines += [(len(settled), each.seconds)] if each.endpoint else []
        partial = said[-1].partial
    if finish:
        last = search.finish()
        settled, partial = settled + last.settled, last.partial
        lines += [(len(settled), last.seconds)] if last.endpoint else []
    return Listened(settled, partial, lines)


def log_probs_of(labels, size, sharp=8.0):
    """[T, V] that say these labels, each frame with a confidence of its own."""
    scores = np.random.default_rng(len(labels)).normal(size=(len(labels), size))
    scores[np.arange(len(labels)), labels] += sharp
    return (scores - np.log(np.exp(scores).sum(1, keepdims=True))).astype(np.float32)


def runs(labels, counts=(1, 1, 2, 3, 16, 18, 40)):
    """Strategy: labels of frames, with many blanks, in runs of such lengths."""
    run = st.tuples(st.integers(0, labels - 1) | st.just(0), st.sampled_from(counts))
    return st.lists(run, min_size=1, max_size=40).map(
        lambda found: [label for label, count in found for _ in range(count)])


def cuts(data, frames):
    """Draw where to cut a stream: nowhere, anywhere, or after every frame."""
    anywhere = st.lists(st.integers(0, frames), max_size=12).map(sorted)
    return data.draw(anywhere | st.just(list(range(1, frames))))
