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
    "A heuristic: nobody has listened to these yet. The model is fairly confident of its hypothesis here, and the "
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
_OVERFIT = 0.8  # times the loss on dev: a training loss below it means overfitting
_PLATEAU = 0.05  # of the training loss over two epochs: it must fall by more
_MIN_LEFT_OUT = 0.02  # share of the rows


class RunFinding(NamedTuple):
    """A finding; ``weight`` is roughly its share of the errors (or the time), ``place`` the section that shows it.

    points : by how much fixing it could lower the WER at most, if known
    """

    weight: float
    headline: str
    detail: str
    place: str
    points: float | None = None


def findings(run: RunData, suspects: Sequence[SuspectLabel] = ()) -> list[RunFinding]:
    """List what stands out in a run, the most important first."""
    found = []
    for line in run.warnings:  # before all else: a model that learnt nothing explains the rest
        advice = "; ".join(line.get("advice") or ())
        when = "" if line.get("at_end") else f"Reported at step {line.get('step', 0):,}. "
        found.append(RunFinding(math.inf, line["headline"], f"{when}{line['detail']}"
                                + (f" What to try, the likeliest first: {advice}." if advice else ""), "curves"))
    known, value = run.old_test or (None, math.nan)
    forgot = known is not None and known.is_worse(value)  # worse on the old test than before this run
    if known is not None and forgot:
        offer = known.offer(run.run, run.tested_weights)
        found.append(RunFinding(
            math.inf, "The model forgot what it had learnt before",
            f"{known.describe(value)}. A larger replay may help" + (f"; {offer}." if offer else "."), "curves"))
    found += _training(run)
    results = run.results
    if run.unread:
        of = f" of {run.unread + len(results):,}" if results is not None else ""
        found.append(RunFinding(
            2.0, f"{run.unread:,}{of} test utterances could not be read: no rate here includes them",
            "The run's log names them. Fix the files and score again before publishing.", "data"))
    splits: Mapping[str, Mapping[str, Any]] = (run.prepared or {}).get("splits", {})
    train = splits.get("train")
    if train and train["rows"] and (train["rows"] - train["kept"]) > _MIN_LEFT_OUT * train["rows"]:
        left = train["rows"] - train["kept"]
        reason, entry = max(train["left_out"].items(), key=lambda item: item[1]["count"])
        found.append(RunFinding(
            left / train["rows"], f"{percent(left / train['rows'], 1)} of the training rows were left out",
            f"{left} of {train['rows']}, most often for this reason: {reason} ({entry['count']}).", "data"))
    if results is not None and results.characters.rate >= _RECOGNISES_NOTHING:
        if not run.warnings:  # otherwise one of training reports it already
            found.append(RunFinding(
                3.0, f"The model recognises almost nothing: CER {rate(results.characters.rate, 1)}",
                "At such a rate it says little which words are wrong. Check whether the model has learnt (the curves), "
                "and whether language, alphabet and recordings of the test match the training data.", "curves"))
    elif results is not None and results.edits.sum():
        recognised = 1 - results.totals[0] / results.totals[1]
        if suspects and recognised >= MIN_RECOGNISED:
            errors = sum(int(results.edits[suspect.index]) for suspect in suspects) / int(results.edits.sum())
            # First if the model is good: the more it gets wrong, the less says its confidence.
            found.append(RunFinding(
                recognised + errors, f"{counted(len(suspects), 'transcript')} may be wrong",
                f"The model is confident of another transcript there: {percent(errors)} of all errors. Listen first. "
                "sbkit clean finds such transcripts in the training data.", "labels", 100 * errors * (1 - recognised)))
        found += _groups(results, {OLD} if forgot else ())
        counts = results.words.counts
        insertions, deletions, total = counts.insertions.sum(), counts.deletions.sum(), counts.edits.sum()
        if deletions > 0.35 * total and deletions > 3 * insertions:
            found.append(RunFinding(
                deletions / total - 0.3, f"Words are deleted: {percent(deletions / total)} of the errors are deletions",
                "Usual reasons: too little training, speech too fast or too quiet, recordings cut off.", "words"))
        if insertions > 0.35 * total and insertions > 3 * deletions:
            found.append(RunFinding(
                insertions / total - 0.3,
                f"Words are inserted: {percent(insertions / total)} of the errors are insertions",
                "Usual reasons: noise, a second speaker, or incomplete transcripts.", "words"))
        silent = sum(not one.hypothesis.split() for one in results.utterances)
        if silent > 0.02 * len(results):
            found.append(RunFinding(
                silent / len(results), f"{counted(silent, 'utterance')} got an empty hypothesis",
                "Are these recordings silent, very short or very quiet?", "worst"))
        found += _words(run, results)
    return sorted(found, key=lambda finding: -finding.weight)[:MAX_FINDINGS]


