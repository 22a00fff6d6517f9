"""Findings about a run: where errors cluster, what training lacked, what data was lost, which labels may be wrong."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from sbkit.score.label_errors import MIN_RECOGNISED
from sbkit.score.old_set import OLD
from sbkit.score.report.data import RunData, ScoredRun, percent, rate
from sbkit.score.report.groups import UtteranceGroup, breakdown
from sbkit.system.console import counted

#: The page's note on how far to trust suspected labels.
SUSPECTS_NOTE = (
    "A heuristic, not checked by listening. The model is fairly confident of its hypothesis here, and the "
    "transcript differs from it much more than usual at this confidence. Possible reasons: a wrong transcript, a "
    "recording that was cut off, a name or number written in another way, or a mistake that the model is confident "
    "of. Listen before you correct anything."
)
_EXCESS = 0.2  # share of the characters beyond what is usual at that confidence
_LOW_CONFIDENCE = 0.25  # share of utterances, those with the lowest confidence, that are never suspected
_NEIGHBOURS = 100
_MIN_UTTERANCES = 20  # utterances needed to know what is usual
_RARELY_SILENT = 0.05  # empty hypotheses that are more frequent than this say nothing about the labels

#: Texts shown if there are no suspects.
NONE_SUSPECTED = "None: no transcript differs from its hypothesis much more than usual at the model's confidence."
NOT_CHECKED = f"Not checked: this needs at least {_MIN_UTTERANCES} utterances with a known confidence."


class SuspectLabel(NamedTuple):
    """A suspected label; ``error`` and ``usual`` are shares of the reference's characters."""

    index: int  # type: ignore[assignment]  # hides a tuple method that is never called
    error: float
    usual: float


