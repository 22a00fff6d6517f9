"""The report of a rehearsal, as text, as an HTML page and as JSON."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sbkit.data.rate import ReadingRate
from sbkit.recipe.report import ERROR, WARNING, Finding, Report, Section
from sbkit.recipe.speed import LAUNCH_MS, least_step_seconds
from sbkit.rehearsal.cards import GIB, Card
from sbkit.rehearsal.run import RANKS, Line
from sbkit.score.report import charts
from sbkit.score.report.templates import render

#: The stages of a run, in the order of the report.
STAGES = ("corpus", "check", "start", "count of FLOPs", "steps", "a step of the planned batch",
          "the largest batch of the estimate", "a batch that doesn't fit", "validation", "checkpoint",
          "kill and resume", "test", "export", "model.pt2 on the card", "a rank that fails")
#: Milliseconds of a GPU step below which the model is a toy, and no larger batch keeps the GPU busy.
TOY_MS = 0.05
UNREACHED, LACKS = "not reached", "the null card has no"
NEEDS_GPU = ("the values that kernels compute, since no kernel runs here",
             "the speed of kernels, and how much communication between ranks overlaps with backward",
             "`make gpu` tests these on a real GPU")


def assemble(recipe: str, found: Sequence[Line], count: int, card: Card, seconds: float) -> Report:
    """Make the report from the log lines of all processes of a rehearsal."""
    lacks = dict.fromkeys(line["lacks"] for line in found if "lacks" in line)
    counts = [line["report"]["sections"].get("cost", {}).get("values", {}) for line in found if "report" in line]
    notes = [*(f"{name}, which the null card does not have" for name in lacks),
             *(why for each in counts for why in each.get("inexact", ())), *NEEDS_GPU]
    report = Report(recipe, seconds=seconds, notes=notes)
    figures: Line = {}
    if counts := [line["collectives"] for line in found if "collectives" in line]:
        figures["collectives"] = sum(counts)
    for line in found:
        figures |= line.get("figures", {}) if line.get("rank") == 0 else {}
        for each in (*line.get("report", {}).get("errors", ()), *line.get("report", {}).get("warnings", ())):
            report.add([Finding(**each)])
    # The findings of all ranks, without duplicates; of errors that end a launch, only the first.
    kept: dict[tuple[Any, ...], Line] = {}
    for line in sorted((line for line in found if "finding" in line), key=lambda line: line.get("at", float("inf"))):
        each = line["finding"] | {"stage": _report_stage(line["launch"], line["finding"]["stage"])}
        kept.setdefault((line["launch"],) if each["ends"] else _identity(each), each)
    findings = list({_identity(each): each for each in kept.values()}.values())
    report.add(Finding(**{name: value for name, value in each.items() if name not in ("stage", "ends")} |
                       {"file": each["file"] or recipe}) for each in findings)
    report.sections["rehearsal"] = _stages(found, findings, report, count, card, figures)
    unreached = [row[0] for row in report.sections["rehearsal"].rows if row[1] == UNREACHED or LACKS in row[1]]
    if unreached and not report.errors:
        severity, why, what_to_do = (
            WARNING, f"since the null card has no {', '.join(lacks)}", "test these on a real GPU: make gpu") \
            if lacks else (ERROR, "and no process reported why",
                           "run it with `python -m sbkit.rehearsal.nullcard -- sbkit train`")
        report.add([Finding(severity, "not-reached", recipe, 0, "", f"{', '.join(unreached)}: not reached, {why}",
                            what_to_do)])
    if "host_ms" in figures:
        reads, gpu_ms = figures.get("reads"), figures["card_ms"]
        if reads is not None and gpu_ms is not None:
            audio = min(figures["batch_seconds"], figures["step_seconds"] / count)
            step_ms = least_step_seconds(audio / figures["batch_seconds"], gpu_ms, LAUNCH_MS * figures["launches"])
            slow = ReadingRate(*reads).advice(figures["num_workers"], 1000 * audio / step_ms, count)
            report.add([] if slow is None else [Finding(WARNING, "slow-reading", recipe, 0, "num_workers", *slow)])
        report.sections["figures"] = _figures(figures, card)
        timeline = figures["timeline"]
        rows = [[_memory_size(size), short(file, line) if file else "in torch", source[:60]]
                for file, line, size, source in timeline["lines"]]
        held = f"plus {_memory_size(figures['held_bytes'])} between steps: weights and optimizer states"
        report.sections["memory"] = Section("Memory at the peak of a step", ["memory", "allocated at", "line"], rows,
                                            [held], timeline)
    return report


def _identity(finding: Line) -> tuple[Any, ...]:
    return finding["code"], finding["file"], finding["line"] or finding["message"]


def _report_stage(launch: str, stage: str) -> str:
    """Return the stage of the report that a stage of a launch belongs to."""
    if launch == "resume" and stage != "test":
        return "kill and resume"
    if launch == "fail" and stage not in STAGES[-1:]:
        return "a batch that doesn't fit"
    return {"kill": "kill and resume"}.get(stage, stage)


def _stages(found: Sequence[Line], findings: Sequence[Line], report: Report, count: int, card: Card,
            figures: Line) -> Section:
    seconds, skipped = dict[str, float](), dict[str, str]()
    for launch in dict.fromkeys(line["launch"] for line in found):
        mine = [line for line in found if line["launch"] == launch and line.get("rank", 0) == 0]
        times = [(line["at"], _report_stage(launch, line["stage"])) for line in mine if line.keys() >= {"stage", "at"}]
        times.append((mine[-1].get("ended", times[-1][0] if times else 0.0), ""))
        for (start, stage), (end, _) in itertools.pairwise(times):
            seconds[stage] = seconds.get(stage, 0.0) + end - start
        stage = ""
        for line in mine:
            stage = line.get("stage", stage)
            if "skip" in line:
                skipped[_report_stage(launch, stage)] = line["skip"]
    failed = {each["stage"] for each in findings}
    if any(line["report"]["errors"] for line in found if "report" in line):
        failed.add("check")
    world = min(count, RANKS)
    rows = []
    for stage in STAGES:
        if stage == STAGES[-1] and world == 1:
            continue
        result = "failed" if stage in failed else f"skipped: {skipped[stage]}" if stage in skipped else \
            "ok" if stage in seconds else UNREACHED
        rows.append([stage, result, f"{seconds[stage]:.1f}" if stage in seconds else ""])
    ranks = f"{count} x {card.name}" + (f", simulated with {world} ranks" if world < count else "")
    return Section(f"Rehearsal on {ranks}; data: {figures.get('data', 'none')}", ["stage", "result", "seconds"], rows,
                   values={"cards": count, "card": card.name, "ranks": world, "data": figures.get("data"),
                           "stages": {row[0]: {"result": row[1], "seconds": seconds.get(row[0])} for row in rows}})


def _figures(figures: Line, card: Card) -> Section:
    launch_ms, gpu_ms = LAUNCH_MS * figures["launches"], figures["card_ms"]
    nodes = figures.get("graph_nodes", {})
    launch_bound = gpu_ms is not None and launch_ms > gpu_ms
    estimated, peak = figures.get("estimated_bytes"), max(figures["peak_bytes"], figures.get("reserved_bytes", 0))
    rows = [["micro-batch per GPU", f"{figures['batch']} in {figures['precision']}"],
            ["kernels per step", f"{figures['launches']:,} launches, {figures['copies']:,} copies"],
            ["host time per step", f"{figures['host_ms']:.1f} ms on a core here; an estimate with a GPU's driver: "
             f"{launch_ms:.1f} ms"]]  # as the host of an H200 took for its launches
    if nodes:
        counts = " and ".join(f"{count:,} nodes for the {kind}" for kind, count in nodes.items())
        rows.insert(2, ["CUDA graphs", f"{counts}, in {_memory_size(figures['graph_bytes'])} that all share"])
    if gpu_ms is not None:
        bound = "too little to keep the GPU busy" if gpu_ms < TOY_MS else \
            "launch-bound" if launch_bound else "not launch-bound"
        rows.append(["GPU time per step", f"an estimate: at least {gpu_ms:.1f} ms for "
                     f"{figures['operations'] / 1e12:.3g} TFLOP, {figures['bytes'] / 1e9:.3g} GB: {bound}"])
    rows.append(["peak memory", f"{_memory_size(peak)} of {_memory_size(card.memory)}" + (
        f"; the check estimates {_memory_size(estimated)}" if estimated else "")])
    if "largest_batch" in figures:
        rows.append(["largest batch of the estimate", f"{figures['largest_batch']}: "
                     f"{_memory_size(figures['largest_peak_bytes'])}"])
    if "waits" in figures:
        rows.append(["host waits per step", f"{sum(wait[2] for wait in figures['waits']):.3g}" + "".join(
            f"; {short(wait[0], wait[1]) if wait[0] else 'in a backward of torch'}" for wait in figures["waits"][:2])])
    if "collectives" in figures:
        rows.append(["collectives", f"{figures['collectives']:,}, the same on all ranks"])
    remarks = []
    if launch_bound and gpu_ms >= TOY_MS:
        remarks.append("the GPU waits for the host in each step: a larger max_batch_seconds (and step_seconds) helps"
                       + ("" if nodes else "; `graphs: true` launches its kernels at once"))
    return Section("Figures", ["figure", "value"], rows, remarks, values={
        name: value for name, value in figures.items() if name not in ("timeline", "exports", "data")})


def _memory_size(count: float) -> str:
    return f"{count / GIB:.2f} GiB" if count >= 0.1 * GIB else f"{count / 2**20:.1f} MiB"


def short(file: str, line: int) -> str:
    """Return a file and line, with the last three parts of the path."""
    return f"{'/'.join(Path(file).parts[-3:])}:{line}"


def page(report: Report) -> str:
    """Return the report for a terminal."""
    tables = [section.text() for section in report.sections.values()]
    untested = "not tested without a GPU: " + "; ".join(report.notes)
    return "\n\n".join(filter(None, [tables[0], report.problems(), *tables[1:], f"{report.verdict()}\n{untested}"]))


def write_html(report: Report, path: Path) -> None:
    """Write the report as an HTML page, with a chart of a step's memory."""
    chart = None
    if "memory" in report.sections:
        timeline = report.sections["memory"].values
        size = [value / GIB for value in timeline["bytes"]]
        chart = charts.curves("Memory during a step, in GiB", [charts.Series("allocated", range(len(size)), size)],
                              [(float(timeline["peak_at"]), "peak")], x_label="")
    path.write_text(render("rehearsal/report.html", "page.js", title=report.recipe, sections=report.sections,
                           findings=[*report.errors, *report.warnings] if report.findings else [], chart=chart,
                           notes=report.notes, short=short), encoding="utf-8")
