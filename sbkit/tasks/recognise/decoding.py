"""What a loss says of decoding: its scores, greedy decoding, and its search. CTC and transducers have one each."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar, Protocol

from torch import Tensor

from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import TokenSearch
from sbkit.runs.evaluation import EvaluateRequest

DecoderScores = Any  # a tensor, or several: the outputs of the model that are decoded
Search = Any  # a TokenSearch, a JointSearch, or a recipe's own


class Decoding(Protocol):
    """Decodes the scores of one kind of model."""

    search_class: ClassVar[type[TokenSearch]]

    def scores(self, encoded: Tensor) -> DecoderScores:
        """Compute the scores to decode from encoder states [B, T, D]."""

    def ctc_scores(self, scores: DecoderScores) -> Tensor | None:
        """Return the CTC head's scores [B, T, V], for aligning words; None if there is no such head."""

    def search_input(self, scores: DecoderScores) -> Tensor:
        """Return the input of a search, and of ``greedy``."""

    def greedy(self, scores: Tensor, frames: Tensor) -> Iterable[TokenSpans]:
        """Decode the input of a search [B, T, ...] of ``frames`` [B] greedily."""

    def complete(self, search: Search) -> None:
        """Give a search the parts of the model that it needs."""

    def joint_search(self, request: EvaluateRequest) -> Search:
        """Build the search with CTC and the attention decoder that an evaluation asks for; raises if there is none."""
