"""What the sections of the report show, each from one kind of data; ``run.html`` lays it out."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from markupsafe import Markup

from sbkit.data.manifest import Utterance
from sbkit.data.provenance import describe
from sbkit.score import chunk_size
from sbkit.score.estimate import MetricEstimate
from sbkit.score.latency import LATE
from sbkit.score.report import charts, groups
from sbkit.score.report.cards import AudioEmbedder, Card, card, short
from sbkit.score.report.charts import Series
from sbkit.score.report.data import RunData, ScoredRun, percent, rate
from sbkit.score.report.findings import NONE_SUSPECTED, NOT_CHECKED, SUSPECTS_NOTE, SuspectLabel, can_judge
from sbkit.score.report.groups import UtteranceGroup
from sbkit.score.significance import MIN_UTTERANCES, RATES, RunComparison, compare, interval_in_text
from sbkit.system.console import counted, time_span

WORDS_SHOWN = 14
EXAMPLES_SHOWN = 10
#: Colours of the parts of a step, the same in every run.
PARTS = {"data": 2, "copy": 9, "features": 3, "forward": 1, "loss": 5, "backward": 4, "all-reduce": 6, "optimizer": 7,
         "other": 8}
COLOURS = 9  # of the page
_BESIDE_FACTS = ("time", "kind", "command", "environment", "changed", "after_step")  # of a start
_OF_EVALUATIONS = ("checkpoints", "manifest", "precision", "device", "devices", "real_time_factor")
#: Explanations of the reasons that preparation gives.
REASONS = {
    "malformed row": "the row cannot be read", "repeated id": "an earlier row has the same id",
    "also in dev or test": "the recording is in dev or test as well", "missing clip": "the recording is missing",
    "no text": "no text", "excluded": "on the exclude list", "undecodable": "the recording cannot be decoded",
    "too short": "shorter than {min_duration} s", "too long": "longer than {max_duration} s",
    "alphabet": "characters outside the alphabet", "few words": "fewer than {short_text} words",
}
Section = dict[str, Any]
"""The values of a section of run.html; each has an optional lead."""


# ---------------------------------------------------------------- at the top


def tiles(run: RunData) -> list[tuple[str, str, str, bool]]:
    """List the most important numbers: name, value, details, and whether it is large."""
    cells = []
    if run.results is not None:
        chunk = "".join(f", {chunk_size.to_label(each['chunk'])}" for each in run.scored.get("chunks", ())[:1])
        for part, results in run.parts.items():
            of = part and f" of {part}"
            enough = len(results) >= MIN_UTTERANCES
            word_details = interval_in_text(results.words, " (95\N{NO-BREAK SPACE}%)") if enough else ""
            character_details = interval_in_text(results.characters) if enough else ""
            cells += [(f"Word error rate{of}{chunk}", rate(results.words.rate), word_details, True),
                      (f"Character error rate{of}", rate(results.characters.rate), character_details, False)]
        summary = run.results.words.summary()
        cells += [
            ("Sentences correct", percent(1 - summary["SER"] / 100, 1),
             f"{summary['num_scored_sents'] - summary['num_erroneous_sents']} of {len(run.results)}", False),
            ("Test set", time_span(run.results.hours * 3600),
             f"{counted(len(run.results), 'utterance')}, {summary['num_scored_tokens']} words", False),
        ]
    for name, value in run.stats.items():
        title = name[:1].upper() + name[1:].replace("_", " ")  # "Mel distance", but STOI as it is
        details = "on the test set"
        bounds = run.shown_interval(name)
        if bounds is not None:
            details = "{:.4g} to {:.4g} (95\N{NO-BREAK SPACE}%)".format(*bounds)
        cells.append((title, f"{value:.4g}", details, name != "loss"))
    trained = sum(epoch.get("train_seconds") or 0 for epoch in run.epochs)
    last = run.epochs[-1] if run.epochs else {}
    if trained:
        cells.append(("Training", time_span(trained),
                      f"{counted(len(run.epochs), 'epoch')}, {last.get('step', 0):,} steps", False))
    if speed := last.get("audio_s_per_s"):
        details = ["of audio"]
        if last.get("padding_share") is not None:
            details.append(f"padding {percent(last['padding_share'])}")
        if last.get("mfu") is not None:
            details.append(f"MFU {percent(last['mfu'])}")
        elif last.get("flops_per_s"):
            details.append(f"{last['flops_per_s'] / 1e12:.3g} TFLOP/s")
        cells.append(("Training speed", f"{speed:.3g}\N{NO-BREAK SPACE}s/s", ", ".join(details), False))
    return cells


# ---------------------------------------------------------------- a comparison


def against(run: RunData, other: RunData, found: RunComparison, clips: AudioEmbedder, count: int) -> Section:
    """Compare ``run`` with ``other`` on the same test set; ``found`` is their difference."""
    columns = [found]
    note = ""
    better: list[int] = []
    worse: list[int] = []
    if run.results is not None and other.results is not None:
        ours = run.results
        before = other.results
        columns.append(dataclasses.replace(compare(before.characters, ours.characters), name="CER"))
        place = {one.id: i for i, one in enumerate(before.utterances)}
        theirs = np.array([place[one.id] for one in ours.utterances])
        change = ours.edits - before.edits[theirs]
        order = np.argsort(change, kind="stable")
        better = [i for i in order if change[i] < 0]
        worse = [i for i in order[::-1] if change[i] > 0]
        note = (f"Of {counted(len(change), 'utterance')} {len(better)} got better, {len(worse)} worse, and "
                f"{len(change) - len(better) - len(worse)} have as many errors as before.")
        shown = [[card(ours, clips, int(i), other=(before.words.hypotheses[theirs[i]], before.alignments[theirs[i]]))
                  for i in indices[:count]] for indices in (better, worse)]
    else:  # by a metric of recordings instead of words
        mine = run.estimate
        before_it = other.estimate
        assert mine is not None and before_it is not None, "write_report refuses runs without results"
        shown = [[], []]
        if mine.values and before_it.values:
            known = dict(zip(before_it.ids, before_it.values, strict=True))
            earlier = np.array([known[name] for name in mine.ids])
            change = (np.array(mine.values) - earlier) * (-1 if mine.lower_is_better else 1)
            order = np.argsort(change, kind="stable")
            better = [i for i in order[::-1] if change[i] > 0]
            worse = [i for i in order if change[i] < 0]
            shown = [[recording(run.recordings[i], clips, f"{mine.name} {earlier[i]:.4g} to {mine.values[i]:.4g}")
                      for i in indices[:count]] for indices in (better, worse)]
    rows = zip(("the other run", "this run", "difference", "95 % interval", "p"), *map(_column, columns), strict=True)
    return {"title": str(found).replace("-", "−"), "columns": ["", *(each.name for each in columns)],
            "rows": [*rows], "note": note, "with_key": run.results is not None,
            "lists": [("Better", shown[0], len(better)), ("Worse", shown[1], len(worse))],
            "lead": f"Compared with {other.folder.resolve()}"}


def _column(found: RunComparison) -> tuple[str, ...]:
    def signed(value: float) -> str:
        return (f"{value:+.2f}" if found.name in RATES else f"{value:+.4g}").replace("-", "−")

    levels = [rate(value) if found.name in RATES else f"{value:.4g}" for value in (found.rate_a, found.rate_b)]
    return (*levels, signed(found.difference), f"{signed(found.low)} to\N{NO-BREAK SPACE}{signed(found.high)}",
            f"{found.p_value:.4f}")


# ---------------------------------------------------------------- training


def _curve(runs: Sequence[RunData], key: str, name: str, colour: int = 1) -> list[Series]:
    """The curve of each run from the lines within epochs or, if it was too short for those, from the epochs."""
    found = []
    for each in runs:
        lines = [line for line in each.steps if line.get(key) is not None]
        of_lines = key
        if whole := not lines:
            of_lines = "train_loss" if key == "loss" else key
            lines = [line for line in each.epochs if line.get(of_lines) is not None]
        if lines:
            found.append(Series(name if each is runs[0] else f"{name}, the other run", [line["step"] for line in lines],
                                [line[of_lines] for line in lines], colour, each is not runs[0], dots=whole))
    return found


def loss_in_text(run: RunData) -> str:
    """The chart of the loss for a terminal; empty before the first epoch."""
    series = _curve([run], "loss", "training") + _curve([run], "valid_loss", "validation", 2)
    ticks = [(epoch["step"], str(epoch["epoch"])) for epoch in run.epochs if "step" in epoch]
    return charts.in_text("loss", series, ticks)


def training(run: RunData, other: RunData | None) -> Section | None:
    """Chart loss, validation results, learning rate, speed and how the time of a step was spent."""
    both = [run] if other is None else [run, other]
    longest = max(both, key=lambda each: each.epochs[-1]["step"] if each.epochs else 0)
    ticks = [(epoch["step"], str(epoch["epoch"])) for epoch in longest.epochs if "step" in epoch]
    curve = functools.partial(_curve, both)

    # Validation results: WER and CER in one chart, or each number with a curve for each part of a mixture.
    names = sorted({key.removeprefix("valid_") for epoch in run.epochs for key in epoch if key.startswith("valid_")}
                   - {"loss", "unread"}, key=lambda name: (name != "WER", name != "CER", name))
    parts = {name: found for name in names if (found := [each for each in names if each.startswith(f"{name} ")])}
    on_dev: dict[str, list[Series]] = {}
    for name in names:
        if name in parts:
            of_parts = [series for number, each in enumerate(parts[name]) for series in
                        curve(f"valid_{each}", each.removeprefix(f"{name} "), 1 + number % COLOURS)]
            mean = curve(f"valid_{name}", "mean", 1 + len(parts[name]) % COLOURS)  # that of one part with best_by
            on_dev[f"{name} on dev"] = of_parts + [one for one in mean if all(one.y != part.y for part in of_parts)]
        elif name in RATES:
            on_dev.setdefault("Error rates on dev", []).extend(curve(f"valid_{name}", name, 1 if name == "WER" else 3))
        elif not any(name in found for found in parts.values()):
            on_dev[f"{name} on dev"] = curve(f"valid_{name}", name, 1)
    padding = [dataclasses.replace(each, y=[100 * share for share in each.y])
               for each in curve("padding_share", "padding")]
    in_per_cent = {"Error rates on dev", *(f"{name} on dev" for name in RATES)}

    drawn = [
        charts.curves("Loss", curve("loss", "training") + curve("valid_loss", "validation", 2), ticks),
        *(charts.curves(title, series, ticks, unit=" %" if title in in_per_cent else "")
          for title, series in on_dev.items()),
        charts.curves("Learning rate", curve("lr", "learning rate"), ticks),
        charts.curves("Throughput", curve("audio_s_per_s", "audio s/s"), ticks, unit=" s/s",
                      note="Seconds of audio per second of training, all devices together."),
        charts.curves("Padding", padding, ticks, unit=" %",
                      note="The share of batches that only fills them up to their longest utterance."),
    ]
    if timed := [(str(epoch["epoch"]), epoch["time_shares"]) for epoch in run.epochs if epoch.get("time_shares")]:
        colours = {**PARTS, **{name: 8 for _, times in timed for name in times if name not in PARTS}}
        drawn.append(charts.shares("How the time of a step is spent", timed, colours,
                                   note="Shares of a step's time, by epoch."))
    drawn.append(charts.curves("Gradient norm", curve("grad_norm", "gradient norm"), ticks))
    drawn = [each for each in drawn if each is not None]
    audio = [(part, time_span(3600 * hours), f"{times:.1f}") for part, (hours, times) in run.training_audio.items()]
    lead = "Dashed: the other run." if other is not None and (other.steps or other.epochs) else ""
    return {"charts": drawn, "audio": audio, "note": run.replay_note, "lead": lead} if drawn else None


# ---------------------------------------------------------------- errors


def tables(run: RunData) -> Section | None:
    """Show the tables that the task made from its test; columns of numbers alone are aligned to the right."""
    shown = []
    for each in run.tables:
        columns = [[str(row[i]) for row in each["rows"]] for i in range(len(each["columns"]))]
        kinds = ["" if all(re.match(r"[-+−]?[\d.]|$", cell) for cell in column) else "text" for column in columns]
        shown.append({"kinds": kinds, "remark": "", **each, "rows": [[*map(_plain, row)] for row in each["rows"]]})
    return {"tables": shown} if shown else None


def players(run: RunData, clips: AudioEmbedder, among_worst: bool = False) -> list[Card]:
    """Make cards of the players of the task, the recordings of each entry side by side."""
    return [{"title": each.title, "sounds": [(sound.label, clips.player(sound)) for sound in each.sounds],
             "facts": each.remark} for each in run.players if each.among_worst == among_worst]


def live(run: RunData) -> Section | None:
    """Show what ``sbkit evaluate --chunk`` found; None for other results."""
    found: list[Mapping[str, Any]] = run.scored.get("chunks") or []
    if not found:
        return None
    rows = []
    points = []
    for each in found:
        name = chunk_size.to_label(each["chunk"])
        (low, high) = each["WER_interval"]
        times = ["not measured" if value is None else f"{value:.2f}\N{NO-BREAK SPACE}s"
                 for value in (each["latency"], each["latency_p95"])]
        rows.append([name, rate(each["WER"]), f"{low:.2f} to\N{NO-BREAK SPACE}{high:.2f}", *times,
                     f"{each['changed']:.1f}"])
        if each["latency"] is not None:
            points.append((name, each["latency"], each["WER"], each["latency_p95"]))
    return {"columns": ["chunk", "WER", "95 % interval", "latency", f"{LATE} % within", "words changed"], "rows": rows,
            "chart": points and charts.points("WER by latency", points, "seconds after a word's end", note=f"Dots: the "
                                              f"mean. Lines: to where {LATE} % of the words are shown.")}


def where(results: ScoredRun, other: ScoredRun | None) -> Section:
    """Show WER by duration, by the model's confidence, by the corpus's metadata, and by speaker."""
    durations, values, speakers, alike = groups.breakdown(results)
    before = None if other is None else groups.breakdown(other)
    note = "Dashed line: this run's whole test set. Whiskers: 95 % interval."
    blocks: list[Markup | Section] = [charts.bars("By duration", durations, note, results.words.rate)]
    if found := groups.by_confidence(results):
        blocks.append(charts.bars("By confidence", found, "Utterances in five parts of equal size. Where confidence "
                                  "can be trusted, WER falls from left to right.", results.words.rate))
    for name, found in values.items():
        same = f"Grouping by {', '.join(alike[name])} gives the same groups." if name in alike else ""
        blocks.append(_bars(f"By {name}", found, before.values.get(name, []) if before else [], same))
    if speakers:
        few = len(speakers) <= groups.SPEAKERS_SHOWN
        title = "By speaker" if few else f"The {groups.SPEAKERS_SHOWN} hardest of {len(speakers)} speakers"
        blocks.append(_bars(title, speakers[:groups.SPEAKERS_SHOWN], before.speakers if before else []))
        if not few:
            blocks.append(charts.histogram("WER of the speakers", [group.rate for group in speakers], "WER %",
                                           note="Number of speakers by WER."))
    return {"blocks": blocks, "lead": "Orange marks: the other run." if before and (values or speakers) else ""}


def _bars(title: str, rows: Sequence[UtteranceGroup], before: Sequence[UtteranceGroup], note: str = "") -> Section:
    """Lay out groups as bars in the lines of a table; lengths and places are in per cent of the largest."""
    shown = {group.label for group in rows}
    earlier = {group.label: group.rate for group in before if group.label in shown}
    top = max([group.high or group.rate for group in rows] + [*earlier.values(), 1e-9])
    lines = [{"label": group.label, "short": short(group.label, 34), "description": charts.describe(group),
              "rate": group.rate, "utterances": group.utterances, "fill": 100 * group.rate / top,
              "range": None if group.low is None or group.high is None else
              (100 * group.low / top, 100 * (group.high - group.low) / top),
              "before": earlier.get(group.label), "mark": 100 * earlier.get(group.label, 0.0) / top} for group in rows]
    return {"title": title, "lines": lines, "note": note}


def confused(results: ScoredRun) -> Section | None:
    """Show the most frequent substitutions, deletions and insertions."""
    pairs = results.words.confusions(100_000)
    if not pairs:
        return None
    counts = results.words.counts
    kinds = [
        ("Substitutions", [pair for pair in pairs if pair[0] and pair[1]], counts.substitutions.sum()),
        ("Deletions", [pair for pair in pairs if not pair[1]], counts.deletions.sum()),
        ("Insertions", [pair for pair in pairs if not pair[0]], counts.insertions.sum()),
    ]
    total = int(counts.edits.sum())
    return {"lists": [(f"{name}: {count} ({percent(count / total)})", each[:WORDS_SHOWN])
                      for name, each, count in kinds if each], "most": pairs[0][-1]}


def worst(results: ScoredRun, clips: AudioEmbedder, count: int, suspects: Sequence[SuspectLabel]) -> Section | None:
    """Show the utterances with the most errors; those with suspected labels are left out."""
    # Beyond what is expected for their length: sorted by rate alone, utterances of one word would come first.
    excess = results.edits - results.lengths * (results.edits.sum() / results.lengths.sum())
    suspected = {suspect.index for suspect in suspects}
    chosen = [int(i) for i in (-excess).argsort(kind="stable") if i not in suspected and results.edits[i] > 0][:count]
    lead = "Those with the most errors beyond what is expected for their length." + (
        " Those with a suspected label error are listed below instead." if suspects else "")
    return {"title": "Worst utterances", "with_key": True, "cards": [card(results, clips, i) for i in chosen],
            "lead": lead} if chosen else None


def worst_recordings(run: RunData, estimate: MetricEstimate, clips: AudioEmbedder, count: int) -> Section | None:
    """Show the recordings with the worst metric, with the model's outputs if the test kept them; None for a metric
    that single recordings don't have."""
    if len(set(estimate.values)) < 2:  # none is worse than another
        return None
    shown = players(run, clips, among_worst=True) or [
        recording(run.recordings[i], clips, f"{estimate.name} {estimate.values[i]:.4g}")
        for i in estimate.worst()[:count]]
    return {"title": "Worst recordings", "with_key": False, "cards": shown,
            "lead": f"By {estimate.name}, which is {estimate.value:.4g} on all {len(estimate.ids)}."}


