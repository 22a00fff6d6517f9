"""The tables of a check on what a recipe costs, with warnings about what would be slow or too large."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sbkit.data import mixture, rate
from sbkit.data.columns import BatchColumns
from sbkit.data.reader import Reader
from sbkit.errors import summary
from sbkit.nn import attention_kernel
from sbkit.recipe import batch_size, cost, flops, price, trace
from sbkit.recipe.batch_size import BatchSize
from sbkit.recipe.check_request import CheckRequest
from sbkit.recipe.corpus_check import PlannedTraining, plan_training
from sbkit.recipe.ownership import Owned
from sbkit.recipe.report import Report, Section
from sbkit.recipe.source import Findings
from sbkit.recipe.speed import limits_of
from sbkit.recipe.trace import Trace
from sbkit.system.console import counted
from sbkit.system.environment import describe

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _PlannedRun:
    """A run whose cost is estimated."""

    traced: Trace
    owned: Owned
    device: torch.device
    precision: str
    training: PlannedTraining | None
    """None if the corpus is not prepared."""
    measured: cost.StepMeasurement | None
    typical_seconds: float | None
    """The length of a typical utterance of the corpus; None if it is unknown or doesn't matter."""

    def estimate(self) -> cost.CostEstimate | None:
        """Estimate what the run costs, with the batches that its recipe has now."""
        return cost.estimate_cost(self.traced, self.owned, self.device, self.precision, self.measured,
                                  self.typical_seconds)


def sections(owned: Owned, traced: Trace, findings: Findings, report: Report,
             request: CheckRequest) -> dict[str, Section]:
    """The tables ``cost`` and, if it is asked for, ``price``; the report gets notes on what is left out."""
    if not traced.complete:
        return {}
    device = request.device
    if request.starting and cost.memory_of(str(device)) is None:
        return {}

    precision = request.precision(traced.built.hparams)
    has_errors = any(finding.severity == "error" for finding in findings)
    measured = request.measure() if request.measure is not None and not has_errors else None
    training = plan_training(traced, device)
    typical_seconds = None
    if training is not None and not request.starting:  # which needs to know what fits: the longest utterances decide
        typical_seconds = flops.typical_seconds(training.train.durations)
    run = _PlannedRun(traced, owned, device, precision, training, measured, typical_seconds)

    try:
        estimate = run.estimate()
    except Exception as error:  # such as an operation that fake tensors lack; the run itself may work
        logger.debug("no cost", exc_info=True)
        report.notes.append(f"the cost: {trace.needs_real_tensors(error) or summary(error)}")
        return {}
    if estimate is None:
        report.notes.append("the cost: the recipe's batching has no max_batch_seconds")
        return {}

    results = batch_size.result_file(batch_size.model_of(owned.roots), traced.keys, precision, device)
    tried = batch_size.cached(results)
    estimate = _with_automatic_batches(run, estimate, tried)
    estimate.check_fits(findings, traced.built.nodes.get("batching"), tried)
    if not request.starting:
        _check_reading(run, estimate, findings)

    cost_table = _cost_section(run, estimate, tried)
    cost_table.remarks += attention_remarks(traced, owned, device, precision, findings)
    tables = {"cost": cost_table}
    if request.pricing is not None and not has_errors:
        price_table = _price_section(run, estimate, request.pricing, report)
        if price_table is not None:
            cost_table.rows = [row for row in cost_table.rows if not row[0].startswith("time ")]  # the price has these
            tables["price"] = price_table
    return tables


def _with_automatic_batches(run: _PlannedRun, estimate: cost.CostEstimate,
                            tried: Sequence[BatchSize]) -> cost.CostEstimate:
    """The estimate with the batches that ``max_batch_seconds: auto`` would have here; the recipe's own otherwise.

    From here on the recipe's batches have this size, for the other tables of the check.
    """
    batching = run.traced.keys.batching
    memory = cost.memory_of(str(run.device))
    largest: float = max((size.seconds for size in tried), default=0)
    if not largest and memory is not None:
        largest = estimate.largest(memory)
    if not batching.auto or not estimate.cost.seconds < largest < batching.max_batch_seconds:
        return estimate
    batching.max_batch_seconds = int(largest)
    return run.estimate() or estimate


