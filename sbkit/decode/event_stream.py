"""The events of a stream, as its frames come: those that its search still needs."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from sbkit.decode.posteriors import Events, events


class EventStream:
    """Finds the same events in a stream, cut into any pieces, as ``posteriors.events`` does in the whole.

    Arguments
    ---------
    blank_id, threshold, most : as for ``posteriors.events``
    labels : V, the number of labels
    """

    def __init__(self, blank_id: int, threshold: float, max_tokens: int, labels: int):
        self._how = (blank_id, threshold, max_tokens)
        self._before = np.zeros((0, labels), np.float32)  # the last frame, which the next may continue
        none = np.zeros(0, np.int64)
        self.kept = Events(first=np.zeros(2, np.int64), offset=np.zeros(1), frame=none, run=none,
                           pause=np.zeros(0, bool), blank=np.zeros(0), begin=np.zeros(1, np.int64), token=none,
                           prob=np.zeros(0), labels=labels)
        """All events that were not dropped, as one utterance; frames count from the first of the stream."""
        self.frames = 0
        """Frames of the stream so far."""

    def feed(self, log_probs: np.ndarray) -> None:
        """Add the events of log-probabilities [T, V]."""
        if not len(log_probs):
            return
        known = len(self._before)
        several = np.concatenate([self._before, log_probs])
        more = events(several[None], np.array([len(several)]), *self._how)
        run = self.kept.run.copy()
        if known and len(more.frame) and not more.frame[0]:  # the frame before has tokens: it is in an event already
            if len(run):
                run[-1] += more.run[0] - 1
            more = more.between(1, len(more.frame))
        more = replace(more, frame=more.frame.astype(np.int64) + self.frames - known, offset=np.zeros(1))
        joined = Events.join([replace(self.kept, run=run), more])
        self.kept = replace(joined, first=np.array([0, len(joined.frame)]), offset=np.zeros(1))
        self._before = log_probs[-1:].copy()
        self.frames += len(log_probs)

    def drop(self, count: int) -> None:
        """Drop the first events."""
        kept = self.kept.between(count, len(self.kept.frame))
        # Copies: views would keep what was dropped in memory.
        self.kept = replace(kept, **{name: getattr(kept, name).copy()
                                     for name in ("frame", "run", "pause", "blank", "token", "prob")})
