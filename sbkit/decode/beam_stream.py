"""Beam search of a stream, with language model, lexicon and hot words, as the frames come; needs only numpy."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

import numpy as np

from sbkit.decode.prefix_search import NOTHING, Beams, Search
from sbkit.decode.spans import TokenSpans, Word
from sbkit.decode.streaming import Spelling, StreamResult, StreamSearch, settled


class Heard(Protocol):
    """What there is to search of a stream: events that were not dropped."""

    frames: int
    """Frames of the stream so far."""

    @property
    def frame(self) -> np.ndarray:
        """The frame of each event, counted from the first of the stream."""

    def feed(self, scores: np.ndarray, /) -> None:
        """Add the events of what a model gave for frames [T, ...]. Refused ones leave the stream unchanged."""

    def drop(self, count: int, /) -> None:
        """Drop the first events."""


H = TypeVar("H", bound=Heard)


class LineSearch(Search, Generic[H]):
    """Searches the events of one stream step by step; each step is one of the whole search.

    :meth:`begin` comes first. The history has the paths that lead to live hypotheses, back to the last cut.
    """

    rank: np.ndarray
    history: list[tuple[np.ndarray, ...]]
    beams: Beams
    start: int  # frame at which the line began
    taken: int  # events of the line that were searched, of those that weren't dropped

    def begin(self, stream: H, frame: int) -> None:
        """Begin a line at a frame, with the events from there on."""
        self.stream, self.start, self.taken = stream, frame, 0
        self.rank, self.scale = np.zeros(1, np.int64), np.zeros(1)
        self.history, self.nodes = [NOTHING], 1
        self.beams = self._start(1)

    def step(self) -> None:
        self._hear()
        self.beams = self._step(self.beams, np.array([self.taken]))
        self.taken += 1

    @abstractmethod
    def _hear(self) -> None:
        """Take what the stream's next event is searched in."""

    @abstractmethod
    def _spans(self, tokens: np.ndarray, events: np.ndarray, likely: np.ndarray) -> TokenSpans:
        """Locate the tokens of a path."""

    # ------------------------------------------------------------ hypotheses

    def scores(self) -> np.ndarray:
        """The scores [M] of the hypotheses if the line goes on."""
        beams = self.beams
        with np.errstate(divide="ignore"):
            return np.log(beams.blank + beams.other) + beams.text + beams.soft

    def spans_to(self, node: int) -> TokenSpans:
        """The tokens on the path to a row of the history."""
        return self._spans(*(column[0] for column in self._trace(np.array([node]))))

    def best(self) -> int:
        """The row in the history of the best hypothesis if the line goes on."""
        return int(self.beams.node[self.scores().argmax()])

    def over(self) -> TokenSpans:
        """The tokens of the best transcript if the line ends here, as the whole search finds it."""
        found = self._finish([self.beams], 1)[0]
        return self._spans(found[0].tokens, found[0].events, found[0].likely) if found else self.spans_to(0)

    def quiet_since(self, doubt: float) -> int:
        """The last frame at which a hypothesis began a token, of those that are less than ``doubt`` worse than the
        best."""
        scores = self.scores()
        event = int(self.beams.event[scores >= scores.max() - doubt].max())
        return self.start if event < 0 else int(self.stream.frame[event])

    # ----------------------------------------------------------- forgetting

    def agreed(self) -> np.ndarray:
        """The rows of the history, which is compacted, that all hypotheses share."""
        self._compact()
        parent, live = self.history[0][0], np.zeros(self.nodes, bool)
        live[self.beams.node] = True
        children, child = np.bincount(parent, minlength=self.nodes), np.zeros(self.nodes, np.int64)
        child[parent] = np.arange(1, self.nodes)
        path, node = [], 0
        while children[node] == 1 and not live[node]:
            node = int(child[node])
            path.append(node)
        return np.array(path, np.int64)

    def keep_like_best(self, count: int) -> None:
        """Keep only hypotheses whose first tokens are those of the best."""
        shared = self._rows_to(self.best())[count - 1]
        like = [shared in self._rows_to(node) for node in self.beams.node.tolist()]
        self.beams = self.beams.take(np.flatnonzero(like))

    def cut(self, path: np.ndarray) -> None:
        """Forget the rows ``path`` that all hypotheses share, but the last, whose token is the first that is left."""
        parent, token, event, likely = self.history[0]
        gone = np.zeros(self.nodes, bool)
        gone[path[:-1]] = True
        place = np.cumsum(~gone) - 1
        place[gone] = 0
        rows, dropped = np.flatnonzero(~gone[1:]), int(event[path[-1] - 1])
        self.history = [(place[parent[rows]], token[rows], event[rows] - dropped, likely[rows])]
        self.nodes = len(rows) + 1
        self.beams.node, self.beams.event = place[self.beams.node], self.beams.event - dropped
        self.stream.drop(dropped)
        self.taken -= dropped

    def _compact(self) -> None:
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

    def _rows_to(self, node: int) -> list[int]:
        parent, rows = np.concatenate([columns[0] for columns in self.history]), []
        while node:
            rows.append(node)
            node = int(parent[node - 1])
        return rows[::-1]


