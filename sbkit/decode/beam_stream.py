"""Beam search of a stream with a language model, a lexicon and hot words; needs only numpy."""

from __future__ import annotations

import functools
import math
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

import numpy as np

from sbkit.decode.posteriors import FramesOfStream
from sbkit.decode.prefix_search import EMPTY_HISTORY, Beams, Search
from sbkit.decode.spans import Spelling, TokenSpans, Word
from sbkit.decode.streaming import StreamResult, StreamSearch, count_settled


class StreamEvents(Protocol):
    """The events of a stream that were not dropped."""

    source: FramesOfStream
    """Counts the stream's frames, and those of which all events are known; in silence, others may still become some."""

    @property
    def frame(self) -> np.ndarray:
        """The frame of each event, counted from the first of the stream."""

    def feed(self, scores: np.ndarray, /) -> None:
        """Add the events of a model's output for frames [T, ...]. Invalid output leaves the stream unchanged."""

    def drop(self, count: int, /) -> None:
        """Drop the first events."""


S = TypeVar("S", bound=StreamEvents)


class LineSearch(Search, Generic[S]):
    """Searches the events of one stream step by step, with the same steps as a search of a whole recording.

    Call :meth:`begin` first. The history has the paths to live hypotheses from the last cut on.
    """

    rank: np.ndarray
    history: list[tuple[np.ndarray, ...]]
    beams: Beams
    start: int  # frame at which the line began
    searched: int  # events of the line that were searched and not dropped

    def begin(self, stream: S, frame: int) -> None:
        """Begin a line at a frame, with the events from there on."""
        self.stream, self.start, self.searched = stream, frame, 0
        self.rank, self.scale = np.zeros(1, np.int64), np.zeros(1)
        self.history, self.nodes = [EMPTY_HISTORY], 1
        self.beams = self._start(1)

    def step(self) -> None:
        self._load_events()
        self.beams = self._step(self.beams, np.array([self.searched]))
        self.searched += 1

    @abstractmethod
    def _load_events(self) -> None:
        """Give the search the stream's events, or states, that were not dropped."""

    @abstractmethod
    def _spans(self, tokens: np.ndarray, events: np.ndarray, probs: np.ndarray) -> TokenSpans:
        """Locate the tokens of a path."""

    # ------------------------------------------------------------ hypotheses

    def scores(self) -> np.ndarray:
        """The scores [M] of the hypotheses if the line continues."""
        beams = self.beams
        with np.errstate(divide="ignore"):
            return np.log(beams.blank + beams.other) + beams.text + beams.soft

    def spans_to(self, node: int) -> TokenSpans:
        """The tokens on the path to a row of the history."""
        return self._spans(*(column[0] for column in self._trace(np.array([node]))))

    def best(self) -> int:
        """The row in the history of the best hypothesis if the line continues."""
        return int(self.beams.node[self.scores().argmax()])

    def final_spans(self) -> TokenSpans:
        """The tokens of the best transcript if the line ends here."""
        found = self._finish([self.beams], 1)[0]
        return self._spans(found[0].tokens, found[0].events, found[0].probs) if found else self.spans_to(0)

    # ------------------------------------------------------------- dropping

    def shared_path(self) -> np.ndarray:
        """Compact the history, and return its rows that all hypotheses share."""
        parent, *columns = (np.concatenate(column) for column in zip(*self.history, strict=True))
        keep = np.zeros(self.nodes, bool)
        keep[0] = True
        rows = np.unique(self.beams.node)
        while len(rows := rows[~keep[rows]]):
            keep[rows] = True
            rows = np.unique(parent[rows - 1])
        place, rows = np.cumsum(keep) - 1, np.flatnonzero(keep[1:])
        self.history = [(place[parent[rows]], *(column[rows] for column in columns))]
        self.nodes = len(rows) + 1
        self.beams.node = place[self.beams.node]
        # What follows is about the compacted history.
        parent, live = self.history[0][0], np.zeros(self.nodes, bool)
        live[self.beams.node] = True
        children, child = np.bincount(parent, minlength=self.nodes), np.zeros(self.nodes, np.int64)
        child[parent] = np.arange(1, self.nodes)
        path, node = [], 0
        while children[node] == 1 and not live[node]:
            node = int(child[node])
            path.append(node)
        return np.array(path, np.int64)

    def keep_prefix_of_best(self, count: int) -> None:
        """Keep only hypotheses whose first ``count`` tokens are those of the best."""
        last = self._rows_to(self.best())[count - 1]
        same = [last in self._rows_to(node) for node in self.beams.node.tolist()]
        self.beams = self.beams.take(np.flatnonzero(same))

    def cut(self, path: np.ndarray) -> None:
        """Drop the shared rows ``path`` except the last, whose token is the first that stays."""
        parent, token, event, probs = self.history[0]
        gone = np.zeros(self.nodes, bool)
        gone[path[:-1]] = True
        place = np.cumsum(~gone) - 1
        place[gone] = 0
        rows, dropped = np.flatnonzero(~gone[1:]), int(event[path[-1] - 1])
        self.history = [(place[parent[rows]], token[rows], event[rows] - dropped, probs[rows])]
        self.nodes = len(rows) + 1
        self.beams.node, self.beams.event = place[self.beams.node], self.beams.event - dropped
        self.stream.drop(dropped)
        self.searched -= dropped

    def _rows_to(self, node: int) -> list[int]:
        parent, rows = np.concatenate([columns[0] for columns in self.history]), []
        while node:
            rows.append(node)
            node = int(parent[node - 1])
        return rows[::-1]


