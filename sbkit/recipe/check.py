"""Checks a recipe as a whole: reads it, builds it as a run does, and finds mistakes that would end a run later."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.checkpoints import CKPT_PREFIX
from speechbrain.utils.run_opts import RunOptions

from sbkit.data.sources import check_exists
from sbkit.data.splits import SPLITS
from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.recipe import (
    corpus_check,
    cost,
    cost_check,
    devices,
    ignoring,
    ownership,
    parts,
    price,
    real_batches,
    trace,
)
from sbkit.recipe.build import Built, build
from sbkit.recipe.check_request import CheckRequest
from sbkit.recipe.files import refuse_another_run
from sbkit.recipe.keys import COMPLETE
from sbkit.recipe.reading import read, read_without_imports, without_imports_from
from sbkit.recipe.report import Finding, Report, Section, listed
from sbkit.recipe.settings import check_accumulation, check_options
from sbkit.recipe.source import UNKNOWN, Findings, Node, Place
from sbkit.recipe.values import data, static
from sbkit.system import disk
from sbkit.system.console import logging_disabled

#: Keys on which the vocabulary of a model depends.
_VOCABULARY_KEYS = frozenset(("output_neurons", "blank_index", "bos_index", "eos_index"))


def check(
    path: str | Path, overrides: Mapping[str, Any] | None = None, *, run_opts: RunOptions | None = None,
    run: bool = True, starting: bool = False, measure: Callable[[], cost.StepMeasurement] | None = None,
    pricing: price.PriceRequest | None = None, needed: Sequence[str] = SPLITS, ignore: Sequence[str] = (),
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
    ignore : codes of warnings to leave out, beside those that the recipe's key ``ignore_findings`` names
    """
    started = time.perf_counter()
    request = CheckRequest(run_opts, starting, measure, pricing, needed)
    report = Report(str(path), built=run)
    findings = Findings()
    check_options(run_opts, findings)

    if run:
        root = _read(Path(path), overrides or {}, findings, starting)
    else:
        root = _read_without_building(Path(path), overrides or {}, findings, report, request)
    if root is not None:
        check_accumulation(root, run_opts, findings)
        builds_something = any(node.tag for node in root.walk())
        if not findings and not builds_something:
            findings.warning("missing-key", Place(str(path)), "brain", "the recipe builds nothing (it has no !new: "
                             "or !name:), so there is nothing to check", COMPLETE)
        elif run:
            _check_built(root, findings, report, request)

    ignored = [ignoring.IgnoredCode(code, Place(), f"--{ignoring.OPTION}") for code in ignore]
    if root is not None:
        ignored += ignoring.in_recipe(root, findings)
    report.add(_without_consequences(findings))
    ignoring.ignore(report, ignored)
    if root is not None and not report.errors and _is_known_whole(root):
        report.tree = root
    report.seconds = time.perf_counter() - started
    return report


def _read(path: Path, overrides: Mapping[str, Any], findings: Findings, starting: bool) -> Node | None:
    """Read a recipe; None if it can't be read.

    A run sets ``output_neurons`` to the number of the prepared corpus's characters. So does a check, but not that of a
    run that starts, whose corpus may be another.
    """
    of_recipe = Findings()
    root = read(path, overrides, of_recipe)
    characters = None
    if root is not None and not starting and "output_neurons" not in overrides:
        characters = _characters(root)
    if characters is not None:
        of_recipe = Findings()
        root = read(path, {**overrides, "output_neurons": characters}, of_recipe)
    findings.include(of_recipe)
    return root


def _characters(root: Node) -> int | None:
    """The number of tokens that the prepared corpus's characters need, if a run will replace the recipe's by it."""
    tokenizer = root.value.get("tokenizer")
    if tokenizer is None or not isinstance(tokenizer.value, dict) or "output_neurons" not in root.value:
        return None
    arguments = {name: static(node) for name, node in tokenizer.value.items()}
    size = arguments.get("vocab_size")
    folder = Path(str(arguments.get("folder")))
    has_own_size = size != static(root.value["output_neurons"]) or (folder / f"{size}_char.model").exists()
    if arguments.get("model_type") != "char" or has_own_size:
        return None
    prepared_sizes = [path.name.partition("_")[0] for path in folder.glob("*_char.model")]
    if len(prepared_sizes) != 1 or not prepared_sizes[0].isdigit():
        return None
    return int(prepared_sizes[0])


def _read_without_building(path: Path, overrides: Mapping[str, Any], findings: Findings, report: Report,
                           request: CheckRequest) -> Node | None:
    """Read a recipe and check what can be checked without the user's code; None if it can't be read."""
    with without_imports_from(Path.cwd(), path.parent, path.parent.parent):
        root, notes = read_without_imports(path, overrides, findings)
    report.notes += notes
    report.notes.append("modules, devices, shapes, labels and cost: nothing is built with --no-run")

    corpus = root.value.get("corpus") if root is not None else None
    for node in corpus.walk() if corpus is not None else ():  # a mixture has several sources
        source = node.value.get("source") if isinstance(node.value, dict) else None
        named = data(source) if source is not None else None
        if source is None or not named or not isinstance(named, (str, dict)):  # then it is the demo corpus
            continue
        try:
            check_exists(named)
        except SbkitError as error:
            request.report_missing(source.source or source, error, findings)
    return root


