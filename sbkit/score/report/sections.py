"""What the sections of the report show, each from one kind of data; ``run.html`` lays it out."""

from __future__ import annotations

import dataclasses
import datetime
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

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
CHARACTERS_SHOWN = 20
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
    return [*_rate_tiles(run), *_figure_tiles(run), *_training_tiles(run)]


def _rate_tiles(run: RunData) -> list[tuple[str, str, str, bool]]:
    """The error rates, and what they were measured on."""
    if run.results is None:
        return []
    tiles = []
    chunks = run.scored.get("chunks") or []
    first_chunk = f", {chunk_size.to_label(chunks[0]['chunk'])}" if chunks else ""
    for part, results in run.parts.items():
        of_part = f" of {part}" if part else ""
        word_details = ""
        character_details = ""
        if len(results) >= MIN_UTTERANCES:
            word_details = interval_in_text(results.words, " (95\N{NO-BREAK SPACE}%)")
            character_details = interval_in_text(results.characters)
        tiles.append((f"Word error rate{of_part}{first_chunk}", rate(results.words.rate), word_details, True))
        tiles.append((f"Character error rate{of_part}", rate(results.characters.rate), character_details, False))
    summary = run.results.words.summary()
    correct = summary["num_scored_sents"] - summary["num_erroneous_sents"]
    tiles.append(("Sentences correct", percent(1 - summary["SER"] / 100, 1),
                  f"{correct} of {len(run.results)}", False))
    tiles.append(("Test set", time_span(run.results.hours * 3600),
                  f"{counted(len(run.results), 'utterance')}, {summary['num_scored_tokens']} words", False))
    return tiles


def _figure_tiles(run: RunData) -> list[tuple[str, str, str, bool]]:
    """The figures of a task without words."""
    tiles = []
    for name, value in run.stats.items():
        title = name[:1].upper() + name[1:].replace("_", " ")  # "Mel distance", but STOI as it is
        details = "on the test set"
        bounds = run.shown_interval(name)
        if bounds is not None:
            details = "{:.4g} to {:.4g} (95\N{NO-BREAK SPACE}%)".format(*bounds)
        tiles.append((title, f"{value:.4g}", details, name != "loss"))
    return tiles


def _training_tiles(run: RunData) -> list[tuple[str, str, str, bool]]:
    """How long training took, and how fast it was in the last epoch."""
    tiles = []
    last = run.epochs[-1] if run.epochs else {}
    seconds = sum(epoch.get("train_seconds") or 0 for epoch in run.epochs)
    if seconds:
        tiles.append(("Training", time_span(seconds),
                      f"{counted(len(run.epochs), 'epoch')}, {last.get('step', 0):,} steps", False))
    speed = last.get("audio_s_per_s")
    if speed:
        details = ["of audio"]
        if last.get("padding_share") is not None:
            details.append(f"padding {percent(last['padding_share'])}")
        if last.get("mfu") is not None:
            details.append(f"MFU {percent(last['mfu'])}")
        elif last.get("flops_per_s"):
            details.append(f"{last['flops_per_s'] / 1e12:.3g} TFLOP/s")
        tiles.append(("Training speed", f"{speed:.3g}\N{NO-BREAK SPACE}s/s", ", ".join(details), False))
    return tiles


# ---------------------------------------------------------------- a comparison


class _Changes(NamedTuple):
    """What got better and worse, as indices with the largest change first and cards of some, and a note."""

    better: Sequence[int]
    worse: Sequence[int]
    better_cards: list[Card]
    worse_cards: list[Card]
    note: str = ""


def against(run: RunData, other: RunData, compared: RunComparison, clips: AudioEmbedder, count: int) -> Section:
    """Compare ``run`` with ``other`` on the same test set; ``compared`` is their difference."""
    columns = [compared]
    if run.results is not None and other.results is not None:
        characters = compare(other.results.characters, run.results.characters)
        columns.append(dataclasses.replace(characters, name="CER"))
        changes = _changed_utterances(run.results, other.results, clips, count)
    else:
        changes = _changed_recordings(run, other, clips, count)
    rows = zip(("the other run", "this run", "difference", "95 % interval", "p"), *map(_column, columns), strict=True)
    return {"title": str(compared).replace("-", "−"), "columns": ["", *(column.name for column in columns)],
            "rows": [*rows], "note": changes.note, "with_key": run.results is not None,
            "lists": [("Better", changes.better_cards, len(changes.better)),
                      ("Worse", changes.worse_cards, len(changes.worse))],
            "lead": f"Compared with {other.folder.resolve()}"}


