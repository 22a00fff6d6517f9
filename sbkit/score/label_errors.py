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

SILENCE = "silence"
MORE_SPEECH = "more speech"
CUT = "cut off"
NOTHING_FITS = "nothing fits"
SPELLING = "other letters"
ONE_WORD = "one word"
OTHER_WORDS = "other words"
REASONS = (SILENCE, MORE_SPEECH, CUT, NOTHING_FITS, SPELLING, ONE_WORD, OTHER_WORDS)
#: Rows are dropped, or listed, while at most this share of them is expected to be right. Those with one wrong word have
#: a limit of their own: the models' errors are like them, and among the demo's 12 to 18 % were right.
_DROPPED = 0.1
_ONE_WORD_DROPPED = 0.25
_LISTED = 0.5
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
    inserted = _weights((heard, step != EQUAL) for pair in pairs for step, _, heard in pair)
    deleted = _weights((word, step != EQUAL) for pair in pairs for step, word, _ in pair)
    places = [_differing_places(pair) for pair in pairs]
    single = [_single_substitutions(places_of_row) for places_of_row in places]
    substitution_counts = Counter(itertools.chain(*single))

    # The first test: words that only one of the two has. The second: one word for another.
    several_words = np.zeros(len(scores))
    one_word = np.zeros(len(scores))
    for i, pair in enumerate(pairs):
        several_words[i] = sum(inserted[heard] for step, _, heard in pair if heard and step != EQUAL) \
            + sum(deleted[word] for _, word, _ in _deleted_ends(pair))
        for word, heard in single[i]:
            evidence = deleted[word] + inserted[heard] - np.log(substitution_counts[word, heard] * len(places[i]))
            one_word[i] = max(one_word[i], evidence)
    margins = np.array([score.margin for score in scores])
    several_words = np.clip(np.minimum(several_words, margins), 0, None)
    one_word = np.clip(np.minimum(one_word, margins / 2), 0, None)

    several_right = expected_right(several_words)
    one_right = expected_right(one_word)
    unsuspected = [score.confidence for score, value in zip(scores, several_words, strict=True) if value == 0]
    unsure = float(np.quantile(unsuspected, _RARELY)) if unsuspected else 0.0
    verdicts = []
    for i, score in enumerate(scores):
        if one_right[i] < several_right[i]:
            verdicts.append(Verdict(float(one_word[i]), float(one_right[i]), ONE_WORD))
        else:
            reason = _reason(score, pairs[i], unsure)
            verdicts.append(Verdict(float(several_words[i]), float(several_right[i]), reason))
    return verdicts


def _differing_places(pair: Sequence[_Step]) -> list[list[_Step]]:
    """The stretches of an alignment between equal words."""
    return [list(steps) for equal, steps in itertools.groupby(pair, lambda step: step[0] == EQUAL) if not equal]


def _single_substitutions(places: Sequence[Sequence[_Step]]) -> list[tuple[str, str]]:
    """The words of label and hypothesis at each place where one word stands for another."""
    return [(place[0][1], place[0][2]) for place in places if len(place) == 1 and place[0][0] == SUBSTITUTION]


def _deleted_ends(pair: list[_Step]) -> list[_Step]:
    """The words before and after all that the hypothesis has."""
    heard = [i for i, (step, *_) in enumerate(pair) if step != DELETION]
    if not heard:
        return pair
    return pair[:heard[0]] + pair[heard[-1] + 1:]


def expected_right(scores: np.ndarray) -> np.ndarray:
    """The expected share of right labels among the rows with each score [N] or more, as Benjamini and Hochberg do it:
    of N right labels, N exp(-s) have a score of s or more."""
    order = np.argsort(-scores, kind="stable")
    shares = np.minimum(1, len(scores) * np.exp(-scores[order]) / np.arange(1, len(scores) + 1))
    result = np.empty(len(scores))
    result[order] = np.minimum.accumulate(shares[::-1])[::-1]
    return result


