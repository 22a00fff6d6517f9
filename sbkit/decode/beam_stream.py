"""Beam search of a stream with a language model, a lexicon and hot words; needs only numpy."""

from __future__ import annotations

import math
from abc import abstractmethod
from typing import Generic, Protocol, TypeVar

import numpy as np

from sbkit.decode.posteriors import FramesOfStream
from sbkit.decode.prefix_search import Beams, History, Search
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
    history: list[History]
    beams: Beams
    start: int  # frame at which the line began
    searched: int  # events of the line that were searched and not dropped

    def begin(self, stream: S, frame: int) -> None:
        """Begin a line at a frame, with the events from there on."""
        self.stream = stream
        self.start = frame
        self.searched = 0
        self.rank = np.zeros(1, np.int64)
        self.scale = np.zeros(1)
        self.history = [History.empty()]
        self.nodes = 1
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
            return np.log(beams.blank + beams.other) + beams.text_score + beams.lookahead

    def spans_to(self, node: int) -> TokenSpans:
        """The tokens on the path to a node of the history."""
        [tokens], [events], [probs] = self._trace(np.array([node]))
        return self._spans(tokens, events, probs)

    def best(self) -> int:
        """The node of the best hypothesis if the line continues."""
        return int(self.beams.node[self.scores().argmax()])

    def final_spans(self) -> TokenSpans:
        """The tokens of the best transcript if the line ends here."""
        [transcripts] = self._finish([self.beams], 1)
        if not transcripts:
            return self.spans_to(0)
        best = transcripts[0]
        return self._spans(best.tokens, best.events, best.probs)

    # ------------------------------------------------------------- dropping

    def shared_path(self) -> np.ndarray:
        """Compact the history, and return the nodes that all hypotheses share, from the first on."""
        self._compact()
        parent = self.history[0].parent
        is_last = np.zeros(self.nodes, bool)  # of a hypothesis
        is_last[self.beams.node] = True
        children = np.bincount(parent, minlength=self.nodes)
        child = np.zeros(self.nodes, np.int64)
        child[parent] = np.arange(1, self.nodes)

        path = []
        node = 0
        while children[node] == 1 and not is_last[node]:
            node = int(child[node])
            path.append(node)
        return np.array(path, np.int64)

    def _compact(self) -> None:
        """Drop the nodes that lead to no hypothesis, and join the history to one part."""
        history = History.join(self.history)
        is_needed = np.zeros(self.nodes, bool)
        is_needed[0] = True
        nodes = np.unique(self.beams.node)
        nodes = nodes[~is_needed[nodes]]
        while len(nodes):
            is_needed[nodes] = True
            nodes = np.unique(history.parent[nodes - 1])
            nodes = nodes[~is_needed[nodes]]

        new_node = np.cumsum(is_needed) - 1
        rows = np.flatnonzero(is_needed[1:])
        self.history = [History(new_node[history.parent[rows]], history.token[rows], history.event[rows],
                                history.prob[rows])]
        self.nodes = len(rows) + 1
        self.beams.node = new_node[self.beams.node]

    def keep_prefix_of_best(self, count: int) -> None:
        """Keep only hypotheses whose first ``count`` tokens are those of the best."""
        last = self._path_to(self.best())[count - 1]
        has_prefix = [last in self._path_to(node) for node in self.beams.node.tolist()]
        self.beams = self.beams.take(np.flatnonzero(has_prefix))

    def cut(self, path: np.ndarray) -> None:
        """Drop the nodes of ``path``, which all hypotheses share, except the last: its token is the first that stays.

        The history must be compact, as ``shared_path`` leaves it.
        """
        [history] = self.history
        is_dropped = np.zeros(self.nodes, bool)
        is_dropped[path[:-1]] = True
        new_node = np.cumsum(~is_dropped) - 1
        new_node[is_dropped] = 0  # the last node of the path now follows the start

        rows = np.flatnonzero(~is_dropped[1:])
        dropped_events = int(history.event[path[-1] - 1])
        self.history = [History(new_node[history.parent[rows]], history.token[rows],
                                history.event[rows] - dropped_events, history.prob[rows])]
        self.nodes = len(rows) + 1
        self.beams.node = new_node[self.beams.node]
        self.beams.event = self.beams.event - dropped_events
        self.stream.drop(dropped_events)
        self.searched -= dropped_events

    def _path_to(self, node: int) -> list[int]:
        """The nodes from the first token of a hypothesis to this one."""
        parent = History.join(self.history).parent
        path = []
        while node:
            path.append(node)
            node = int(parent[node - 1])
        return path[::-1]


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
        self.line = line
        self.events = events
        self.spelling = spelling
        line.begin(events, 0)
        self._settled: list[Word] = []  # of this line, and not returned yet
        self._in_line = False  # whether a word of this line was settled

    def feed(self, scores: np.ndarray) -> list[StreamResult]:
        """Search a model's output for frames [T, ...]; see ``sbkit.decode.streaming.StreamSearch``."""
        self.events.feed(scores)
        line = self.line
        results = []
        for frame in self.events.frame[line.searched:].tolist():
            results += self._close_before(frame)
            self._bound_memory(frame)
            line.step()
        results += self._close_before(self.events.source.known)
        self._settle_shared()

        partial = self.spelling.words(line.spans_to(line.best()))
        now = self._result(partial, False, self.events.source.frames)
        if now.settled or partial or not results:
            results.append(now)
        return results

    def finish(self) -> StreamResult:
        self._end(self.events.source.frames)
        return self._result([], self._in_line, self.events.source.frames)

    def _result(self, partial: list[Word], endpoint: bool, frame: int) -> StreamResult:
        """Return the words that were settled since the last result."""
        settled = self._settled
        self._settled = []
        return StreamResult(settled, partial, endpoint, frame * self.spelling.frame_seconds)

    # ----------------------------------------------------------------- lines

    def _close_before(self, frame: int) -> list[StreamResult]:
        """End the line if its pause is long enough at this frame, before which all events were searched."""
        line = self.line
        pause = self.spelling.pause
        if not line.searched and not self._in_line:
            return []

        # The last frame at which the best hypothesis, or one with nearly its score, began a token.
        scores = line.scores()
        event = int(line.beams.event[scores >= scores.max() - _END_MARGIN].max())
        last_begin = line.start if event < 0 else int(line.stream.frame[event])
        if frame - last_begin < pause:
            return []
        ends = line.spans_to(line.best()).ends
        last_end = int(ends[-1]) if len(ends) else line.start
        if frame - last_end < pause:
            return []

        self._end(self.spelling.after_pause(last_end))
        if not self._in_line:
            return []
        self._in_line = False
        return [self._result([], True, line.start)]

    def _end(self, frame: int) -> None:
        """Settle all words of the line, and start a new search at ``frame``."""
        self._add(self.spelling.words(self.line.final_spans()))
        self.events.drop(self.line.searched)
        self.line.begin(self.events, frame)

    def _add(self, words: list[Word]) -> None:
        self._settled += words
        self._in_line |= bool(words)

    # -------------------------------------------------------------- settling

    def _bound_memory(self, frame: int) -> None:
        """Settle words if none was settled for ``LONGEST_SECONDS``: those of the best hypothesis if that is enough,
        otherwise all of them, by ending the line."""
        if self._waits_too_long(frame):
            self._settle_shared()
        if self._waits_too_long(frame):
            self._trust_best()
        if self._waits_too_long(frame):
            self._settle_shared()
        if self._waits_too_long(frame):
            self._end(frame)

    def _waits_too_long(self, frame: int) -> bool:
        return self.line.searched > 0 and frame - int(self.events.frame[0]) >= self.spelling.longest

    def _settle_shared(self) -> None:
        """Settle the words that all hypotheses share."""
        line = self.line
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
        spans = self.line.spans_to(self.line.best())
        count, first = count_settled(self.spelling.groups(spans))
        if count:
            self.line.keep_prefix_of_best(first + 1)
