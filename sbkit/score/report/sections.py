"""Sections of the report, each from one kind of data."""

from __future__ import annotations

import datetime
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from sbkit.data.manifest import Utterance
from sbkit.score import chunk_size
from sbkit.score.estimate import MetricEstimate
from sbkit.score.markup import Markup, tag, text
from sbkit.score.rates import Confusion
from sbkit.score.report import charts, groups
from sbkit.score.report.cards import AudioEmbedder, card, key, most_wrong, short
from sbkit.score.report.charts import Series
from sbkit.score.report.data import RunData, ScoredRun, percent, rate
from sbkit.score.report.findings import NONE_SUSPECTED, NOT_CHECKED, SUSPECTS_NOTE, RunFinding, SuspectLabel, can_judge
from sbkit.score.report.groups import UtteranceGroup
from sbkit.score.results import Player
from sbkit.score.significance import RATES, interval
from sbkit.system.console import counted, time_span

WORDS_SHOWN = 14
EXAMPLES_SHOWN = 10
#: Colours of the parts of a step, the same in every run.
PARTS = {"data": 2, "copy": 9, "features": 3, "forward": 1, "loss": 5, "backward": 4, "all-reduce": 6, "optimizer": 7,
         "other": 8}
COLOURS = 9  # of the page
_BESIDE_FACTS = ("time", "kind", "command", "environment", "changed", "after_step")  # of a start
_OF_EVALUATIONS = ("checkpoints", "manifest", "precision", "device", "devices", "real_time_factor")
#: Names in the lines of epochs that differ from those in the lines within epochs.
_OF_EPOCHS = {"loss": "train_loss"}
#: Explanations of the reasons that preparation gives.
REASONS = {
    "malformed row": "the row cannot be read", "repeated id": "an earlier row has the same id",
    "also in dev or test": "the recording is in dev or test as well", "missing clip": "the recording is missing",
    "no text": "no text", "excluded": "on the exclude list", "undecodable": "the recording cannot be decoded",
    "too short": "shorter than {min_duration} s", "too long": "longer than {max_duration} s",
    "alphabet": "characters outside the alphabet", "few words": "fewer than {short_text} words",
}


def section(place: str, title: str, *content: Any, lead: str | None = None) -> Markup:
    """Make a section of the page that the navigation reaches as ``#place``."""
    return tag("section", tag("h2", title), lead and tag("p", lead, class_="lead"), *content, id=place)


def table(head: Sequence[Any], rows: Sequence[Any]) -> Markup:
    """Make a table of cells ``th`` and of rows ``tr``, which can be scrolled on a phone."""
    return tag("div", tag("table", tag("thead", tag("tr", head)), tag("tbody", rows), class_="plain"), class_="scroll")


def listed(title: str, cards: Sequence[Markup], count: int) -> Markup | None:
    """List the first of ``count`` cards; None without any."""
    more = f" (the first {len(cards)} of {count})" if len(cards) < count else f" ({count})"
    return text(tag("h3", title + more), tag("div", cards, class_="cards")) if count else None


# ---------------------------------------------------------------- at the top


