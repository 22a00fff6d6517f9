"""Checks a recipe as a whole: reads it, builds it as a run does, and finds mistakes that would end a run later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from speechbrain.utils.checkpoints import CKPT_PREFIX
from speechbrain.utils.run_opts import RunOptions

from sbkit.data import leaks, mixture, rate
from sbkit.data.augment import planned_seconds
from sbkit.data.columns import BatchColumns
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.mixture import Mixture
from sbkit.data.plan import Plan
from sbkit.data.reader import Reader
from sbkit.data.sources import check_exists
from sbkit.data.sources.base import MissingRecordings
from sbkit.data.splits import SPLITS
from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError, summary
from sbkit.nn import attention_kernel
from sbkit.recipe import (
    batch_size,
    cost,
    devices,
    flops,
    ownership,
    parts,
    price,
    real_batches,
    trace,
)
from sbkit.recipe.build import Built, build
from sbkit.recipe.files import refuse_another_run
from sbkit.recipe.keys import COMPLETE, TaskClass
from sbkit.recipe.reading import read, read_without_imports, without_imports_from
from sbkit.recipe.report import Report, Section, listed
from sbkit.recipe.settings import check_accumulation, check_options
from sbkit.recipe.source import UNKNOWN, Findings, Node, Place
from sbkit.recipe.speed import limits_of, native_precision
from sbkit.recipe.values import data, static
from sbkit.system import disk
from sbkit.system.console import counted, logging_disabled, stored_json
from sbkit.system.environment import describe

logger = logging.getLogger(__name__)


def check(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, run_opts: RunOptions | None = None,
    run: bool = True, starting: bool = False, measure: Callable[[], cost.StepMeasurement] | None = None,
    pricing: price.PriceRequest | None = None, needed: Sequence[str] = SPLITS,
) -> Report:
    """Check a recipe; the report has all mistakes at once.

    path, overrides : the recipe's file and values that replace those in it
    run_opts : SpeechBrain's run options; their numbers are checked, and the cost depends on device and precision
    run : import what the recipe names, build its objects and check ownership, devices, shapes, vocabulary and cost;
        otherwise nothing is built or called, and only SpeechBrain, torch and sbkit are imported
    starting : a run starts on this machine: its corpus must exist, its labels are checked once it is prepared,
        and only for a GPU the cost is counted, as its memory is limited, and the modules are moved to it
    measure : measures a few steps for the cost
    pricing : the request to predict the price of the whole run
    needed : the splits that the corpus must have
    """
    started = time.perf_counter()
    report, findings = Report(str(path), built=run), Findings()
    check_options(run_opts, findings)
    if run:
        given = overrides or {}
        root = read(Path(path), given, found := Findings())
        size = _characters(root) if root is not None and not starting and "output_neurons" not in given else None
        if size is not None:
            root = read(Path(path), {**given, "output_neurons": size}, found := Findings())
        findings.include(found)
    else:
        with without_imports_from(Path.cwd(), Path(path).parent, Path(path).parent.parent):
            root, notes = read_without_imports(Path(path), overrides or {}, findings)
        report.notes += notes
        report.notes.append("modules, devices, shapes, labels and cost: nothing is built with --no-run")
        for node in root.value["corpus"].walk() if root is not None and "corpus" in root.value else ():
            source = node.value.get("source") if isinstance(node.value, dict) else None
            named = data(source) if source is not None else None
            if source is not None and named and isinstance(named, (str, dict)):  # else the demo corpus
                try:
                    check_exists(named)
                except SbkitError as error:
                    _add_missing("no-corpus", source.source or source, error, findings, starting)
    if root is not None:
        check_accumulation(root, run_opts, findings)
    if root is not None and not findings and not any(node.tag for node in root.walk()):
        findings.warning("missing-key", Place(str(path)), "brain", "nothing in it is built (!new:, !name:), so nothing "
                         "can be checked", COMPLETE)
    elif root is not None and run:
        _check_built(root, findings, report, _Request(run_opts, starting, measure, pricing, needed))
    owned = {finding.key for finding in findings if finding.code == "not-owned"}  # more specific
    findings[:] = [each for each in findings if each.code != "unread-key" or each.key not in owned]
    shadowed = [each.key for each in findings if each.code == "shadowed"]
    findings[:] = [each for each in findings if each.code != "vocabulary"  # differs because of that
                   or not any(key in each.message for key in shadowed)]
    report.add(findings)
    if root is not None and not report.errors and not any(
            node.value is UNKNOWN or node.tag.startswith("!applyref:") for node in root.walk()):
        report.tree = root
    report.seconds = time.perf_counter() - started
    return report


def _characters(root: Node) -> int | None:
    """The number of tokens that the prepared corpus's characters need, if a run will replace the recipe's by it."""
    node = root.value.get("tokenizer")
    given = {name: static(each) for name, each in node.value.items()} if node and isinstance(node.value, dict) else {}
    size, folder = given.get("vocab_size"), Path(str(given.get("folder")))
    if given.get("model_type") != "char" or "output_neurons" not in root.value or \
            size != static(root.value["output_neurons"]) or (folder / f"{size}_char.model").exists():
        return None
    sizes = [path.name.partition("_")[0] for path in folder.glob("*_char.model")]
    return int(sizes[0]) if len(sizes) == 1 and sizes[0].isdigit() else None


@dataclass(frozen=True)
class _Request:
    """What was asked of a check; see ``check``."""

    run_opts: RunOptions | None
    starting: bool
    measure: Callable[[], cost.StepMeasurement] | None
    pricing: price.PriceRequest | None
    needed: Sequence[str]

    @property
    def device(self) -> torch.device:
        return _device(self.run_opts)


def _check_built(root: Node, findings: Findings, report: Report, request: _Request) -> None:
    """Build the recipe and check what it builds.

    The order matters: a forward needs modules that are named and owned, the cost needs a forward, and what moves
    modules to a device or trains on real batches comes last.
    """
    with logging_disabled(logging.INFO), build(root, findings) as built:  # the run itself logs messages of constructors
        ownership.check_pretrainer(built, findings)
        modules = ownership.check_modules(built, findings)
        if modules is None:
            if "modules" in root.value:
                parts.check_named(built, torch.nn.ModuleDict(), False, findings)
                report.notes.append("modules, devices, shapes and cost: the modules could not be built")
            return
        complete = len(modules) == sum(module is not None for module in built.hparams["modules"].values())
        owned = ownership.Owned(modules)
        _check_modules(built, modules, owned, complete, request.run_opts, findings)

        report.sections["devices"] = devices_table = devices.section(built, owned)
        traced = trace.trace(built, modules, findings)
        report.partly = traced.brain is not None and not traced.complete
        if traced.note:
            report.notes.append(traced.note + ("; so the cost is unknown" if report.partly else ""))
        start = None
        if traced.task is not None:
            traced.task.check_outputs(traced, findings)
            start = traced.task.check_start(traced, findings)

        _check_corpus(built, traced.task, findings, request.needed, request.starting)
        _check_files(built, findings, request.starting)
        _check_output(built, owned, findings, request)
        for problem in traced.keys.missing() if traced.keys is not None else ():
            missing = SbkitError(problem.message, hint=problem.hint)
            _add_missing("not-installed", built.nodes[problem.key], missing, findings, request.starting)
        labels, note = (None, "") if request.starting else _check_prepared(traced, findings)

        sound = not any(finding.severity == "error" for finding in findings)
        if traced.brain is not None and sound:
            report.notes += filter(None, [real_batches.try_batches(traced, findings)])
        learning = _learning(traced, torch.nn.ModuleDict(modules), findings)
        # Before the mixture's table, as the batches of `max_batch_seconds: auto` are known only then.
        costs = _cost(owned, traced, findings, report, request.run_opts, request.starting, request.measure,
                      request.pricing)
        sections = {
            "shapes": trace.section(traced), "start": start, "learning": learning, "labels": labels,
            "mixture": _mixture(traced, request.device), "leaks": None if request.starting else _leaks(built), **costs}
        if complete and not (request.starting and request.device.type == "cpu"):  # that run moves nothing
            report.notes += filter(None, [devices.check_moved(owned, devices_table, traced, findings)])
        report.sections |= {name: section for name, section in sections.items() if section is not None}
        if note:
            report.notes.append(note)


def _check_modules(built: Built, modules: dict[str, torch.nn.Module], owned: ownership.Owned, complete: bool,
                   run_opts: RunOptions | None, findings: Findings) -> None:
    """Check what trains: that it is owned, saved, named as keys name it, compiled, and in an optimizer.

    complete : whether all modules could be built
    """
    if complete:
        ownership.check_ownership(built, owned, findings)
    if run_opts is not None and run_opts.jit and not run_opts.compile:
        _check_jit(modules, run_opts.jit_module_keys or list(modules), findings)
    parts.check_named(built, torch.nn.ModuleDict(modules), complete, findings)
    if complete:
        ownership.check_saved(built, owned, findings)  # after freezing: frozen weights need not be saved
    ownership.check_optimizer(built, owned, findings)


def _check_jit(modules: Mapping[str, torch.nn.Module], keys: Sequence[str], findings: Findings) -> None:
    """Add an error for each module that ``--jit`` can't compile."""
    for key in keys:
        if key not in modules:
            findings.error("setting", Place(), "--jit_module_keys", f"there is no {key} under modules",
                           f"choose among {listed(modules)}")
            continue
        try:
            torch.jit.script(modules[key])
        except Exception:  # whatever its compiler meets
            findings.error("setting", Place(), "--jit", f"TorchScript can't take {key}", "take --compile instead")