def _check_reading(run: _PlannedRun, estimate: cost.CostEstimate, findings: Findings) -> None:
    """Warn if a GPU would wait for recordings to be read. Recordings that lie elsewhere aren't read for that."""
    training = run.training
    limits = limits_of(run.device, run.precision) if run.device.type == "cuda" and training is not None else None
    if training is None or limits is None or training.train.has_urls:
        return
    keys = run.traced.keys
    reader = Reader(training.train, None, augment=keys.augment, sample_rate=keys.sample_rate,
                    columns=BatchColumns(run.traced.task.columns, keys), as_stored=True)
    update_seconds = keys.batching.update_seconds
    audio_s_per_s = update_seconds / estimate.least_step_seconds(update_seconds, limits)
    advice = rate.measure(reader).advice(keys.num_workers, audio_s_per_s)
    if advice is not None:
        findings.warning("slow-reading", run.traced.built.place("num_workers"), "num_workers", *advice)


def _cost_section(run: _PlannedRun, estimate: cost.CostEstimate, tried: Sequence[BatchSize]) -> Section:
    """The table of memory and, once the corpus is prepared, of the time of an epoch and of the run."""
    keys = run.traced.keys
    if run.training is None:
        table = cost.section(estimate, tried)
    else:
        table = cost.section(estimate, tried, mixture.hours_of_pass(run.training.train), run.training.plan.passes,
                             keys.epoch_counter.limit)
    if keys.batching.auto:
        table.remarks.append(f"max_batch_seconds: auto is measured before the first step; here it is "
                             f"{keys.batching.max_batch_seconds:g} s")
    return table


def attention_remarks(traced: Trace, owned: Owned, device: torch.device, precision: str,
                      findings: Findings) -> list[str]:
    """Remarks on the kernels that compute attention on this device; a slow one is a warning too."""
    remarks = []
    for kernel in attention_kernel.kernels(owned.roots.values(), device, precision, traced.keys.accelerate):
        remarks.append(f"attention on {device}: torch's {kernel.name} kernel ({kernel.why})")
        if not kernel.fused:
            findings.warning("slow-attention", traced.built.place("nhead"), "nhead",
                             f"attention on {device} is not fused: {kernel.why}", kernel.fix)
    return remarks


def _price_section(run: _PlannedRun, estimate: cost.CostEstimate, pricing: price.PriceRequest,
                   report: Report) -> Section | None:
    """The price of the whole run; None, with a note, if its length or the device's speed is unknown."""
    if run.training is None:
        report.notes.append("the price: the corpus is not prepared, so the length of the run is unknown; "
                            "prepare it with sbkit prepare, the same recipe and keys")
        return None
    keys = run.traced.keys
    plan = run.training.plan
    epochs = keys.epoch_counter.limit
    audio = plan.padded_seconds(pricing.processes)

    seconds_per_second = None if run.measured is None else run.measured.planned
    if seconds_per_second is not None:
        step_seconds = seconds_per_second * audio
    else:
        limits = limits_of(run.device, run.precision, pricing.device or "")
        if limits is None:
            report.notes.append(f"the price: the speed of {run.device} is unknown; --measure times a few steps")
            return None
        step_seconds = estimate.least_step_seconds(audio, limits)

    if pricing.device:
        device_name = pricing.device
    elif run.device.type == "cuda":
        device_name = torch.cuda.get_device_name(run.device)
    else:
        device_name = f"{describe()['cpu']}, {counted(torch.get_num_threads(), 'thread')}"
    dev_hours, test_hours = (keys.corpus.manifest(split).hours for split in ("dev", "test"))
    evaluated = 3600 * (epochs * dev_hours + test_hours) / pricing.processes
    return price.section(pricing, device_name, epochs * len(plan), step_seconds, audio, evaluated,
                         measured=seconds_per_second is not None)
