"""Prefix beam search over a whole batch at once: every step is a few array operations.

All hypotheses of all utterances are in flat arrays [M], sorted by utterance. One step extends each by the likely
tokens of its utterance's next event, merges those with the same spelling, scores words that became complete, and
keeps the best of each utterance. Probabilities are not logarithms: they are rescaled to the best of their utterance
after each step, which avoids logarithms of sums. ``Search`` has what CTC and a transducer share.

CTC's speed, measured by tools/bench/decode.py on two cores with a beam of 100, a 3-gram model and 64 utterances, in
seconds of audio per second, one process: 2500 for 25 characters, 970 for 1000 pieces and 640 for 5000. SpeechBrain's
CTCBeamSearcher reaches 460, 130 and 60 at a higher error rate; flashlight, with 20 tokens followed per frame, 460, 130
and 110, at a lower error rate for characters (as here with token_threshold -12) and a higher one for pieces. So it
isn't used. A step takes about as long for a few utterances as for many: search many at once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from sbkit.decode.fusion import Fusion, FusionWeights
from sbkit.decode.hashing import mix
from sbkit.decode.posteriors import Events

MAX_BATCH = 256  # utterances searched together; more would not fit in the cache, and a key has room for 4096
SCORED_PER_KEPT = 2  # hypotheses scored for each that may be kept
BINS = 64
_HASH_BITS = np.uint64(52)  # of a key; the bits above are its utterance's number
_SHIFT = np.uint64(12)
EMPTY_HISTORY = (*(np.zeros(0, np.int64),) * 3, np.zeros(0))
_DONE, _WORD, _LAST = np.uint64(0xC2B2AE3D27D4EB4F), np.uint64(0x165667B19E3779F9), np.uint64(0x27D4EB2F165667C5)


@dataclass(frozen=True)
class TokenHypothesis:
    """A transcript of an utterance. Scores are natural logarithms."""

    tokens: np.ndarray  # [U]
    events: np.ndarray  # [U] where each token begins, counted across the batch
    probs: np.ndarray  # [U] the probability of each token there
    score: float  # total: acoustic, language model, words and hot words
    acoustic: float


@dataclass
class Beams:
    """Hypotheses as arrays [M], sorted by key and so by utterance."""

    utterance: np.ndarray
    key: np.ndarray  # hash of utterance, words, unfinished word and last tokens
    done: np.ndarray  # hash of the complete words, or of the tokens if the language model is over pieces
    word: np.ndarray  # hash of the unfinished word, 0 for none
    last: np.ndarray  # the last token, or as many as a transducer's prediction depends on [M, N]
    predicted: np.ndarray  # [M, J] a transducer's prediction from them; [M, 0] without one
    blank: np.ndarray  # probability of all paths that end in a blank
    other: np.ndarray  # the same for paths that end in the last token
    text: np.ndarray  # score of the complete words
    soft: np.ndarray  # expected score of the unfinished word
    state: np.ndarray  # of the language model
    hot: np.ndarray  # of the hot words
    node: np.ndarray  # row in the history
    event: np.ndarray  # at which its last token began, -1 for none
    known: np.ndarray  # bool: whether the three below are computed
    gain: np.ndarray  # score of the unfinished word if it ends here
    after: np.ndarray  # the language model's state then
    hot_after: np.ndarray  # the hot words' state then

    def __len__(self) -> int:
        return len(self.key)

    def take(self, rows: np.ndarray | slice) -> Beams:
        return Beams(*(getattr(self, field.name)[rows] for field in fields(self)))


class Extensions(NamedTuple):
    """The hypotheses [M] without a new token, and N with one."""

    stay_blank: np.ndarray  # [M] without a new token: probability of all paths that end in a blank
    stay_other: np.ndarray  # [M] the same for paths that end in the last token
    parent: np.ndarray  # [N] the hypothesis that is extended
    token: np.ndarray  # [N]
    probs: np.ndarray  # [N] the token's probability
    extended: np.ndarray  # [N] the extended hypothesis's


class Spelled(NamedTuple):
    """Extensions [N] with their tokens appended."""

    key: np.ndarray  # equal for hypotheses that are one
    done: np.ndarray  # hash of the finished words
    word: np.ndarray  # hash of the unfinished word
    last: np.ndarray  # the last tokens
    closes: np.ndarray  # bool: whether the token ends a word that was begun


class Results(NamedTuple):
    """The hypotheses [K] after merging: each stays as it was, or is fresh, which means extended by a token."""

    key: np.ndarray
    blank: np.ndarray  # probability of all paths that end in a blank
    other: np.ndarray  # the same for paths that end in the last token
    source: np.ndarray  # the hypothesis [M] that it was, or that was extended
    fresh: np.ndarray  # the rows [F] of fresh ones
    extension: np.ndarray  # [F] their extensions


class Scores(NamedTuple):
    """Scores of the words of results [K], natural logarithms."""

    total: np.ndarray  # with the acoustic score
    text: np.ndarray  # of finished words
    lookahead: np.ndarray  # expected of the unfinished word
    state: np.ndarray  # [F] the language model's state of fresh ones
    hot: np.ndarray  # [F] that of the hot words


class Search(ABC):
    """One search over a batch. Subclasses compute how hypotheses are extended.

    beam : hypotheses kept per utterance
    width : how much worse than the best a hypothesis may be (natural logarithm)
    """

    def __init__(self, fusion: Fusion, weights: FusionWeights, beam: int, width: float):
        self.fusion, self.pieces, self.weights = fusion, fusion.pieces, weights
        self.beam, self.width = beam, width
        self.max_gain = max(0.0, weights.word) + fusion.hot.max_boost  # of one token, without the language model
        self.opening = fusion.expect(self.pieces.hash, weights)  # [V] best score of a word that begins with the token

    def _search(self, counts: np.ndarray, offset: np.ndarray, nbest: int) -> list[list[TokenHypothesis]]:
        """Find the best transcripts of each utterance, best first.

        counts : [B] events of each utterance, which follow one another
        offset : [B] added to the score of every hypothesis of an utterance
        """
        self.rank = np.argsort(-counts, kind="stable")  # most events first, so that finished utterances are last
        self.first = (np.cumsum(counts) - counts)[self.rank]
        counts = counts[self.rank]
        self.scale = offset[self.rank].astype(np.float64)
        self.history: list[tuple[np.ndarray, ...]] = [EMPTY_HISTORY]  # columns: parent, token, event, probability
        self.nodes = len(counts)  # the first rows of the history are the starts
        beams, ended = self._start(len(counts)), []
        for step in range(int(counts.max(initial=0))):
            active = int(np.searchsorted(-counts, -step, side="left"))
            cut = int(np.searchsorted(beams.utterance, active))
            if cut < len(beams):
                ended.append(beams.take(slice(cut, None)))
                beams = beams.take(slice(cut))
            beams = self._step(beams, self.first[:active] + step)
        return self._finish([*ended, beams], nbest)

    # ------------------------------------------------------------ for subclasses

    @abstractmethod
    def _begin(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return ``last`` and ``predicted`` of hypotheses [B] without tokens."""

    @abstractmethod
    def _extend(self, beams: Beams, event: np.ndarray) -> Extensions:
        """Extend hypotheses [M] at their utterances' events [B]."""

    @abstractmethod
    def _append(self, last: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Append a token [N] to the last tokens [N, ...]; returns them and their hashes [N]."""

    def _predict(self, last: np.ndarray) -> np.ndarray:
        """Compute a transducer's prediction from the last tokens [N, ...]."""
        return np.zeros((len(last), 0))

    # ------------------------------------------------------------ shared

    def _start(self, batch: int) -> Beams:
        utterance = np.arange(batch)
        none, zero, letters = np.zeros(batch, np.int64), np.zeros(batch), np.zeros(batch, np.uint64)
        state = np.repeat(self.fusion.start[None], batch, axis=0)
        last, predicted = self._begin(batch)
        return Beams(
            utterance=utterance, key=utterance.astype(np.uint64) << _HASH_BITS, done=letters, word=letters,
            last=last, predicted=predicted, blank=zero, other=zero + 1, text=zero, soft=zero, state=state, hot=none,
            node=utterance, event=none - 1, known=none.astype(bool), gain=zero, after=state, hot_after=none)

    def _step(self, beams: Beams, event: np.ndarray) -> Beams:
        """Process the next event [B] of each active utterance."""
        return self._advance(beams, event, self._extend(beams, event))

    def _advance(self, beams: Beams, event: np.ndarray, extensions: Extensions) -> Beams:
        """Merge and score extended hypotheses at events [B], and keep the best."""
        spelled = self._spell(beams, extensions)
        results = self._merge_equal(beams, extensions, spelled)
        scores = self._score(beams, extensions, spelled, results)
        kept = self._prune(beams.utterance[results.source], scores.total, len(event))
        new = self._record(beams, event, extensions, spelled, results, scores, kept)
        return self._rescaled(new, len(event))

    def _spell(self, beams: Beams, extensions: Extensions) -> Spelled:
        """Append the tokens of extensions [N] to the words and last tokens of their hypotheses."""
        parent, token = extensions.parent, extensions.token
        opens = self.pieces.opens[token]
        unfinished = beams.word[parent]
        closes = opens & (unfinished != 0)
        word = np.where(opens, np.uint64(0), unfinished) * self.pieces.power[token] + self.pieces.hash[token]
        done = beams.done[parent]
        if self.fusion.per_piece:
            done = (done + token.astype(np.uint64) + np.uint64(1)) * _DONE
        else:
            done = np.where(closes, (done + unfinished) * _DONE, done)
        # The key is what two hypotheses must share to be one: the finished words, the unfinished one, the last tokens,
        # and the utterance in the highest bits, which keeps results in the order of utterances.
        last, ending = self._append(beams.last[parent], token)
        key = mix(done + word * _WORD + ending) >> _SHIFT
        key |= beams.utterance[parent].astype(np.uint64) << _HASH_BITS
        return Spelled(key, done, word, last, closes)

    @staticmethod
    def _merge_equal(beams: Beams, extensions: Extensions, spelled: Spelled) -> Results:
        """Merge equal hypotheses; the most likely one represents all."""
        keys = np.concatenate([beams.key, spelled.key])
        ending_in_blank = np.concatenate([extensions.stay_blank, np.zeros(len(spelled.key))])
        ending_in_token = np.concatenate([extensions.stay_other, extensions.extended])
        chosen, blank, other = _merge(keys, ending_in_blank, ending_in_token)
        fresh = np.flatnonzero(chosen >= len(beams))
        extension = chosen[fresh] - len(beams)
        source = chosen.copy()
        source[fresh] = extensions.parent[extension]
        return Results(keys[chosen], blank, other, source, fresh, extension)

    def _score(self, beams: Beams, extensions: Extensions, spelled: Spelled, results: Results) -> Scores:
        """Score the words of results: a word that a fresh token closes now, by language model and hot words, and the
        unfinished one by the best that it can get."""
        extension, fresh = results.extension, results.fresh
        parent = extensions.parent[extension]  # the hypotheses of fresh results
        closes = spelled.closes[extension]
        self._complete(beams, parent[closes])

        text, lookahead = beams.text[results.source], beams.soft[results.source]
        state = beams.state[parent]
        state[closes] = beams.after[parent[closes]]
        hot = np.where(closes, beams.hot_after[parent], beams.hot[parent])
        text[fresh] += np.where(closes, beams.gain[parent], 0.0)
        if self.fusion.per_piece:
            gain, state = self.fusion.extend(beams.state[parent], extensions.token[extension], self.weights)
            text[fresh] += gain
        expected = self.fusion.expect(spelled.word[extension], self.weights)
        if self.fusion.hot:
            expected = expected + self.fusion.hot.expect(hot, spelled.word[extension])
        lookahead[fresh] = expected
        with np.errstate(divide="ignore"):  # a hypothesis without any path left is pruned
            total = np.log(results.blank + results.other) + text + lookahead
        return Scores(total, text, lookahead, state, hot)

    def _record(self, beams: Beams, event: np.ndarray, extensions: Extensions, spelled: Spelled, results: Results,
                scores: Scores, kept: np.ndarray) -> Beams:
        """Make the new hypotheses of the results that are kept, and add the tokens of fresh ones to the history."""
        new = beams.take(results.source[kept])
        new.key, new.blank, new.other = results.key[kept], results.blank[kept], results.other[kept]
        new.text, new.soft = scores.text[kept], scores.lookahead[kept]

        # Fresh ones among those kept: their rows, and their places among all fresh results.
        place = np.full(len(results.source), -1)
        place[results.fresh] = np.arange(len(results.fresh))
        place = place[kept]
        rows = np.flatnonzero(place >= 0)
        place = place[rows]
        extension = results.extension[place]
        new.state[rows], new.hot[rows], new.known[rows] = scores.state[place], scores.hot[place], False
        new.done[rows], new.word[rows] = spelled.done[extension], spelled.word[extension]
        new.last[rows] = spelled.last[extension]
        new.predicted[rows] = self._predict(spelled.last[extension])
        new.event[rows] = event[new.utterance[rows]]
        token, probs = extensions.token[extension], extensions.probs[extension]
        self.history.append((new.node[rows], token, new.event[rows], probs))
        new.node[rows] = self.nodes + np.arange(len(rows))
        self.nodes += len(rows)
        return new

    def _rescaled(self, beams: Beams, active: int) -> Beams:
        """Divide probabilities by the highest of each utterance."""
        sizes = np.bincount(beams.utterance, minlength=active)
        highest = np.maximum.reduceat(beams.blank + beams.other, np.cumsum(sizes) - sizes)
        self.scale[:active] += np.log(highest)
        highest = np.repeat(highest, sizes)
        beams.blank, beams.other = beams.blank / highest, beams.other / highest
        return beams

    def _preselect(self, beams: Beams, active: int, stay: np.ndarray, parent: np.ndarray, token: np.ndarray,
                   extended: np.ndarray) -> np.ndarray:
        """Select extensions [N] whose upper bound is within the beam's width of the best without a new token [M]."""
        sizes = np.bincount(beams.utterance, minlength=active)
        with np.errstate(divide="ignore"):
            best, bound = np.log(stay) + beams.text + beams.soft, np.log(extended)
        best = np.maximum(np.maximum.reduceat(best, np.cumsum(sizes) - sizes), -1e300)
        bound += (beams.text + self.max_gain)[parent]
        same_word = (beams.word != 0)[parent] & ~self.pieces.opens[token]
        bound += np.where(same_word, beams.soft[parent], self.opening[token])
        kept = np.flatnonzero(bound > np.repeat(best - self.width, sizes)[parent])
        if len(kept) > SCORED_PER_KEPT * self.beam:
            kept = kept[self._top(beams.utterance[parent[kept]], bound[kept], active)]
        return kept

    def _top(self, utterance: np.ndarray, bound: np.ndarray, active: int) -> np.ndarray | slice:
        """Select about ``SCORED_PER_KEPT * beam`` rows [N] per utterance with the highest bounds, by a histogram."""
        sizes, enough = np.bincount(utterance, minlength=active), SCORED_PER_KEPT * self.beam
        if sizes.max() <= enough:
            return slice(None)
        some = np.flatnonzero(sizes)
        best = np.full(active, -np.inf)
        best[some] = np.maximum.reduceat(bound, (np.cumsum(sizes) - sizes)[some])
        place = np.minimum((best[utterance] - bound) * (BINS / self.width), BINS - 1).astype(np.int64)
        counts = np.bincount(utterance * BINS + place, minlength=active * BINS).reshape(active, BINS)
        last = (np.cumsum(counts, axis=1) < enough).sum(1)  # the bin that has the last of them
        return place <= last[utterance]

    def _complete(self, beams: Beams, rows: np.ndarray) -> None:
        """Fill in the scores of unfinished words if they end here."""
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

    def _prune(self, utterance: np.ndarray, score: np.ndarray, active: int) -> np.ndarray:
        sizes = np.bincount(utterance, minlength=active)
        best = np.maximum.reduceat(score, np.cumsum(sizes) - sizes)
        rows = np.flatnonzero(score >= np.repeat(best - self.width, sizes))
        sizes = np.bincount(utterance[rows], minlength=active)
        full = sizes > self.beam
        if not full.any():
            return rows
        some = np.flatnonzero(full[utterance[rows]])  # only utterances with too many rows need sorting
        order = some[np.lexsort((-score[rows[some]], utterance[rows[some]]))]
        sizes = sizes[full]
        keep = np.ones(len(rows), bool)
        keep[order[np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes) >= self.beam]] = False
        return rows[keep]

    def _finish(self, parts: list[Beams], nbest: int) -> list[list[TokenHypothesis]]:
        beams = Beams(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Beams)))
        rows = np.flatnonzero(beams.word != 0)
        self._complete(beams, rows)
        beams.text[rows] += beams.gain[rows]
        beams.done[rows] = (beams.done[rows] + beams.word[rows]) * _DONE
        if not self.fusion.per_piece:
            beams.state[rows] = beams.after[rows]
        text = beams.text + self.fusion.finish(beams.state, self.weights)
        # Hypotheses with the same words and different last tokens are one transcript.
        key = mix(beams.done) >> _SHIFT | beams.utterance.astype(np.uint64) << _HASH_BITS
        rows, blank, other = _merge(key, beams.blank, beams.other)
        acoustic = np.log(blank + other) + self.scale[beams.utterance[rows]]
        score = acoustic + text[rows]
        order = np.lexsort((-score, beams.utterance[rows]))
        rows, score, acoustic = rows[order], score[order], acoustic[order]
        utterance = beams.utterance[rows]
        first = np.arange(len(rows)) - np.searchsorted(utterance, utterance) < nbest
        rows, score, acoustic, utterance = rows[first], score[first], acoustic[first], utterance[first]
        found: list[list[TokenHypothesis]] = [[] for _ in self.rank]
        hypotheses = map(TokenHypothesis, *self._trace(beams.node[rows]), score.tolist(), acoustic.tolist())
        for place, hypothesis in zip(self.rank[utterance].tolist(), hypotheses, strict=True):
            found[place].append(hypothesis)
        return found

    def _trace(self, nodes: np.ndarray) -> list[list[np.ndarray]]:
        """Trace the tokens of each hypothesis, their events and probabilities back from its row in the history."""
        roots = len(self.rank)
        parent, *columns = (np.concatenate(column) for column in zip(*self.history, strict=True))
        steps, at = [], nodes
        while (at >= roots).any():
            steps.append(at)
            at = np.where(at >= roots, parent[np.maximum(at - roots, 0)], at)
        path = np.stack(steps[::-1], axis=1) - roots if steps else np.zeros((len(nodes), 0), np.int64)
        paths = [row[row >= 0] for row in path]
        return [[column[row] for row in paths] for column in columns]


