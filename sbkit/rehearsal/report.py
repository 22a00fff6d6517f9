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
UNREACHED, LACKS = "not reached", "the fake GPU has no"
NEEDS_GPU = ("the values that kernels compute, since no kernel runs here",
             "the speed of kernels, and how much communication between ranks overlaps with backward",
             "`make gpu` tests these on a real GPU")


def assemble(recipe: str, lines: Sequence[Line], count: int, card: Card, seconds: float) -> Report:
    """Make the report from the log lines of all processes of a rehearsal."""
    lacks = dict.fromkeys(line["lacks"] for line in lines if "lacks" in line)
    checks = [line["report"] for line in lines if "report" in line]
    costs = [check["sections"].get("cost", {}).get("values", {}) for check in checks]
    report = Report(recipe, seconds=seconds, notes=[
        *(f"{name}, which the fake GPU does not have" for name in lacks),
        *(why for cost in costs for why in cost.get("inexact", ())), *NEEDS_GPU])
    for check in checks:
        report.add([Finding(**finding) for finding in (*check.get("errors", ()), *check.get("warnings", ()))])

    findings = _distinct_findings(lines)
    for finding in findings:
        values = {name: value for name, value in finding.items() if name not in ("stage", "ends")}
        report.add([Finding(**values | {"file": finding["file"] or recipe})])

    figures: Line = {}
    collectives = [line["collectives"] for line in lines if "collectives" in line]
    if collectives:
        figures["collectives"] = sum(collectives)
    for line in lines:
        if line.get("rank") == 0:
            figures |= line.get("figures", {})
    report.sections["rehearsal"] = _stages(lines, findings, report, count, card, figures)
    _add_unreached(report, recipe, list(lacks))
    if "host_ms" in figures:
        _add_figures(report, recipe, figures, count, card)
    return report


def _distinct_findings(lines: Sequence[Line]) -> list[Line]:
    """Return the findings of all ranks without duplicates, and of errors that end a launch only the first."""
    with_finding = [line for line in lines if "finding" in line]
    first: dict[tuple[Any, ...], Line] = {}
    for line in sorted(with_finding, key=lambda line: line.get("at", float("inf"))):
        finding = line["finding"] | {"stage": _report_stage(line["launch"], line["finding"]["stage"])}
        first.setdefault((line["launch"],) if finding["ends"] else _identity(finding), finding)
    return list({_identity(finding): finding for finding in first.values()}.values())


def _add_unreached(report: Report, recipe: str, lacks: Sequence[str]) -> None:
    """Add a finding for the stages that no process reached, unless an error says why."""
    unreached = [stage for stage, result, *_ in report.sections["rehearsal"].rows
                 if result == UNREACHED or LACKS in result]
    if not unreached or report.errors:
        return
    if lacks:
        severity, why = WARNING, f"since the fake GPU has no {', '.join(lacks)}"
        what_to_do = "test these on a real GPU: make gpu"
    else:
        severity, why = ERROR, "and no process reported why"
        what_to_do = "run it with `python -m sbkit.rehearsal.fake_gpu -- sbkit train`"
    report.add([Finding(severity, "not-reached", recipe, 0, "", f"{', '.join(unreached)}: not reached, {why}",
                        what_to_do)])


def _add_figures(report: Report, recipe: str, figures: Line, count: int, card: Card) -> None:
    """Add the figures of a step, and a warning if the corpus is read more slowly than the GPUs train."""
    reads, gpu_ms = figures.get("reads"), figures["card_ms"]
    if reads is not None and gpu_ms is not None:
        audio = min(figures["batch_seconds"], figures["step_seconds"] / count)
        step_ms = least_step_seconds(audio / figures["batch_seconds"], gpu_ms, LAUNCH_MS * figures["launches"])
        advice = ReadingRate(*reads).advice(figures["num_workers"], 1000 * audio / step_ms, count)
        if advice is not None:
            report.add([Finding(WARNING, "slow-reading", recipe, 0, "num_workers", *advice)])
    report.sections["figures"] = _figures(figures, card)
    timeline = figures["timeline"]
    rows = [[_memory_size(size), short(file, line) if file else "in torch", source[:60]]
            for file, line, size, source in timeline["lines"]]
    between_steps = f"plus {_memory_size(figures['held_bytes'])} between steps: weights and optimizer states"
    report.sections["memory"] = Section("Memory at the peak of a step", ["memory", "allocated at", "line"], rows,
                                        [between_steps], timeline)


def _identity(finding: Line) -> tuple[Any, ...]:
    return finding["code"], finding["file"], finding["line"] or finding["message"]


def _report_stage(launch: str, stage: str) -> str:
    """Return the stage of the report that a stage of a launch belongs to."""
    if launch == "resume" and stage != "test":
        return "kill and resume"
    if launch == "fail" and stage not in STAGES[-1:]:
        return "a batch that doesn't fit"
    return {"kill": "kill and resume"}.get(stage, stage)


