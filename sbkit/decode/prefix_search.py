"""CTC prefix beam search over a whole batch at once: every step is a handful of array operations.

All hypotheses of all utterances lie in flat arrays [M], sorted by utterance. One step extends each by the
likely tokens of its utterance's next event, adds up those that spell the same, scores words that became
complete, and keeps the best of each utterance. Probabilities are plain numbers, scaled to the best of
their utterance after each step, which spares logarithms of sums.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from sbkit.decode.fusion import Fusion, Weights
from sbkit.decode.hashing import mix
from sbkit.decode.posteriors import Events

AT_ONCE = 256  # utterances searched together; more only leave the cache, and a key has room for 4096
CROWD = 2  # hypotheses scored for each that may be kept
BINS = 64
_HASH_BITS = np.uint64(52)  # of a key; its utterance's number lies above
_SHIFT = np.uint64(12)
_DONE, _WORD, _LAST = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9), np.uint64(0x27D4EB2F165667C5)


@dataclass(frozen=True)
class Found:
    """One transcript of an utterance. Scores are natural logarithms."""

    tokens: np.ndarray  # [U]
    events: np.ndarray  # [U] at which each token begins, counted through the whole batch
    score: float  # the search's: acoustic, and what language model, words and hot words add
    acoustic: float


@dataclass
class Beams:
    """Hypotheses: arrays [M], sorted by key and so by utterance."""

    utterance: np.ndarray
    key: np.ndarray  # utterance, words, begun word and last token in one number
    done: np.ndarray  # hash of the words that are complete, or of the tokens where the model is over those
    word: np.ndarray  # hash of the word that has begun, 0 for none
    last: np.ndarray  # token that it ends with
    blank: np.ndarray  # probability of all paths that end in a blank
    other: np.ndarray  # and of those that end in the token
    text: np.ndarray  # score of the complete words
    soft: np.ndarray  # and what the word that has begun is expected to add
    state: np.ndarray  # of the language model
    hot: np.ndarray  # of the hot words
    node: np.ndarray  # row in the history
    known: np.ndarray  # bool: is what the begun word adds, when it ends here, in these:
    gain: np.ndarray
    after: np.ndarray
    hot_after: np.ndarray

    def __len__(self) -> int:
        return len(self.key)

    def take(self, rows: np.ndarray | slice) -> Beams:
        """Some of them."""
        return Beams(*(getattr(self, field.name)[rows] for field in fields(self)))


class Search:
    """One search over a batch.

    Arguments
    ---------
    beam : hypotheses kept of each utterance
    width : how much worse than the best a hypothesis may be, a natural logarithm
    """

    def __init__(self, fusion: Fusion, weights: Weights, beam: int, width: float):
        self.fusion, self.pieces, self.weights = fusion, fusion.pieces, weights
        self.beam, self.width = beam, width
        self.most_gained = max(0.0, weights.word) + fusion.hot.most  # by one token, the model aside
        self.opening = fusion.expect(self.pieces.hash, weights)  # [V] what a word that begins with it adds at best

    def run(self, events: Events, nbest: int) -> list[list[Found]]:
        """The best transcripts of each utterance, the very best first."""
        self.events = events
        counts = np.diff(events.first)
        self.rank = np.argsort(-counts, kind="stable")  # those with most events first, so that the others end
        counts = counts[self.rank]
        self.first = events.first[:-1][self.rank]
        self.scale = events.offset[self.rank].astype(np.float64)
        self.history: list[tuple[np.ndarray, ...]] = [(np.zeros(0, np.int64),) * 3]
        self.nodes = len(counts)  # the first rows of the history are the beginnings
        beams, ended = self._start(len(counts)), []
        for step in range(int(counts.max(initial=0))):
            active = int(np.searchsorted(-counts, -step, side="left"))
            cut = int(np.searchsorted(beams.utterance, active))
            if cut < len(beams):
                ended.append(beams.take(slice(cut, None)))
                beams = beams.take(slice(cut))
            beams = self._step(beams, step)
        return self._finish([*ended, beams], nbest)

    def _start(self, batch: int) -> Beams:
        utterance = np.arange(batch, dtype=np.int32)
        none, zero, letters = np.zeros(batch, np.int32), np.zeros(batch), np.zeros(batch, np.uint64)
        state = np.full(batch, self.fusion.start, np.int32)
        return Beams(
            utterance=utterance, key=utterance.astype(np.uint64) << _HASH_BITS, done=letters, word=letters,
            last=none - 1, blank=zero + 1, other=zero, text=zero, soft=zero, state=state, hot=none, node=utterance,
            known=none.astype(bool), gain=zero, after=state, hot_after=none)

    def _step(self, beams: Beams, step: int) -> Beams:
        event = self.first[beams.utterance] + step
        stay_blank, stay_other, parent, token, extended = self._extend(beams, event)
        # What each token makes of its hypothesis's last word.
        opens, begun = self.pieces.opens[token], beams.word[parent]
        closes = opens & (begun != 0)
        word = np.where(opens, np.uint64(0), begun) * self.pieces.power[token] + self.pieces.hash[token]
        done = beams.done[parent]
        if self.fusion.per_piece:
            done = (done + token.astype(np.uint64) + np.uint64(1)) * _DONE
        else:
            done = np.where(closes, (done + begun) * _DONE, done)
        key = mix(done + word * _WORD + token.astype(np.uint64) * _LAST) >> _SHIFT
        key |= beams.utterance[parent].astype(np.uint64) << _HASH_BITS

        # One that stayed and those extended to it are the same: the likeliest speaks for all.
        keys = np.concatenate([beams.key, key])
        blank = np.concatenate([stay_blank, np.zeros(len(key))])
        other = np.concatenate([stay_other, extended])
        order = np.argsort(keys)
        groups = _firsts(keys[order])
        chosen = order[_best_of((blank + other)[order], groups)]
        fresh = np.flatnonzero(chosen >= len(beams))
        pick = chosen[fresh] - len(beams)
        source = chosen.copy()
        source[fresh] = parent[pick]
        self._complete(beams, parent[pick[closes[pick]]])
        new = beams.take(source)
        new.key = keys[order[groups]]
        new.blank, new.other = np.add.reduceat(blank[order], groups), np.add.reduceat(other[order], groups)
        closed = fresh[closes[pick]]
        new.text[closed] += new.gain[closed]
        new.state[closed], new.hot[closed] = new.after[closed], new.hot_after[closed]
        new.done[fresh], new.word[fresh], new.last[fresh] = done[pick], word[pick], token[pick]
        new.known[fresh] = False
        if self.fusion.per_piece:
            gain, new.state[fresh] = self.fusion.extend(new.state[fresh], token[pick], self.weights)
            new.text[fresh] += gain
        new.soft[fresh] = self._expect(new.hot[fresh], new.word[fresh])

        keep = self._prune(new)
        is_fresh = np.zeros(len(new), bool)
        is_fresh[fresh] = True
        new = new.take(keep)
        added = np.flatnonzero(is_fresh[keep])
        self.history.append((new.node[added], new.last[added], self.first[new.utterance[added]] + step))
        new.node[added] = self.nodes + np.arange(len(added))
        self.nodes += len(added)
        firsts, sizes = _runs(new.utterance)
        most = np.maximum.reduceat(new.blank + new.other, firsts)
        self.scale[new.utterance[firsts]] += np.log(most)
        most = np.repeat(most, sizes)
        new.blank /= most
        new.other /= most
        return new

    def _extend(self, beams: Beams, event: np.ndarray) -> tuple[np.ndarray, ...]:
        """What stays of each hypothesis [M], as probabilities that end in a blank and in the token; and which are
        extended by which token with which probability [N], but for those that have no chance."""
        events = self.events
        total = beams.blank + beams.other
        pause = events.pause[event]
        blank, other = np.where(pause, total, beams.blank), np.where(pause, 0.0, beams.other)
        begin = events.begin[event]
        counts = events.begin[event + 1] - begin
        parent = np.repeat(np.arange(len(beams)), counts)
        at = np.arange(len(parent)) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        token, prob = events.token[at], events.prob[at]
        # A token that follows itself needs a blank between; without one it is the same token still.
        again = token == beams.last[parent]
        extended = np.where(again, blank[parent], total[parent]) * prob
        stay_blank, stay_other = total * events.blank[event], np.zeros(len(beams))
        stay_other[parent[again]] = other[parent[again]] * prob[again]
        with np.errstate(divide="ignore"):
            stay = np.log(stay_blank + stay_other) + beams.text + beams.soft
            hope = np.log(extended) + (beams.text + self.most_gained)[parent]
        goes_on = (beams.word != 0)[parent] & ~self.pieces.opens[token]
        hope += np.where(goes_on, beams.soft[parent], self.opening[token])
        firsts, sizes = _runs(beams.utterance)
        floor = np.repeat(np.maximum.reduceat(stay, firsts) - self.width, sizes)
        kept = np.flatnonzero(hope > np.maximum(floor, -1e300)[parent])
        kept = kept[self._promising(beams.utterance[parent[kept]], hope[kept])]
        return stay_blank, stay_other, parent[kept], token[kept], extended[kept]

    def _promising(self, utterance: np.ndarray, hope: np.ndarray) -> np.ndarray:
        """Rows [N], sorted by utterance, that may be among the best: not many more than the beam."""
        enough = CROWD * self.beam
        if len(hope) <= enough:
            return np.arange(len(hope))
        firsts, sizes = _runs(utterance)
        if sizes.max() <= enough:
            return np.arange(len(hope))
        best = np.repeat(np.maximum.reduceat(hope, firsts), sizes)
        place = np.minimum((best - hope) * (BINS / self.width), BINS - 1).astype(np.int64)
        counts = np.bincount(np.repeat(np.arange(len(firsts)) * BINS, sizes) + place, minlength=len(firsts) * BINS)
        last = (np.cumsum(counts.reshape(-1, BINS), axis=1) < enough).sum(1)  # the bin that makes them enough
        return np.flatnonzero(place <= np.repeat(last, sizes))

    def _complete(self, beams: Beams, rows: np.ndarray) -> None:
        """Fill in what the words that have begun add when they end here."""
        need = np.zeros(len(beams), bool)
        need[rows] = True
        rows = np.flatnonzero(need & ~beams.known)
        if not len(rows):
            return
        gain, beams.after[rows] = self.fusion.complete(beams.state[rows], beams.word[rows], self.weights)
        if self.fusion.hot:
            boost, beams.hot_after[rows] = self.fusion.hot.complete(beams.hot[rows], beams.word[rows])
            gain = gain + boost
        beams.gain[rows], beams.known[rows] = gain, True

    def _expect(self, hot: np.ndarray, word: np.ndarray) -> np.ndarray:
        soft = self.fusion.expect(word, self.weights)
        return soft + self.fusion.hot.expect(hot, word) if self.fusion.hot else soft

    def _prune(self, beams: Beams) -> np.ndarray:
        """Rows to keep, in order."""
        score = np.log(beams.blank + beams.other) + beams.text + beams.soft
        firsts, sizes = _runs(beams.utterance)
        rows = np.flatnonzero(score >= np.repeat(np.maximum.reduceat(score, firsts) - self.width, sizes))
        firsts, sizes = _runs(beams.utterance[rows])
        if sizes.max() <= self.beam:
            return rows
        order = np.lexsort((-score[rows], beams.utterance[rows]))
        place = np.arange(len(rows)) - np.repeat(firsts, sizes)
        return np.sort(rows[order[place < self.beam]])

    def _finish(self, parts: list[Beams], nbest: int) -> list[list[Found]]:
        beams = Beams(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Beams)))
        begun = np.flatnonzero(beams.word != 0)
        self._complete(beams, begun)
        beams.text[begun] += beams.gain[begun]
        beams.done[begun] = (beams.done[begun] + beams.word[begun]) * _DONE
        if not self.fusion.per_piece:
            beams.state[begun] = beams.after[begun]
        text = beams.text + self.fusion.finish(beams.state, self.weights)
        # The same words that end with different tokens are one transcript.
        mass = beams.blank + beams.other
        key = mix(beams.done) >> _SHIFT | beams.utterance.astype(np.uint64) << _HASH_BITS
        order = np.argsort(key)
        groups = _firsts(key[order])
        rows = order[_best_of(mass[order], groups)]
        acoustic = np.log(np.add.reduceat(mass[order], groups)) + self.scale[beams.utterance[rows]]
        score = acoustic + text[rows]
        order = np.lexsort((-score, beams.utterance[rows]))
        rows, score, acoustic = rows[order], score[order], acoustic[order]
        utterance = beams.utterance[rows]
        first = np.arange(len(rows)) - np.searchsorted(utterance, utterance) < nbest
        rows, score, acoustic, utterance = rows[first], score[first], acoustic[first], utterance[first]
        found: list[list[Found]] = [[] for _ in self.rank]
        columns = zip(self.rank[utterance].tolist(), *self._trace(beams.node[rows]), score.tolist(), acoustic.tolist(),
                      strict=True)
        for place, *parts in columns:
            found[place].append(Found(*parts))
        return found

    def _trace(self, nodes: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """The tokens of each hypothesis and their events, followed back from its row in the history."""
        roots = len(self.rank)
        parent, token, event = (np.concatenate(column) for column in zip(*self.history, strict=True))
        steps, at = [], nodes
        while (at >= roots).any():
            steps.append(at)
            at = np.where(at >= roots, parent[np.maximum(at - roots, 0)], at)
        path = np.stack(steps[::-1], axis=1) - roots if steps else np.zeros((len(nodes), 0), np.int64)
        paths = [row[row >= 0] for row in path]
        return [token[row] for row in paths], [event[row] for row in paths]


def _firsts(values: np.ndarray) -> np.ndarray:
    """Where each run of equal neighbours begins."""
    return np.flatnonzero(np.concatenate([[True], values[1:] != values[:-1]])) if len(values) else np.zeros(0, np.int64)


def _runs(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Where each run of equal neighbours begins, and how long it is."""
    firsts = _firsts(values)
    return firsts, np.diff(firsts, append=len(values))


def _best_of(values: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """The place of the largest value of each group of neighbours."""
    if len(groups) == len(values):
        return groups
    sizes = np.diff(groups, append=len(values))
    largest = np.repeat(np.maximum.reduceat(values, groups), sizes)
    places = np.flatnonzero(values == largest)
    return places[_firsts(np.repeat(np.arange(len(groups)), sizes)[places])]
