"""How the states of a transducer are decoded: greedily, or by a beam search."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import TokenSearch
from sbkit.decode.transducer import TransducerSearch
from sbkit.decode.transducer_beam import TransducerBeam
from sbkit.errors import SbkitError
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.decoding import Decoding, Search
from sbkit.tasks.transducer.keys import TransducerKeys
from sbkit.tasks.transducer.search import TorchJoint

StatesAndCTC = tuple[Tensor, Tensor | None]
"""The encoder's states as they are joined [B, T, J], and the scores of the CTC head [B, T, V] if there is one."""


class TransducerDecoding(Decoding):
    """Decodes states [B, T, J] that are joined with those of the tokens so far."""

    search_class: ClassVar[type[TokenSearch] | None] = TransducerBeam

    def __init__(self, acoustic_model: AcousticModel, keys: TransducerKeys):
        self.acoustic_model = acoustic_model
        self.keys = keys

    def scores(self, encoded: Tensor) -> StatesAndCTC:
        ctc_head = self.keys.ctc_lin
        return self.acoustic_model.head(encoded), None if ctc_head is None else ctc_head(encoded)

    def ctc_scores(self, scores: StatesAndCTC) -> Tensor | None:
        return scores[1]

    def search_input(self, scores: StatesAndCTC) -> Tensor:
        return scores[0].float()

    def greedy(self, scores: Tensor, frames: Tensor) -> list[TokenSpans]:
        rows = scores.float().cpu().numpy()
        search = TransducerSearch(self._joint(), len(rows))
        return search.feed([row[:count] for row, count in zip(rows, frames.tolist(), strict=True)])

    def complete(self, search: Search) -> None:
        search.joint = self._joint()

    def joint_search(self, request: EvaluateRequest) -> Search:
        raise SbkitError("no-such-search", "a transducer has no attention decoder, so it can't use --joint",
                         key="joint", hint="leave it out")

    def _joint(self) -> TorchJoint:
        return TorchJoint(self.keys.transducer, self.keys.blank_index)
