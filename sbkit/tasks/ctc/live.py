"""A test of CTC in chunks."""

from __future__ import annotations

from torch import Tensor

from sbkit.decode.greedy import Hypotheses, greedy
from sbkit.tasks.recognise.live import LiveTest


class Live(LiveTest):
    """Hears each utterance of a test in chunks of each size that was asked for."""

    def searched(self, scores: Tensor) -> Tensor:
        return scores.float().log_softmax(-1)

    def greedy(self, searched: Tensor, frames: Tensor) -> Hypotheses:
        return greedy(searched, frames, blank_id=self.keys.blank_index)
