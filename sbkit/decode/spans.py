"""Tokens and words with times and confidences, from the best label of each frame; needs only numpy."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from sbkit.errors import SbkitError

if TYPE_CHECKING:
    from torch import Tensor

WORD_START = "▁"  # how SentencePiece writes the space before a word
#: A pause this long ends a word and a line of a stream.
PAUSE_SECONDS = 0.7
#: A word, or audio without a settled word, ends after this long: a stream's memory has to be bounded.
LONGEST_SECONDS = 10.0
_BYTES = re.compile(r"(?:<0x[0-9A-F]{2}>)+")  # how SentencePiece writes a character that has no piece
_LATER_BYTE = re.compile(r"<0x[89AB][0-9A-F]>")  # of a character, but not its first


@dataclass(frozen=True)
class TokenSpans:
    """The tokens of one utterance: arrays of equal length [U].

    ``starts`` and ``ends`` are frames, the end excluded; ``confidence`` is the mean probability of the token over its
    frames.
    """

    ids: np.ndarray
    starts: np.ndarray
    ends: np.ndarray
    confidence: np.ndarray

    def __len__(self) -> int:
        return len(self.ids)

    def take(self, rows: np.ndarray | slice) -> TokenSpans:
        return TokenSpans(self.ids[rows], self.starts[rows], self.ends[rows], self.confidence[rows])


@dataclass(frozen=True)
class Word:
    """A word, its times in seconds, and its confidence: of its tokens the lowest one, calibrated if the bundle is."""

    text: str
    start: float
    end: float
    confidence: float

    def facts(self) -> dict[str, float]:
        """Its times and confidence, rounded for JSON."""
        return {"start": round(self.start, 3), "end": round(self.end, 3), "confidence": round(self.confidence, 4)}


def at_pauses(words: Iterable[Word], seconds: float = PAUSE_SECONDS) -> list[list[Word]]:
    """Split words at pauses of at least ``seconds``."""
    runs: list[list[Word]] = []
    for word in words:
        if runs and word.start - runs[-1][-1].end < seconds:
            runs[-1].append(word)
        else:
            runs.append([word])
    return runs


def collapse(labels: np.ndarray, confidence: np.ndarray, blank_id: int = 0) -> list[TokenSpans]:
    """Apply CTC's rule: merge equal neighbours and drop blanks.

    labels : [B, T] integers, blank beyond an utterance's end
    confidence : [B, T] of each frame; a token gets the mean over its frames
    """
    batch, frames = labels.shape
    if not labels.size:
        nothing = np.zeros(0, dtype=np.int64)
        return [TokenSpans(nothing, nothing, nothing, np.zeros(0, dtype=np.float32))] * batch
    begins = np.ones(labels.shape, dtype=bool)
    begins[:, 1:] = labels[:, 1:] != labels[:, :-1]
    starts = np.flatnonzero(begins)  # starts of the runs, for all rows
    ends = np.append(starts[1:], labels.size)
    ids = labels.ravel()[starts]
    tokens = ids != blank_id
    row, first = np.divmod(starts, frames)
    mean = sums(begins.ravel(), confidence.ravel()) / (ends - starts)
    columns = [ids, first, first + ends - starts, mean.astype(np.float32)]
    cuts = np.cumsum(np.bincount(row[tokens], minlength=batch))[:-1]
    utterances = zip(*(np.split(column[tokens], cuts) for column in columns), strict=True)
    return [TokenSpans(*parts) for parts in utterances]


def sums(begins: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Sum the weights [N] of each run [R], whose first element ``begins`` [N] marks.

    They are added one after another, so that a sum that is continued later is the same to the last bit.
    """
    return np.bincount(np.cumsum(begins) - 1, weights=weights)


class WordTokens(NamedTuple):
    """The tokens of one word; none if the model only output a word's start mark."""

    first: int  # the token at which it begins
    clean: bool  # that token has no text of the word before
    parts: list[str]
    tokens: list[int]  # the token of each part


