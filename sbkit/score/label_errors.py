"""Which labels are probably wrong: evidence for each row in natural logarithms, how much of it is chance, a reason."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from rapidfuzz.distance import Levenshtein

from sbkit.data.manifest import Manifest
from sbkit.data.suspects import DROP, KEEP, Suspect
from sbkit.errors import SbkitError
from sbkit.score.edits import DELETION, EQUAL, INSERTION, align
from sbkit.score.rates import aligned
from sbkit.system.console import table

SILENCE, MORE_SPEECH, CUT, NOTHING_FITS, SPELLING, OTHER_WORDS = REASONS = (
    "silence", "more speech", "cut off", "nothing fits", "other letters", "other words")
#: Rows are named while at most this share of them is expected to be right.
_NAMED = 0.1
_LISTED = 0.5
_HEARD = 0.4  # least share of the labels' words that models which can judge them hear
_WELL_HEARD = 0.65  # of models that hear less, misspelt labels can hardly be told from what they mishear
_RARELY = 0.01  # share of the rows that nothing speaks against whose confidence is lower than what "nothing fits" means

_Step = tuple[str, str, str]


class LabelScore(NamedTuple):
    """What a model that hasn't seen a row says of it.

    hypothesis : what was heard
    margin : how much likelier the hypothesis is than the label by the sound alone, a natural logarithm
    confidence : the mean probability of the hypothesis's tokens, 0 if it is empty
    """

    id: str
    label: str
    hypothesis: str
    margin: float
    confidence: float


class Verdict(NamedTuple):
    """What speaks against a label.

    score : a natural logarithm: it would take chance 1 in exp(score) if the label were right
    expected_right : of the rows with this score and higher ones, the share that is expected to be right
    """

    score: float
    expected_right: float
    reason: str


def units(texts: Iterable[str]) -> str:
    """What is compared: ``word``, or ``character`` where most texts are written without spaces."""
    spaced = [" " in text.strip() for text in texts]
    return "word" if 2 * sum(spaced) >= len(spaced) else "character"


def judge(scores: Sequence[LabelScore]) -> list[Verdict]:
    """Judge each label by the records of words.

    A word's record is how often it is heard where no label has it: a word that a model likes to make up, or no word at
    all, tells nothing, and one that labels nearly always have tells a lot. The score of a row adds up the logarithms of
    such shares for the words that were heard and are not in the label, and for those at an end of the label that were
    not heard. It is at most the margin: both the words and the sound have to speak against the label.

    As wrong labels are part of the records, scores are too low rather than too high.
    """
    pairs = _aligned(scores)
    heard, label = _record((word, step != EQUAL) for pair in pairs for step, _, word in pair), \
        _record((said, step != EQUAL) for pair in pairs for step, said, _ in pair)
    evidence = [sum(heard[word] for step, _, word in pair if word and step != EQUAL)
                + sum(label[said] for said in _unheard_at_ends(pair)) for pair in pairs]
    found = np.clip(np.minimum(evidence, [score.margin for score in scores]), 0, None)
    sure = [score.confidence for score, value in zip(scores, found, strict=True) if not value]
    unsure = float(np.quantile(sure, _RARELY)) if sure else 0.0
    return [Verdict(float(value), float(share), _reason(score, pair, unsure)) for value, share, score, pair in zip(
        found, expected_right(found), scores, pairs, strict=True)]


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
    labels, heard = [split(score.label) for score in scores], [split(score.hypothesis) for score in scores]
    return [list(aligned(*row)) for row in zip(labels, heard, align(labels, heard), strict=True)]


def _characters(text: str) -> list[str]:
    return list("".join(text.split()))


def _record(words: Iterable[tuple[str, bool]]) -> dict[str, float]:
    """For each word, minus the logarithm of the share of its occurrences that are alone."""
    every, alone = Counter[str](), Counter[str]()
    for word, unmatched in words:
        every[word] += 1
        alone[word] += unmatched
    return {word: float(np.log(every[word] / alone[word])) for word in alone if alone[word]}


def _unheard_at_ends(pair: Sequence[_Step]) -> list[str]:
    """The words of a label at its beginning and its end in place of which nothing was heard."""
    start = next((at for at, (step, *_) in enumerate(pair) if step != DELETION), len(pair))
    rest = pair[start:]
    end = next((at for at, (step, *_) in enumerate(reversed(rest)) if step != DELETION), len(rest))
    return [said for _, said, _ in [*pair[:start], *rest[len(rest) - end:]]]


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
    return SPELLING if 2 * letters < sum(max(len(said), len(word)) for step, said, word in pair if step != EQUAL) \
        else OTHER_WORDS


def _heard(scores: Sequence[LabelScore]) -> tuple[float, float]:
    """Return the share of the labels' words that the models hear, and their error rate."""
    steps = Counter(step for pair in _aligned(scores) for step, *_ in pair)
    words = max(1, steps.total() - steps[INSERTION])
    return steps[EQUAL] / words, (steps.total() - steps[EQUAL]) / words


def _refuse_untrained(scores: Sequence[LabelScore]) -> None:
    """Refuse scores of models that hear too little to judge labels."""
    right, rate = _heard(scores)
    if right < _HEARD:
        unit = units(score.label for score in scores)
        raise SbkitError("the models have not learnt enough to judge labels: on rows that they were not trained on "
                         f"they recognise {right:.0%} of the {unit}s ({unit} error rate {rate:.0%}), and {_HEARD:.0%} "
                         "are needed",
                         hint="the same command with a larger --number_of_epochs trains them further", exit_code=1)


def suspects(scores: Sequence[LabelScore], train: Manifest, corpus: str) -> list[Suspect]:
    """List the rows that are probably wrong, the worst first, with the decision ``drop``; as far as half of them may be
    right, further ones follow with ``keep``.

    corpus : where the rows were read from
    """
    _refuse_untrained(scores)
    place = {name: at for at, name in enumerate(train.ids)}
    judged = sorted(zip(judge(scores), scores, strict=True), key=lambda each: -each[0].score)
    return [Suspect(score.id, DROP if verdict.expected_right <= _NAMED else KEEP, verdict.reason, verdict.score,
                    verdict.expected_right, score.label, score.hypothesis, "", train.wavs[place[score.id]], corpus)
            for verdict, score in judged if verdict.expected_right <= _LISTED]


def summary(found: Sequence[Suspect], scores: Sequence[LabelScore], rows: int) -> str:
    """Say how many labels are probably wrong, by reason, and what is expected of the list."""
    named, scored = [row for row in found if row.decision != KEEP], len(scores)
    notes = f"; {rows - scored:,} rows could not be read" if scored < rows else ""
    heard, _ = _heard(scores)
    if heard < _WELL_HEARD:
        notes += (f"\nthe models recognise {heard:.0%} of the {units(score.label for score in scores)}s, so most "
                  "misspelt labels are not listed: the same command with a larger --number_of_epochs finds more")
    if not named:
        return f"none of {scored:,} labels is probably wrong{notes}"
    counts = Counter(row.reason for row in named)
    right = named[-1].expected_right
    low = (1 - right) * len(named) / scored
    reasons = table(["reason", "labels"], [[name, counts[name]] for name in REASONS if counts[name]])
    return (f"{reasons}\n{len(named):,} of {scored:,} labels are probably wrong; at most {right:.0%} of these are "
            f"expected to be right, so at least {low:.1%} of all labels are wrong{notes}")