def tiles(run: RunData) -> Markup:
    """Show the most important numbers."""
    cells = []
    if run.results is not None:
        chunk = "".join(f", {chunk_size.to_label(each['chunk'])}" for each in run.scored.get("chunks", ())[:1])
        for part, results in run.parts.items():
            of, (low, high) = part and f" of {part}", interval(results.words)
            cells += [_tile(f"Word error rate{of}{chunk}", rate(results.words.rate),
                            f"{low:.2f} to {high:.2f} (95\N{NO-BREAK SPACE}%)", big=True),
                      _tile(f"Character error rate{of}", rate(results.characters.rate),
                            "{:.2f} to {:.2f}".format(*interval(results.characters)))]
        summary = run.results.words.summary()
        cells += [
            _tile("Sentences correct", percent(1 - summary["SER"] / 100, 1),
                  f"{summary['num_scored_sents'] - summary['num_erroneous_sents']} of {len(run.results)}"),
            _tile("Test set", time_span(run.results.hours * 3600),
                  f"{counted(len(run.results), 'utterance')}, {summary['num_scored_tokens']} words"),
        ]
    estimate = run.estimate
    for name, value in run.stats.items():
        between = estimate.interval if estimate is not None and estimate.name == name else None
        title = name[:1].upper() + name[1:].replace("_", " ")  # "Mel distance", but STOI as it is
        cells.append(_tile(title, f"{value:.4g}", "on the test set" if between is None else
                           f"{between[0]:.4g} to {between[1]:.4g} (95\N{NO-BREAK SPACE}%)", big=name != "loss"))
    trained = sum(epoch.get("train_seconds") or 0 for epoch in run.epochs)
    if trained:
        steps = run.epochs[-1].get("step", 0)
        cells.append(_tile("Training", time_span(trained), f"{counted(len(run.epochs), 'epoch')}, {steps:,} steps"))
    speed = run.epochs[-1].get("audio_s_per_s") if run.epochs else None
    if speed:
        cells.append(_tile("Training speed", f"{speed:.3g}\N{NO-BREAK SPACE}s/s", _speed_details(run.epochs[-1])))
    return tag("div", cells, class_="tiles")


def _speed_details(epoch: Mapping[str, Any]) -> str:
    """Describe the last epoch's speed in terms other than seconds of audio per second."""
    found = ["of audio"]
    if epoch.get("padding_share") is not None:
        found.append(f"padding {percent(epoch['padding_share'])}")
    if epoch.get("mfu") is not None:
        found.append(f"MFU {percent(epoch['mfu'])}")
    elif epoch.get("flops_per_s"):
        found.append(f"{epoch['flops_per_s'] / 1e12:.3g} TFLOP/s")
    return ", ".join(found)


def _tile(name: str, value: str, more: str, big: bool = False) -> Markup:
    return tag("div", tag("h3", name), tag("strong", value), tag("p", more), class_="tile big" if big else "tile")


def findings_list(found: Sequence[RunFinding]) -> Markup | None:
    """List the findings, each with a link to the section that shows it."""
    if not found:
        return None
    def points(finding: RunFinding) -> str:
        return "" if finding.points is None else f" At most {finding.points:.1f} points of WER."

    items = [tag("li", tag("a", tag("b", finding.headline), " ", tag("span", finding.detail + points(finding)),
                           href=f"#{finding.place}")) for finding in found]
    return section("first", "What to do next", tag("ol", items, class_="findings"))


# ---------------------------------------------------------------- training


def training(run: RunData, other: RunData | None) -> Markup | None:
    """Chart loss, validation results, learning rate, speed and how the time of a step was spent."""
    ticks = _epoch_ticks(run, other)

    def curve(key: str, name: str, colour: int = 1) -> list[Series]:
        return _curve(run, key, name, colour) + ([] if other is None else _curve(other, key, name, colour, other=True))

    drawn = [
        charts.curves("Loss", curve("loss", "training") + curve("valid_loss", "validation", 2), ticks),
        *_on_dev(run, curve, ticks),
        charts.curves("Learning rate", curve("lr", "learning rate"), ticks),
        charts.curves("Throughput", curve("audio_s_per_s", "audio s/s"), ticks, unit=" s/s",
                      note="Seconds of audio per second of training, all devices together."),
        _step_time(run),
        charts.curves("Gradient norm", curve("grad_norm", "gradient norm"), ticks),
    ]
    drawn = [each for each in drawn if each is not None]
    lead = "Dashed: the other run." if other is not None and (other.steps or other.epochs) else None
    return section("curves", "Training", tag("div", drawn, class_="charts"), _audio(run), lead=lead) if drawn else None


