"""Which labels are probably wrong: the evidence against each, how many of them are expected to be right, a reason."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

from sbkit.data.manifest import Manifest
from sbkit.data.suspects import DROP, KEEP, Suspect
from sbkit.errors import SbkitError
from sbkit.score.edits import DELETION, EQUAL, INSERTION, SUBSTITUTION, align
from sbkit.score.rates import aligned
from sbkit.system.console import table

SILENCE, MORE_SPEECH, CUT, NOTHING_FITS, SPELLING, ONE_WORD, OTHER_WORDS = REASONS = (
    "silence", "more speech", "cut off", "nothing fits", "other letters", "one word", "other words")
#: Rows are dropped, or listed, while at most this share of them is expected to be right. Those with one wrong word have
#: a limit of their own: the models' errors are like them, and among the demo's 12 to 18 % were right.
_DROPPED, _ONE_WORD_DROPPED, _LISTED = 0.1, 0.25, 0.5
#: What the list lacks, for whoever reads it.
UNSEEN = ("Not all wrong labels are here: of single wrong words about two thirds, if a tenth of the labels have one, "
          "and none if few have. Hardly any of single words that are missing or too many, of words that the models "
          "often mishear, of names that occur once and of wrong letters in short words are found.")
#: Share of the labels' words that models have to recognise to judge labels.
MIN_RECOGNISED = 0.4
_WELL_RECOGNISED = 0.65  # below this share, misspelt labels can't be told from the models' own errors
_RARELY = 0.01  # quantile of the confidence of unsuspected rows below which the reason is "nothing fits"

_Step = tuple[str, str, str]


class LabelScore(NamedTuple):
    """The scores of a row by a model that wasn't trained on it.

    hypothesis : the model's transcript
    margin : the log-likelihood of the hypothesis minus that of the label, given the audio
    confidence : the mean probability of the hypothesis's tokens, 0 if it is empty
    """

    id: str
    label: str
    hypothesis: str
    margin: float
    confidence: float


class Verdict(NamedTuple):
    """The evidence against a label.

    score : a right label has this score or a higher one with a probability of exp(-score)
    expected_right : of the rows with this score and higher ones, the share that is expected to be right; rows with the
        reason ``ONE_WORD`` are counted by themselves
    """

    score: float
    expected_right: float
    reason: str


def units(texts: Iterable[str]) -> str:
    """What is compared: ``word``, or ``character`` where most texts are written without spaces."""
    spaced = [" " in text.strip() for text in texts]
    return "word" if 2 * sum(spaced) >= len(spaced) else "character"


def judge(scores: Sequence[LabelScore]) -> list[Verdict]:
    """Judge each label by how reliable its differing words are over the whole corpus.

    A word that a model often inserts wrongly says little; one that the label nearly always has too says a lot. The
    score of a row adds up the logarithms of such shares for inserted words, and for words that are deleted at an end
    of the label. It is at most the margin: both the words and the audio have to contradict the label.

    Where one word stands for another between words that fit, that is a second test: the shares of both words count
    against the label. The number of places that differ, and of equal substitutions in the corpus, speak for it, because
    these are errors of the models. The score is at most half the margin, because models are surer of words than they
    are right. Each test has its own expected shares, so that many wrong labels of one kind don't lower the bar for the
    other.

    Because wrong labels count in these shares too, scores are too low rather than too high.
    """
    pairs = _aligned(scores)
    inserted = _weights((word, step != EQUAL) for pair in pairs for step, _, word in pair)
    deleted = _weights((word, step != EQUAL) for pair in pairs for step, word, _ in pair)
    places = [[list(place) for equal, place in itertools.groupby(pair, lambda step: step[0] == EQUAL) if not equal]
              for pair in pairs]
    single = [[(word, heard) for ((step, word, heard), *more) in each if step == SUBSTITUTION and not more]
              for each in places]
    alike = Counter(itertools.chain(*single))
    found = []
    for pair, each, several in zip(pairs, places, single, strict=True):
        # Words that only one of the two has: any of the hypothesis, and those of the label's ends.
        kept = [at for at, (step, *_) in enumerate(pair) if step != DELETION]
        ends = pair[:kept[0]] + pair[kept[-1] + 1:] if kept else pair
        found.append((
            sum(inserted[word] for step, _, word in pair if word and step != EQUAL)
            + sum(deleted[word] for _, word, _ in ends),
            max((deleted[word] + inserted[heard] - np.log(alike[word, heard] * len(each)) for word, heard in several),
                default=0.0)))
    evidence = np.array(found).reshape(-1, 2)
    whole, one = np.clip(np.minimum(evidence, [(score.margin, score.margin / 2) for score in scores] or 0), 0, None).T
    shares, shares_of_one = expected_right(whole), expected_right(one)
    unsuspected = [score.confidence for score, value in zip(scores, whole, strict=True) if not value]
    unsure = float(np.quantile(unsuspected, _RARELY)) if unsuspected else 0.0
    return [Verdict(float(one[i]), float(shares_of_one[i]), ONE_WORD) if shares_of_one[i] < shares[i] else
            Verdict(float(whole[i]), float(shares[i]), _reason(scores[i], pairs[i], unsure))
            for i in range(len(scores))]


def expected_right(found: np.ndarray) -> np.ndarray:
    """The expected share of right labels among the rows with each score [N] or more, as Benjamini and Hochberg do it:
    of N right labels, N exp(-s) have a score of s or more."""
    order = np.argsort(-found, kind="stable")
    shares = np.minimum(1, len(found) * np.exp(-found[order]) / np.arange(1, len(found) + 1))
    result = np.empty(len(found))
    result[order] = np.minimum.accumulate(shares[::-1])[::-1]
    return result


def _aligned(scores: Sequence[LabelScore]) -> list[list[_Step]]:
    split = str.split if units(score.label for score in scores) == "word" else _characters
    labels, hypotheses = [split(score.label) for score in scores], [split(score.hypothesis) for score in scores]
    return [list(aligned(*row)) for row in zip(labels, hypotheses, align(labels, hypotheses), strict=True)]


def _characters(text: str) -> list[str]:
    return list("".join(text.split()))


def _weights(words: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """For each word, minus the logarithm of the share of its occurrences that are unmatched."""
    every, unmatched = Counter[str](), Counter[str]()
    for word, alone in words:
        every[word] += 1
        unmatched[word] += alone
    return {word: float(np.log(every[word] / unmatched[word])) for word in unmatched if unmatched[word]}


def _reason(score: LabelScore, pair: Sequence[_Step], unsure: float) -> str:
    if not score.hypothesis.strip():
        return SILENCE
    steps = Counter(step for step, *_ in pair)
    for step, reason in ((INSERTION, MORE_SPEECH), (DELETION, CUT)):
        if steps[EQUAL] and 2 * steps[step] > len(pair) - steps[EQUAL]:
            return reason
    if score.confidence < unsure:
        return NOTHING_FITS
    letters = Levenshtein.distance(score.label, score.hypothesis)
    return SPELLING if 2 * letters < sum(max(map(len, words)) for step, *words in pair if step != EQUAL) \
        else OTHER_WORDS


def _recognised(scores: Sequence[LabelScore]) -> tuple[float, float]:
    """Return the share of the labels' words that the models recognise, and their error rate."""
    steps = Counter(step for pair in _aligned(scores) for step, *_ in pair)
    words = max(1, steps.total() - steps[INSERTION])
    return steps[EQUAL] / words, (steps.total() - steps[EQUAL]) / words


