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
        partial = self.spelling.write(groups[count:], rest)
        if words or partial or not results:
            results.append(StreamResult(words, partial, False, self._frames * self.spelling.frame_seconds))
        return results

    def end(self, tokens: TokenSpans) -> StreamResult:
        words = self.spelling.write(self._groups(tokens), tokens)
        return StreamResult(words, [], self._in_line or bool(words), self._frames * self.spelling.frame_seconds)

    def _groups(self, tokens: TokenSpans) -> list[WordTokens]:
        return self.spelling.groups(tokens, self.spelling.longest)

    def _close(self, line: TokenSpans) -> StreamResult | None:
        """Settle the rest of a line that a pause ends; None if it has no words."""
        words = self.spelling.write(self._groups(line), line)
        has_words = self._in_line or bool(words)
        self._in_line = False
        if not has_words:
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
        # The run of equal labels that may continue: its label, first frame, and the sum of its probabilities.
        self._label = blank_id
        self._began = 0
        self._sum = 0.0

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
        new_frames = len(labels)
        # The open run comes first, as if it were one frame.
        labels = np.concatenate([[self._label], labels])
        weights = np.concatenate([[self._sum], confidence])
        begins = np.ones(len(labels), bool)
        begins[1:] = labels[1:] != labels[:-1]
        first = np.flatnonzero(begins)
        ids = labels[first]
        total = sums(begins, weights)

        starts = first - 1 + self._frames
        starts[0] = self._began
        self._frames += new_frames
        ends = np.append(starts[1:], self._frames)
        self._label = int(ids[-1])
        self._began = int(starts[-1])
        self._sum = float(total[-1])

        has_text = self._has_text[ids]
        mean = (total / (ends - starts).clip(1)).astype(np.float32)  # an open run of blanks may have no frame
        spans = TokenSpans(ids, starts, ends, mean).take(has_text)
        return concatenate(self._open, spans), bool(has_text[-1])


def concatenate(*several: TokenSpans) -> TokenSpans:
    return TokenSpans(
        np.concatenate([spans.ids for spans in several]),
        np.concatenate([spans.starts for spans in several]),
        np.concatenate([spans.ends for spans in several]),
        np.concatenate([spans.confidence for spans in several]),
    )