def _changed_utterances(ours: ScoredRun, others: ScoredRun, clips: AudioEmbedder, count: int) -> _Changes:
    """Find the utterances that have more or fewer errors than in the other run."""
    row_of_other = {one.id: row for row, one in enumerate(others.utterances)}
    rows_of_other = np.array([row_of_other[one.id] for one in ours.utterances])
    change = ours.edits - others.edits[rows_of_other]
    order = np.argsort(change, kind="stable")
    better = [int(i) for i in order if change[i] < 0]
    worse = [int(i) for i in order[::-1] if change[i] > 0]

    def cards(indices: Sequence[int]) -> list[Card]:
        made = []
        for i in indices[:count]:
            row = rows_of_other[i]
            made.append(card(ours, clips, i, other=(others.words.hypotheses[row], others.alignments[row])))
        return made

    note = (f"Of {counted(len(change), 'utterance')} {len(better)} got better, {len(worse)} worse, and "
            f"{len(change) - len(better) - len(worse)} have as many errors as before.")
    return _Changes(better, worse, cards(better), cards(worse), note)


def _changed_recordings(run: RunData, other: RunData, clips: AudioEmbedder, count: int) -> _Changes:
    """Find the recordings whose metric changed, of a task that measures recordings instead of words."""
    ours = run.estimate
    others = other.estimate
    assert ours is not None and others is not None, "write_report refuses runs without results"
    if not ours.values or not others.values:  # single recordings have no such metric
        return _Changes([], [], [], [])
    value_of_other = dict(zip(others.ids, others.values, strict=True))
    earlier = np.array([value_of_other[name] for name in ours.ids])
    gain = (np.array(ours.values) - earlier) * (-1 if ours.lower_is_better else 1)
    order = np.argsort(gain, kind="stable")
    better = [int(i) for i in order[::-1] if gain[i] > 0]
    worse = [int(i) for i in order if gain[i] < 0]

    def cards(indices: Sequence[int]) -> list[Card]:
        return [recording(run.recordings[i], clips, f"{ours.name} {earlier[i]:.4g} to {ours.values[i]:.4g}")
                for i in indices[:count]]

    return _Changes(better, worse, cards(better), cards(worse))


def _column(compared: RunComparison) -> tuple[str, ...]:
    """The cells of a metric in the table of a comparison."""
    in_per_cent = compared.name in RATES

    def signed(value: float) -> str:
        return (f"{value:+.2f}" if in_per_cent else f"{value:+.4g}").replace("-", "−")

    levels = [rate(value) if in_per_cent else f"{value:.4g}" for value in (compared.rate_a, compared.rate_b)]
    return (*levels, signed(compared.difference),
            f"{signed(compared.low)} to\N{NO-BREAK SPACE}{signed(compared.high)}", f"{compared.p_value:.4f}")


# ---------------------------------------------------------------- training


def _curve(runs: Sequence[RunData], key: str, name: str, colour: int = 1) -> list[Series]:
    """The curve of each run from the lines within epochs or, if it was too short for those, from the epochs."""
    series = []
    for run in runs:
        key_of_lines = key
        lines = [line for line in run.steps if line.get(key) is not None]
        from_epochs = not lines
        if from_epochs:
            key_of_lines = "train_loss" if key == "loss" else key
            lines = [line for line in run.epochs if line.get(key_of_lines) is not None]
        if lines:
            is_other = run is not runs[0]
            series.append(Series(
                f"{name}, the other run" if is_other else name, [line["step"] for line in lines],
                [line[key_of_lines] for line in lines], colour, is_other, dots=from_epochs))
    return series


def loss_in_text(run: RunData) -> str:
    """The chart of the loss for a terminal; empty before the first epoch."""
    series = _curve([run], "loss", "training") + _curve([run], "valid_loss", "validation", 2)
    return charts.in_text("loss", series, _epoch_ticks(run))


def _epoch_ticks(run: RunData) -> list[tuple[float, str]]:
    """The steps at which epochs ended, each with the epoch's number."""
    return [(epoch["step"], str(epoch["epoch"])) for epoch in run.epochs if "step" in epoch]


def _validation_curves(runs: Sequence[RunData]) -> dict[str, list[Series]]:
    """The curves of validation results by the title of their chart: WER and CER in one chart, or each number with a
    curve for each part of a mixture."""
    names = {key.removeprefix("valid_") for epoch in runs[0].epochs for key in epoch if key.startswith("valid_")}
    ordered = sorted(names - {"loss", "unread"}, key=lambda name: (name != "WER", name != "CER", name))
    parts: dict[str, list[str]] = {}  # by the number's name: "WER" has "WER new" and "WER old"
    for name in ordered:
        of_parts = [other for other in ordered if other.startswith(f"{name} ")]
        if of_parts:
            parts[name] = of_parts
    all_parts = {name for of_parts in parts.values() for name in of_parts}

    curves: dict[str, list[Series]] = {}
    for name in ordered:
        if name in parts:
            series = []
            for number, part in enumerate(parts[name]):
                label = part.removeprefix(f"{name} ")
                series += _curve(runs, f"valid_{part}", label, 1 + number % COLOURS)
            mean = _curve(runs, f"valid_{name}", "mean", 1 + len(parts[name]) % COLOURS)
            # With best_by, the mean is that of one part, whose curve is there already.
            curves[f"{name} on dev"] = series + [one for one in mean if all(one.y != part.y for part in series)]
        elif name in RATES:
            colour = 1 if name == "WER" else 3
            curves.setdefault("Error rates on dev", []).extend(_curve(runs, f"valid_{name}", name, colour))
        elif name not in all_parts:
            curves[f"{name} on dev"] = _curve(runs, f"valid_{name}", name, 1)
    return curves


