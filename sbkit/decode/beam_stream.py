"""Beam search of a stream, with language model, lexicon and hot words, as the frames come; needs only numpy."""

from __future__ import annotations

import math

import numpy as np

from sbkit.decode.beam import BeamSearch
from sbkit.decode.event_stream import EventStream
from sbkit.decode.line_search import LineSearch
from sbkit.decode.spans import TokenSpans, Word
from sbkit.decode.streaming import Spelling, StreamResult, settled
from sbkit.errors import SbkitError

#: No line ends while a hypothesis that goes on is more than a hundredth as likely as one that is silent.
_DOUBT = math.log(100)


class BeamStream:
    """Searches a stream line by line: a line's words are those that the whole search finds in it.

    A word is settled once all hypotheses share it and the beginning of the next; what they share is cut off. A line
    ends where the best hypothesis, and all that are nearly as likely, have been silent for ``PAUSE_SECONDS``; the next
    begins like a sentence. Where hypotheses disagree about a word for ``LONGEST_SECONDS``, the best is right.

    Arguments
    ---------
    search : how to search; its language model is shared by all streams, which threads may feed at the same time
    spelling : how its tokens are written
    """

    quick = False

    def __init__(self, search: BeamSearch, spelling: Spelling):
        if len(search.pieces) != len(spelling.symbols):
            raise SbkitError(f"the search has {len(search.pieces)} tokens, and the stream {len(spelling.symbols)}",
                             hint="give both those of the model")
        self.search, self.spelling = search, spelling
        self._line = LineSearch(search.fusion, search.weights, search.beam, search.width)
        self.reset()

    def reset(self) -> None:
        """Begin a fresh stream."""
        search = self.search
        self._events = EventStream(search.blank_id, search.token_threshold, search.token_beam, len(search.pieces))
        self._line.begin(self._events, 0)
        self._settled: list[Word] = []  # of this line, and not told yet
        self._in_line = False  # whether a word of this line was settled

    def feed(self, log_probs: np.ndarray) -> list[StreamResult]:
        """Hear log-probabilities [T, V]; see ``sbkit.decode.streaming.StreamSearch``."""
        self.spelling.check(log_probs)
        self._events.feed(log_probs)
        line, heard = self._line, []
        while line.taken < len(self._events.kept.frame):
            frame = int(self._events.kept.frame[line.taken])
            heard += self._close_before(frame)
            self._shorten(frame)
            line.step()
        heard += self._close_before(self._events.frames)
        self._finalise()
        partial = self._write(line.spans_to(line.best()))
        now = self._result(partial, False, self._events.frames)
        return [*heard, now] if now.settled or partial or not heard else heard

    def finish(self) -> StreamResult:
        """Settle what is left: the stream is over."""
        self._end(self._events.frames)
        heard = self._result([], self._in_line, self._events.frames)
        self._in_line = False
        return heard

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
            if not line.taken or frame - self._events.kept.frame[0] < longest:
                return
            narrow()

    def _trust_best(self) -> None:
        """Drop the hypotheses that disagree with the best about the words before its last."""
        count, first = settled(self.spelling.groups(self._line.spans_to(self._line.best())))
        if count:
            self._line.keep_like_best(first + 1)
