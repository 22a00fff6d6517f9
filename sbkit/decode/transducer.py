"""Greedy decoding of a transducer, for a whole batch or a stream; needs only numpy."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from sbkit.decode.greedy_stream import SettlingStream, concatenate
from sbkit.decode.spans import Spelling, TokenSpans
from sbkit.decode.streaming import StreamResult
from sbkit.errors import SbkitError

#: Tokens in one frame, after which decoding moves to the next; speech has fewer.
MAX_TOKENS_PER_FRAME = 5


class Joint(ABC):
    """A transducer's prediction and joint network."""

    context: int
    """The number of last tokens that the prediction depends on."""
    blank: int

    @abstractmethod
    def predict(self, tokens: np.ndarray) -> np.ndarray:
        """Map the last tokens [N, context] to states [N, J]."""

    @abstractmethod
    def join(self, encoded: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Map states [N, J] of both to log-probabilities [N, V] of the next token or the blank."""


class GraphJoint(Joint):
    """A joint network of two graphs.

    decoder : maps the last tokens [N, context] to states [N, J]
    joiner : maps states [N, J] of both to scores [N, V]
    """

    def __init__(self, decoder: Callable[[np.ndarray], np.ndarray],
                 joiner: Callable[[np.ndarray, np.ndarray], np.ndarray], vocabulary: int, context: int, blank: int):
        self._decoder = decoder
        self._joiner = joiner
        self._vocabulary = vocabulary
        self.context = context
        self.blank = blank

    def predict(self, tokens: np.ndarray) -> np.ndarray:
        return self._decoder(tokens)

    def join(self, encoded: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        scores = self._joiner(encoded, predicted)
        if scores.shape != (len(encoded), self._vocabulary):
            raise SbkitError("mismatched-bundle", f"the joiner outputs {list(scores.shape)} for {len(encoded)} frames "
                             f"and {self._vocabulary} tokens", hint="do its files come from the same export?")
        scores = scores - scores.max(-1, keepdims=True)
        log_probs: np.ndarray = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        return log_probs


class _Emission(NamedTuple):
    """A token, the frame in which it was output, and its probability there."""

    token: int
    frame: int
    prob: float


class TransducerSearch:
    """Decodes several utterances or streams at once, frame by frame: it takes the best token until that is the blank.

    An utterance's tokens don't depend on the others, or on how its frames were split into calls of :meth:`feed`.

    count : utterances
    """

    def __init__(self, joint: Joint, count: int = 1):
        self.joint = joint
        self._last = np.full((count, joint.context), joint.blank, np.int64)
        self._predicted = joint.predict(self._last)
        self._frames = np.zeros(count, np.int64)

    def feed(self, encoded: Sequence[np.ndarray]) -> list[TokenSpans]:
        """Decode the next states [T, J] of each; returns their tokens, with frames counted from the first one."""
        emissions: list[list[_Emission]] = [[] for _ in encoded]
        lengths = np.array([len(states) for states in encoded], np.int64)
        for frame in range(int(lengths.max(initial=0))):
            rows = np.flatnonzero(lengths > frame)  # of utterances that are still in this frame
            states = np.stack([encoded[row][frame] for row in rows.tolist()])
            for _ in range(MAX_TOKENS_PER_FRAME):
                log_probs = self.joint.join(states, self._predicted[rows])
                best = log_probs.argmax(-1)
                best_log_prob = np.take_along_axis(log_probs, best[:, None], -1)[:, 0]
                if not np.isfinite(best_log_prob).all():
                    raise not_a_number()
                emits = best != self.joint.blank
                if not emits.any():
                    break
                rows = rows[emits]
                states = states[emits]
                tokens = best[emits]
                for row, token, log_prob in zip(rows, tokens.tolist(), best_log_prob[emits].tolist(), strict=True):
                    emissions[row].append(_Emission(token, int(self._frames[row]) + frame, float(np.exp(log_prob))))
                self._last[rows] = np.concatenate([self._last[rows, 1:], tokens[:, None]], 1)
                self._predicted[rows] = self.joint.predict(self._last[rows])
        self._frames += lengths
        return [spans_of(np.array([emission.token for emission in utterance], np.int64),
                         np.array([emission.frame for emission in utterance], np.int64),
                         np.array([emission.prob for emission in utterance])) for utterance in emissions]


class TransducerStream(SettlingStream):
    """Decodes a transducer's stream greedily."""

    quick = False

    def __init__(self, spelling: Spelling, joint: Joint):
        super().__init__(spelling)
        self._greedy = TransducerSearch(joint)

    def feed(self, scores: np.ndarray) -> list[StreamResult]:
        [spans] = self._greedy.feed([scores])
        self._frames += len(scores)
        silent = np.isin(spans.ids, list(self.spelling.silent))
        return self.update(concatenate(self._open, spans.take(~silent)))

    def finish(self) -> StreamResult:
        return self.end(self._open)


def spans_of(tokens: np.ndarray, frames: np.ndarray, probs: np.ndarray) -> TokenSpans:
    """Return the spans of tokens [U] that were output in frames [U] with these probabilities [U]."""
    return TokenSpans(tokens, frames, frames + 1, probs.astype(np.float32))


def not_a_number() -> SbkitError:
    """The error for a model whose output is not a number."""
    return SbkitError("nan-output", "the model's output is NaN",
                      hint="training may have diverged, or the precision is too low")
