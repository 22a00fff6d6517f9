"""Sparse CTC log-probabilities for a search: only the few frames that can change a transcript."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

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
        last = len(near) - int(near[::-1].argmax()) if near.any() else 0
        count = max(last, len(frames) - NEAR_SPEECH)
        self._held, self._spoken = frames[count:].copy(), spoken[count:]
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
        events, tokens = slice(start, stop), slice(*self.begin[[start, stop]].tolist())
        return Events(
            first=np.array([0, stop - start]), offset=np.zeros(1),
            frame=self.frame[events], run=self.run[events], pause=self.pause[events], blank=self.blank[events],
            begin=self.begin[start:stop + 1] - tokens.start, token=self.token[tokens], prob=self.prob[tokens],
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
        for name, others in (("first", "frame"), ("begin", "token")):
            shifts = np.cumsum([0, *(len(getattr(part, others)) for part in parts[:-1])])
            columns[name] = np.append(
                np.concatenate([getattr(part, name)[:-1] + shift for part, shift in zip(parts, shifts, strict=True)]),
                len(columns[others]))
        return Events(labels=parts[0].labels, **columns)


def events(log_probs: np.ndarray | Tensor, lengths: np.ndarray | Tensor, blank_id: int = 0, threshold: float = -7.0,
           max_tokens: int = 20, near: np.ndarray | None = None) -> Events:
    """Keep the likely tokens of each frame.

    log_probs : [B, T, V] log-probabilities: an array, or a tensor on any device, of which only likely tokens are copied
    lengths : [B] frames of each utterance, integers
    threshold : log-probability below which a token is dropped; the best token of a frame is always kept
    max_tokens : tokens kept per frame
    near : [B, T] the frames in which tokens may begin; None: those of ``near_speech``
    """
    check_shapes(log_probs, lengths)
    sizes = np.asarray(lengths.tolist())
    batch, frames, labels = log_probs.shape
    inside = np.arange(frames) < sizes.reshape(-1, 1)
    utterance, time = np.nonzero(inside)
    top, blank, row, token, value = _likely(log_probs, inside.ravel(), blank_id, threshold)
    best = np.zeros(inside.shape)
    best[inside] = top
    refuse_nan(best)
    refuse_scores(top)
    if near is None:
        spoken = np.zeros(inside.shape, bool)
        spoken[inside] = top > blank
        near = near_speech(spoken)
    kept = near[inside][row]
    row, token, value = row[kept], token[kept], value[kept]
    row, token, value = strongest(row, token, value, max_tokens)
    counts = np.bincount(row, minlength=len(top))  # likely tokens per frame
    begin = np.concatenate([[0], np.cumsum(counts)])
    blank = blank.astype(np.float64)

    # Of all frames [F], those that are no event. In one kind only the blank is likely (no token is): it separates the
    # events around it, which ``pause`` says. In the other the frame before had the same only token, and neither a blank
    # between them nor another token is likely: it makes that event longer, which ``run`` says.
    same = np.zeros(len(top), dtype=bool)  # in the same utterance as the frame before
    same[1:] = utterance[1:] == utterance[:-1]
    single = (counts == 1) & (blank < _NO_BLANK)
    only = np.full(len(top), -1)
    only[single] = token[begin[:-1][single]]
    repeats = np.zeros(len(top), dtype=bool)
    repeats[1:] = same[1:] & single[1:] & (only[1:] == only[:-1])
    event = (counts > 0) & ~repeats
    pause = np.zeros(len(top), dtype=bool)
    pause[1:] = same[1:] & (counts[:-1] == 0)

    # Every path takes the one likely label of a folded frame, so its probability is a constant of the utterance.
    folded = np.where(counts == 0, blank, 0.0)
    folded[repeats] = value[begin[:-1][repeats]]
    numbers = np.cumsum(event) - 1
    kept = np.repeat(event, counts)
    return Events(
        first=np.concatenate([[0], np.cumsum(np.bincount(utterance[event], minlength=batch))]),
        offset=np.bincount(utterance, weights=folded, minlength=batch),
        frame=time[event].astype(np.int32),
        run=np.bincount(numbers[event | repeats], minlength=int(event.sum())).astype(np.int32),
        pause=pause[event], blank=np.exp(blank[event]),
        begin=np.concatenate([[0], np.cumsum(counts[event])]), token=token[kept], prob=np.exp(value[kept]),
        labels=labels,
    )


def _likely(log_probs: np.ndarray | Tensor, inside: np.ndarray, blank_id: int, threshold: float
            ) -> tuple[np.ndarray, ...]:
    """Find the likely tokens of the frames inside, except the blank. A frame without any keeps its best.

    Returns the highest log-probability and the blank's of each frame [F], and frame, token and log-probability of each
    likely token [N]. If the blank is almost certain, no other token can reach the threshold, so most frames need only
    one value to be read instead of V.
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
        numpy, indices = np.asarray, np.asarray
        nonzero, highest = np.flatnonzero, lambda rows: rows.max(-1, initial=-np.inf)
    else:
        import torch

        flat = flat.detach()
        numpy = lambda column: column.float().cpu().numpy()  # noqa: E731
        indices = lambda rows: torch.from_numpy(rows).to(flat.device)  # noqa: E731
        nonzero, highest = lambda mask: mask.reshape(-1).nonzero()[:, 0].cpu().numpy(), lambda rows: rows.amax(-1)
    frames = np.flatnonzero(inside)
    blank = numpy(flat[:, blank_id][indices(frames)])
    uncertain = np.flatnonzero(~(blank >= certain))  # also NaN
    top = blank.copy()
    if not len(uncertain):
        none = np.zeros(0, np.int64)
        return top, blank, none, none, np.zeros(0, np.float32)
    some = flat[indices(frames[uncertain])]
    above = highest(some)
    top[uncertain] = numpy(above)
    places = nonzero(some > threshold)
    flat_rows = np.flatnonzero(top[uncertain] <= threshold)
    if len(flat_rows):
        best = some[indices(flat_rows)].argmax(-1)
        places = np.concatenate([places, flat_rows * some.shape[1] + np.asarray(best.tolist())])
    row, token = np.divmod(places, some.shape[1])
    value = numpy(some.reshape(-1)[indices(places)])
    other = token != blank_id
    return top, blank, uncertain[row[other]], token[other], value[other]


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
    sizes = np.array([len(each) for each in tokens])
    token, event = np.concatenate(tokens).astype(np.int64), np.concatenate(events).astype(np.int64)
    # A token ends at the latest with the next token, or the utterance.
    limit = np.append(event[1:], 0)
    last = np.cumsum(sizes)[sizes > 0] - 1
    limit[last] = batch.first[np.searchsorted(batch.first, event[last], side="right")]
    keys = np.repeat(np.arange(len(batch.frame)), np.diff(batch.begin)) * np.int64(batch.labels) + batch.token
    order = np.argsort(keys)
    keys, probs = keys[order], batch.prob[order]

    def prob(event: np.ndarray, token: np.ndarray) -> np.ndarray:
        wanted = event * batch.labels + token
        at = np.minimum(np.searchsorted(keys, wanted), len(keys) - 1)
        return np.where(keys[at] == wanted, probs[at], 0.0)

    # Each token is followed event by event up to its limit: ``each`` are these events, ``owner`` their tokens. The
    # probabilities come from one sorted list of (event, token) of the batch, 0 where a token wasn't likely.
    longest = np.maximum(limit - event, 1)
    owner = np.repeat(np.arange(len(token)), longest)
    begin = np.cumsum(longest) - longest
    each = np.arange(len(owner)) + (event - begin)[owner]
    probability, frames = prob(each, token[owner]), batch.run[each]
    adjacent = batch.frame[each] == batch.frame[each - 1] + batch.run[each - 1]
    # A token lives until the first event that isn't adjacent, lacks it, or has a likelier blank.
    stops = ~(adjacent & (probability > 0) & (probability >= batch.blank[each]))
    stops[begin] = False
    stopped = np.cumsum(stops)
    alive = stopped == stopped[begin][owner]
    # bincount adds in order, so that a stream and a recording give the same to the last bit.
    mass, run = (np.bincount(owner[alive], column[alive], minlength=len(token))
                 for column in (probability * frames, frames))
    run = run.astype(np.int64)
    starts = batch.frame[event].astype(np.int64)
    columns = (token, starts, starts + run, (mass / run).astype(np.float32))
    cuts = np.cumsum(sizes)[:-1]
    return [TokenSpans(*parts) for parts in zip(*(np.split(column, cuts) for column in columns), strict=True)]
