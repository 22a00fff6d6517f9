"""Beam search over CTC log-probabilities with a language model, a lexicon and hot words, for use in a YAML."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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

    def events(self, scores: np.ndarray | Tensor, lengths: np.ndarray | Tensor,
               tokens_may_begin: np.ndarray | None = None) -> Events:
        """Find the likely tokens of log-probabilities, small enough to keep for a whole test set.

        tokens_may_begin : [B, T] in which frames they may. A stream says that, since it sees only some of its frames;
            None: in those near speech. A class that overrides this method passes it on
        """
        return events(scores, lengths, self.blank_id, self.token_threshold, self.token_beam, tokens_may_begin)

    def join(self, batches: Sequence[Events]) -> Events:
        return Events.join(list(batches))

    def search(self, batch: Events, weights: FusionWeights | None = None) -> list[list[Hypothesis]]:
        if len(batch) and batch.labels != len(self.pieces):
            raise SbkitError("tokenizer-mismatch", f"the model has {batch.labels} outputs, but the search's tokenizer "
                             f"has {len(self.pieces)} tokens",
                             hint="is it the tokenizer that the model was trained with?")
        return super().search(batch, weights)

    def _search_spans(self, batch: Events, weights: FusionWeights, nbest: int
                      ) -> list[list[tuple[TokenHypothesis, TokenSpans]]]:
        search = CTCSearch(self.fusion, weights, max(self.beam, self.nbest), self.width)
        transcripts = search.run(batch, nbest)
        # Spans are found for the whole batch at once.
        flat = [hypothesis for hypotheses in transcripts for hypothesis in hypotheses]
        spans = iter(spans_of(batch, [hypothesis.tokens for hypothesis in flat],
                              [hypothesis.events for hypothesis in flat]))
        return [[(hypothesis, next(spans)) for hypothesis in hypotheses] for hypotheses in transcripts]

    def stream(self, spelling: Spelling) -> BeamStream[EventStream]:
        if len(self.pieces) != len(spelling.symbols):
            raise SbkitError("tokenizer-mismatch", f"the search has {len(self.pieces)} tokens, and the stream "
                             f"{len(spelling.symbols)}", hint="use the model's tokens for both")
        line = CTCLine(self.fusion, self.weights, self.beam, self.width)
        return BeamStream(line, EventStream(spelling, self.blank_id, self.events), spelling)


class EventStream:
    """Finds the events of a stream, the same as ``BeamSearch.events`` finds in all its frames at once.

    spelling : how its tokens are written, one for each label
    blank_id : the label of the blank
    find_events : the ``events`` of a search, which may be a class of the user's own
    """

    def __init__(self, spelling: Spelling, blank_id: int,
                 find_events: Callable[[np.ndarray, np.ndarray, np.ndarray], Events]):
        self._spelling = spelling
        self._blank_id = blank_id
        self._find_events = find_events
        labels = len(spelling.symbols)
        self._last_frame = np.zeros((0, labels), np.float32)  # of those known; the next may continue its token
        self.source = FramesOfStream()
        none = np.zeros(0, np.int64)
        self.events = Events(first=np.zeros(2, np.int64), offset=np.zeros(1), frame=none, run=none,
                             pause=np.zeros(0, bool), blank=np.zeros(0), begin=np.zeros(1, np.int64), token=none,
                             prob=np.zeros(0), labels=labels)
        """All events that were not dropped, as one utterance; frames count from the stream's first."""

    @property
    def frame(self) -> np.ndarray:
        return self.events.frame

    def feed(self, log_probs: np.ndarray) -> None:
        """Add the events of log-probabilities [T, V]."""
        self._spelling.check(log_probs)
        first_frame = self.source.known
        spoken = log_probs.max(1, initial=-np.inf) > log_probs[:, self._blank_id]
        frames, near_speech = self.source.feed(log_probs, spoken)
        if not len(frames):
            return
        frames = frames.astype(np.float32)
        frames[~near_speech] = -np.inf
        frames[~near_speech, self._blank_id] = 0.0

        # The last frame of the call before is looked at again: its token may continue.
        overlap = len(self._last_frame)
        frames = np.concatenate([self._last_frame, frames])
        may_begin_in_all = np.ones((1, len(frames)), bool)  # those far from speech have a sure blank now
        new = self._find_events(frames[None], np.array([len(frames)]), may_begin_in_all)
        run = self.events.run.copy()
        if overlap and len(new.frame) and new.frame[0] == 0:  # it has tokens, so it has an event already
            if len(run):
                run[-1] += new.run[0] - 1
            new = new.between(1, len(new.frame))
        new = replace(new, frame=new.frame.astype(np.int64) + first_frame - overlap, offset=np.zeros(1))
        joined = Events.join([replace(self.events, run=run), new])
        self.events = replace(joined, first=np.array([0, len(joined.frame)]), offset=np.zeros(1))
        self._last_frame = frames[-1:].copy()

    def drop(self, count: int) -> None:
        rest = self.events.between(count, len(self.events.frame))
        # Copies: views would keep what was dropped in memory.
        self.events = replace(rest, **{name: getattr(rest, name).copy()
                                       for name in ("frame", "run", "pause", "blank", "token", "prob")})


class CTCLine(LineSearch[EventStream], CTCSearch):
    """Searches a line of a stream in CTC's events."""

    def _load_events(self) -> None:
        self.events = self.stream.events
        self.token = self.events.token.astype(np.int64, copy=False)

    def _spans(self, tokens: np.ndarray, events: np.ndarray, probs: np.ndarray) -> TokenSpans:
        [spans] = spans_of(self.stream.events.between(0, self.searched), [tokens], [events])
        return spans