def _groups(results: ScoredRun, known: Collection[str]) -> Iterator[RunFinding]:
    """Yield the groups that stand out; ``known``: parts of a mixture that another finding covers."""
    found = breakdown(results)
    total = results.totals[0]
    for kind, groups in {"duration": found.durations, **found.values}.items():
        worst = max((group for group in groups if group.low is not None and group.rest is not None
                     and group.low > group.rest * _MIN_RATIO and _excess(group) >= _MIN_SHARE * total
                     and not (kind == "corpus" and group.label in known)), key=_excess, default=None)
        if worst is not None and worst.rest is not None:
            share, words = worst.edits / total, worst.words / results.totals[1]
            label = worst.label if kind == "duration" else f"{kind} “{worst.label}”"
            yield RunFinding(
                _excess(worst) / total,
                f"{label[0].upper()}{label[1:]}: {rate(worst.rate, 1)} of the words are wrong",
                f"Elsewhere {rate(worst.rest, 1)}. These are {percent(words)} of the words and {percent(share)} of the "
                "errors: more such data may help.", "where", 100 * _excess(worst) / results.totals[1])
    if len(found.speakers) >= 20:
        tenth = found.speakers[:len(found.speakers) // 10]
        errors = sum(group.edits for group in tenth) / results.totals[0]
        words = sum(group.words for group in tenth) / results.totals[1]
        if errors > 1.5 * words and errors - words > _MIN_SHARE:
            yield RunFinding(
                errors - words, f"A tenth of the speakers account for {percent(errors)} of the errors",
                f"These {len(tenth)} of {len(found.speakers)} speakers account for {percent(words)} of the words.",
                "where", 100 * (errors - words) * results.totals[0] / results.totals[1])


def _excess(group: UtteranceGroup) -> float:
    """The errors beyond those expected at the rate of all others."""
    return group.edits - (group.rest or 0) / 100 * group.words


def _words(run: RunData, results: ScoredRun) -> Iterator[RunFinding]:
    """Yield the most confused words, and how many errors are non-words, which a language model would avoid."""
    total, words = results.totals
    for ref, hyp, count in results.words.confusions(1):
        if count < max(3, _MIN_SHARE * total):
            continue
        what = (f"“{ref}” is recognised as “{hyp}”" if ref and hyp
                else f"“{ref}” is deleted" if ref else f"“{hyp}” is inserted")
        yield RunFinding(
            count / total, f"{what} {count} times", f"That is {percent(count / total)} of the errors.", "words")
    known = run.training_words | {word for one in results.utterances for word in one.reference.split()}
    unknown = [word for one in results.utterances for word in one.hypothesis.split() if word not in known]
    if run.training_words and len(unknown) > _MIN_SHARE * total:
        share = min(1.0, len(unknown) / total)
        yield RunFinding(
            share, f"{percent(share)} of the errors are non-words",
            f"For example {', '.join(map(repr, unknown[:3]))}, which no transcript of the corpus has: a language model "
            "(sbkit lm, then --lm) prefers known words.", "words",
            100 * share * total / words)


def _training(run: RunData) -> Iterator[RunFinding]:
    rates = [(epoch["epoch"], epoch["valid_WER"]) for epoch in run.epochs if epoch.get("valid_WER") is not None]
    falling = False
    if len(rates) >= 3:
        best = min(rates, key=lambda pair: pair[1])
        last, earlier = rates[-1], rates[-3]
        gain = (earlier[1] - last[1]) / max(earlier[1], 1e-9)
        if falling := best == last and gain > 0.03:
            yield RunFinding(
                1.0 if gain > 0.1 else gain, "The WER was still falling when training ended",
                f"It fell from {rate(earlier[1])} to {rate(last[1])} over the last two epochs: train longer.",
                "curves", min(earlier[1] - last[1], last[1]))
        elif best[0] < 0.7 * last[0] and last[1] > 1.03 * best[1]:
            yield RunFinding(
                min(1.0, last[1] / max(best[1], 1e-9) - 1), f"The WER was best in epoch {best[0]} of {last[0]}",
                f"{rate(best[1])} then, {rate(last[1])} at the end: more augmentation, more data or a smaller "
                "model may help.", "curves")
    # Whether the model overfits, or is too small for its training data; if the WER falls, that would contradict it.
    losses = [(epoch["epoch"], epoch["train_loss"], epoch["valid_loss"]) for epoch in run.epochs
              if epoch.get("train_loss") is not None and epoch.get("valid_loss")]
    if not falling and len(losses) >= 4:
        (_, before, _), (_, train, valid) = losses[-3], losses[-1]
        lowest_in, _, lowest = min(losses, key=lambda each: each[2])
        losses_now = f"In the last epoch the loss is {train:.2f} in training and {valid:.2f} on dev"
        if train < before and lowest_in < losses[-2][0] and train < _OVERFIT * valid:
            yield RunFinding(
                0.1, "More data or augmentation would help more than a larger model",
                f"{losses_now}, where it was lowest ({lowest:.2f}) in epoch {lowest_in}: the model overfits now.",
                "curves")
        elif train > valid and before - train < _PLATEAU * before:
            yield RunFinding(
                0.1, "A larger model would help more than more data",
                f"{losses_now}, and over the last two epochs it fell by {percent((before - train) / before, 1)}.",
                "curves")
    epochs = [(epoch["time_shares"].get("data", 0.0), epoch.get("train_seconds") or 0.0) for epoch in run.epochs
              if epoch.get("time_shares")]
    waited = float(np.mean([share for share, _ in epochs])) if epochs else 0.0
    if waited > _MIN_WAITING and sum(share * seconds for share, seconds in epochs) >= _MIN_LOST_SECONDS:
        on_cpu = bool(run.starts) and run.starts[-1].get("device") == "cpu"
        advice = ("Data workers and training share the cores here: WAV takes less time to read than MP3, and more "
                  "num_workers help only if cores are free." if on_cpu else
                  "More num_workers, a faster disk or shards (sbkit shard) give that time back.")
        yield RunFinding(waited, f"The device waited for data during {percent(waited)} of a step", advice, "curves")
    skipped = sum(epoch.get("skipped_steps") or 0 for epoch in run.epochs)
    if skipped:
        yield RunFinding(
            0.2, f"{skipped} steps were skipped because a value was not finite",
            "sbkit rerun names the utterances and layers.", "curves")