class CTCSearch(Search):
    """A search over CTC's events."""

    def run(self, events: Events, nbest: int) -> list[list[TokenHypothesis]]:
        """The best transcripts of each utterance, best first."""
        self.events, self.token = events, events.token.astype(np.int64)
        return self._search(np.diff(events.first), events.offset, nbest)

    def _begin(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(batch, -1), np.zeros((batch, 0))

    def _append(self, last: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return token, token.astype(np.uint64) * _LAST

    def _extend(self, beams: Beams, event: np.ndarray) -> Extensions:
        events, active, event = self.events, len(event), event[beams.utterance]
        total = beams.blank + beams.other
        pause = events.pause[event]
        blank, other = np.where(pause, total, beams.blank), np.where(pause, 0.0, beams.other)
        begin = events.begin[event]
        counts = events.begin[event + 1] - begin
        parent = np.repeat(np.arange(len(beams)), counts)
        at = np.arange(len(parent)) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        token, prob = self.token[at], events.prob[at]
        # A repeated token needs a blank in between; without one it is still the same token.
        again = np.flatnonzero(token == beams.last[parent])
        before = parent[again]
        extended = total[parent]
        extended[again] = blank[before]
        extended *= prob
        stay_blank, stay_other = total * events.blank[event], np.zeros(len(beams))
        stay_other[before] = other[before] * prob[again]
        kept = self._preselect(beams, active, stay_blank + stay_other, parent, token, extended)
        return Extensions(stay_blank, stay_other, parent[kept], token[kept], prob[kept], extended[kept])


def _merge(keys: np.ndarray, blank: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge equal keys: returns the most likely row of each key, in the order of keys, and the summed probabilities."""
    order = np.argsort(keys)
    keys = keys[order]
    changes = np.ones(len(keys), bool)
    changes[1:] = keys[1:] != keys[:-1]
    firsts = np.flatnonzero(changes)
    if len(firsts) == len(keys):
        return order, blank[order], other[order]
    sizes = np.diff(firsts, append=len(keys))
    chosen = order[firsts]
    blanks, others = blank[chosen], other[chosen]
    several = np.flatnonzero(sizes > 1)
    sizes = sizes[several]
    starts = np.cumsum(sizes) - sizes
    rows = order[np.repeat(firsts[several] - starts, sizes) + np.arange(sizes.sum())]
    blanks[several], others[several] = np.add.reduceat(blank[rows], starts), np.add.reduceat(other[rows], starts)
    mass = blank[rows] + other[rows]
    group = np.repeat(np.arange(len(several)), sizes)
    best = np.flatnonzero(mass == np.maximum.reduceat(mass, starts)[group])
    chosen[several[group[best]]] = rows[best]
    return chosen, blanks, others
