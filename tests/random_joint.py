"""A transducer's prediction and joint network with random scores."""

from __future__ import annotations

import numpy as np

PIECES = ["<blk>", "▁", "a", "b", "▁c"]


class Joint:
    """Random scores, which depend on the last two tokens; the blank is likely."""

    context, blank = 2, 0

    def __init__(self, seed=0, blank=2.0):
        rng = np.random.default_rng(seed)
        self.table = 2 * rng.normal(size=(len(PIECES), len(PIECES), len(PIECES))).astype(np.float32)
        self.bias = np.array([blank, 0, 0, 0, 0], np.float32)

    def predict(self, tokens):
        return self.table[tokens[:, 0], tokens[:, 1]]

    def join(self, encoded, predicted):
        scores = encoded + predicted + self.bias
        return scores - np.log(np.exp(scores).sum(-1, keepdims=True))


def drawn(seed, *lengths):
    """Random states [T, V] of utterances."""
    rng = np.random.default_rng(seed)
    return [2 * rng.normal(size=(length, len(PIECES))).astype(np.float32) for length in lengths]