def training(run: RunData, other: RunData | None) -> Section | None:
    """Chart loss, validation results, learning rate, speed and how the time of a step was spent."""
    both = [run] if other is None else [run, other]
    longest = max(both, key=lambda one: one.epochs[-1]["step"] if one.epochs else 0)
    ticks = _epoch_ticks(longest)
    curve = functools.partial(_curve, both)
    on_dev = _validation_curves(both)
    in_per_cent = {"Error rates on dev", *(f"{name} on dev" for name in RATES)}
    padding = [dataclasses.replace(series, y=[100 * share for share in series.y])
               for series in curve("padding_share", "padding")]

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
    timed = [(str(epoch["epoch"]), epoch["time_shares"]) for epoch in run.epochs if epoch.get("time_shares")]
    if timed:
        # A script may name parts of its own.
        colours = PARTS | {name: PARTS["other"] for _, time_shares in timed for name in time_shares
                           if name not in PARTS}
        drawn.append(charts.shares("How the time of a step is spent", timed, colours,
                                   note="Shares of a step's time, by epoch."))
    drawn.append(charts.curves("Gradient norm", curve("grad_norm", "gradient norm"), ticks))
    drawn = [chart for chart in drawn if chart is not None]
    audio = [(part, time_span(3600 * hours), f"{times:.1f}") for part, (hours, times) in run.training_audio.items()]
    lead = "Dashed: the other run." if other is not None and (other.steps or other.epochs) else ""
    return {"charts": drawn, "audio": audio, "note": run.replay_note, "lead": lead} if drawn else None


# ---------------------------------------------------------------- errors


def tables(run: RunData) -> Section | None:
    """Show the tables that the task made from its test; columns of numbers alone are aligned to the right."""
    shown = []
    for table in run.tables:
        columns = [[str(row[i]) for row in table["rows"]] for i in range(len(table["columns"]))]
        kinds = ["" if all(re.match(r"[-+−]?[\d.]|$", cell) for cell in column) else "text" for column in columns]
        rows = [[_plain(cell) for cell in row] for row in table["rows"]]
        shown.append({"kinds": kinds, "remark": "", **table, "rows": rows})
    return {"tables": shown} if shown else None


def players(run: RunData, clips: AudioEmbedder, among_worst: bool = False) -> list[Card]:
    """Make cards of the players of the task, the recordings of each entry side by side."""
    return [{"title": player.title, "sounds": [(sound.label, clips.player(sound)) for sound in player.sounds],
             "facts": player.remark} for player in run.players if player.among_worst == among_worst]


def live(run: RunData) -> Section | None:
    """Show what ``sbkit evaluate --chunk`` found; None for other results."""
    results_by_chunk: list[Mapping[str, Any]] = run.scored.get("chunks") or []
    if not results_by_chunk:
        return None
    rows = []
    points = []
    for result in results_by_chunk:
        name = chunk_size.to_label(result["chunk"])
        low, high = result["WER_interval"]
        times = ["not measured" if value is None else f"{value:.2f}\N{NO-BREAK SPACE}s"
                 for value in (result["latency"], result["latency_p95"])]
        rows.append([name, rate(result["WER"]), f"{low:.2f} to\N{NO-BREAK SPACE}{high:.2f}", *times,
                     f"{result['changed']:.1f}"])
        if result["latency"] is not None:
            points.append((name, result["latency"], result["WER"], result["latency_p95"]))
    chart = None
    if points:
        chart = charts.points("WER by latency", points, "seconds after a word's end",
                              note=f"Dots: the mean. Lines: to where {LATE} % of the words are shown.")
    return {"columns": ["chunk", "WER", "95 % interval", "latency", f"{LATE} % within", "words changed"], "rows": rows,
            "chart": chart}


