"""Beam search over CTC log-probabilities with a language model, a lexicon and hot words, for use in a YAML."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from sbkit.decode.beam_stream import BeamStream, LineSearch
from sbkit.decode.fusion import FusionWeights
from sbkit.decode.posteriors import Events, FramesOfStream, events, spans_of
from sbkit.decode.prefix_search import CTCSearch, TokenHypothesis
from sbkit.decode.spans import Spelling, TokenSpans
from sbkit.decode.token_search import Hypothesis, TokenSearch
from sbkit.errors import SbkitError

if TYPE_CHECKING:
    from torch import Tensor


class BeamSearch(TokenSearch):
    """Beam search over CTC log-probabilities [B, T, V]."""

    def events(self, scores: np.ndarray | Tensor, lengths: np.ndarray | Tensor) -> Events:
        """Find the likely tokens of log-probabilities, small enough to keep for a whole test set."""
        return events(scores, lengths, self.blank_id, self.token_threshold, self.token_beam)

    def join(self, batches: Sequence[Events]) -> Events:
        return Events.join(list(batches))

    def search(self, batch: Events, weights: FusionWeights | None = None) -> list[list[Hypothesis]]:
        if len(batch) and batch.labels != len(self.pieces):
            raise SbkitError(f"the model has {batch.labels} outputs, and the tokenizer of the search "
                             f"{len(self.pieces)} tokens", hint="is it the tokenizer that the model was trained with?")
        return super().search(batch, weights)

    def _search_spans(self, batch: Events, weights: FusionWeights, nbest: int
                      ) -> list[list[tuple[TokenHypothesis, TokenSpans]]]:
        found = CTCSearch(self.fusion, weights, max(self.beam, self.nbest), self.width).run(batch, nbest)
        flat = [each for hypotheses in found for each in hypotheses]
        spans = iter(spans_of(batch, [each.tokens for each in flat], [each.events for each in flat]))
        return [[(each, next(spans)) for each in hypotheses] for hypotheses in found]

    def stream(self, spelling: Spelling) -> BeamStream[EventStream]:
        if len(self.pieces) != len(spelling.symbols):
            raise SbkitError(f"the search has {len(self.pieces)} tokens, and the stream {len(spelling.symbols)}",
                             hint="use the model's tokens for both")
        line = CTCLine(self.fusion, self.weights, self.beam, self.width)
        return BeamStream(line, EventStream(spelling, self.blank_id, self.token_threshold, self.token_beam), spelling)


class EventStream:
    """Finds the events of a stream, the same as ``posteriors.events`` finds in all its frames at once.

    spelling : how its tokens are written, one for each label
    blank_id, threshold, max_tokens : as for ``posteriors.events``
    """

    def __init__(self, spelling: Spelling, blank_id: int, threshold: float, max_tokens: int):
        self._spelling, labels = spelling, len(spelling.symbols)
        self._options = (blank_id, threshold, max_tokens)
        self._before = np.zeros((0, labels), np.float32)  # the last known frame, whose token the next may continue
        self.source = FramesOfStream()
        none = np.zeros(0, np.int64)
        self.kept = Events(first=np.zeros(2, np.int64), offset=np.zeros(1), frame=none, run=none,
                           pause=np.zeros(0, bool), blank=np.zeros(0), begin=np.zeros(1, np.int64), token=none,
                           prob=np.zeros(0), labels=labels)
        """All events that were not dropped, as one utterance; frames count from the stream's first."""

    @property
    def frame(self) -> np.ndarray:
        return self.kept.frame

    def feed(self, log_probs: np.ndarray) -> None:
        """Add the events of log-probabilities [T, V]."""
        self._spelling.check(log_probs)
        blank, first = self._options[0], self.source.known
        frames, near = self.source.feed(log_probs, log_probs.max(1, initial=-np.inf) > log_probs[:, blank])
        if not len(frames):
            return
        frames = frames.astype(np.float32)
        frames[~near], frames[~near, blank] = -np.inf, 0.0
        known, several = len(self._before), np.concatenate([self._before, frames])
        more = events(several[None], np.array([len(several)]), *self._options, near=np.ones((1, len(several)), bool))
        run = self.kept.run.copy()
        if known and len(more.frame) and not more.frame[0]:  # the last frame has tokens, so it has an event already
            if len(run):
                run[-1] += more.run[0] - 1
            more = more.between(1, len(more.frame))
        more = replace(more, frame=more.frame.astype(np.int64) + first - known, offset=np.zeros(1))
        joined = Events.join([replace(self.kept, run=run), more])
        self.kept = replace(joined, first=np.array([0, len(joined.frame)]), offset=np.zeros(1))
        self._before = several[-1:].copy()

    def drop(self, count: int) -> None:
        kept = self.kept.between(count, len(self.kept.frame))
        # Copies: views would keep what was dropped in memory.
        self.kept = replace(kept, **{name: getattr(kept, name).copy()
                                     for name in ("frame", "run", "pause", "blank", "token", "prob")})


class CTCLine(LineSearch[EventStream], CTCSearch):
    """Searches a line of a stream in CTC's events."""

    def _load_events(self) -> None:
        self.events = self.stream.kept
        self.token = self.events.token.astype(np.int64, copy=False)

    def _spans(self, tokens: np.ndarray, events: np.ndarray, probs: np.ndarray) -> TokenSpans:
        return spans_of(self.stream.kept.between(0, self.searched), [tokens], [events])[0]
