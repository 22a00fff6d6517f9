"""What a loss says of decoding: its scores, greedy decoding, and its search."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

from sbkit.decode.spans import TokenSpans
from sbkit.decode.token_search import TokenSearch
from sbkit.errors import SbkitError
from sbkit.runs.evaluation_request import EvaluateRequest

DecoderScores = Any  # a tensor, or several: the outputs of the model that are decoded
Search = Any  # a TokenSearch, a JointSearch, or a recipe's own


class Decoding(ABC):
    """Decodes the scores of one kind of model.

    A derived class says what the scores are and decodes them greedily. What it leaves out, an evaluation refuses.
    """

    search_class: ClassVar[type[TokenSearch] | None] = None
    """The search that an evaluation builds of ``--beam``, ``--lm`` and the like; None: there is no such search."""

    @abstractmethod
    def scores(self, encoded: Tensor) -> DecoderScores:
        """Compute the scores to decode from encoder states [B, T, D]."""

    @abstractmethod
    def search_input(self, scores: DecoderScores) -> Tensor:
        """Return the input of a search, and of ``greedy``."""

    @abstractmethod
    def greedy(self, scores: Tensor, frames: Tensor) -> Iterable[TokenSpans]:
        """Decode the input of a search [B, T, ...] of ``frames`` [B] greedily."""

    def ctc_scores(self, scores: DecoderScores) -> Tensor | None:
        """Return the CTC head's scores [B, T, V], for aligning words; None if there is no such head."""
        return None

    def complete(self, search: Search) -> None:  # noqa: B027 (most searches need nothing)
        """Give a search the parts of the model that it needs."""

    def joint_search(self, request: EvaluateRequest) -> Search:
        """Build the search with CTC and the attention decoder that an evaluation asks for; raises if there is none."""
        raise SbkitError("no-such-search", "the model has no attention decoder, so it can't use --joint", key="joint",
                         hint="leave it out")
