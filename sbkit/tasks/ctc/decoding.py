"""How the scores of CTC are decoded: greedily, by a beam search, or jointly with the attention decoder."""

from __future__ import annotations

from typing import ClassVar

from torch import Tensor

from sbkit.decode.beam import BeamSearch
from sbkit.decode.greedy import greedy
from sbkit.decode.joint import JointSearch
from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import TokenSearch
from sbkit.errors import SbkitError
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.decoding import Decoding
from sbkit.tasks.recognise.search import options


class CTCDecoding(Decoding):
    """Decodes scores [B, T, V] of the CTC head."""

    search_class: ClassVar[type[TokenSearch] | None] = BeamSearch

    def __init__(self, acoustic_model: AcousticModel, keys: CTCKeys):
        self.acoustic_model = acoustic_model
        self.keys = keys

    def scores(self, encoded: Tensor) -> Tensor:
        scores: Tensor = self.acoustic_model.head(encoded)
        return scores

    def ctc_scores(self, scores: Tensor) -> Tensor:
        return scores

    def search_input(self, scores: Tensor) -> Tensor:
        return scores.float().log_softmax(-1)

    def greedy(self, scores: Tensor, frames: Tensor) -> list[TokenSpans]:
        return greedy(scores, frames, blank_id=self.keys.blank_index)

    def joint_search(self, request: EvaluateRequest) -> JointSearch:
        arguments = options(request, self.keys)
        weight = self.keys.ctc_weight
        if set(arguments) - {"beam", "nbest"} or request.tune_lm:
            raise SbkitError("conflicting-options",
                             "the joint search takes no language model, no word score and no hot "
                             "words", key="joint", hint="leave these options out, or leave out --joint")
        if weight == 1:
            raise SbkitError("no-such-search", f"{request.run} has no trained attention decoder: its recipe says "
                             f"ctc_weight: {weight}", key="joint",
                             hint="train with less than 1, such as --ctc_weight 0.3, or leave out --joint")
        if request.ctc_weight is not None:
            arguments["ctc_weight"] = request.ctc_weight
        begin, end = self.keys.ends
        return JointSearch(self.keys.tokenizer, blank_id=self.keys.blank_index, bos_id=begin, eos_id=end, **arguments)