#: A line ends only if every hypothesis with recent tokens is at least this much worse than the best silent one.
_END_MARGIN = math.log(100)


class BeamStream(StreamSearch, Generic[S]):
    """Searches a stream line by line: a line's words are the same as if it were searched as a whole.

    A word is settled once all hypotheses share it and the first token of the next; then the search drops it. A line
    ends where the best hypothesis, and all that are nearly as likely, have had no token for ``PAUSE_SECONDS``; the next
    starts like a sentence. If hypotheses disagree about a word for ``LONGEST_SECONDS``, the best one is taken.

    line : its search; streams may share its language model, and may be fed by different threads at the same time
    events : the stream's events
    spelling : how its tokens are written
    """

    quick = False

    def __init__(self, line: LineSearch[S], events: S, spelling: Spelling):
        self._line, self._events, self.spelling = line, events, spelling
        line.begin(events, 0)
        self._settled: list[Word] = []  # of this line, and not returned yet
        self._in_line = False  # whether a word of this line was settled

    def feed(self, scores: np.ndarray) -> list[StreamResult]:
        """Search a model's output for frames [T, ...]; see ``sbkit.decode.streaming.StreamSearch``."""
        self._events.feed(scores)
        line, results = self._line, []
        for frame in self._events.frame[line.searched:].tolist():
            results += self._close_before(frame)
            # If no word was settled for too long: first those of the best hypothesis, then all, by ending the line.
            for settle in (self._settle_shared, self._trust_best, self._settle_shared,
                           functools.partial(self._end, frame)):
                if not line.searched or frame - self._events.frame[0] < self.spelling.longest:
                    break
                settle()
            line.step()
        results += self._close_before(self._events.source.known)
        self._settle_shared()
        partial = self._write(line.spans_to(line.best()))
        now = self._result(partial, False, self._events.source.frames)
        return [*results, now] if now.settled or partial or not results else results

    def finish(self) -> StreamResult:
        self._end(self._events.source.frames)
        return self._result([], self._in_line, self._events.source.frames)

    def _result(self, partial: list[Word], endpoint: bool, frame: int) -> StreamResult:
        words, self._settled = self._settled, []
        return StreamResult(words, partial, endpoint, frame * self.spelling.frame_seconds)

    def _write(self, spans: TokenSpans) -> list[Word]:
        return self.spelling.words(spans)

    # ----------------------------------------------------------------- lines

    def _close_before(self, frame: int) -> list[StreamResult]:
        """End the line if its pause is long enough at this frame, before which all events were searched."""
        line, pause = self._line, self.spelling.pause
        if not line.searched and not self._in_line:
            return []
        # The last frame at which the best hypothesis, or one with nearly its score, began a token.
        scores = line.scores()
        event = int(line.beams.event[scores >= scores.max() - _END_MARGIN].max())
        if frame - (line.start if event < 0 else int(line.stream.frame[event])) < pause:
            return []
        ends = line.spans_to(line.best()).ends
        end = int(ends[-1]) if len(ends) else line.start
        if frame - end < pause:
            return []
        self._end(self.spelling.after_pause(end))
        if not self._in_line:
            return []
        result, self._in_line = self._result([], True, line.start), False
        return [result]

    def _end(self, frame: int) -> None:
        """Settle all words of the line, and start a new search at ``frame``."""
        self._add(self._write(self._line.final_spans()))
        self._events.drop(self._line.searched)
        self._line.begin(self._events, frame)

    def _add(self, words: list[Word]) -> None:
        self._settled += words
        self._in_line |= bool(words)

    # -------------------------------------------------------------- settling

    def _settle_shared(self) -> None:
        """Settle the words that all hypotheses share."""
        line = self._line
        path = line.shared_path()
        if not len(path):
            return
        spans = line.spans_to(int(path[-1]))
        groups = self.spelling.groups(spans)
        count, first = count_settled(groups)
        if count:
            self._add(self.spelling.write(groups[:count], spans))
            line.cut(path[:first + 1])

    def _trust_best(self) -> None:
        """Drop the hypotheses that disagree with the best about the words before its last."""
        spans = self._line.spans_to(self._line.best())
        count, first = count_settled(self.spelling.groups(spans))
        if count:
            self._line.keep_prefix_of_best(first + 1)