def _check_files(built: Built, findings: Findings, starting: bool) -> None:
    """Add a finding for folders of noises and impulse responses, and for a tokenizer, that aren't there."""
    augmentations = [(stage, "augment") for stage in getattr(built.hparams.get("augment"), "stages", [])]
    for augmentation, key in [*augmentations, (built.hparams.get("nonspeech"), "nonspeech")]:
        if getattr(augmentation, "files", None) is None:
            continue
        try:
            augmentation.files.check()
        except SbkitError as error:
            node = built.origin(augmentation) or built.nodes[key]
            _add_missing("no-recordings", _named_in(node, "folder"), error, findings, starting)

    tokenizer = built.hparams.get("tokenizer")
    if isinstance(tokenizer, Tokenizer) and tokenizer.model is not None and not tokenizer.model.exists():
        missing = SbkitError(f"{tokenizer.model}: no such file", hint="give the path of a sentencepiece model")
        _add_missing("no-tokenizer", _named_in(built.nodes["tokenizer"], "model"), missing, findings, starting)


def _named_in(node: Node, key: str) -> Node:
    """Return where an argument of an object is written; the object's own place if it isn't."""
    argument = node.value.get(key, node) if isinstance(node.value, dict) else node
    return argument.source or argument


def _check_output(built: Built, owned: ownership.Owned, findings: Findings, request: _Request) -> None:
    """Check that the output folder can be written, holds no other run's checkpoints, and has room for one."""
    output = built.hparams.get("output_folder")
    if isinstance(output, str):
        try:
            disk.check_writable(Path(output) / "hyperparams.yaml", "--output_folder")
        except SbkitError as error:
            node = built.nodes["output_folder"]
            _add_missing("no-output", node.source or node, error, findings, request.starting)

    saver = built.nodes.get("checkpointer")
    checkpoints = saver.value.get("checkpoints_dir") if saver is not None and isinstance(saver.value, dict) else None
    if checkpoints is None:
        return
    folder = Path(str(data(checkpoints)))
    if isinstance(output, str):
        try:
            refuse_another_run(str(folder), output)
        except SbkitError as error:
            findings.error("another-run", checkpoints.place, checkpoints.key, error.message, error.hint or "")

    run_opts = request.run_opts
    saves = request.starting and not (run_opts is not None and (run_opts.test_only or run_opts.debug))
    if not saves or any(folder.glob(f"{CKPT_PREFIX}*")):  # it had room before
        return
    trained = sum(p.numel() * p.element_size() for p in owned.parameters.values() if p.requires_grad)
    least = trained * (1 + cost.states_per_parameter(built.hparams.get("opt_class")))
    free = disk.free(folder)
    if least > free:
        findings.error("no-room", checkpoints.place, checkpoints.key, f"a checkpoint in {folder} needs about "
                       f"{disk.size(least)}, and {disk.size(free)} are free there",
                       "make room, or choose another place with --output_folder")


