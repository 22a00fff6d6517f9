"""The report of a rehearsal: a page for the terminal, one for a browser, and the same for programs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbkit.recipe.price import EFFICIENCY
from sbkit.recipe.report import ERROR, WARNING, Finding, Report, Section
from sbkit.rehearsal.cards import Card
from sbkit.rehearsal.run import RANKS, Line
from sbkit.score.markup import Markup, tag, text
from sbkit.score.report import charts
from sbkit.score.report.page import filled
from sbkit.score.report.sections import section

GIB = 2**30
#: The stages of a run, in the order in which the report has them.
STAGES = ("corpus", "check", "start", "count of FLOPs", "steps", "a step of the planned batch",
          "the largest batch of the estimate", "a batch that doesn't fit", "validation", "checkpoint",
          "kill and resume", "test", "export", "model.pt2 on the card", "a rank that fails")
#: Milliseconds of a card for a step below which the model is a toy, and no larger batch makes it busy.
LITTLE = 0.05
#: A step's launches take so many times as long with a real card's driver as on the null card: on an H200 3.3 times for
#: the flagship, 2.6 times for large.yaml.
DRIVER = 3.0
UNREACHED, LACKS = "not reached", "the null card has no"
UNPROVEN = ("what kernels compute: their values are never looked at here",
            "how fast they are, and how much of an exchange between ranks hides behind backward",
            "`make gpu` proves these first, once there is a card")


def assemble(recipe: str, found: Sequence[Line], count: int, card: Card, seconds: float) -> Report:
    """Make the report of what the processes of a rehearsal wrote down."""
    lacks = dict.fromkeys(line["lacks"] for line in found if "lacks" in line)
    counts = [line["report"]["sections"].get("cost", {}).get("values", {}) for line in found if "report" in line]
    notes = [*(f"what {name} does, which the null card has not" for name in lacks),
             *(why for each in counts for why in each.get("inexact", ())), *UNPROVEN]
    report = Report(recipe, seconds=seconds, notes=notes)
    figures: Line = {}
    if counts := [line["collectives"] for line in found if "collectives" in line]:
        figures["collectives"] = sum(counts)
    for line in found:
        figures |= line.get("figures", {}) if line.get("rank") == 0 else {}
        for each in (*line.get("report", {}).get("errors", ()), *line.get("report", {}).get("warnings", ())):
            report.add([Finding(**each)])
    wrong = _findings(found)
    report.add(Finding(**{name: value for name, value in each.items() if name not in ("stage", "ends")} |
                       {"file": each["file"] or recipe}) for each in wrong)
    report.sections["rehearsal"] = _stages(found, wrong, report, count, card, figures)
    unreached = [row[0] for row in report.sections["rehearsal"].rows if row[1] == UNREACHED or LACKS in row[1]]
    if unreached and not report.errors:
        severity, why, what_to_do = (
            WARNING, f"since the null card has no {', '.join(lacks)}", "only a real card shows these: make gpu") \
            if lacks else (ERROR, "and no process said why",
                           "run it with `python -m sbkit.rehearsal.nullcard -- sbkit train`")
        report.add([Finding(severity, "not-reached", recipe, 0, "", f"{', '.join(unreached)}: not reached, {why}",
                            what_to_do)])
    if "host_ms" in figures:
        report.sections["figures"] = _figures(figures, card)
        report.sections["memory"] = _memory(figures["timeline"], figures)
    return report


def _findings(found: Sequence[Line]) -> list[Line]:
    """The findings of all ranks: one of each kind and place, and of errors that end a launch the first."""
    kept: dict[tuple[Any, ...], Line] = {}
    for line in sorted((line for line in found if "finding" in line), key=lambda line: line.get("at", float("inf"))):
        each = line["finding"] | {"stage": _named(line["launch"], line["finding"]["stage"])}
        kept.setdefault((line["launch"],) if each["ends"] else _what(each), each)
    return list({_what(each): each for each in kept.values()}.values())


def _what(finding: Line) -> tuple[Any, ...]:
    return finding["code"], finding["file"], finding["line"] or finding["message"]


def _named(launch: str, stage: str) -> str:
    """The stage of the report that a stage of a launch belongs to."""
    if launch == "resume" and stage != "test":
        return "kill and resume"
    if launch == "fail" and stage not in STAGES[-1:]:
        return "a batch that doesn't fit"
    return {"kill": "kill and resume"}.get(stage, stage)


def _stages(found: Sequence[Line], wrong: Sequence[Line], report: Report, count: int, card: Card,
            figures: Line) -> Section:
    seconds, left_out = dict[str, float](), dict[str, str]()
    for launch in dict.fromkeys(line["launch"] for line in found):
        mine = [line for line in found if line["launch"] == launch and line.get("rank", 0) == 0]
        times = [(line["at"], _named(launch, line["stage"])) for line in mine if "stage" in line and "at" in line]
        times.append((mine[-1].get("ended", times[-1][0] if times else 0.0), ""))
        for (start, stage), (end, _) in itertools.pairwise(times):
            seconds[stage] = seconds.get(stage, 0.0) + end - start
        stage = ""
        for line in mine:
            stage = line.get("stage", stage)
            if "skip" in line:
                left_out[_named(launch, stage)] = line["skip"]
    bad = {each["stage"] for each in wrong}
    if any(line["report"]["errors"] for line in found if "report" in line):
        bad.add("check")
    world = min(count, RANKS)
    rows = []
    for stage in STAGES:
        if stage == STAGES[-1] and world == 1:
            continue
        result = "wrong" if stage in bad else f"left out: {left_out[stage]}" if stage in left_out else \
            "ok" if stage in seconds else UNREACHED
        rows.append([stage, result, f"{seconds[stage]:.1f}" if stage in seconds else ""])
    ranks = f"{count} x {card.name}" + (f", {world} ranks stand for {count}" if world < count else "")
    return Section(f"Rehearsal on {ranks}; data: {figures.get('data', 'none')}", ["stage", "result", "seconds"], rows,
                   values={"cards": count, "card": card.name, "ranks": world, "data": figures.get("data"),
                           "stages": {row[0]: {"result": row[1], "seconds": seconds.get(row[0])} for row in rows}})


def _figures(figures: Line, card: Card) -> Section:
    host, needs = figures["host_ms"], figures["card_ms"]
    late = needs is not None and DRIVER * host > needs
    estimated, peak = figures.get("estimated_bytes"), figures["peak_bytes"]
    rows = [["a micro-batch on one card", f"{figures['batch']} in {figures['precision']}"],
            ["a step asks the card for", f"{figures['launches']:,} launches, {figures['copies']:,} copies"],
            ["the host needs", f"{host:.1f} ms a step, on a core of this machine; with a card's driver about "
             f"{DRIVER * host:.0f}"]]
    if needs is not None:
        bound = "too little to fill one" if needs < LITTLE else \
            "bound by launches" if late else "not bound by launches"
        rows.append(["the card needs", f"{needs:.1f} ms for {figures['operations'] / 1e12:.3g} TFLOP, at "
                     f"{EFFICIENCY:.0%} of its peak: {bound}"])
    rows.append(["memory at once", f"{_memory_size(peak)} of {_memory_size(card.memory)}" + (
        f"; the check estimates {_memory_size(estimated)}" if estimated else "")])
    if "largest_batch" in figures:
        rows.append(["the largest batch of the estimate", f"{figures['largest_batch']}: "
                     f"{_memory_size(figures['largest_peak_bytes'])}"])
    if "waits" in figures:
        rows.append(["waits in the run's steps", f"{sum(wait[2] for wait in figures['waits']):.3g} a step" + "".join(
            f"; {short(wait[0], wait[1]) if wait[0] else 'in a backward of torch'}" for wait in figures["waits"][:2])])
    if "collectives" in figures:
        rows.append(["collectives", f"{figures['collectives']:,}, the same on all ranks"])
    graphs = "" if figures.get("cuda_graphs") else \
        f", or{'' if figures.get('compiled') else ' --compile'} --compile_mode reduce-overhead,"
    remarks = ["the card waits for the host in each step: a larger max_batch_seconds (and step_seconds)"
               f"{graphs} helps"] if late and needs >= LITTLE else []
    return Section("Figures", ["what", "how much"], rows, remarks, values={
        name: value for name, value in figures.items() if name not in ("timeline", "exports", "data")})


def _memory(timeline: Line, figures: Line) -> Section:
    rows = [[_memory_size(size), short(file, line) if file else "in torch", source[:60]]
            for file, line, size, source in timeline["lines"]]
    held = f"{_memory_size(figures['held_bytes'])} more are held all the time: weights and the optimizer's states"
    return Section("What a step holds at its peak", ["memory", "made at", "line"], rows, [held], timeline)


def _memory_size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"


def short(file: str, line: int) -> str:
    """A place with as much of its path as tells where it is."""
    return f"{'/'.join(Path(file).parts[-3:])}:{line}"


def page(report: Report) -> str:
    """The report for a terminal."""
    tables = [section.text() for section in report.sections.values()]
    unproven = "not proven without a card: " + "; ".join(report.notes)
    return "\n\n".join(filter(None, [tables[0], report.problems(), *tables[1:], f"{report.verdict()}\n{unproven}"]))


def write_html(report: Report, path: Path) -> None:
    """Write the report as a page with the picture of a step's memory."""
    parts = []
    for name, each in report.sections.items():
        head = tag("tr", [tag("th", column, class_="said") for column in each.columns])
        rows = [tag("tr", [tag("td", str(cell), class_="said") for cell in row]) for row in each.rows]
        table = tag("table", tag("thead", head), tag("tbody", rows), class_="plain")
        content: list[Markup | None] = [tag("div", table, class_="scroll")]
        if name == "memory":
            content.insert(0, _picture(each.values))
        parts.append(section(name, each.title, content, lead="; ".join(each.remarks) or None))
        if name == "rehearsal" and report.findings:
            told = [tag("li", tag("b", f"{short(each.file, each.line)} " if each.file else "", each.key), " ",
                        each.message, tag("br"), each.suggestion) for each in (*report.errors, *report.warnings)]
            parts.append(section("findings", "What is wrong", tag("ul", told)))
    head = tag("header", tag("p", "sbkit check --as", class_="over"), tag("h1", report.recipe))
    foot = tag("footer", "Not proven without a card: ", "; ".join(report.notes))
    path.write_text(filled(report.recipe, text(head, tag("main", parts), foot)), encoding="utf-8")


def _picture(timeline: Line) -> Markup | None:
    size = [value / GIB for value in timeline["bytes"]]
    return charts.curves("Memory during a step, in GiB", [charts.Series("allocated", range(len(size)), size)],
                         [(float(timeline["peak_at"]), "peak")], x_label="")