def _without_consequences(findings: Findings) -> list[Finding]:
    """The findings without those that follow from another one, which says more."""
    not_owned = {finding.key for finding in findings if finding.code == "not-owned"}
    shadowed = {finding.key for finding in findings if finding.code == "shadowed"}

    def follows(finding: Finding) -> bool:
        if finding.code == "unread-key":
            return finding.key in not_owned
        # A vocabulary may have another size because a key is shadowed.
        return finding.code == "vocabulary" and not shadowed.isdisjoint(_VOCABULARY_KEYS)

    return [finding for finding in findings if not follows(finding)]


def _is_known_whole(root: Node) -> bool:
    """Whether no value of a recipe has to be computed by the user's code."""
    return not any(node.value is UNKNOWN or node.tag.startswith("!applyref:") for node in root.walk())


def _check_built(root: Node, findings: Findings, report: Report, request: CheckRequest) -> None:
    """Build the recipe and check what it builds."""
    with logging_disabled(logging.INFO), build(root, findings) as built:  # the run itself logs messages of constructors
        ownership.check_pretrainer(built, findings)
        modules = ownership.check_modules(built, findings)
        if modules is not None:
            _check_with_modules(built, modules, findings, report, request)
            return
        if "modules" in root.value:
            parts.check_named(built, torch.nn.ModuleDict(), False, findings)
            report.notes.append("modules, devices, shapes and cost: the modules could not be built")
        _check_without_modules(built, findings, report, request)


def _check_without_modules(built: Built, findings: Findings, report: Report, request: CheckRequest) -> None:
    """Check what a run of a task reads and writes, which needs no model: so all mistakes are reported at once."""
    without_brain = trace.Trace(built)
    task = without_brain.task
    if task is None:  # only a script knows what it reads
        return
    task.check_start(without_brain, findings)
    report.notes += without_brain.unchecked
    corpus_check.check_corpus(built, task, findings, request)
    _check_files(built, findings, request)
    _check_output(built, findings, request)


def _check_with_modules(built: Built, modules: dict[str, torch.nn.Module], findings: Findings, report: Report,
                        request: CheckRequest) -> None:
    """Check everything; ``modules`` are those that could be built.

    The order matters: a forward needs modules that are named and owned, the cost needs a forward, and what moves
    modules to a device or trains on real batches comes last.
    """
    complete = len(modules) == sum(module is not None for module in built.hparams["modules"].values())
    owned = ownership.Owned(modules)
    _check_modules(built, modules, owned, complete, request.run_opts, findings)

    devices_table = devices.section(built, owned)
    report.sections["devices"] = devices_table
    traced = trace.trace(built, modules, findings)
    report.partly = traced.brain is not None and not traced.complete
    if traced.note:
        report.notes.append(traced.note + ("; so the cost is unknown" if report.partly else ""))
    start = None
    if traced.task is not None:
        traced.task.check_outputs(traced, findings)
        start = traced.task.check_start(traced, findings)
        report.notes += traced.unchecked
        _check_optimizer(traced, findings)

    corpus_check.check_corpus(built, traced.task, findings, request)
    _check_files(built, findings, request)
    _check_output(built, findings, request)
    _check_room(built, owned, findings, request)
    _check_installed(traced, findings, request)
    labels, unchecked_labels = (None, "") if request.starting else corpus_check.check_labels(traced, findings)

    has_errors = any(finding.severity == "error" for finding in findings)
    if traced.brain is not None and not has_errors:
        _add_note(report, real_batches.try_batches(traced, findings))
    learning = _learning_section(traced, torch.nn.ModuleDict(modules), findings)
    # Before the mixture's table, as the batches of `max_batch_seconds: auto` are known only then.
    costs = cost_check.sections(owned, traced, findings, report, request)
    tables: dict[str, Section | None] = {
        "shapes": trace.section(traced), "start": start, "learning": learning, "labels": labels,
        "mixture": corpus_check.mixture_section(traced, request.device),
        "leaks": None if request.starting else corpus_check.leaks_section(built), **costs}

    moves_modules = not (request.starting and request.device.type == "cpu")
    if complete and moves_modules:
        _add_note(report, devices.check_moved(owned, devices_table, traced, findings))
    report.sections |= {name: table for name, table in tables.items() if table is not None}
    _add_note(report, unchecked_labels)


def _add_note(report: Report, note: str) -> None:
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


def _check_optimizer(traced: trace.Trace, findings: Findings) -> None:
    """Add an error for what an optimizer of the user's own does wrong, of which a run would say nothing."""
    opt_class = traced.built.hparams.get("opt_class")
    if callable(opt_class) and "opt_class" in traced.built.nodes:
        for mistake, remedy in traced.task.optimizer_mistakes(opt_class):
            findings.error("wrong-optimizer", traced.built.place("opt_class"), "opt_class", mistake, remedy)


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


