"""Sparse CTC log-probabilities for a search: only the few frames that can change a transcript."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from sbkit.decode.spans import TokenSpans, check_shapes, refuse_nan, refuse_scores

if TYPE_CHECKING:
    from torch import Tensor

_NO_BLANK = -15.0  # log-probability of a blank that is too unlikely to split a token in two
#: A token begins at most this many frames before or after one in which any token is likelier than the blank. Elsewhere
#: nobody speaks: a search, which adds up all places where a word may be, finds one sooner or later in any noise.
NEAR_SPEECH = 8


def near_speech(spoken: np.ndarray) -> np.ndarray:
    """Mark the frames [..., T] in which tokens may begin, given those in which a token is likelier than the blank."""
    frames = spoken.shape[-1]
    before = np.concatenate([np.zeros((*spoken.shape[:-1], 1), np.int64), spoken.cumsum(-1)], -1)
    places = np.arange(frames)
    marked: np.ndarray = before[..., np.minimum(places + NEAR_SPEECH + 1, frames)] \
        > before[..., np.maximum(places - NEAR_SPEECH, 0)]
    return marked


class FramesOfStream:
    """Passes a stream's frames on once it is known whether they are near speech: those in silence some frames later."""

    def __init__(self) -> None:
        self.frames = 0
        """All frames so far."""
        self._spoken = np.zeros(NEAR_SPEECH, bool)  # of the last known frames, and of those that are held
        self._held: np.ndarray | None = None

    @property
    def known(self) -> int:
        """The frames that were passed on."""
        return self.frames - (0 if self._held is None else len(self._held))

    def feed(self, frames: np.ndarray, spoken: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Take frames [T, ...] and whether something is said in them [T]; return those [N, ...] that are known now,
        and whether tokens may begin in them [N]."""
        frames = frames if self._held is None else np.concatenate([self._held, frames])
        self.frames += len(spoken)
        spoken = np.concatenate([self._spoken, spoken])
        near = near_speech(spoken)[NEAR_SPEECH:]
        # What is near speech stays so. What is not may still become so, by one of the next frames.
        last_near = len(near) - int(near[::-1].argmax()) if near.any() else 0
        count = max(last_near, len(frames) - NEAR_SPEECH)
        self._held = frames[count:].copy()
        self._spoken = spoken[count:]
        return frames[:count], near[:count]


@dataclass(frozen=True)
class Events:
    """Frames of a batch that can change a transcript, one utterance after another.

    Runs of frames where only the blank is likely just end the token before, and runs where only one token is likely
    are equivalent to their first frame; both are folded, which does not change the result of a search. ``offset`` is
    the score that they add to every hypothesis. Frames farther than ``NEAR_SPEECH`` from speech are blanks.

    Arrays: [B] utterances, [E] events, [N] likely tokens of all events.
    """

    first: np.ndarray  # [B + 1] where each utterance's events begin
    offset: np.ndarray  # [B] log-probability of the folded frames
    frame: np.ndarray  # [E] frame of the event
    run: np.ndarray  # [E] number of frames that it represents
    pause: np.ndarray  # [E] bool: there was a blank between it and the event before
    blank: np.ndarray  # [E] probability of the blank, 0 where it is unlikely
    begin: np.ndarray  # [E + 1] where each event's tokens begin
    token: np.ndarray  # [N] int32
    prob: np.ndarray  # [N] probability
    labels: int = 0  # V, to detect a tokenizer of another model

    def __len__(self) -> int:
        return len(self.offset)

    def part(self, start: int, stop: int) -> Events:
        first = self.first[start:stop + 1]
        events = self.between(int(first[0]), int(first[-1]))
        return replace(events, first=first - first[0], offset=self.offset[start:stop])

    def between(self, start: int, stop: int) -> Events:
        """Select a range of events as one utterance."""
        events = slice(start, stop)
        tokens = slice(int(self.begin[start]), int(self.begin[stop]))
        return Events(
            first=np.array([0, stop - start]),
            offset=np.zeros(1),
            frame=self.frame[events],
            run=self.run[events],
            pause=self.pause[events],
            blank=self.blank[events],
            begin=self.begin[start:stop + 1] - tokens.start,
            token=self.token[tokens],
            prob=self.prob[tokens],
            labels=self.labels,
        )

    @staticmethod
    def join(parts: list[Events]) -> Events:
        if not parts:
            none = np.zeros(0)
            one = np.zeros(1, np.int64)
            return Events(one, none, none, none, none, none, one, none, none)
        columns: dict[str, Any] = {
            field.name: np.concatenate([getattr(part, field.name) for part in parts])
            for field in fields(Events) if field.name not in ("first", "begin", "labels")
        }
        first = _join_begins([part.first for part in parts])
        begin = _join_begins([part.begin for part in parts])
        return Events(first=first, begin=begin, labels=parts[0].labels, **columns)


def _join_begins(several: Sequence[np.ndarray]) -> np.ndarray:
    """Join columns of where rows begin, each of which ends with the number of its own rows."""
    shifts = np.cumsum([0, *(begins[-1] for begins in several)])
    shifted = [begins[:-1] + shift for begins, shift in zip(several, shifts[:-1], strict=True)]
    return np.append(np.concatenate(shifted), shifts[-1])


def events(log_probs: np.ndarray | Tensor, lengths: np.ndarray | Tensor, blank_id: int = 0, threshold: float = -7.0,
           max_tokens: int = 20, tokens_may_begin: np.ndarray | None = None) -> Events:
    """Keep the likely tokens of each frame.

    log_probs : [B, T, V] log-probabilities: an array, or a tensor on any device, of which only likely tokens are copied
    lengths : [B] frames of each utterance, integers
    threshold : log-probability below which a token is dropped; the best token of a frame is always kept
    max_tokens : tokens kept per frame
    tokens_may_begin : [B, T] in which frames they may; None: in those of ``near_speech``
    """
    check_shapes(log_probs, lengths)
    sizes = np.asarray(lengths.tolist())
    batch, frames, labels = log_probs.shape
    inside = np.arange(frames) < sizes.reshape(-1, 1)
    utterance, time = np.nonzero(inside)  # of each frame [F] of the whole batch
    likely = _likely(log_probs, inside.ravel(), blank_id, threshold)
    best = np.zeros(inside.shape)
    best[inside] = likely.best
    refuse_nan(best)
    refuse_scores(likely.best)
    if tokens_may_begin is None:
        spoken = np.zeros(inside.shape, bool)
        spoken[inside] = likely.best > likely.blank
        tokens_may_begin = near_speech(spoken)
    may_begin = tokens_may_begin[inside][likely.frame]
    frame, token, value = strongest(likely.frame[may_begin], likely.token[may_begin], likely.value[may_begin],
                                    max_tokens)
    counts = np.bincount(frame, minlength=len(utterance))  # likely tokens of each frame
    begin = np.concatenate([[0], np.cumsum(counts)])
    blank = likely.blank.astype(np.float64)

    # Of all frames [F], those that are no event. In one kind only the blank is likely (no token is): it separates the
    # events around it, which ``pause`` says. In the other the frame before had the same only token, and neither a blank
    # between them nor another token is likely: it makes that event longer, which ``run`` says.
    same_utterance = np.zeros(len(utterance), dtype=bool)  # as the frame before
    same_utterance[1:] = utterance[1:] == utterance[:-1]
    single = (counts == 1) & (blank < _NO_BLANK)
    only_token = np.full(len(utterance), -1)
    only_token[single] = token[begin[:-1][single]]
    repeats = np.zeros(len(utterance), dtype=bool)
    repeats[1:] = same_utterance[1:] & single[1:] & (only_token[1:] == only_token[:-1])
    event = (counts > 0) & ~repeats
    pause = np.zeros(len(utterance), dtype=bool)
    pause[1:] = same_utterance[1:] & (counts[:-1] == 0)

    # Every path takes the one likely label of a folded frame, so its probability is a constant of the utterance.
    folded = np.where(counts == 0, blank, 0.0)
    folded[repeats] = value[begin[:-1][repeats]]
    numbers = np.cumsum(event) - 1
    of_event = np.repeat(event, counts)
    return Events(
        first=np.concatenate([[0], np.cumsum(np.bincount(utterance[event], minlength=batch))]),
        offset=np.bincount(utterance, weights=folded, minlength=batch),
        frame=time[event].astype(np.int32),
        run=np.bincount(numbers[event | repeats], minlength=int(event.sum())).astype(np.int32),
        pause=pause[event],
        blank=np.exp(blank[event]),
        begin=np.concatenate([[0], np.cumsum(counts[event])]),
        token=token[of_event],
        prob=np.exp(value[of_event]),
        labels=labels,
    )


class _Likely(NamedTuple):
    """The likely tokens [N] of frames [F], as log-probabilities."""

    best: np.ndarray  # [F] the highest
    blank: np.ndarray  # [F]
    frame: np.ndarray  # [N] of each likely token
    token: np.ndarray  # [N]
    value: np.ndarray  # [N]


def _likely(log_probs: np.ndarray | Tensor, inside: np.ndarray, blank_id: int, threshold: float) -> _Likely:
    """Find the likely tokens of the frames inside, except the blank. A frame without any keeps its best.

    If the blank is almost certain, no other token can reach the threshold, so most frames need only one value to be
    read instead of V.
    """
    least = math.exp(threshold)
    # Below float32's precision, a blank of 1 says nothing about the other tokens.
    certain = math.log1p(-least) if np.finfo(np.float32).eps < least < 1 else math.inf
    flat = log_probs.reshape(-1, log_probs.shape[-1])
    numpy: Callable[[Any], np.ndarray]
    indices: Callable[[np.ndarray], Any]  # on the device of ``log_probs``, like the result
    nonzero: Callable[[Any], np.ndarray]
    highest: Callable[[Any], Any]
    if isinstance(flat, np.ndarray):
        numpy = np.asarray
        indices = np.asarray
        nonzero = np.flatnonzero
        highest = lambda rows: rows.max(-1, initial=-np.inf)  # noqa: E731
    else:
        import torch

        flat = flat.detach()
        numpy = lambda column: column.float().cpu().numpy()  # noqa: E731
        indices = lambda rows: torch.from_numpy(rows).to(flat.device)  # noqa: E731
        nonzero = lambda mask: mask.reshape(-1).nonzero()[:, 0].cpu().numpy()  # noqa: E731
        highest = lambda rows: rows.amax(-1)  # noqa: E731
    frames = np.flatnonzero(inside)
    blank = numpy(flat[:, blank_id][indices(frames)])
    best = blank.copy()
    uncertain = np.flatnonzero(~(blank >= certain))  # also NaN
    if not len(uncertain):
        none = np.zeros(0, np.int64)
        return _Likely(best, blank, none, none, np.zeros(0, np.float32))

    rows = flat[indices(frames[uncertain])]
    best[uncertain] = numpy(highest(rows))
    places = nonzero(rows > threshold)
    rows_without = np.flatnonzero(best[uncertain] <= threshold)
    if len(rows_without):
        best_token = rows[indices(rows_without)].argmax(-1)
        places = np.concatenate([places, rows_without * rows.shape[1] + np.asarray(best_token.tolist())])
    row, token = np.divmod(places, rows.shape[1])
    value = numpy(rows.reshape(-1)[indices(places)])
    is_token = token != blank_id
    return _Likely(best, blank, uncertain[row[is_token]], token[is_token], value[is_token])


def strongest(row: np.ndarray, token: np.ndarray, value: np.ndarray, max_tokens: int) -> tuple[np.ndarray, ...]:
    """Keep at most ``max_tokens`` per frame, in the order of frames, the most likely first."""
    order = np.lexsort((-value, row))
    counts = np.bincount(row)
    rank = np.arange(len(row)) - np.repeat(np.cumsum(counts) - counts, counts)
    order = order[rank < max_tokens]
    return row[order], token[order].astype(np.int32), value[order].astype(np.float64)


def spans_of(batch: Events, tokens: Sequence[np.ndarray], events: Sequence[np.ndarray]) -> list[TokenSpans]:
    """Return the spans and confidences of each transcript's tokens [U], which begin at events [U].

    A token begins at the event where the best path first takes it, and continues while it is at least as likely as the
    blank.
    """
    if not len(tokens):
        return []
    sizes = np.array([len(ids) for ids in tokens])
    token = np.concatenate(tokens).astype(np.int64)
    event = np.concatenate(events).astype(np.int64)
    # A token ends at the latest with the next token, or the utterance.
    limit = np.append(event[1:], 0)
    last = np.cumsum(sizes)[sizes > 0] - 1
    limit[last] = batch.first[np.searchsorted(batch.first, event[last], side="right")]

    # All probabilities of the batch, sorted by event and token.
    keys = np.repeat(np.arange(len(batch.frame)), np.diff(batch.begin)) * np.int64(batch.labels) + batch.token
    order = np.argsort(keys)
    keys = keys[order]
    probs = batch.prob[order]

    def prob(event: np.ndarray, token: np.ndarray) -> np.ndarray:
        """The probabilities of tokens [N] at events [N], 0 where a token wasn't likely."""
        wanted = event * batch.labels + token
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, probs[at], 0.0)

    # Each token is followed event by event up to its limit: these are the events, and ``owner`` their tokens.
    longest = np.maximum(limit - event, 1)
    owner = np.repeat(np.arange(len(token)), longest)
    begin = np.cumsum(longest) - longest
    followed = np.arange(len(owner)) + (event - begin)[owner]
    probability = prob(followed, token[owner])
    frames = batch.run[followed]
    adjacent = batch.frame[followed] == batch.frame[followed - 1] + batch.run[followed - 1]

    # A token lives until the first event that isn't adjacent, lacks it, or has a likelier blank.
    stops = ~(adjacent & (probability > 0) & (probability >= batch.blank[followed]))
    stops[begin] = False
    stopped = np.cumsum(stops)
    alive = stopped == stopped[begin][owner]

    # bincount adds in order, so that a stream and a recording give the same to the last bit.
    mass = np.bincount(owner[alive], (probability * frames)[alive], minlength=len(token))
    run = np.bincount(owner[alive], frames[alive], minlength=len(token)).astype(np.int64)
    starts = batch.frame[event].astype(np.int64)
    ends = starts + run
    confidence = (mass / run).astype(np.float32)
    transcript_ends = np.cumsum(sizes)
    return [TokenSpans(token[part], starts[part], ends[part], confidence[part])
            for part in map(slice, transcript_ends - sizes, transcript_ends)]