def recording(one: Utterance, clips: AudioEmbedder, title: str) -> Card:
    """Make a card of a recording: a title, a player, and its metadata."""
    facts = [f"{one.duration:.1f} s", *([f"speaker {short(one.speaker)}"] if one.speaker else [])]
    return {"title": title, "sounds": [("", clips.player(one))], "facts": " · ".join(facts), "id": one.id}


def labels(results: ScoredRun, clips: AudioEmbedder, suspects: Sequence[SuspectLabel], count: int) -> Section:
    """Show transcripts that may be wrong."""
    shown = []
    for suspect in suspects[:count]:
        why = "The hypothesis is empty." if not suspect.usual and suspect.error == 1 else (
            f"{percent(suspect.error)} of the characters differ; {percent(suspect.usual)} is usual at this confidence.")
        shown.append(card(results, clips, suspect.index, why))
    lead = SUSPECTS_NOTE if suspects else NONE_SUSPECTED if can_judge(results) else NOT_CHECKED
    return {"cards": shown, "more": max(0, len(suspects) - count), "lead": lead}


# ---------------------------------------------------------------- data, making


def data(run: RunData) -> Section | None:
    """Show what was read, kept and left out, and why."""
    if not run.prepared:
        return None
    splits = run.prepared["splits"]
    source = run.prepared["source"]
    limits = {"min_duration": "?", "max_duration": "?", "short_text": "?", **run.prepared.get("options", {})}
    return {
        "rows": [(name, f"{entry['rows']:,}", f"{entry['kept']:,}", time_span(3600 * entry["hours"]),
                  f"{entry['rows'] - entry['kept']:,}") for name, entry in splits.items()],
        "left_out": [{"split": split, "what": REASONS.get(reason, reason).format_map(limits),
                      "much": f"{entry['count']:,} rows, {time_span(3600 * entry['hours'])}",
                      "examples": entry["examples"][:EXAMPLES_SHOWN]}
                     for split, part in splits.items() for reason, entry in part["left_out"].items()],
        "strange": [(split, ", ".join(f"{character!r} × {count}" for character, count in [*found.items()][:20]))
                    for split, part in splits.items() if (found := part.get("outside_alphabet"))],
        "lead": f"{describe(run.prepared)}: {source['where']}"}


def making(run: RunData) -> Section:
    """Show how to repeat this run: command, versions, hardware, recipe."""
    scores = None
    if run.scored:
        shown = {name: run.scored.get(name) for name in _OF_EVALUATIONS} | (run.scored.get("decoder") or {})
        scores = {name: _plain(value) for name, value in shown.items() if value is not None}
    facts: dict[str, Any] = {}
    for start in run.starts[-1:]:
        when = datetime.datetime.fromtimestamp(start["time"]).astimezone().strftime("%Y-%m-%d %H:%M %Z")
        facts = {"started": when, **{name: value for name, value in start.items() if name not in _BESIDE_FACTS},
                 **({"parameters": f"{start['parameters']:,}"} if "parameters" in start else {}),
                 **(start.get("environment") or {})}
    return {"scores": scores, "score_command": run.scored.get("command", ""), "facts": facts, "starts": run.starts,
            "recipe": run.recipe, "lead": str(run.folder.resolve())}


def _plain(value: object) -> object:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else value