def where(results: ScoredRun, other: ScoredRun | None) -> Section:
    """Show WER by duration, by the model's confidence, by the corpus's metadata, and by speaker."""
    durations, values, speakers, alike = groups.breakdown(results)
    before = None if other is None else groups.breakdown(other)
    note = "Dashed line: this run's whole test set."
    if any(group.low is not None for group in durations):
        note += " Whiskers: 95 % interval."
    blocks: list[Markup | Section] = [charts.bars("By duration", durations, note, results.words.rate)]
    by_confidence = groups.by_confidence(results)
    if by_confidence:
        blocks.append(charts.bars("By confidence", by_confidence, "Utterances in five parts of equal size. Where "
                                  "confidence can be trusted, WER falls from left to right.", results.words.rate))
    for name, of_column in values.items():
        same = f"Grouping by {', '.join(alike[name])} gives the same groups." if name in alike else ""
        blocks.append(_bars(f"By {name}", of_column, before.values.get(name, []) if before else [], same))
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
    labels = {group.label for group in rows}
    earlier = {group.label: group.rate for group in before if group.label in labels}
    top = max([group.high or group.rate for group in rows] + [*earlier.values(), 1e-9])
    lines = []
    for group in rows:
        bounds = None
        if group.low is not None and group.high is not None:
            bounds = (100 * group.low / top, 100 * (group.high - group.low) / top)
        lines.append({
            "label": group.label, "short": short(group.label, 34), "description": charts.describe(group),
            "rate": group.rate, "utterances": group.utterances, "fill": 100 * group.rate / top, "range": bounds,
            "before": earlier.get(group.label), "mark": 100 * earlier.get(group.label, 0.0) / top})
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
    lists = [(f"{name}: {count} ({percent(count / total)})", pairs_of_kind[:WORDS_SHOWN])
             for name, pairs_of_kind, count in kinds if pairs_of_kind]
    return {"lists": lists, "most": pairs[0][-1]}


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
        why = (f"{percent(suspect.error)} of the characters differ; {percent(suspect.usual)} is usual at this "
               "confidence.")
        if not suspect.usual and suspect.error == 1:
            why = "The hypothesis is empty."
        shown.append(card(results, clips, suspect.index, why))
    if suspects:
        lead = SUSPECTS_NOTE
    else:
        lead = NONE_SUSPECTED if can_judge(results) else NOT_CHECKED
    return {"cards": shown, "more": max(0, len(suspects) - count), "lead": lead}


# ---------------------------------------------------------------- data, making


def data(run: RunData) -> Section | None:
    """Show what was read, kept and left out, and why."""
    if not run.prepared:
        return None
    splits = run.prepared["splits"]
    source = run.prepared["source"]
    limits = {"min_duration": "?", "max_duration": "?", "short_text": "?", **run.prepared.get("options", {})}
    rows = []
    left_out = []
    outside_alphabet = []
    for split, entry in splits.items():
        rows.append((split, f"{entry['rows']:,}", f"{entry['kept']:,}", time_span(3600 * entry["hours"]),
                     f"{entry['rows'] - entry['kept']:,}"))
        for reason, lost in entry["left_out"].items():
            left_out.append({"split": split, "what": REASONS.get(reason, reason).format_map(limits),
                             "much": f"{lost['count']:,} rows, {time_span(3600 * lost['hours'])}",
                             "examples": lost["examples"][:EXAMPLES_SHOWN]})
        counts = list((entry.get("outside_alphabet") or {}).items())[:CHARACTERS_SHOWN]
        if counts:
            outside_alphabet.append((split, ", ".join(f"{character!r} × {count}" for character, count in counts)))
    return {"rows": rows, "left_out": left_out, "strange": outside_alphabet,
            "lead": f"{describe(run.prepared)}: {source['where']}"}


def making(run: RunData) -> Section:
    """Show how to repeat this run: command, versions, hardware, recipe."""
    scores = None
    if run.scored:
        shown = {name: run.scored.get(name) for name in _OF_EVALUATIONS} | (run.scored.get("decoder") or {})
        scores = {name: _plain(value) for name, value in shown.items() if value is not None}
    facts: dict[str, Any] = {}
    if run.starts:
        start = run.starts[-1]
        time = datetime.datetime.fromtimestamp(start["time"]).astimezone()
        facts["started"] = time.strftime("%Y-%m-%d %H:%M %Z")
        facts |= {name: value for name, value in start.items() if name not in _BESIDE_FACTS}
        if "parameters" in start:
            facts["parameters"] = f"{start['parameters']:,}"
        facts |= start.get("environment") or {}
        facts = {name: _plain(value) for name, value in facts.items()}
    return {"scores": scores, "score_command": run.scored.get("command", ""), "facts": facts, "starts": run.starts,
            "recipe": run.recipe, "lead": str(run.folder.resolve())}


def _plain(value: object) -> object:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    if isinstance(value, dict):
        return ", ".join(f"{name}: {_plain(entry)}" for name, entry in value.items())
    return f"{value:.4g}" if isinstance(value, float) else value