def _on_dev(run: RunData, curve: Callable[[str, str, int], list[Series]],
            ticks: list[tuple[float, str]]) -> list[Markup | None]:
    """Chart validation results: WER and CER in one, or each number with a curve for each part of a mixture."""
    names = sorted({key.removeprefix("valid_") for epoch in run.epochs for key in epoch if key.startswith("valid_")}
                   - {"loss", "unread"}, key=lambda name: (name != "WER", name != "CER", name))
    parts = {name: found for name in names if (found := [each for each in names if each.startswith(f"{name} ")])}
    shown: dict[str, list[Series]] = {}
    for name in names:
        if name in parts:
            drawn = [series for number, each in enumerate(parts[name]) for series in
                     curve(f"valid_{each}", each.removeprefix(f"{name} "), 1 + number % COLOURS)]
            mean = curve(f"valid_{name}", "mean", 1 + len(parts[name]) % COLOURS)  # that of one part with best_by
            shown[f"{name} on dev"] = drawn + [one for one in mean if all(one.y != part.y for part in drawn)]
        elif name in RATES:
            shown.setdefault("Error rates on dev", []).extend(curve(f"valid_{name}", name, 1 if name == "WER" else 3))
        elif not any(name in found for found in parts.values()):
            shown[f"{name} on dev"] = curve(f"valid_{name}", name, 1)
    rates = {"Error rates on dev", *(f"{name} on dev" for name in RATES)}
    return [charts.curves(title, series, ticks, unit=" %" if title in rates else "")
            for title, series in shown.items()]


def _audio(run: RunData) -> Markup | None:
    """Show how much audio of each part of a mixture training used, and how many passes through it."""
    rows = [tag("tr", tag("th", part, scope="row"), tag("td", time_span(3600 * hours)), tag("td", f"{times:.1f}"))
            for part, (hours, times) in run.training_audio.items()]
    head = [tag("th", name) for name in ("part of the mixture", "audio in training", "passes")]
    return text(table(head, rows), run.replay_note and tag("p", run.replay_note, class_="note")) if rows else None


def _curve(run: RunData, key: str, name: str, colour: int, other: bool = False) -> list[Series]:
    """The curve of ``key`` from the lines within epochs or, if the run was too short for those, from the epochs."""
    lines = [line for line in run.steps if line.get(key) is not None]
    whole = not lines
    if whole:
        key = _OF_EPOCHS.get(key, key)
        lines = [line for line in run.epochs if line.get(key) is not None]
    if not lines:
        return []
    return [Series(f"{name}, the other run" if other else name, [line["step"] for line in lines],
                   [line[key] for line in lines], colour, other, dots=whole)]


def _epoch_ticks(run: RunData, other: RunData | None) -> list[tuple[float, str]]:
    longest = max((r for r in (run, other) if r is not None), key=lambda r: r.epochs[-1]["step"] if r.epochs else 0)
    return [(epoch["step"], str(epoch["epoch"])) for epoch in longest.epochs if "step" in epoch]


def _step_time(run: RunData) -> Markup | None:
    timed = [epoch for epoch in run.epochs if epoch.get("time_shares")]
    if not timed:
        return None
    rows = [(str(epoch["epoch"]), epoch["time_shares"]) for epoch in timed]
    parts = {**PARTS, **{name: 8 for epoch in timed for name in epoch["time_shares"] if name not in PARTS}}
    return charts.shares("How the time of a step is spent", rows, parts, note="Shares of a step's time, by epoch.")


# ---------------------------------------------------------------- errors


def tables(run: RunData) -> Markup | None:
    """Show the tables that the task made from its test."""
    if not run.tables:
        return None
    shown = []
    for each in run.tables:
        kinds = [None if _are_numbers([row[i] for row in each["rows"]]) else "text"
                 for i in range(len(each["columns"]))]
        head = [tag("th", str(name), class_=kind) for name, kind in zip(each["columns"], kinds, strict=True)]
        lines = [tag("tr", [tag("td", _plain(value), class_=kind) for value, kind in zip(row, kinds, strict=True)])
                 for row in each["rows"]]
        shown += [tag("h3", each["title"]), table(head, lines),
                  each.get("remark") and tag("p", each["remark"], class_="lead")]
    return section("results", "Results", *shown)