def _check_files(built: Built, findings: Findings, request: CheckRequest) -> None:
    """Add a finding for folders of noises and impulse responses, and for a tokenizer, that aren't there."""
    augmentations = [(stage, "augment") for stage in getattr(built.hparams.get("augment"), "stages", [])]
    augmentations.append((built.hparams.get("nonspeech"), "nonspeech"))
    for augmentation, key in augmentations:
        if getattr(augmentation, "files", None) is None:
            continue
        try:
            augmentation.files.check()
        except SbkitError as error:
            node = built.origin(augmentation) or built.nodes[key]
            request.report_missing(_named_in(node, "folder"), error, findings)

    tokenizer = built.hparams.get("tokenizer")
    if isinstance(tokenizer, Tokenizer) and tokenizer.model is not None and not tokenizer.model.exists():
        missing = SbkitError("no-such-path", f"{tokenizer.model}: no such file", file=tokenizer.model,
                             hint="give the path of a sentencepiece model")
        request.report_missing(_named_in(built.nodes["tokenizer"], "model"), missing, findings)


def _named_in(node: Node, key: str) -> Node:
    """Return where an argument of an object is written; the object's own place if it isn't."""
    argument = node.value.get(key, node) if isinstance(node.value, dict) else node
    return argument.source or argument


def _check_output(built: Built, findings: Findings, request: CheckRequest) -> None:
    """Check that the output folder can be written, and that the checkpoints don't go into another run's."""
    output = built.hparams.get("output_folder")
    if not isinstance(output, str):
        return
    try:
        disk.check_writable(Path(output) / "hyperparams.yaml", "--output_folder")
    except SbkitError as error:
        node = built.nodes["output_folder"]
        request.report_missing(node.source or node, error, findings)

    checkpoints = _checkpoints_node(built)
    if checkpoints is not None:
        try:
            refuse_another_run(str(data(checkpoints)), output)
        except SbkitError as error:
            findings.report(error, checkpoints.place, checkpoints.key)


def _check_room(built: Built, owned: ownership.Owned, findings: Findings, request: CheckRequest) -> None:
    """Check that a checkpoint fits on the disk, before a run that saves its first one starts."""
    run_opts = request.run_opts
    saves_nothing = run_opts is not None and (run_opts.test_only or run_opts.debug)
    checkpoints = _checkpoints_node(built)
    if checkpoints is None or not request.starting or saves_nothing:
        return
    folder = Path(str(data(checkpoints)))
    if any(folder.glob(f"{CKPT_PREFIX}*")):  # it had room before
        return
    trained = sum(p.numel() * p.element_size() for p in owned.parameters.values() if p.requires_grad)
    least = trained * (1 + cost.states_per_parameter(built.hparams.get("opt_class")))
    free = disk.free(folder)
    if least > free:
        findings.error("no-room", checkpoints.place, checkpoints.key, f"a checkpoint in {folder} needs about "
                       f"{disk.size(least)}, and {disk.size(free)} are free there",
                       "make room, or choose another place with --output_folder")


def _checkpoints_node(built: Built) -> Node | None:
    """Where the recipe says in which folder checkpoints go; the check's own checkpointer has another."""
    saver = built.nodes.get("checkpointer")
    return saver.value.get("checkpoints_dir") if saver is not None and isinstance(saver.value, dict) else None


def _check_installed(traced: trace.Trace, findings: Findings, request: CheckRequest) -> None:
    """Report keys whose values need a package or program that isn't installed here."""
    for problem in traced.keys.missing() if traced.keys is not None else ():
        missing = SbkitError("missing-package", problem.message, hint=problem.hint, key=problem.key)
        request.report_missing(traced.built.nodes[problem.key], missing, findings)


def _learning_section(traced: trace.Trace, modules: torch.nn.ModuleDict, findings: Findings) -> Section | None:
    """The table of trained parts; wrong values of layer_decay are a finding."""
    built = traced.built
    if not traced.complete:
        return None
    groups = parts.ParameterGroups(modules, built.hparams)
    freeze = groups.values_by_path(traced.keys.freeze or {}, "freeze")
    frozen_until = {path: parts.frozen_until(value) for path, value in freeze.items()}
    frozen_until = {path: step for path, step in frozen_until.items() if step}
    for path, parameter in groups.parameters.items():
        if not parameter.requires_grad:
            frozen_until[path] = parts.FOR_GOOD
    try:
        factors = traced.brain.rate_factors()
    except SbkitError as error:
        key = "layer_decay"  # learning_rates has been checked
        findings.report(error, built.place(key), key)
        return None
    peak = getattr(traced.keys.schedule, "peak", None)  # SpeechBrain's schedulers have none
    return parts.trained_parts(groups, frozen_until, factors, peak)
