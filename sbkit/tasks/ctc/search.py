"""How a test is searched: in chunks, and jointly by CTC and the attention decoder."""

from __future__ import annotations

from torch import Tensor

from sbkit.decode.greedy import Hypotheses, greedy
from sbkit.decode.joint import JointSearch
from sbkit.errors import SbkitError
from sbkit.runs.evaluation import EvaluateRequest
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.recognise.live import LiveTest
from sbkit.tasks.recognise.search import options


def joint(request: EvaluateRequest, keys: CTCKeys) -> JointSearch:
    """Build the search that ``--joint`` asks for."""
    given = options(request, keys)
    if set(given) - {"beam", "nbest"} or request.tune_lm:
        raise SbkitError("the joint search takes no language model, no word score and no hot words",
                         hint="leave out these, or --joint")
    weight = keys.ctc_weight
    if weight >= 1:
        raise SbkitError(f"{request.run} has no trained attention decoder: its recipe says ctc_weight: {weight}",
                         hint="train with less than 1, such as --ctc_weight 0.3, or leave out --joint")
    if request.ctc_weight is not None:
        given["ctc_weight"] = request.ctc_weight
    begin, end = keys.ends
    return JointSearch(keys.tokenizer, blank_id=keys.blank_index, bos_id=begin, eos_id=end, **given)


class Live(LiveTest):
    """Hears each utterance of a test in chunks of each size that was asked for."""

    def searched(self, scores: Tensor) -> Tensor:
        return scores.float().log_softmax(-1)

    def greedy(self, searched: Tensor, frames: Tensor) -> Hypotheses:
        return greedy(searched, frames, blank_id=self.keys.blank_index)