def _leaks(built: Built) -> Section | None:
    """Return the table of what splits share; None before the corpus is prepared."""
    corpus = built.hparams.get("corpus")
    if not isinstance(corpus, Corpus):
        return None
    shared = stored_json(corpus.report_path).get("leaks")
    if shared is None:
        return None
    return Section("Shared by splits", leaks.COLUMNS, leaks.rows(shared), leaks.remarks(shared), {"shared": shared})


def _learning(traced: trace.Trace, modules: torch.nn.ModuleDict, findings: Findings) -> Section | None:
    """The table of trained parts; wrong values of layer_decay are a finding."""
    built = traced.built
    if not traced.complete:
        return None
    known = parts.ParameterGroups(modules, built.hparams)
    steps = {path: parts.frozen_until(value) for path,
             value in known.values_by_path(traced.keys.freeze or {}, "freeze").items()}
    frozen = {path for path, parameter in known.parameters.items() if not parameter.requires_grad}
    until = {path: step for path, step in steps.items() if step} | dict.fromkeys(frozen, parts.FOR_GOOD)
    try:
        factors = traced.brain.rate_factors()
    except SbkitError as error:
        key = "layer_decay"  # learning_rates has been checked
        findings.error("setting", built.place(key), key, error.message.removeprefix(f"{key}: "), error.hint or "")
        return None
    peak = getattr(traced.keys.schedule, "peak", None)  # SpeechBrain's schedulers have none
    return parts.trained_parts(known, until, factors, peak)