def _stages(lines: Sequence[Line], findings: Sequence[Line], report: Report, count: int, card: Card,
            figures: Line) -> Section:
    """Make the table of stages: how each ended, and the seconds that rank 0 took for it."""
    seconds: dict[str, float] = {}
    skipped: dict[str, str] = {}
    for launch in dict.fromkeys(line["launch"] for line in lines):
        of_rank_0 = [line for line in lines if line["launch"] == launch and line.get("rank", 0) == 0]
        _add_times(of_rank_0, launch, seconds)
        stage = ""
        for line in of_rank_0:
            stage = line.get("stage", stage)
            if "skip" in line:
                skipped[_report_stage(launch, stage)] = line["skip"]
    failed = {finding["stage"] for finding in findings if finding["severity"] == ERROR}
    if any(line["report"]["errors"] for line in lines if "report" in line):
        failed.add("check")

    def result(stage: str) -> str:
        if stage in failed:
            return "failed"
        if stage in skipped:
            return f"skipped: {skipped[stage]}"
        return "ok" if stage in seconds else UNREACHED

    world = min(count, RANKS)
    stages = STAGES[:-1] if world == 1 else STAGES  # without a rank that fails
    rows = [[stage, result(stage), f"{seconds[stage]:.1f}" if stage in seconds else ""] for stage in stages]
    ranks = f"{count} x {card.name}" + (f", simulated with {world} ranks" if world < count else "")
    return Section(f"Rehearsal on {ranks}; data: {figures.get('data', 'none')}", ["stage", "result", "seconds"], rows,
                   values={"cards": count, "card": card.name, "ranks": world, "data": figures.get("data"),
                           "stages": {stage: {"result": outcome, "seconds": seconds.get(stage)}
                                      for stage, outcome, _ in rows}})


def _add_times(lines: Sequence[Line], launch: str, seconds: dict[str, float]) -> None:
    """Add the time of each stage of a launch of one rank to ``seconds``, by the report's stages."""
    begins = [(line["at"], _report_stage(launch, line["stage"])) for line in lines if line.keys() >= {"stage", "at"}]
    last_begin = begins[-1][0] if begins else 0.0
    begins.append((lines[-1].get("ended", last_begin), ""))
    for (start, stage), (end, _) in itertools.pairwise(begins):
        seconds[stage] = seconds.get(stage, 0.0) + end - start


def _figures(figures: Line, card: Card) -> Section:
    launch_ms = LAUNCH_MS * figures["launches"]
    gpu_ms = figures["card_ms"]
    nodes = figures.get("graph_nodes", {})
    is_launch_bound = gpu_ms is not None and launch_ms > gpu_ms
    estimated = figures.get("estimated_bytes")
    peak = max(figures["peak_bytes"], figures.get("reserved_bytes", 0))
    rows = [["micro-batch per GPU", f"{figures['batch']} in {figures['precision']}"],
            ["kernels per step", f"{figures['launches']:,} launches, {figures['copies']:,} copies"],
            ["host time per step", f"{figures['host_ms']:.1f} ms on a core here; an estimate with a GPU's driver: "
             f"{launch_ms:.1f} ms"]]  # as the host of an H200 took for its launches
    if nodes:
        counts = " and ".join(f"{count:,} nodes for the {kind}" for kind, count in nodes.items())
        rows.insert(2, ["CUDA graphs", f"{counts}, in {_memory_size(figures['graph_bytes'])} that all share"])
    if gpu_ms is not None:
        if gpu_ms < TOY_MS:
            bound = "too little to keep the GPU busy"
        else:
            bound = "launch-bound" if is_launch_bound else "not launch-bound"
        rows.append(["GPU time per step", f"an estimate: at least {gpu_ms:.1f} ms for "
                     f"{figures['operations'] / 1e12:.3g} TFLOP, {figures['bytes'] / 1e9:.3g} GB: {bound}"])
    rows.append(["peak memory", f"{_memory_size(peak)} of {_memory_size(card.memory)}" + (
        f"; the check estimates {_memory_size(estimated)}" if estimated else "")])
    if "largest_batch" in figures:
        rows.append(["largest batch of the estimate", f"{figures['largest_batch']}: "
                     f"{_memory_size(figures['largest_peak_bytes'])}"])
    if "waits" in figures:
        waits = figures["waits"]  # file, line and number a step of each
        places = [short(file, line) if file else "in a backward of torch" for file, line, _ in waits[:2]]
        rows.append(["host waits per step", "; ".join([f"{sum(number for *_, number in waits):.3g}", *places])])
    if "collectives" in figures:
        rows.append(["collectives", f"{figures['collectives']:,}, the same on all ranks"])
    remarks = []
    if is_launch_bound and gpu_ms >= TOY_MS:
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