def require_trained(scores: Sequence[LabelScore]) -> None:
    """Raise if the models recognise too little to judge labels."""
    right, rate = _recognised(scores)
    if right < MIN_RECOGNISED:
        unit = units(score.label for score in scores)
        raise SbkitError("the models have not learnt enough to judge labels: on rows that they were not trained on "
                         f"they recognise {right:.0%} of the {unit}s ({unit} error rate {rate:.0%}), and "
                         f"{MIN_RECOGNISED:.0%} are needed",
                         hint="the same command with a larger --number_of_epochs trains them further", exit_code=1)


def suspects(scores: Sequence[LabelScore], train: Manifest, corpus: str) -> list[Suspect]:
    """List the rows that are probably wrong, the worst first, with the decision ``drop``, and then those with ``keep``
    that are less certain.

    corpus : where the rows were read from
    """
    place = {name: at for at, name in enumerate(train.ids)}
    found = [Suspect(
        score.id, DROP if verdict.expected_right <= (_ONE_WORD_DROPPED if verdict.reason == ONE_WORD else _DROPPED)
        else KEEP, verdict.reason, verdict.score, verdict.expected_right, score.label, score.hypothesis, "",
        train.wavs[place[score.id]], corpus)
        for verdict, score in zip(judge(scores), scores, strict=True) if verdict.expected_right <= _LISTED]
    return sorted(found, key=lambda row: (row.decision == KEEP, -row.score))


def summary(found: Sequence[Suspect], scores: Sequence[LabelScore], rows: int) -> str:
    """Describe how many labels are probably wrong, by reason, and how many of those are expected to be right."""
    dropped, scored = [row for row in found if row.decision != KEEP], len(scores)
    notes = f"; {rows - scored:,} rows could not be read" if scored < rows else ""
    recognised, _ = _recognised(scores)
    if recognised < _WELL_RECOGNISED:
        notes += (f"\nthe models recognise {recognised:.0%} of the {units(score.label for score in scores)}s, so most "
                  "misspelt labels are not listed: the same command with a larger --number_of_epochs finds more")
    if not dropped:
        return f"none of {scored:,} labels is probably wrong{notes}"
    counts = Counter(row.reason for row in dropped)
    right = sum(max((row.expected_right for row in dropped if (row.reason == ONE_WORD) == single), default=0.0)
                * sum((row.reason == ONE_WORD) == single for row in dropped) for single in (False, True)) / len(dropped)
    low = (1 - right) * len(dropped) / scored
    reasons = table(["reason", "labels"], [[name, counts[name]] for name in REASONS if counts[name]])
    return (f"{reasons}\n{len(dropped):,} of {scored:,} labels are probably wrong; at most {right:.0%} of these are "
            f"expected to be right, so at least {low:.1%} of all labels are wrong{notes}")