def _aligned(scores: Sequence[LabelScore]) -> list[list[_Step]]:
    split = str.split if units(score.label for score in scores) == "word" else _characters
    labels = [split(score.label) for score in scores]
    hypotheses = [split(score.hypothesis) for score in scores]
    return [list(aligned(label, hypothesis, alignment))
            for label, hypothesis, alignment in zip(labels, hypotheses, align(labels, hypotheses), strict=True)]


def _characters(text: str) -> list[str]:
    return list("".join(text.split()))


def _weights(words: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """For each word, minus the logarithm of the share of its occurrences that are unmatched."""
    occurrences = Counter[str]()
    unmatched = Counter[str]()
    for word, is_unmatched in words:
        occurrences[word] += 1
        unmatched[word] += is_unmatched
    return {word: float(np.log(occurrences[word] / count)) for word, count in unmatched.items() if count}


def _reason(score: LabelScore, pair: Sequence[_Step], unsure: float) -> str:
    if not score.hypothesis.strip():
        return SILENCE
    steps = Counter(step for step, *_ in pair)
    for step, reason in ((INSERTION, MORE_SPEECH), (DELETION, CUT)):
        if steps[EQUAL] and 2 * steps[step] > len(pair) - steps[EQUAL]:
            return reason
    if score.confidence < unsure:
        return NOTHING_FITS
    differing_letters = Levenshtein.distance(score.label, score.hypothesis)
    letters = sum(max(len(word), len(heard)) for step, word, heard in pair if step != EQUAL)
    return SPELLING if 2 * differing_letters < letters else OTHER_WORDS


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
        raise SbkitError("model-too-weak", "the models have not learnt enough to judge labels: on rows that they were "
                         f"not trained on they recognise {right:.0%} of the {unit}s ({unit} error rate {rate:.0%}), "
                         f"and {MIN_RECOGNISED:.0%} are needed",
                         hint="the same command with a larger --number_of_epochs trains them further", exit_code=1)


def suspects(scores: Sequence[LabelScore], train: Manifest, corpus: str) -> list[Suspect]:
    """List the rows that are probably wrong, the worst first, with the decision ``drop``, and then those with ``keep``
    that are less certain.

    corpus : where the rows were read from
    """
    place = {name: i for i, name in enumerate(train.ids)}
    rows = []
    for verdict, score in zip(judge(scores), scores, strict=True):
        if verdict.expected_right > _LISTED:
            continue
        limit = _ONE_WORD_DROPPED if verdict.reason == ONE_WORD else _DROPPED
        decision = DROP if verdict.expected_right <= limit else KEEP
        rows.append(Suspect(score.id, decision, verdict.reason, verdict.score, verdict.expected_right, score.label,
                            score.hypothesis, "", train.wavs[place[score.id]], corpus))
    return sorted(rows, key=lambda row: (row.decision == KEEP, -row.score))


def summary(suspected: Sequence[Suspect], scores: Sequence[LabelScore], rows: int) -> str:
    """Describe how many labels are probably wrong, by reason, and how many of those are expected to be right."""
    dropped = [row for row in suspected if row.decision != KEEP]
    scored = len(scores)
    notes = f"; {rows - scored:,} rows could not be read" if scored < rows else ""
    recognised, _ = _recognised(scores)
    if recognised < _WELL_RECOGNISED:
        notes += (f"\nthe models recognise {recognised:.0%} of the {units(score.label for score in scores)}s, so most "
                  "misspelt labels are not listed: the same command with a larger --number_of_epochs finds more")
    if not dropped:
        return f"none of {scored:,} labels is probably wrong{notes}"
    counts = Counter(row.reason for row in dropped)
    # Each kind of rows has its own expected share, which is that of its least certain row.
    expected = 0.0
    for of_one_word in (False, True):
        shares = [row.expected_right for row in dropped if (row.reason == ONE_WORD) == of_one_word]
        expected += max(shares, default=0.0) * len(shares)
    right = expected / len(dropped)
    low = (1 - right) * len(dropped) / scored
    reasons = table(["reason", "labels"], [[name, counts[name]] for name in REASONS if counts[name]])
    return (f"{reasons}\n{len(dropped):,} of {scored:,} labels are probably wrong; at most {right:.0%} of these are "
            f"expected to be right, so at least {low:.1%} of all labels are wrong{notes}")
