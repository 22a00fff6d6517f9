"""The search of one line of a stream, which forgets what its hypotheses share."""

from __future__ import annotations

import numpy as np

from sbkit.decode.event_stream import EventStream
from sbkit.decode.posteriors import Events, spans_of
from sbkit.decode.prefix_search import Beams, Search
from sbkit.decode.spans import TokenSpans


class LineSearch(Search):
    """Searches the events of one stream step by step; each step is one of the whole search.

    :meth:`begin` comes first. The history has the paths that lead to live hypotheses, back to the last cut.
    """

    rank: np.ndarray
    history: list[tuple[np.ndarray, ...]]
    beams: Beams
    start: int  # frame at which the line began
    taken: int  # events of the line that were searched, of those that weren't dropped

    def begin(self, stream: EventStream, frame: int) -> None:
        """Begin a line at a frame, with the events from there on."""
        self.stream, self.start, self.taken = stream, frame, 0
        self.rank, self.first, self.scale = np.zeros(1, np.int64), np.zeros(1, np.int64), np.zeros(1)
        self.history, self.nodes = [(np.zeros(0, np.int64),) * 3], 1
        self.beams = self._start(1)

    def step(self) -> None:
        """Search the next event."""
        self.events = self.stream.kept
        self.token = self.events.token.astype(np.int64, copy=False)
        self.beams = self._step(self.beams, self.taken, 1)
        self.taken += 1

    @property
    def searched(self) -> Events:
        """The events that were searched and not dropped."""
        return self.stream.kept.between(0, self.taken)

    # ------------------------------------------------------------ hypotheses

    def scores(self) -> np.ndarray:
        """The scores [M] of the hypotheses if the line goes on."""
        beams = self.beams
        with np.errstate(divide="ignore"):
            return np.log(beams.blank + beams.other) + beams.text + beams.soft

    def spans_to(self, node: int) -> TokenSpans:
        """The tokens on the path to a row of the history."""
        return self._spans(*(part[0] for part in self._trace(np.array([node]))))

    def best(self) -> int:
        """The row in the history of the best hypothesis if the line goes on."""
        return int(self.beams.node[self.scores().argmax()])

    def over(self) -> TokenSpans:
        """The tokens of the best transcript if the line ends here, as the whole search finds it."""
        found = self._finish([self.beams], 1)[0]
        return self._spans(found[0].tokens, found[0].events) if found else self.spans_to(0)

    def quiet_since(self, doubt: float) -> int:
        """The last frame at which a hypothesis began a token, of those that are less than ``doubt`` worse than the
        best."""
        scores = self.scores()
        nodes = self.beams.node[scores >= scores.max() - doubt]
        event = np.concatenate([column for _, _, column in self.history])[nodes[nodes > 0] - 1]
        return int(self.stream.kept.frame[event].max(initial=self.start))

    def _spans(self, tokens: np.ndarray, events: np.ndarray) -> TokenSpans:
        return spans_of(self.searched, [tokens], [events])[0]

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
        parent, token, event = self.history[0]
        gone = np.zeros(self.nodes, bool)
        gone[path[:-1]] = True
        place = np.cumsum(~gone) - 1
        place[gone] = 0
        rows, dropped = np.flatnonzero(~gone[1:]), int(event[path[-1] - 1])
        self.history = [(place[parent[rows]], token[rows], event[rows] - dropped)]
        self.nodes = len(rows) + 1
        self.beams.node = place[self.beams.node]
        self.stream.drop(dropped)
        self.taken -= dropped

    def _compact(self) -> None:
        parent, token, event = (np.concatenate(column) for column in zip(*self.history, strict=True))
        keep = np.zeros(self.nodes, bool)
        keep[0] = True
        rows = np.unique(self.beams.node)
        while len(rows := rows[~keep[rows]]):
            keep[rows] = True
            rows = np.unique(parent[rows - 1])
        place, rows = np.cumsum(keep) - 1, np.flatnonzero(keep[1:])
        self.history = [(place[parent[rows]], token[rows], event[rows])]
        self.nodes = len(rows) + 1
        self.beams.node = place[self.beams.node]

    def _rows_to(self, node: int) -> list[int]:
        parent, rows = np.concatenate([column for column, _, _ in self.history]), []
        while node:
            rows.append(node)
            node = int(parent[node - 1])
        return rows[::-1]