def _cost(owned: ownership.Owned, traced: trace.Trace, findings: Findings, report: Report,
          run_opts: RunOptions | None, starting: bool, measure: Callable[[], cost.StepMeasurement] | None,
          pricing: price.PriceRequest | None) -> dict[str, Section]:
    """The tables ``cost`` and, if it is asked for, ``price``."""
    built = traced.built
    if not traced.complete:
        return {}
    device = _device(run_opts)
    if starting and cost.memory_of(str(device)) is None:
        return {}
    chosen = run_opts.precision if _given(run_opts, "precision") else built.hparams.get("precision")
    precision = chosen or RunOptions.precision
    absent = device.type == "cuda" and not torch.cuda.is_available()
    if precision == "auto":
        precision = "bf16" if absent else native_precision(device)
    wrong = any(f.severity == "error" for f in findings)
    measured = measure() if measure is not None and not wrong else None
    planned = _plan(traced, device)
    typical = None if planned is None or starting else flops.typical_seconds(planned[0].durations)
    try:
        estimate = cost.estimate_cost(traced, owned, device, precision, measured, typical)
    except Exception as error:  # such as an operation that fake tensors lack; the run itself may work
        logger.debug("no cost", exc_info=True)
        report.notes.append(f"the cost: {trace.needs_real_tensors(error) or summary(error)}")
        return {}
    if estimate is None:
        report.notes.append("the cost: the recipe's batching has no max_batch_seconds")
        return {}
    tried = batch_size.cached(batch_size.result_file(batch_size.model_of(owned.roots), traced.keys, precision, device))
    batching, memory = traced.keys.batching, cost.memory_of(str(device))
    largest = max((one.seconds for one in tried), default=0) or (0 if memory is None else estimate.largest(memory))
    if batching.auto and estimate.cost.seconds < largest < batching.max_batch_seconds:
        batching.max_batch_seconds = int(largest)
        estimate = cost.estimate_cost(traced, owned, device, precision, measured, typical) or estimate
    estimate.check_fits(findings, built.nodes.get("batching"), tried)
    audio = () if planned is None else (
        mixture.hours_of_pass(planned[0]), planned[1].passes, traced.keys.epoch_counter.limit)
    limits = limits_of(device, precision) if device.type == "cuda" and planned is not None and not starting else None
    if planned is not None and limits is not None and not planned[0].has_urls:
        reader = Reader(planned[0], None, augment=traced.keys.augment, sample_rate=traced.keys.sample_rate,
                        columns=BatchColumns(traced.task.columns, traced.keys), as_stored=True)
        audio_s_per_s = batching.update_seconds / estimate.least_step_seconds(batching.update_seconds, limits)
        slow = rate.measure(reader).advice(traced.keys.num_workers, audio_s_per_s)
        if slow is not None:
            findings.warning("slow-reading", built.place("num_workers"), "num_workers", *slow)
    section = cost.section(estimate, tried, *audio)
    if batching.auto:
        section.remarks.append(f"max_batch_seconds: auto is measured before the first step; here it is "
                               f"{batching.max_batch_seconds:g} s")
    section.remarks += _attention(traced, owned, device, precision, findings)
    sections = {"cost": section}
    if pricing is not None and not wrong:
        if planned is None:
            report.notes.append("the price: the corpus is not prepared, so the length of the run is unknown; "
                                "prepare it with sbkit prepare, the same recipe and keys")
        elif (priced := _price(traced, estimate, device, precision, pricing, planned[1], measured)) is not None:
            section.rows = [row for row in section.rows if not row[0].startswith("time ")]  # the price has these
            sections["price"] = priced
        else:
            report.notes.append(f"the price: the speed of {device} is unknown; --measure times a few steps")
    return sections


