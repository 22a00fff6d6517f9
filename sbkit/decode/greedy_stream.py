"""Greedy CTC of a stream: the best label of every frame, as the frames come; needs only numpy."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from sbkit.decode.spans import Spelling, TokenSpans, WordTokens, best_path, sums
from sbkit.decode.streaming import StreamResult, StreamSearch, count_settled

_NOTHING = TokenSpans(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.float32))


class SettlingStream(StreamSearch):
    """Turns the tokens of a stream into words as they come. Words, times and confidences are the same as for all tokens
    at once (``sbkit.decode.spans.Spelling.words``), except that a word ends after ``LONGEST_SECONDS``.

    A word is settled once the next has begun or a pause has followed, so that only one word is kept.
    """

    def __init__(self, spelling: Spelling):
        self.spelling = spelling
        self._frames = 0
        self._open = _NOTHING  # complete tokens of words that aren't settled
        self._in_line = False  # whether a word of this line was settled

    def update(self, tokens: TokenSpans, unfinished: bool = False) -> list[StreamResult]:
        """Take all tokens of words that aren't settled, the last of which may be ``unfinished``."""
        # Split at pauses; the last part, which may be empty, is the line that goes on.
        gaps = np.append(tokens.starts[1:], self._frames)[:len(tokens)] - tokens.ends
        cuts = [0, *(np.flatnonzero(gaps >= self.spelling.pause) + 1).tolist(), len(tokens)]
        lines = [tokens.take(slice(start, stop)) for start, stop in pairwise(cuts)]
        results = [line for line in map(self._close, lines[:-1]) if line is not None]
        rest = lines[-1]
        groups = self._groups(rest)
        count, first = count_settled(groups)
        words = self.spelling.write(groups[:count], rest)
        self._in_line |= bool(words)
        self._open = rest.take(slice(first, len(rest) - unfinished))
        now = StreamResult(words, self.spelling.write(groups[count:], rest), False,
                           self._frames * self.spelling.frame_seconds)
        return [*results, now] if words or now.partial or not results else results

    def end(self, tokens: TokenSpans) -> StreamResult:
        words = self.spelling.write(self._groups(tokens), tokens)
        return StreamResult(words, [], self._in_line or bool(words), self._frames * self.spelling.frame_seconds)

    def _groups(self, tokens: TokenSpans) -> list[WordTokens]:
        return self.spelling.groups(tokens, self.spelling.longest)

    def _close(self, line: TokenSpans) -> StreamResult | None:
        """Settle the rest of a line that a pause ends; None if it has no words."""
        words = self.spelling.write(self._groups(line), line)
        spoken, self._in_line = self._in_line or bool(words), False
        if not spoken:
            return None
        return StreamResult(words, [], True,
                            self.spelling.after_pause(int(line.ends[-1])) * self.spelling.frame_seconds)


class GreedyStream(SettlingStream):
    """Decodes CTC's log-probabilities of a stream greedily."""

    quick = True

    def __init__(self, spelling: Spelling, blank_id: int = 0):
        super().__init__(spelling)
        self.blank_id = blank_id
        self._has_text = np.ones(len(spelling.symbols), bool)
        self._has_text[[blank_id, *spelling.silent]] = False
        self._label, self._began, self._sum = self.blank_id, 0, 0.0  # the run of frames that may continue

    def feed(self, scores: np.ndarray) -> list[StreamResult]:
        self.spelling.check(scores)
        labels, confidence = best_path(scores[None], np.array([len(scores)]), self.blank_id)
        return self.decode(labels[0], confidence[0])

    def decode(self, labels: np.ndarray, confidence: np.ndarray) -> list[StreamResult]:
        """Decode the best labels [T] of frames and their probabilities [T], as found by ``best_path``."""
        return self.update(*self._tokens(labels, confidence))

    def finish(self) -> StreamResult:
        tokens, _ = self._tokens(np.zeros(0, np.int64), np.zeros(0, np.float32))
        return self.end(tokens)

    def _tokens(self, labels: np.ndarray, confidence: np.ndarray) -> tuple[TokenSpans, bool]:
        """The tokens that aren't settled, and whether the last of them may continue; counts the frames."""
        labels = np.concatenate([[self._label], labels])
        weights = np.concatenate([[self._sum], confidence])
        begins = np.ones(len(labels), bool)
        begins[1:] = labels[1:] != labels[:-1]
        starts, total = np.flatnonzero(begins), sums(begins, weights)
        ids = labels[starts]
        starts = starts - 1 + self._frames
        starts[0] = self._began
        self._frames += len(labels) - 1
        ends = np.append(starts[1:], self._frames)
        self._label, self._began, self._sum = int(ids[-1]), int(starts[-1]), float(total[-1])
        text = self._has_text[ids]
        mean = (total[text] / (ends - starts)[text]).astype(np.float32)
        columns = (ids[text], starts[text], ends[text], mean)
        return concatenate(self._open, TokenSpans(*columns)), bool(text[-1])


def concatenate(*several: TokenSpans) -> TokenSpans:
    columns = zip(*((each.ids, each.starts, each.ends, each.confidence) for each in several), strict=True)
    return TokenSpans(*map(np.concatenate, columns))