def _are_numbers(column: Sequence[object]) -> bool:
    """Whether a column has only numbers, with or without a unit: these are aligned to the right."""
    return all(re.match(r"[-+−]?[\d.]|$", str(value)) for value in column)


def players(run: RunData, clips: AudioEmbedder) -> Markup | None:
    """Show the players of the task, the recordings of each entry side by side."""
    shown = [_player(each, clips) for each in run.players if not each.among_worst]
    return section("listen", "Listen", tag("div", shown, class_="cards")) if shown else None


def _player(each: Player, clips: AudioEmbedder) -> Markup:
    sounds = [(tag("p", sound.label, class_="side"), clips.player(sound)) for sound in each.sounds]
    return tag("article", tag("p", each.title, dir="auto"), sounds,
               each.remark and tag("p", each.remark, class_="facts"), class_="utterance")


def where(results: ScoredRun, other: ScoredRun | None) -> Markup:
    """Show WER by duration, by the corpus's metadata, and by speaker."""
    durations, values, speakers, alike = groups.breakdown(results)
    before = None if other is None else groups.breakdown(other)
    blocks = [charts.bars("By duration", durations, mean=results.words.rate,
                          note="Dashed line: this run's whole test set. Whiskers: 95 % interval.")]
    for name, found in values.items():
        same = f"Grouping by {', '.join(alike[name])} gives the same groups." if name in alike else ""
        blocks.append(_table(f"By {name}", found, before.values.get(name, []) if before else [], same))
    if speakers:
        few = len(speakers) <= groups.SPEAKERS_SHOWN
        title = "By speaker" if few else f"The {groups.SPEAKERS_SHOWN} hardest of {len(speakers)} speakers"
        blocks.append(_table(title, speakers[:groups.SPEAKERS_SHOWN], before.speakers if before else []))
        if not few:
            blocks.append(charts.histogram("WER of the speakers", [group.rate for group in speakers], "WER %",
                                           note="Number of speakers by WER."))
    lead = "Orange marks: the other run." if before and (values or speakers) else None
    return section("where", "Where the errors are", tag("div", blocks, class_="columns"), lead=lead)


def _table(title: str, rows: Sequence[UtteranceGroup], before: Sequence[UtteranceGroup] = (),
           note: str = "") -> Markup:
    shown = {group.label for group in rows}
    earlier = {group.label: group.rate for group in before if group.label in shown}
    top = max([group.high or group.rate for group in rows] + [*earlier.values(), 1e-9])
    lines = []
    for group in rows:
        marks = [tag("i", class_="fill", style=f"width:{100 * group.rate / top:.1f}%")]
        if group.low is not None and group.high is not None:
            marks.append(tag("i", class_="range", style=f"left:{100 * group.low / top:.1f}%;"
                                                        f"width:{100 * (group.high - group.low) / top:.1f}%"))
        if group.label in earlier:
            marks.append(tag("i", class_="before", style=f"left:{100 * earlier[group.label] / top:.1f}%",
                             title=f"the other run: {earlier[group.label]:.1f}"))
        lines.append(tag("tr", tag("th", short(group.label, 34), title=group.label, scope="row"),
                         tag("td", tag("div", marks, class_="track", title=charts.describe(group)), class_="wide"),
                         tag("td", f"{group.rate:.1f}"), tag("td", group.utterances, class_="dim")))
    head = tag("tr", tag("th"), tag("th"), tag("th", "WER %"), tag("th", "n"))
    return tag("figure", tag("figcaption", title),
               tag("table", tag("thead", head), tag("tbody", lines), class_="groups"),
               note and tag("p", note, class_="note"))