def _price(traced: trace.Trace, estimate: cost.CostEstimate, device: torch.device, precision: str,
           pricing: price.PriceRequest, plan: Plan, measured: cost.StepMeasurement | None) -> Section | None:
    """The price of the whole run; None if the device's speed is unknown."""
    keys = traced.keys
    audio, epochs = plan.padded_seconds(pricing.processes), keys.epoch_counter.limit
    if measured is not None and measured.planned is not None:
        step_seconds = measured.planned * audio
    else:
        limits = limits_of(device, precision, pricing.device or "")
        if limits is None:
            return None
        step_seconds = estimate.least_step_seconds(audio, limits)
    name = pricing.device or (torch.cuda.get_device_name(device) if device.type == "cuda" else
                              f"{describe()['cpu']}, {counted(torch.get_num_threads(), 'thread')}")
    dev, test = (keys.corpus.manifest(split).hours for split in ("dev", "test"))
    return price.section(pricing, name, epochs * len(plan), step_seconds, audio,
                         3600 * (epochs * dev + test) / pricing.processes,
                         measured is not None and measured.planned is not None)


def _attention(traced: trace.Trace, owned: ownership.Owned, device: torch.device, precision: str,
               findings: Findings) -> list[str]:
    """Remarks on the kernels that compute attention on this device; a slow one is a warning too."""
    remarks = []
    for kernel in attention_kernel.kernels(owned.roots.values(), device, precision, traced.keys.accelerate):
        remarks.append(f"attention on {device}: torch's {kernel.name} kernel ({kernel.why})")
        if not kernel.fused:
            findings.warning("slow-attention", traced.built.place("nhead"), "nhead",
                             f"attention on {device} is not fused: {kernel.why}", kernel.fix)
    return remarks


