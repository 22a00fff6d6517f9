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
from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import NamedTuple

import numpy as np

from sbkit.decode.fusion import Fusion, FusionWeights
from sbkit.decode.hashing import mix
from sbkit.decode.posteriors import Events

MAX_BATCH = 256  # utterances searched together; more would not fit in the cache, and a key has room for 4096
SCORED_PER_KEPT = 2  # hypotheses scored for each that may be kept
BINS = 64
# A key has an utterance's number in its 12 highest bits and a hash in the others.
_HASH_BITS = np.uint64(52)
_UTTERANCE_BITS = np.uint64(12)
# Odd factors, so that the parts of a key mix differently.
_WORDS_FACTOR = np.uint64(0xC2B2AE3D27D4EB4F)
_WORD_FACTOR = np.uint64(0x165667B19E3779F9)
_TOKEN_FACTOR = np.uint64(0x27D4EB2F165667C5)


@dataclass(frozen=True)
class TokenHypothesis:
    """A transcript of an utterance. Scores are natural logarithms."""

    tokens: np.ndarray  # [U]
    events: np.ndarray  # [U] where each token begins, counted across the batch
    probs: np.ndarray  # [U] the probability of each token there
    score: float  # total: acoustic, language model, words and hot words
    acoustic: float


class History(NamedTuple):
    """Tokens of hypotheses, one a row [N]. The tokens of a hypothesis are those from its row back to a start.

    The starts, one for each utterance, are numbered first and have no row here.
    """

    parent: np.ndarray  # the number of the token before, or of a start
    token: np.ndarray
    event: np.ndarray  # at which it began
    prob: np.ndarray

    @classmethod
    def empty(cls) -> History:
        none = np.zeros(0, np.int64)
        return cls(none, none, none, np.zeros(0))

    @classmethod
    def join(cls, parts: Iterable[History]) -> History:
        return cls(*map(np.concatenate, zip(*parts, strict=True)))


@dataclass
class Beams:
    """Hypotheses as arrays [M], sorted by key and so by utterance."""

    utterance: np.ndarray
    key: np.ndarray  # hash of utterance, words, unfinished word and last tokens
    complete_words: np.ndarray  # their hash, or that of the tokens if the language model is over pieces
    unfinished_word: np.ndarray  # its hash, 0 for none
    last: np.ndarray  # the last token, or as many as a transducer's prediction depends on [M, N]
    predicted: np.ndarray  # [M, J] a transducer's prediction from them; [M, 0] without one
    blank: np.ndarray  # probability of all paths that end in a blank
    other: np.ndarray  # the same for paths that end in the last token
    text_score: np.ndarray  # of the complete words
    lookahead: np.ndarray  # expected score of the unfinished word
    lm_state: np.ndarray
    hot_state: np.ndarray  # of the hot words
    node: np.ndarray  # number of its last token in the history
    event: np.ndarray  # at which its last token began, -1 for none
    # If the unfinished word ends here, computed only when it is needed:
    has_completion: np.ndarray  # bool: whether the three below are computed
    completion_gain: np.ndarray  # score of that word
    completion_lm_state: np.ndarray
    completion_hot_state: np.ndarray

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
    complete_words: np.ndarray  # hash
    unfinished_word: np.ndarray  # hash
    last: np.ndarray  # the last tokens
    closes: np.ndarray  # bool: whether the token ends a word that was begun


class Merged(NamedTuple):
    """The hypotheses [K] after merging: each stays as it was, or is fresh, which means extended by a token."""

    key: np.ndarray
    blank: np.ndarray  # probability of all paths that end in a blank
    other: np.ndarray  # the same for paths that end in the last token
    source: np.ndarray  # the hypothesis [M] that it was, or that was extended
    fresh: np.ndarray  # the rows [F] of fresh ones
    extension: np.ndarray  # [F] their extensions


class Scores(NamedTuple):
    """Scores of the words of merged hypotheses [K], natural logarithms."""

    total: np.ndarray  # with the acoustic score
    text_score: np.ndarray  # of complete words
    lookahead: np.ndarray  # expected of the unfinished word
    fresh_lm_state: np.ndarray  # [F]
    fresh_hot_state: np.ndarray  # [F]