def suspects(results: ScoredRun) -> list[SuspectLabel]:
    """List utterances whose reference may be wrong, the most suspicious first."""
    if not can_judge(results):
        return []
    errors = np.minimum(results.characters.edits / results.characters.lengths, 1.0)
    confidence = np.array([np.nan if one.confidence is None else one.confidence for one in results.utterances])
    known = np.flatnonzero(~np.isnan(confidence))
    order = known[np.argsort(confidence[known], kind="stable")]
    # The median of the errors at a similar confidence; at the ends, that of the first or last utterances.
    width = min(_NEIGHBOURS, max(_MIN_UTTERANCES, len(order) // 4), len(order))
    medians = np.median(np.lib.stride_tricks.sliding_window_view(errors[order], width), axis=1)
    before = (width - 1) // 2
    usual = np.pad(medians, (before, len(order) - len(medians) - before), mode="edge")
    least = np.quantile(confidence[known], _LOW_CONFIDENCE)
    found = [SuspectLabel(int(i), float(errors[i]), float(median)) for i, median in zip(order, usual, strict=True)
             if confidence[i] >= least and errors[i] - median >= _EXCESS]
    silent = [SuspectLabel(i, 1.0, 0.0) for i, one in enumerate(results.utterances) if not one.hypothesis.split()]
    if len(silent) <= _RARELY_SILENT * len(results):
        found += silent
    return sorted(found, key=lambda suspect: suspect.usual - suspect.error)


def can_judge(results: ScoredRun) -> bool:
    """Whether there are enough utterances to know what is usual."""
    return sum(one.confidence is not None for one in results.utterances) >= _MIN_UTTERANCES


MAX_FINDINGS = 7
_MIN_RATIO = 1.15  # times the rate of all others: a group with a higher rate is reported
_MIN_SHARE = 0.03  # of all errors
_MIN_WAITING = 0.1  # share of the time
_MIN_LOST_SECONDS = 60.0  # less isn't worth speeding up
_RECOGNISES_NOTHING = 90.0  # CER in per cent from which single errors say nothing: that of guessed letters
_FALLING = 0.03  # of the value two epochs before: a validation that falls by more still improves
_MIN_VALIDATIONS = 3  # fewer don't show whether it still falls
_SHORT_STEPS = 1000  # ``min_steps`` of hparams/: fewer are a trial, unless their validations show no more progress
_OVERFIT = 0.8  # times the loss on dev: a training loss below it means overfitting
_PLATEAU = 0.05  # of the training loss over two epochs: it must fall by more
_MIN_LEFT_OUT = 0.02  # share of the rows

# Weights of findings that come first, whatever their share of the errors.
_EXPLAINS_THE_REST = math.inf  # what training warned of: a model that learnt nothing explains all else
_NOT_TRAINED_TO_ITS_END = 10.0  # with more training all rates change, so that other advice may not hold
_RECOGNISES_NOTHING_WEIGHT = 3.0
_UNREAD_WEIGHT = 2.0
_LONGER = "Train longer before you try a language model, other data or another model"


class RunFinding(NamedTuple):
    """A finding; ``weight`` is roughly its share of the errors (or the time), ``place`` the section that shows it.

    code : names its kind; ``sbkit explain CODE`` tells more
    points : by how much fixing it could lower the WER of the test at most, if known
    """

    code: str
    weight: float
    headline: str
    detail: str
    place: str
    points: float | None = None


def findings(run: RunData, suspects: Sequence[SuspectLabel] = ()) -> list[RunFinding]:
    """List what stands out in a run, the most important first."""
    forgot = _forgot(run)
    all_findings = [*_warnings(run), *forgot, *_training(run), *_lost_data(run)]
    results = run.results
    if results is not None and results.characters.rate >= _RECOGNISES_NOTHING:
        if not run.warnings:  # otherwise one of training reports it already
            all_findings.append(RunFinding(
                "recognises-nothing", _RECOGNISES_NOTHING_WEIGHT,
                f"The model recognises almost nothing: CER {rate(results.characters.rate, 1)}",
                "At such a rate it says little which words are wrong. Check whether the model has learnt (the curves), "
                "and whether language, alphabet and recordings of the test match the training data.", "curves"))
    elif results is not None and results.edits.sum():
        all_findings += _labels(results, suspects)
        all_findings += _groups(results, covered_parts={OLD} if forgot else ())
        all_findings += _kinds_of_errors(results)
        all_findings += _words(run, results)
    return sorted(all_findings, key=lambda finding: -finding.weight)[:MAX_FINDINGS]


def _warnings(run: RunData) -> Iterator[RunFinding]:
    """Yield what training warned of."""
    for line in run.warnings:
        detail = line["detail"]
        if not line.get("at_end"):
            detail = f"Reported at step {line.get('step', 0):,}. {detail}"
        advice = "; ".join(line.get("advice") or ())
        if advice:
            detail += f" What to try, the likeliest first: {advice}."
        yield RunFinding(line.get("code") or line.get("what", ""), _EXPLAINS_THE_REST, line["headline"], detail,
                         "curves")


def _forgot(run: RunData) -> list[RunFinding]:
    """Return the finding that a model is worse on its old test than before this run, if it is."""
    if run.old_test is None:
        return []
    old_set, value = run.old_test
    if not old_set.is_worse(value):
        return []
    offer = old_set.offer(run.run, run.tested_weights)
    detail = f"{old_set.describe(value)}. A larger replay may help" + (f"; {offer}." if offer else ".")
    return [RunFinding("forgot", _EXPLAINS_THE_REST, "The model forgot what it had learnt before", detail, "curves")]


def _lost_data(run: RunData) -> Iterator[RunFinding]:
    """Yield what of the test could not be read, and what of the training data was left out."""
    if run.unread:
        total = "" if run.results is None else f" of {run.unread + len(run.results):,}"
        yield RunFinding("unread-test-utterances", _UNREAD_WEIGHT, f"{run.unread:,}{total} test utterances could not "
                         "be read: no rate here includes them", "The run's log names them. Fix the files and score "
                         "again before publishing.", "data")
    splits: Mapping[str, Mapping[str, Any]] = (run.prepared or {}).get("splits", {})
    train = splits.get("train")
    if not train:
        return
    left_out = train["rows"] - train["kept"]
    if left_out > _MIN_LEFT_OUT * train["rows"]:
        share = left_out / train["rows"]
        reason, entry = max(train["left_out"].items(), key=lambda item: item[1]["count"])
        yield RunFinding(
            "many-rows-left-out", share, f"{percent(share, 1)} of the training rows were left out",
            f"{left_out} of {train['rows']}, most often for this reason: {reason} ({entry['count']}).", "data")


def _labels(results: ScoredRun, suspects: Sequence[SuspectLabel]) -> Iterator[RunFinding]:
    """Yield that transcripts may be wrong, if the model recognises enough to say so."""
    wrong_words, words = results.totals
    recognised = 1 - wrong_words / words
    if suspects and recognised >= MIN_RECOGNISED:
        errors = sum(int(results.edits[suspect.index]) for suspect in suspects) / wrong_words
        # First if the model is good: the more it gets wrong, the less its confidence says.
        yield RunFinding(
            "suspect-transcripts", recognised + errors, f"{counted(len(suspects), 'transcript')} may be wrong",
            f"The model is confident of another transcript there: {percent(errors)} of all errors. Listen first. "
            "sbkit clean finds such transcripts in the training data.", "labels", 100 * errors * (1 - recognised))


def _kinds_of_errors(results: ScoredRun) -> Iterator[RunFinding]:
    """Yield that most errors are deletions or insertions, or that hypotheses are empty."""
    counts = results.words.counts
    insertions = counts.insertions.sum()
    deletions = counts.deletions.sum()
    total = counts.edits.sum()
    if deletions > 0.35 * total and deletions > 3 * insertions:
        yield RunFinding("many-deletions", deletions / total - 0.3, f"Words are deleted: {percent(deletions / total)} "
                         "of the errors are deletions", "Usual reasons: too little training, speech too fast or too "
                         "quiet, recordings cut off.", "words")
    if insertions > 0.35 * total and insertions > 3 * deletions:
        yield RunFinding("many-insertions", insertions / total - 0.3,
                         f"Words are inserted: {percent(insertions / total)} of the errors are insertions",
                         "Usual reasons: noise, a second speaker, or incomplete transcripts.", "words")
    empty = sum(not one.hypothesis.split() for one in results.utterances)
    if empty > 0.02 * len(results):
        yield RunFinding(
            "empty-hypotheses", empty / len(results), f"{counted(empty, 'utterance')} got an empty hypothesis",
            "Are these recordings silent, very short or very quiet?", "worst")


def _groups(results: ScoredRun, covered_parts: Collection[str]) -> Iterator[RunFinding]:
    """Yield the groups that stand out.

    covered_parts : parts of a mixture that another finding covers
    """
    breakdown_of_test = breakdown(results)
    all_edits, all_words = results.totals
    for kind, groups in {"duration": breakdown_of_test.durations, **breakdown_of_test.values}.items():
        candidates = [group for group in groups if _stands_out(group, all_edits)
                      and not (kind == "corpus" and group.label in covered_parts)]
        worst = max(candidates, key=_excess, default=None)
        if worst is None:
            continue
        assert worst.rest is not None, "a group that stands out has others beside it"
        label = worst.label if kind == "duration" else f"{kind} “{worst.label}”"
        yield RunFinding(
            "weak-group", _excess(worst) / all_edits,
            f"{label[0].upper()}{label[1:]}: {rate(worst.rate, 1)} of the words are wrong",
            f"Elsewhere {rate(worst.rest, 1)}. These are {percent(worst.words / all_words)} of the words and "
            f"{percent(worst.edits / all_edits)} of the errors: more such data may help.", "where",
            100 * _excess(worst) / all_words)
    speakers = breakdown_of_test.speakers
    if len(speakers) >= 20:
        tenth = speakers[:len(speakers) // 10]
        errors = sum(group.edits for group in tenth) / all_edits
        words = sum(group.words for group in tenth) / all_words
        if errors > 1.5 * words and errors - words > _MIN_SHARE:
            yield RunFinding("uneven-speakers", errors - words,
                             f"A tenth of the speakers account for {percent(errors)} of the errors",
                             f"These {len(tenth)} of {len(speakers)} speakers account for {percent(words)} of the "
                             "words.", "where", 100 * (errors - words) * all_edits / all_words)


def _stands_out(group: UtteranceGroup, all_edits: int) -> bool:
    """Whether a group is significantly worse than the others, and has enough errors for that to matter."""
    return (group.low is not None and group.rest is not None and group.low > group.rest * _MIN_RATIO
            and _excess(group) >= _MIN_SHARE * all_edits)


def _excess(group: UtteranceGroup) -> float:
    """The errors beyond those expected at the rate of all others."""
    return group.edits - (group.rest or 0) / 100 * group.words


def _words(run: RunData, results: ScoredRun) -> Iterator[RunFinding]:
    """Yield the most confused words, and how many errors are non-words, which a language model would avoid."""
    total, words = results.totals
    for reference, hypothesis, count in results.words.confusions(1):
        if count < max(3, _MIN_SHARE * total):
            continue
        what = f"“{reference}” is recognised as “{hypothesis}”"
        if not hypothesis:
            what = f"“{reference}” is deleted"
        elif not reference:
            what = f"“{hypothesis}” is inserted"
        yield RunFinding("confused-word", count / total, f"{what} {count} times",
                         f"That is {percent(count / total)} of the errors.", "words")
    vocabulary = run.training_words | {word for one in results.utterances for word in one.reference.split()}
    non_words = [word for one in results.utterances for word in one.hypothesis.split() if word not in vocabulary]
    if run.training_words and len(non_words) > _MIN_SHARE * total:
        share = min(1.0, len(non_words) / total)
        yield RunFinding(
            "non-words", share, f"{percent(share)} of the errors are non-words",
            f"For example {', '.join(map(repr, non_words[:3]))}, which no transcript of the corpus has: a language "
            "model (sbkit lm, then --lm) prefers known words.", "words",
            100 * share * total / words)


# ---------------------------------------------------------------- training


def _training(run: RunData) -> Iterator[RunFinding]:
    """Yield what the curves say: more training, data or parameters, time that was lost, steps without effect."""
    rates = [(epoch["epoch"], epoch["valid_WER"]) for epoch in run.epochs if epoch.get("valid_WER") is not None]
    incomplete = _incomplete(run, rates)
    yield from incomplete
    if not incomplete:
        yield from _worse_after_its_best(rates)
        yield from _size(run)
    yield from _waiting(run)
    skipped = sum(epoch.get("skipped_steps") or 0 for epoch in run.epochs)
    if skipped:
        yield RunFinding(
            "skipped-steps", 0.2, f"{skipped} steps were skipped because a value was not finite",
            "sbkit rerun names the utterances and layers.", "curves")


def _incomplete(run: RunData, rates: Sequence[tuple[int, float]]) -> list[RunFinding]:
    """Return the finding that the model has not been trained to its end, if so: the first of three signs.

    rates : epochs with their WER on dev
    """
    planned = run.planned_epochs
    # A run that ended early because it stopped improving has tested.
    if planned is not None and 0 < run.last_epoch < planned and not run.tested:
        return [RunFinding("unfinished-training", _NOT_TRAINED_TO_ITS_END,
                           f"Not trained to its end: epoch {run.last_epoch} of {planned}",
                           "The run has not finished: the same command resumes it.", "curves")]

    losses = [(epoch["epoch"], epoch["valid_loss"]) for epoch in run.epochs if epoch.get("valid_loss") is not None]
    worse_again = any(_worse_after_its_best(rates))
    for name, values, in_text in (("WER", rates, rate), ("loss on dev", losses, "{:.2f}".format)):
        if worse_again or not _still_falls(values):
            continue
        earlier = values[-min(_MIN_VALIDATIONS, len(values))][1]
        last = values[-1][1]
        when = "over the last two epochs" if len(values) >= _MIN_VALIDATIONS else "in the last epoch"
        # No possible gain: what an early epoch gains is on dev, and may be more than the whole WER of the test.
        return [RunFinding(
            "unfinished-training", _NOT_TRAINED_TO_ITS_END, f"Not trained to its end: the {name} was still falling",
            f"On dev, it fell from {in_text(earlier)} to {in_text(last)} {when}. {_LONGER}.", "curves")]

    steps = run.epochs[-1].get("step", 0) if run.epochs else 0
    if 0 < steps < _SHORT_STEPS and max(len(rates), len(losses)) < _MIN_VALIDATIONS:
        return [RunFinding("unfinished-training", _NOT_TRAINED_TO_ITS_END,
                           f"Not trained to its end: {counted(steps, 'step')} are a trial",
                           f"So few epochs don't show whether the model still improves. {_LONGER}.", "curves")]
    return []


def _still_falls(values: Sequence[tuple[int, float]]) -> bool:
    """Whether the last of (epoch, value) is the best, and by much less than the one two epochs before, or the first."""
    if len(values) < 2:
        return False
    best = min(values, key=lambda pair: pair[1])
    earlier = values[-min(_MIN_VALIDATIONS, len(values))][1]
    gain = (earlier - values[-1][1]) / max(abs(earlier), 1e-9)
    return best == values[-1] and gain > _FALLING


def _worse_after_its_best(rates: Sequence[tuple[int, float]]) -> Iterator[RunFinding]:
    """Yield that the WER on dev rose long before the end."""
    if len(rates) < _MIN_VALIDATIONS:
        return
    best = min(rates, key=lambda pair: pair[1])
    last = rates[-1]
    if best[0] < 0.7 * last[0] and last[1] > 1.03 * best[1]:
        yield RunFinding("overtrained", min(1.0, last[1] / max(best[1], 1e-9) - 1),
                         f"The WER was best in epoch {best[0]} of {last[0]}",
                         f"{rate(best[1])} then, {rate(last[1])} at the end: more augmentation, more data or a smaller "
                         "model may help.", "curves")


def _size(run: RunData) -> Iterator[RunFinding]:
    """Yield that the model overfits, or is too small for its training data."""
    losses = [(epoch["epoch"], epoch["train_loss"], epoch["valid_loss"]) for epoch in run.epochs
              if epoch.get("train_loss") is not None and epoch.get("valid_loss")]
    if len(losses) < 4:
        return
    _, before, _ = losses[-3]
    _, train, valid = losses[-1]
    best_epoch, _, best = min(losses, key=lambda losses_of_epoch: losses_of_epoch[2])
    losses_now = f"In the last epoch the loss is {train:.2f} in training and {valid:.2f} on dev"
    if train < before and best_epoch < losses[-2][0] and train < _OVERFIT * valid:
        yield RunFinding(
            "overfitting", 0.1, "More data or augmentation would help more than a larger model",
            f"{losses_now}, where it was lowest ({best:.2f}) in epoch {best_epoch}: the model overfits now.",
            "curves")
    elif train > valid and before - train < _PLATEAU * before:
        yield RunFinding(
            "underfitting", 0.1, "A larger model would help more than more data",
            f"{losses_now}, and over the last two epochs it fell by {percent((before - train) / before, 1)}.",
            "curves")


def _waiting(run: RunData) -> Iterator[RunFinding]:
    """Yield that the device waited for data, if that is worth speeding up."""
    epochs = [(epoch["time_shares"].get("data", 0.0), epoch.get("train_seconds") or 0.0) for epoch in run.epochs
              if epoch.get("time_shares")]
    waited = float(np.mean([share for share, _ in epochs])) if epochs else 0.0
    if waited > _MIN_WAITING and sum(share * seconds for share, seconds in epochs) >= _MIN_LOST_SECONDS:
        advice = "More num_workers, a faster disk or shards (sbkit shard) give that time back."
        if run.starts and run.starts[-1].get("device") == "cpu":
            advice = ("Data workers and training share the cores here: WAV takes less time to read than MP3, and more "
                      "num_workers help only if cores are free.")
        yield RunFinding("waiting-for-data", waited, f"The device waited for data during {percent(waited)} of a step",
                         advice, "curves")