def _plan(traced: trace.Trace, device: torch.device) -> tuple[Manifest, Plan] | None:
    """The training set and the plan of a new run, None if the corpus is not prepared."""
    keys = traced.keys
    if not hasattr(keys.corpus, "manifest_path") or not keys.corpus.manifest_path("train").exists():
        return None
    try:
        train = keys.rows_of_training(keys.corpus.manifest("train"))
        rounding = keys.batching.rounding(device.type, traced.brain.compile)
        return train, Plan.of(train, keys.batching, keys.augment, keys.epoch_counter.limit, rounding)
    except SbkitError:
        return None


def _device(run_opts: RunOptions | None) -> torch.device:
    name = getattr(run_opts, "device", None) if _given(run_opts, "device") else None
    try:
        return torch.device(name or ("cuda:0" if torch.cuda.is_available() else "cpu"))
    except RuntimeError as error:
        raise SbkitError(f"--device {name!r} is no device", hint="write cpu, cuda or cuda:1") from error


def _given(run_opts: RunOptions | None, name: str) -> TypeGuard[RunOptions]:
    return name in getattr(run_opts, "overridden_args", ())


def _check_corpus(built: Built, task: TaskClass, findings: Findings, needed: Sequence[str], starting: bool) -> None:
    """Check that the longest utterances fit into a batch, and that the source exists and has the task's columns and the
    splits that are needed.

    The path of a recipe's file may be meant for another machine, so it is an error only if a run is ``starting`` here.
    """
    batching = built.hparams.get("batching")
    if batching is not None and getattr(batching, "auto", False):
        batching.max_batch_seconds = batching.most_seconds(cost.longest_utterance(built.hparams))
    mixed = built.hparams.get("corpus")
    for corpus, node in _corpora(built):
        longest = getattr(corpus, "max_duration", None)
        most = getattr(batching, "max_batch_seconds", None)
        if longest is not None and most is not None:
            planned = float(planned_seconds(built.hparams.get("augment"), longest))
            if planned > most * (1 + 1e-6):
                slowed = f", {planned:g} s when they are slowed down" if planned > longest else ""
                findings.warning("batch", node.place_of("max_duration"), node.key_of("max_duration"),
                                 f"utterances of {longest:g} s are kept{slowed}, but a batch holds {most:g} s: "
                                 "training would stop at one that doesn't fit", "lower it, or raise max_batch_seconds")
        _check_source(corpus, node, findings, starting)
        there = not any(finding.code == "no-corpus" for finding in findings)
        if task is not None and there and isinstance(corpus, Corpus):
            try:
                corpus.check_source(task.needs_text(), task.columns, () if isinstance(mixed, Mixture) else needed)
            except MissingRecordings as error:
                given = node.value.get("source", node)
                _add_missing("no-recordings", given.source or given, error, findings, starting)
            except SbkitError as error:
                at = next((key for key in ("columns", "splits", "only")  # what the recipe itself says of it
                           if key in node.value and getattr(corpus, key) and f" {key[:5]}" in error.message
                           and "line " not in error.message), "source")
                findings.error("corpus", *node.origin_of(at), error.message, error.hint or "")
    if isinstance(mixed, Mixture) and not any(finding.code in ("no-corpus", "corpus") for finding in findings):
        try:
            known = {name: part.known_splits() for name, part in mixed.parts.items()}
            if None not in known.values():
                mixed.check_splits({name: splits or () for name, splits in known.items()}, needed)
        except SbkitError as error:
            findings.error("splits", *built.nodes["corpus"].origin_of("parts"), error.message, error.hint or "")


def _add_missing(code: str, given: Node, error: SbkitError, findings: Findings, starting: bool) -> None:
    """Report a path that doesn't exist here: a recipe's may be meant for another machine, a command line's is not."""
    if starting or not given.place.line:
        findings.error(code, given.place, given.key if given.place.line else f"--{given.key}", error.message,
                       error.hint or "")
    else:
        findings.warning(code, given.place, given.key, f"{error.message} on this machine",
                         "a run here couldn't start; " + (error.hint or ""))