@dataclass(frozen=True)
class Spelling:
    """How the tokens of a model are written as words: the one rule for validation, evaluation, export and bundles.

    A word begins where a token says so and, because a model that learnt single sentences may not say so at the next
    sentence's first word, after a pause.

    symbols : the tokens in order of their ids, as SentencePiece writes them
    frame_seconds : seconds from one frame to the next
    silent : ids without text, such as the blank
    separator : marks a word's start; None makes every token a word, for scripts without spaces
    reliability : points of the curve from the lowest confidence of a word's tokens to the word's confidence, such as
        the share of these words that are right
    pause_seconds : time without a token that ends a word, whatever the next token is; infinity: only tokens end words
    """

    symbols: Sequence[str]
    frame_seconds: float
    silent: Collection[int] = (0,)
    separator: str | None = WORD_START
    reliability: Sequence[Sequence[float]] = ((0.0, 0.0), (1.0, 1.0))
    pause_seconds: float = PAUSE_SECONDS

    @property
    def pause(self) -> float:
        """The frames without a token that end a word and a line of a stream."""
        return self.pause_seconds / self.frame_seconds

    @property
    def space(self) -> str:
        """The text between words: a space, or nothing for scripts without spaces."""
        return "" if self.separator is None else " "

    @property
    def longest(self) -> float:
        """The maximum frames of a word, or of audio without a settled word, in a stream."""
        return LONGEST_SECONDS / self.frame_seconds

    def words(self, spans: TokenSpans, start: float = 0.0) -> list[Word]:
        """Join the tokens of an utterance into words.

        start : time of the first frame in seconds
        """
        return self.write(self.groups(spans), spans, start)

    def text(self, spans: TokenSpans) -> str:
        """Write the tokens of an utterance as its transcript."""
        return self.join(self.words(spans))

    def join(self, words: Iterable[Word]) -> str:
        """Join words into a transcript."""
        return self.space.join(word.text for word in words)

    def groups(self, spans: TokenSpans, longest: float | None = None) -> list[WordTokens]:
        """Assign tokens to words.

        longest : a word's maximum length in frames: a token that begins later begins another word; None: no maximum
        """
        words: list[WordTokens] = []
        last_end = 0
        word_start = 0
        pause = self.pause
        for i, token in enumerate(spans.ids.tolist()):
            if token in self.silent:
                continue
            breaks = spans.starts[i] - last_end >= pause
            breaks |= longest is not None and spans.starts[i] - word_start >= longest
            last_end = spans.ends[i]
            text = self.symbols[token]
            if self.separator is None:  # each piece is a word, unless it is a further byte of a character
                parts = [text.replace(WORD_START, "")]
                breaks |= not _LATER_BYTE.fullmatch(text)
            else:  # each part behind a separator begins a word
                parts = text.split(self.separator)
            for number, part in enumerate(parts):
                if number > 0 or not words or breaks:
                    clean = not words or i not in words[-1].tokens
                    if clean:
                        word_start = spans.starts[i]
                    words.append(WordTokens(i, clean, [], []))
                if part:
                    words[-1].parts.append(part)
                    words[-1].tokens.append(i)
        return words

    def write(self, groups: Sequence[WordTokens], spans: TokenSpans, start: float = 0.0) -> list[Word]:
        """Write groups of tokens as words with times, in whole milliseconds, and confidences."""
        lowest_confidences, word_confidences = np.transpose(self.reliability)
        return [
            Word(
                text=_BYTES.sub(_decode_bytes, "".join(group.parts)),
                start=round(start + self.frame_seconds * int(spans.starts[group.tokens[0]]), 3),
                end=round(start + self.frame_seconds * int(spans.ends[group.tokens[-1]]), 3),
                confidence=float(np.interp(spans.confidence[group.tokens].min(), lowest_confidences,
                                           word_confidences)),
            )
            for group in groups if group.parts
        ]

    def after_pause(self, end: int) -> int:
        """The frame at which the pause after a token that ended at frame ``end`` is long enough."""
        frame = end + math.floor(self.pause)
        return frame if frame - end >= self.pause else frame + 1

    def check(self, log_probs: np.ndarray) -> None:
        """Raise if these can't be log-probabilities [T, V] of these tokens."""
        if log_probs.ndim != 2 or log_probs.shape[1] != len(self.symbols) or log_probs.dtype.kind != "f":
            raise SbkitError("tokenizer-mismatch", f"a piece of a stream is {log_probs.dtype} {[*log_probs.shape]}, "
                             f"but must be float [frames, {len(self.symbols)}]",
                             hint="do the tokens belong to this model?")
        best = log_probs.max(-1) if len(log_probs) else np.zeros(0)
        wrong = np.flatnonzero(~np.isfinite(best))
        if len(wrong):
            raise SbkitError("nan-output", f"the model's output for frame {wrong[0]} of a piece of a stream is NaN or "
                             "infinite",
                             hint="check that the samples are numbers; otherwise the model's weights may be damaged")
        refuse_scores(best)


def _decode_bytes(match: re.Match[str]) -> str:
    """The characters of bytes such as ``<0xC3><0xA4>``."""
    return bytes.fromhex(re.sub("<0x|>", "", match[0])).decode(errors="replace")


def check_shapes(log_probs: np.ndarray | Tensor, lengths: np.ndarray | Tensor) -> None:
    """Raise if log_probs aren't [B, T, V] or lengths aren't integers [B]."""
    if len(log_probs.shape) != 3 or tuple(lengths.shape) != tuple(log_probs.shape[:1]):
        shapes = f"{[*log_probs.shape]} and {[*lengths.shape]}"
        raise ValueError(f"log_probs [B, T, V] and lengths [B] have the shapes {shapes}")
    if "float" in str(lengths.dtype):
        raise ValueError("lengths must be numbers of frames (integers), not fractions of the longest")


def refuse_nan(values: np.ndarray) -> None:
    """Raise with the numbers of utterances that have a NaN among the values of their frames [B, T]."""
    rows = np.flatnonzero(np.isnan(values).any(axis=1)).tolist()
    if rows:
        raise SbkitError("nan-output", f"the model's output for utterances {rows} of the batch is NaN",
                         hint="training may have diverged, or the precision is too low")


def refuse_scores(best: np.ndarray) -> None:
    """Raise if the best values of frames [N] are too large for log-probabilities."""
    if len(best) and best.max() > 1e-3:
        raise SbkitError("not-log-probabilities", "the search needs log-probabilities but got scores of up to "
                         f"{best.max():.3g}", hint="apply log_softmax to the model's output")


def best_path(log_probs: np.ndarray, frames: np.ndarray, blank_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Find labels [B, T] (blank beyond an utterance's end) and their probabilities [B, T], for ``spans.collapse``.

    log_probs : [B, T, V] float log-probabilities
    frames : [B] number of frames of each utterance
    """
    check_shapes(log_probs, frames)
    batch, size, _ = log_probs.shape
    if not log_probs.size:
        return np.full((batch, size), blank_id, dtype=np.int64), np.ones((batch, size), dtype=np.float32)
    labels = log_probs.argmax(-1)
    best = np.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    inside = np.arange(size) < np.asarray(frames)[:, None]
    # numpy's maximum of a frame with a NaN is NaN, so checking the best checks all.
    refuse_nan(np.where(inside, best, 0.0))
    confidence = np.where(inside, np.exp(best), 1.0).astype(np.float32)
    return np.where(inside, labels, blank_id).astype(np.int64), confidence