def confused(results: ScoredRun) -> Markup | None:
    """Show the most frequent substitutions, deletions and insertions."""
    pairs = results.words.confusions(100_000)
    if not pairs:
        return None
    counts = results.words.counts
    kinds = [
        ("Substitutions", [pair for pair in pairs if pair.reference and pair.hypothesis], counts.substitutions.sum()),
        ("Deletions", [pair for pair in pairs if not pair.hypothesis], counts.deletions.sum()),
        ("Insertions", [pair for pair in pairs if not pair.reference], counts.insertions.sum()),
    ]
    total, most = int(counts.edits.sum()), pairs[0].count
    lists = [_words(f"{name}: {count} ({percent(count / total)})", each, most) for name, each, count in kinds if each]
    return section("words", "Most confused words", tag("div", lists, class_="charts three"))


def _words(title: str, pairs: Sequence[Confusion], limit: int) -> Markup:
    lines = []
    for ref, hyp, count in pairs[:WORDS_SHOWN]:
        both = [tag("bdi", ref), tag("span", " → ", class_="dim"), tag("bdi", hyp)] if ref and hyp else tag(
            "bdi", ref or hyp)
        width = f"--share:{100 * count / limit:.0f}%"
        lines.append(tag("li", tag("span", both), tag("span", f"{count} ×", class_="dim"), style=width))
    return tag("figure", tag("figcaption", title), tag("ol", lines, class_="words"))


def worst(results: ScoredRun, clips: AudioEmbedder, count: int, suspects: Sequence[SuspectLabel]) -> Markup | None:
    """Show the utterances with the most errors; those with suspected labels are left out."""
    chosen = most_wrong(results, count, [suspect.index for suspect in suspects])
    if not chosen:
        return None
    lead = "Those with the most errors beyond what is expected for their length."
    if suspects:
        lead += " Those with a suspected label error are listed below instead."
    shown = tag("div", [card(results, clips, i) for i in chosen], class_="cards")
    return section("worst", "Worst utterances", key("reference"), shown, lead=lead)


def worst_recordings(run: RunData, estimate: MetricEstimate, clips: AudioEmbedder, count: int) -> Markup | None:
    """Show the recordings with the worst metric, with the model's outputs if the test kept them; None for a metric
    that single recordings don't have."""
    if len(set(estimate.values)) < 2:  # none is worse than another
        return None
    shown = [_player(each, clips) for each in run.players if each.among_worst] or [
        recording(run.recordings[i], clips, f"{estimate.name} {estimate.values[i]:.4g}")
        for i in estimate.worst()[:count]]
    return section("worst", "Worst recordings", tag("div", shown, class_="cards"),
                   lead=f"By {estimate.name}, which is {estimate.value:.4g} on all {len(estimate.ids)}.")


def recording(one: Utterance, clips: AudioEmbedder, remark: str) -> Markup:
    """Make a card of a recording: a remark, a player, and its metadata."""
    facts = [f"{one.duration:.1f} s", *([f"speaker {short(one.speaker)}"] if one.speaker else [])]
    return tag("article", tag("p", remark), clips.player(one),
               tag("p", " · ".join(facts), " ", tag("span", one.id, class_="id"), class_="facts"), class_="utterance")


def labels(results: ScoredRun, clips: AudioEmbedder, suspects: Sequence[SuspectLabel], count: int) -> Markup:
    """Show transcripts that may be wrong."""
    if not suspects:
        return section("labels", "Suspected label errors", lead=NONE_SUSPECTED if can_judge(results) else NOT_CHECKED)
    shown = [card(results, clips, suspect.index, _why(suspect)) for suspect in suspects[:count]]
    more = None if len(suspects) <= count else tag("p", f"{len(suspects) - count} more are not shown.", class_="note")
    return section("labels", "Suspected label errors", key("reference"), tag("div", shown, class_="cards"), more,
                   lead=SUSPECTS_NOTE)


def _why(suspect: SuspectLabel) -> str:
    if not suspect.usual and suspect.error == 1:
        return "The hypothesis is empty."
    return (f"{percent(suspect.error)} of the characters differ; {percent(suspect.usual)} is usual at this confidence.")