def _corpora(built: Built) -> Iterator[tuple[Any, Node]]:
    """The corpus of a recipe, or each part of its mixture, of any class with check_exists, and where it is written."""
    corpus, node = built.hparams.get("corpus"), built.nodes.get("corpus")
    if node is None or not hasattr(corpus, "check_exists") or not isinstance(node.value, dict):
        return
    if isinstance(corpus, Mixture):
        parts = node.value["parts"].value
        yield from ((part, parts[name]) for name, part in corpus.parts.items() if isinstance(parts[name].value, dict))
    else:
        yield corpus, node


def _check_source(corpus: Any,  # of any class with check_exists
                  node: Node, findings: Findings, starting: bool) -> None:
    """Check that the source, and a list of rows to leave out, exist."""
    # Without a source it is the demo corpus, which may lack the language.
    argument = "source" if getattr(corpus, "source", None) is not None else "language"
    if (listed := getattr(corpus, "exclude", None)) is not None and not listed.is_file():
        argument = "exclude"
    if argument == "language" and argument not in node.value:
        return
    given = node.value.get(argument, node)
    given = given.source or given
    try:
        corpus.check_exists()
    except SbkitError as error:
        _add_missing("no-corpus", given, error, findings, starting)
        return
    if isinstance(corpus, Corpus) and (other := corpus.prepared_elsewhere()) is not None:
        findings.warning("other-corpus", given.place, given.key, f"{corpus.folder} was prepared from {other}: labels, "
                         "leaks, steps and hours in this report are of that corpus",
                         "sbkit prepare, with the same arguments, prepares this one")


def _mixture(traced: trace.Trace, device: torch.device) -> Section | None:
    """Shares of the parts of a mixture in training; None if the mixture is not prepared."""
    planned = _plan(traced, device) if traced.complete and isinstance(traced.keys.corpus, Mixture) else None
    if planned is None:
        return None
    passes = planned[1].passes * traced.keys.epoch_counter.limit
    rows = traced.keys.corpus.rows(traced.keys.corpus.manifest("train"))
    for row in rows:
        row.append(round(row[-1] * passes, 1))
    columns = [*mixture.COLUMNS, "in the whole run"]
    return Section("Mixture", columns, rows, values={row[0]: dict(zip(columns[1:], row[1:], strict=True))
                                                     for row in rows})


def _check_prepared(traced: trace.Trace, findings: Findings) -> tuple[Section | None, str]:
    """The task's check of labels in a prepared corpus, or why they weren't checked."""
    corpus: object = traced.built.hparams.get("corpus")
    if not hasattr(corpus, "manifest_path"):
        return None, ""
    if not traced.complete:
        return None, "labels: the model or the vocabulary could not be checked"
    paths = {split: corpus.manifest_path(split) for split in SPLITS}
    if not any(path.exists() for path in paths.values()):
        return None, (f"labels and recordings: the corpus is not prepared in {paths['train'].parent}; prepare it with "
                      "sbkit prepare, the same recipe and keys")
    if not traced.task.is_prepared(traced.keys):
        return None, ("labels: the corpus is prepared, but its tokenizer (or symbols, or statistics) doesn't match "
                      "these keys; sbkit prepare, with the same recipe and keys, creates it, and a run checks the "
                      "labels when it starts")
    if any(f.code == "vocabulary" for f in findings):
        return None, "labels: the vocabulary is wrong"
    try:
        manifests = {split: Manifest.open_prepared(path) for split, path in paths.items() if path.exists()}
        if "train" in manifests:
            BatchColumns(traced.task.columns, traced.keys).check_classes(manifests["train"])
        return traced.task.check_labels(traced.keys, manifests, findings, traced.built.nodes), ""
    except SbkitError as error:
        node = traced.built.nodes["corpus"]
        findings.error("labels", node.place, "corpus", error.message, error.hint or "")
        return None, ""