class Search(ABC):
    """One search over a batch. Subclasses compute how hypotheses are extended.

    beam : hypotheses kept per utterance
    width : how much worse than the best a hypothesis may be (natural logarithm)
    """

    def __init__(self, fusion: Fusion, weights: FusionWeights, beam: int, width: float):
        self.fusion = fusion
        self.pieces = fusion.pieces
        self.weights = weights
        self.beam = beam
        self.width = width
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
        self.history = [History.empty()]  # each step adds a part
        self.nodes = len(counts)  # starts and tokens
        beams = self._start(len(counts))
        finished = []
        for step in range(int(counts.max(initial=0))):
            active = int(np.searchsorted(-counts, -step, side="left"))
            first_finished = int(np.searchsorted(beams.utterance, active))
            if first_finished < len(beams):
                finished.append(beams.take(slice(first_finished, None)))
                beams = beams.take(slice(first_finished))
            beams = self._step(beams, self.first[:active] + step)
        return self._finish([*finished, beams], nbest)

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
        no_letters = np.zeros(batch, np.uint64)  # hashes of the empty text
        no_score = np.zeros(batch)
        lm_state = np.repeat(self.fusion.start[None], batch, axis=0)
        hot_state = np.zeros(batch, np.int64)
        last, predicted = self._begin(batch)
        return Beams(
            utterance=utterance,
            key=utterance.astype(np.uint64) << _HASH_BITS,
            complete_words=no_letters,
            unfinished_word=no_letters,
            last=last,
            predicted=predicted,
            blank=np.zeros(batch),
            other=np.ones(batch),
            text_score=no_score,
            lookahead=no_score,
            lm_state=lm_state,
            hot_state=hot_state,
            node=utterance,
            event=np.full(batch, -1),
            has_completion=np.zeros(batch, bool),
            completion_gain=no_score,
            completion_lm_state=lm_state,
            completion_hot_state=hot_state,
        )

    def _step(self, beams: Beams, event: np.ndarray) -> Beams:
        """Process the next event [B] of each active utterance."""
        return self._advance(beams, event, self._extend(beams, event))

    def _advance(self, beams: Beams, event: np.ndarray, extensions: Extensions) -> Beams:
        """Merge and score extended hypotheses at events [B], and keep the best."""
        spelled = self._spell(beams, extensions)
        merged = self._merge_equal(beams, extensions, spelled)
        scores = self._score(beams, extensions, spelled, merged)
        survivors = self._prune(beams.utterance[merged.source], scores.total, len(event))
        survived = self._record(beams, event, extensions, spelled, merged, scores, survivors)
        return self._rescaled(survived, len(event))

    def _spell(self, beams: Beams, extensions: Extensions) -> Spelled:
        """Append the tokens of extensions [N] to the words and last tokens of their hypotheses."""
        parent = extensions.parent
        token = extensions.token
        opens = self.pieces.opens[token]
        word_before = beams.unfinished_word[parent]
        closes = opens & (word_before != 0)
        word = np.where(opens, np.uint64(0), word_before) * self.pieces.power[token] + self.pieces.hash[token]
        complete_words = beams.complete_words[parent]
        if self.fusion.per_piece:
            complete_words = (complete_words + token.astype(np.uint64) + np.uint64(1)) * _WORDS_FACTOR
        else:
            complete_words = np.where(closes, (complete_words + word_before) * _WORDS_FACTOR, complete_words)

        # The key is what two hypotheses must share to be one: the complete words, the unfinished one, the last tokens,
        # and the utterance in the highest bits, which keeps hypotheses in the order of utterances.
        last, last_hash = self._append(beams.last[parent], token)
        key = mix(complete_words + word * _WORD_FACTOR + last_hash) >> _UTTERANCE_BITS
        key |= beams.utterance[parent].astype(np.uint64) << _HASH_BITS
        return Spelled(key, complete_words, word, last, closes)

    @staticmethod
    def _merge_equal(beams: Beams, extensions: Extensions, spelled: Spelled) -> Merged:
        """Merge equal hypotheses; the most likely one represents all."""
        keys = np.concatenate([beams.key, spelled.key])
        ending_in_blank = np.concatenate([extensions.stay_blank, np.zeros(len(spelled.key))])
        ending_in_token = np.concatenate([extensions.stay_other, extensions.extended])
        chosen, blank, other = _merge(keys, ending_in_blank, ending_in_token)
        fresh = np.flatnonzero(chosen >= len(beams))
        extension = chosen[fresh] - len(beams)
        source = chosen.copy()
        source[fresh] = extensions.parent[extension]
        return Merged(keys[chosen], blank, other, source, fresh, extension)

    def _score(self, beams: Beams, extensions: Extensions, spelled: Spelled, merged: Merged) -> Scores:
        """Score the words of merged hypotheses: a word that a fresh token closes now, by language model and hot words,
        and the unfinished one by the best that it can get."""
        fresh = merged.fresh
        extension = merged.extension
        parent = extensions.parent[extension]  # the hypotheses of fresh ones
        closes = spelled.closes[extension]
        self._complete(beams, parent[closes])

        text_score = beams.text_score[merged.source]
        text_score[fresh] += np.where(closes, beams.completion_gain[parent], 0.0)
        lm_state = beams.lm_state[parent]
        lm_state[closes] = beams.completion_lm_state[parent[closes]]
        if self.fusion.per_piece:
            gain, lm_state = self.fusion.extend(beams.lm_state[parent], extensions.token[extension], self.weights)
            text_score[fresh] += gain
        hot_state = np.where(closes, beams.completion_hot_state[parent], beams.hot_state[parent])

        expected = self.fusion.expect(spelled.unfinished_word[extension], self.weights)
        if self.fusion.hot:
            expected = expected + self.fusion.hot.expect(hot_state, spelled.unfinished_word[extension])
        lookahead = beams.lookahead[merged.source]
        lookahead[fresh] = expected

        with np.errstate(divide="ignore"):  # a hypothesis without any path left is pruned
            total = np.log(merged.blank + merged.other) + text_score + lookahead
        return Scores(total, text_score, lookahead, lm_state, hot_state)

    def _record(self, beams: Beams, event: np.ndarray, extensions: Extensions, spelled: Spelled, merged: Merged,
                scores: Scores, survivors: np.ndarray) -> Beams:
        """Make the hypotheses of the rows that survive, and add the tokens of fresh ones to the history."""
        new = beams.take(merged.source[survivors])
        new.key = merged.key[survivors]
        new.blank = merged.blank[survivors]
        new.other = merged.other[survivors]
        new.text_score = scores.text_score[survivors]
        new.lookahead = scores.lookahead[survivors]

        # Fresh ones among the survivors: their rows, and their places among all fresh ones.
        place = np.full(len(merged.source), -1)
        place[merged.fresh] = np.arange(len(merged.fresh))
        place = place[survivors]
        rows = np.flatnonzero(place >= 0)
        place = place[rows]
        extension = merged.extension[place]

        new.lm_state[rows] = scores.fresh_lm_state[place]
        new.hot_state[rows] = scores.fresh_hot_state[place]
        new.has_completion[rows] = False
        new.complete_words[rows] = spelled.complete_words[extension]
        new.unfinished_word[rows] = spelled.unfinished_word[extension]
        new.last[rows] = spelled.last[extension]
        new.predicted[rows] = self._predict(spelled.last[extension])
        new.event[rows] = event[new.utterance[rows]]

        self.history.append(History(
            parent=new.node[rows], token=extensions.token[extension], event=new.event[rows],
            prob=extensions.probs[extension]))
        new.node[rows] = self.nodes + np.arange(len(rows))
        self.nodes += len(rows)
        return new

    def _rescaled(self, beams: Beams, active: int) -> Beams:
        """Divide probabilities by the highest of each utterance."""
        sizes = np.bincount(beams.utterance, minlength=active)
        highest = np.maximum.reduceat(beams.blank + beams.other, np.cumsum(sizes) - sizes)
        self.scale[:active] += np.log(highest)
        highest = np.repeat(highest, sizes)
        beams.blank = beams.blank / highest
        beams.other = beams.other / highest
        return beams

    def _preselect(self, beams: Beams, active: int, stay: np.ndarray, parent: np.ndarray, token: np.ndarray,
                   extended: np.ndarray) -> np.ndarray:
        """Select extensions [N] whose upper bound is within the beam's width of the best without a new token [M]."""
        sizes = np.bincount(beams.utterance, minlength=active)
        with np.errstate(divide="ignore"):
            best = np.log(stay) + beams.text_score + beams.lookahead
            bound = np.log(extended)
        best = np.maximum(np.maximum.reduceat(best, np.cumsum(sizes) - sizes), -1e300)
        bound += (beams.text_score + self.max_gain)[parent]
        same_word = (beams.unfinished_word != 0)[parent] & ~self.pieces.opens[token]
        bound += np.where(same_word, beams.lookahead[parent], self.opening[token])
        promising = np.flatnonzero(bound > np.repeat(best - self.width, sizes)[parent])
        if len(promising) > SCORED_PER_KEPT * self.beam:
            promising = promising[self._top(beams.utterance[parent[promising]], bound[promising], active)]
        return promising

    def _top(self, utterance: np.ndarray, bound: np.ndarray, active: int) -> np.ndarray | slice:
        """Select about ``SCORED_PER_KEPT * beam`` rows [N] per utterance with the highest bounds, by a histogram."""
        sizes = np.bincount(utterance, minlength=active)
        enough = SCORED_PER_KEPT * self.beam
        if sizes.max() <= enough:
            return slice(None)

        nonempty = np.flatnonzero(sizes)
        best = np.full(active, -np.inf)
        best[nonempty] = np.maximum.reduceat(bound, (np.cumsum(sizes) - sizes)[nonempty])
        bin_of_row = np.minimum((best[utterance] - bound) * (BINS / self.width), BINS - 1).astype(np.int64)
        counts = np.bincount(utterance * BINS + bin_of_row, minlength=active * BINS).reshape(active, BINS)
        last_bin = (np.cumsum(counts, axis=1) < enough).sum(1)  # with it there are enough
        return bin_of_row <= last_bin[utterance]

    def _complete(self, beams: Beams, rows: np.ndarray) -> None:
        """Fill in the scores of unfinished words if they end here."""
        is_needed = np.zeros(len(beams), bool)
        is_needed[rows] = True
        rows = np.flatnonzero(is_needed & ~beams.has_completion)
        if not len(rows):
            return
        words = beams.unfinished_word[rows]
        gain, lm_state = self.fusion.complete(beams.lm_state[rows], words, self.weights)
        if self.fusion.hot:
            boost, hot_state = self.fusion.hot.complete(beams.hot_state[rows], words)
            gain = gain + boost
            beams.completion_hot_state[rows] = hot_state
        beams.completion_lm_state[rows] = lm_state
        beams.completion_gain[rows] = gain
        beams.has_completion[rows] = True

    def _prune(self, utterance: np.ndarray, score: np.ndarray, active: int) -> np.ndarray:
        """Select the rows [N] of each utterance that are within the beam's width of its best, at most ``beam``."""
        sizes = np.bincount(utterance, minlength=active)
        best = np.maximum.reduceat(score, np.cumsum(sizes) - sizes)
        rows = np.flatnonzero(score >= np.repeat(best - self.width, sizes))
        sizes = np.bincount(utterance[rows], minlength=active)
        full = sizes > self.beam
        if not full.any():
            return rows
        crowded = np.flatnonzero(full[utterance[rows]])  # only utterances with too many rows need sorting
        order = crowded[np.lexsort((-score[rows[crowded]], utterance[rows[crowded]]))]
        sizes = sizes[full]
        rank = np.arange(len(order)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        survives = np.ones(len(rows), bool)
        survives[order[rank >= self.beam]] = False
        return rows[survives]

    def _finish(self, parts: list[Beams], nbest: int) -> list[list[TokenHypothesis]]:
        """End all hypotheses, and return the best transcripts of each utterance, in the order of the batch."""
        beams = Beams(*(np.concatenate([getattr(part, field.name) for part in parts]) for field in fields(Beams)))
        rows = np.flatnonzero(beams.unfinished_word != 0)
        self._complete(beams, rows)
        beams.text_score[rows] += beams.completion_gain[rows]
        beams.complete_words[rows] = (beams.complete_words[rows] + beams.unfinished_word[rows]) * _WORDS_FACTOR
        if not self.fusion.per_piece:
            beams.lm_state[rows] = beams.completion_lm_state[rows]
        text_score = beams.text_score + self.fusion.finish(beams.lm_state, self.weights)

        # Hypotheses with the same words and different last tokens are one transcript.
        key = mix(beams.complete_words) >> _UTTERANCE_BITS
        key |= beams.utterance.astype(np.uint64) << _HASH_BITS
        rows, blank, other = _merge(key, beams.blank, beams.other)
        acoustic = np.log(blank + other) + self.scale[beams.utterance[rows]]
        score = acoustic + text_score[rows]

        # The best of each utterance.
        order = np.lexsort((-score, beams.utterance[rows]))
        utterance = beams.utterance[rows[order]]
        is_best = np.arange(len(order)) - np.searchsorted(utterance, utterance) < nbest
        order = order[is_best]
        utterance = utterance[is_best]
        transcripts: list[list[TokenHypothesis]] = [[] for _ in self.rank]
        hypotheses = map(TokenHypothesis, *self._trace(beams.node[rows[order]]), score[order].tolist(),
                         acoustic[order].tolist())
        for place, hypothesis in zip(self.rank[utterance].tolist(), hypotheses, strict=True):
            transcripts[place].append(hypothesis)
        return transcripts

    def _trace(self, nodes: np.ndarray) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        """The tokens of hypotheses [N] that end at these nodes, with their events and probabilities."""
        history = History.join(self.history)
        starts = len(self.rank)
        steps = []  # nodes [N] of all hypotheses at once, from the last backwards; one that is at its start stays there
        node = nodes
        while (node >= starts).any():
            steps.append(node)
            node = np.where(node >= starts, history.parent[np.maximum(node - starts, 0)], node)
        row_of_step = np.stack(steps[::-1], axis=1) - starts if steps else np.zeros((len(nodes), 0), np.int64)
        paths = [rows[rows >= 0] for rows in row_of_step]
        return ([history.token[path] for path in paths], [history.event[path] for path in paths],
                [history.prob[path] for path in paths])


class CTCSearch(Search):
    """A search over CTC's events."""

    def run(self, events: Events, nbest: int) -> list[list[TokenHypothesis]]:
        """The best transcripts of each utterance, best first."""
        self.events = events
        self.token = events.token.astype(np.int64)
        return self._search(np.diff(events.first), events.offset, nbest)

    def _begin(self, batch: int) -> tuple[np.ndarray, np.ndarray]:
        return np.full(batch, -1), np.zeros((batch, 0))

    def _append(self, last: np.ndarray, token: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return token, token.astype(np.uint64) * _TOKEN_FACTOR

    def _extend(self, beams: Beams, event: np.ndarray) -> Extensions:
        events = self.events
        active = len(event)
        event = event[beams.utterance]
        total = beams.blank + beams.other
        pause = events.pause[event]
        blank = np.where(pause, total, beams.blank)
        other = np.where(pause, 0.0, beams.other)

        # Each hypothesis by each likely token of its event.
        begin = events.begin[event]
        counts = events.begin[event + 1] - begin
        parent = np.repeat(np.arange(len(beams)), counts)
        place = np.arange(len(parent)) + np.repeat(begin - np.cumsum(counts) + counts, counts)
        token = self.token[place]
        prob = events.prob[place]

        # A repeated token needs a blank in between; without one it is still the same token.
        repeated = np.flatnonzero(token == beams.last[parent])
        repeated_parent = parent[repeated]
        extended = total[parent]
        extended[repeated] = blank[repeated_parent]
        extended *= prob
        stay_blank = total * events.blank[event]
        stay_other = np.zeros(len(beams))
        stay_other[repeated_parent] = other[repeated_parent] * prob[repeated]

        chosen = self._preselect(beams, active, stay_blank + stay_other, parent, token, extended)
        return Extensions(stay_blank, stay_other, parent[chosen], token[chosen], prob[chosen], extended[chosen])


def _merge(keys: np.ndarray, blank: np.ndarray, other: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Merge equal keys: returns the most likely row of each key, in the order of keys, and the summed probabilities."""
    order = np.argsort(keys)
    keys = keys[order]
    changes = np.ones(len(keys), bool)
    changes[1:] = keys[1:] != keys[:-1]
    firsts = np.flatnonzero(changes)
    if len(firsts) == len(keys):
        return order, blank[order], other[order]

    # Only keys that several rows share have anything to sum.
    sizes = np.diff(firsts, append=len(keys))
    chosen = order[firsts]
    blanks = blank[chosen]
    others = other[chosen]
    several = np.flatnonzero(sizes > 1)
    sizes = sizes[several]
    starts = np.cumsum(sizes) - sizes
    rows = order[np.repeat(firsts[several] - starts, sizes) + np.arange(sizes.sum())]
    blanks[several] = np.add.reduceat(blank[rows], starts)
    others[several] = np.add.reduceat(other[rows], starts)

    mass = blank[rows] + other[rows]
    group = np.repeat(np.arange(len(several)), sizes)
    best = np.flatnonzero(mass == np.maximum.reduceat(mass, starts)[group])
    chosen[several[group[best]]] = rows[best]
    return chosen, blanks, others