# ---------------------------------------------------------------- data, making


def data(run: RunData) -> Markup | None:
    """Show what was read, kept and left out, and why."""
    if not run.prepared:
        return None
    splits = run.prepared["splits"]
    rows = [tag("tr", tag("th", name, scope="row"), tag("td", f"{entry['rows']:,}"), tag("td", f"{entry['kept']:,}"),
                tag("td", time_span(3600 * entry["hours"])), tag("td", f"{entry['rows'] - entry['kept']:,}"))
            for name, entry in splits.items()]
    head = [tag("th", name) for name in ("split", "rows", "kept", "length", "left out")]
    reasons = [_reason(split, reason, entry, run.prepared.get("options", {}))
               for split, part in splits.items() for reason, entry in part["left_out"].items()]
    strange = [tag("p", f"{split}: outside the alphabet: ", _counted(part["outside_alphabet"]), class_="note")
               for split, part in splits.items() if part.get("outside_alphabet")]
    source = run.prepared["source"]
    return section("data", "The data", table(head, rows), reasons or tag("p", "Nothing was left out.", class_="note"),
                   strange, lead=f"{source['kind']}: {source['where']}")


def _reason(split: str, reason: str, entry: dict[str, Any], options: dict[str, Any]) -> Markup:
    examples = [tag("li", example) for example in entry["examples"][:EXAMPLES_SHOWN]]
    much = f": {entry['count']:,} rows, {time_span(3600 * entry['hours'])}"
    limits = {"min_duration": "?", "max_duration": "?", "short_text": "?", **options}
    what = REASONS.get(reason, reason).format_map(limits)
    return tag("details", tag("summary", f"{split}, ", tag("b", what), much), tag("ul", examples, class_="examples"))


def _counted(characters: dict[str, int]) -> str:
    return ", ".join(f"{character!r} × {count}" for character, count in list(characters.items())[:20])


def making(run: RunData) -> Markup:
    """Show how to repeat this run: command, versions, hardware, recipe."""
    parts: list[Any] = []
    if run.scored:
        shown = {name: run.scored.get(name) for name in _OF_EVALUATIONS}
        shown |= run.scored.get("decoder") or {}
        parts += [tag("h3", "The scores"), tag("pre", run.scored.get("command", ""), class_="command"),
                  _facts({name: _plain(value) for name, value in shown.items() if value is not None}),
                  tag("h3", "The training")]
    for start in run.starts[-1:]:
        when = datetime.datetime.fromtimestamp(start["time"]).astimezone().strftime("%Y-%m-%d %H:%M %Z")
        facts = {"started": when, **{name: value for name, value in start.items()
                                     if name not in _BESIDE_FACTS},
                 **({"parameters": f"{start['parameters']:,}"} if "parameters" in start else {}),
                 **(start.get("environment") or {})}
        parts += [tag("pre", start.get("command", ""), class_="command"), _facts(facts)]
    parts += [tag("p", f"Steps after {start['after_step']:,} ran with changed values: {'; '.join(start['changed'])}.")
              for start in run.starts if start.get("changed")]
    if len(run.starts) > 1:
        parts.append(tag("p", f"The run was started {len(run.starts)} times; this is the last start.", class_="note"))
    if not run.starts:
        parts.append(tag("p", "The command and the versions were not recorded.", class_="note"))
    if run.recipe:
        parts.append(tag("details", tag("summary", tag("b", "The recipe")), tag("pre", run.recipe)))
    return section("making", "How to reproduce this run", *parts, lead=str(run.folder.resolve()))


def _plain(value: object) -> object:
    if isinstance(value, list):
        return ", ".join(map(str, value))
    return f"{value:.4g}" if isinstance(value, float) else value


def _facts(facts: dict[str, Any]) -> Markup:
    return tag("dl", [text(tag("dt", name.replace("_", " ")), tag("dd", value)) for name, value in facts.items()],
               class_="facts-list")