#: No line ends while a hypothesis that goes on is more than a hundredth as likely as one that is silent.
_DOUBT = math.log(100)


class BeamStream(StreamSearch, Generic[H]):
    """Searches a stream line by line: a line's words are those that the whole search finds in it.

    A word is settled once all hypotheses share it and the beginning of the next; what they share is cut off. A line
    ends where the best hypothesis, and all that are nearly as likely, have been silent for ``PAUSE_SECONDS``; the next
    begins like a sentence. Where hypotheses disagree about a word for ``LONGEST_SECONDS``, the best is right.

    line : searches it; what it has loaded may be shared by all streams, which threads may feed at the same time
    events : what there is to search of the stream
    spelling : how its tokens are written
    """

    quick = False

    def __init__(self, line: LineSearch[H], events: H, spelling: Spelling):
        self._line, self._events, self.spelling = line, events, spelling
        line.begin(events, 0)
        self._settled: list[Word] = []  # of this line, and not told yet
        self._in_line = False  # whether a word of this line was settled

    def feed(self, scores: np.ndarray) -> list[StreamResult]:
        """Hear what a model gave for frames [T, ...]; see ``sbkit.decode.streaming.StreamSearch``."""
        self._events.feed(scores)
        line, heard = self._line, []
        for frame in self._events.frame[line.taken:].tolist():
            heard += self._close_before(frame)
            self._shorten(frame)
            line.step()
        heard += self._close_before(self._events.frames)
        self._finalise()
        partial = self._write(line.spans_to(line.best()))
        now = self._result(partial, False, self._events.frames)
        return [*heard, now] if now.settled or partial or not heard else heard

    def finish(self) -> StreamResult:
        self._end(self._events.frames)
        return self._result([], self._in_line, self._events.frames)

    def _result(self, partial: list[Word], endpoint: bool, frame: int) -> StreamResult:
        words, self._settled = self._settled, []
        return StreamResult(words, partial, endpoint, frame * self.spelling.frame_seconds)

    def _write(self, spans: TokenSpans) -> list[Word]:
        return self.spelling.write(self.spelling.groups(spans), spans)

    # ----------------------------------------------------------------- lines

    def _close_before(self, frame: int) -> list[StreamResult]:
        """End the line if a pause has come by a frame, before which all events were searched."""
        line, pause = self._line, self.spelling.pause
        if not (line.taken or self._in_line) or frame - line.quiet_since(_DOUBT) < pause:
            return []
        ends = line.spans_to(line.best()).ends
        end = int(ends[-1]) if len(ends) else line.start
        if frame - end < pause:
            return []
        self._end(self.spelling.after_pause(end))
        if not self._in_line:
            return []
        heard, self._in_line = self._result([], True, line.start), False
        return [heard]

    def _end(self, frame: int) -> None:
        """Settle all words of the line, and search afresh from ``frame`` on."""
        self._add(self._write(self._line.over()))
        self._events.drop(self._line.taken)
        self._line.begin(self._events, frame)

    def _add(self, words: list[Word]) -> None:
        self._settled += words
        self._in_line |= bool(words)

    # -------------------------------------------------------------- settling

    def _finalise(self) -> None:
        """Settle the words that all hypotheses share."""
        line = self._line
        path = line.agreed()
        if not len(path):
            return
        spans = line.spans_to(int(path[-1]))
        groups = self.spelling.groups(spans)
        count, first = settled(groups)
        if count:
            self._add(self.spelling.write(groups[:count], spans))
            line.cut(path[:first + 1])

    def _shorten(self, frame: int) -> None:
        """Settle words if none has been for long, first by the best hypothesis, then by ending the search."""
        line, longest = self._line, self.spelling.longest
        for narrow in (self._finalise, self._trust_best, self._finalise, lambda: self._end(frame)):
            if not line.taken or frame - self._events.frame[0] < longest:
                return
            narrow()

    def _trust_best(self) -> None:
        """Drop the hypotheses that disagree with the best about the words before its last."""
        count, first = settled(self.spelling.groups(self._line.spans_to(self._line.best())))
        if count:
            self._line.keep_like_best(first + 1)
