"""Checks the keys that a run reads by name: values of declared keys, run options, and kinds of classes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from speechbrain.utils.run_opts import RunOptions

from sbkit.data.language_code import LANGUAGE_CODE, SEVERAL
from sbkit.data.language_code import UNKNOWN as UNKNOWN_LANGUAGE
from sbkit.errors import SbkitError
from sbkit.recipe.keys import COMPLETE, ONLY_NAMED, Declared, Keys
from sbkit.recipe.names import brain_class, declared
from sbkit.recipe.patterns import BY_PART
from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.signatures import locate
from sbkit.recipe.source import UNKNOWN, Findings, Node, Place
from sbkit.recipe.values import data, static
from sbkit.score.weights import average_of
from sbkit.system.schema import SIZE

_PRECISIONS = ("auto", *next(a.choices for a in RunOptions._create_parser()._actions if a.dest == "precision"))
#: Run options that are numbers: int or float, by the option's name.
NUMBERS: dict[str, Any] = {  # of these two types
    field.name: type(field.default) for field in dataclasses.fields(RunOptions) if type(field.default) in (int, float)
} | {"optimizer_step_limit": int}
#: Why SpeechBrain's Brain refuses data_parallel_backend without a GPU, and what does the same.
NO_DATA_PARALLEL = ("one process on several GPUs, and this machine has none",
                    "leave it out; torchrun --nproc_per_node=N starts one process per device")
ACCUMULATION = "grad_accumulation_factor"
_MINIMUM = {ACCUMULATION: 1, "nonfinite_patience": 0, "max_grad_norm": 0}


def check_settings(root: Node, findings: Findings) -> None:
    """Add findings about keys with values that a run would refuse."""
    known = declared(root)
    task = getattr(brain_class(root) if known else None, "Keys", Keys)
    for key, node in root.value.items():
        value = static(node)
        if value is UNKNOWN or findings.unusable(node) or not isinstance(key, str):
            continue
        if key in _CHECKS:
            _CHECKS[key](root, key, value, findings)
        if findings.unusable(node):
            continue
        if key in known:
            own = known[key]
            given = data(value) if isinstance(value, Node) else value
            if given is UNKNOWN:  # an object, or a list of them: neither a number nor a text
                if own.plain:
                    _report(root, own.name, f"it is {_shown(value)}, and must be {own.wanted}", findings)
                elif own.built and node.tag.startswith("!new:speechbrain.tokenizers."):  # building it trains it
                    with contextlib.suppress(LookupError):  # reported where the name is checked
                        for _, message, hint in task.misfits({own.name: locate(node.tag.removeprefix("!new:"))}):
                            if hint != ONLY_NAMED:
                                _report(root, own.name, message, findings, hint)
            elif own.name not in BY_PART and (problem := own.problem(given)):
                hint = COMPLETE if given is None and own.needed else f"it sets: {own.what}" if given is True else ""
                _report(root, own.name, f"it {problem}", findings, hint)
            elif own.built and isinstance(value, (str, bool)) and value != "None":  # check_text reports "None"
                null = "" if own.needed else " or null"
                findings.error("setting", root.place_of(own.name), own.name,
                               f"it is {_shown(value)}, and must be an object{null}",
                               "write null" if null and str(value).lower() in ("false", "none") else
                               f"write !new: and its class{null}")
        elif key in NUMBERS and not _is_number(key, value):
            _report(root, key, f"it is {_shown(value)}, and must be a number", findings)
        elif _too_low(key, value):
            _report_too_low(root.place_of(key), key, key, value, findings)
    if "average_checkpoints" in known:
        _check_average(root, known, findings)


def _check_average(root: Node, known: Mapping[str, Declared], findings: Findings) -> None:
    """Check that enough checkpoints are kept to average, and that their weights aren't moving averages already."""
    key = "average_checkpoints"
    value = _static_value(root, known[key])
    if not isinstance(value, (int, str)) or not average_of(value).several:
        return
    average = average_of(value)
    ema = root.value.get("ema")
    switched_off = ema is None or static(ema) is None or static(ema) is UNKNOWN
    written_decay = ema.value.get("decay") if ema is not None and isinstance(ema.value, dict) else None
    decay = static(written_decay) if written_decay is not None else 1
    if not switched_off and isinstance(decay, (int, float)) and decay > 0:
        _report(root, key, "ema averages weights as well", findings, f"use one of them: ema_decay: 0, or {key}: 1")
        return
    kept, kept_for_good = (_static_value(root, known[name]) for name in ("keep_checkpoints", "keep_every"))
    if isinstance(kept, int) and not kept_for_good and kept < average.count:
        _report(root, key, f"it is {average}, but keep_checkpoints is {kept}: fewer are kept", findings,
                f"set keep_checkpoints to {average.count} or more")


def check_options(run_opts: RunOptions | None, findings: Findings) -> None:
    """Add findings about run options from the command line with values that a run would refuse."""
    for name in sorted(getattr(run_opts, "overridden_args", ())):
        value = getattr(run_opts, name, None)
        if _too_low(name, value):
            _report_too_low(Place(), f"--{name}", name, value, findings)
        if "precision" in name and value not in _PRECISIONS:
            findings.error("setting", Place(), f"--{name}", *_no_precision(value))
        if name == "device" and str(value).startswith("cuda") and not torch.cuda.is_available():
            findings.warning("no-device", Place(), f"--{name}",
                             f"this machine has no {value}, so no run here could start", "--as 8xH100 rehearses one")
        if name == "data_parallel_backend" and value and torch.cuda.device_count() == 0:
            findings.error("setting", Place(), f"--{name}", *NO_DATA_PARALLEL)


def check_accumulation(root: Node, run_opts: RunOptions | None, findings: Findings) -> None:
    """Refuse ``grad_accumulation_factor`` in the recipe of a task, whose updates are given in seconds of audio.

    It would be the number of micro-batches of an update on each device. Here their number follows from the size of an
    update, which is the same on any number of devices.
    """
    if "brain" not in root.value:  # a script's, which trains as in SpeechBrain
        return
    name, place, value = ACCUMULATION, Place(), None
    if name in getattr(run_opts, "overridden_args", ()):
        value, written = getattr(run_opts, name), f"--{name}"
    elif name in root.value and not findings.unusable(root.value[name]):
        value, written, place = static(root.value[name]), name, root.place_of(name)
    if value is None or not _is_number(name, value) or _too_low(name, value) or option_number(name, value) == 1:
        return
    key = "step_seconds" if "step_seconds" in root.value else "batching.step_seconds"
    findings.error("setting", place, written, f"it is {value}, but an update of a task is given in seconds of audio, "
                   "and the number of micro-batches follows from it",
                   f"leave it out, and set {key}: the audio of an update, over all devices and micro-batches")


def _too_low(name: str, value: object) -> bool:
    number = option_number(name, value) if name in _MINIMUM and _is_number(name, value) else None
    return number is not None and number < _MINIMUM[name]


def _report_too_low(place: Place, written: str, name: str, value: object, findings: Findings) -> None:
    if name == "max_grad_norm":
        findings.warning("setting", place, written, f"it is {value}, so no gradient would be clipped",
                         "write 0 if that is meant")
    else:
        findings.error("setting", place, written, f"it is {value}, and must be {_MINIMUM[name]} or more")


def _static_value(root: Node, known: Declared) -> object:
    """The value of a key; None if it is known only later, or already reported as wrong."""
    value = static(root.value[known.name]) if known.name in root.value else known.default
    return None if value is UNKNOWN or isinstance(value, Node) or known.problem(value) else value


def _check_precision(root: Node, key: str, value: object, findings: Findings) -> None:
    if isinstance(value, Node) or value not in _PRECISIONS:
        message, hint = _no_precision(value)
        _report(root, key, message, findings, hint)


def _no_precision(value: object) -> tuple[str, str]:
    """A message about a precision that doesn't exist, and a hint."""
    near = did_you_mean(str(value), _PRECISIONS)
    return f"there is no precision {value!r}", f"did you mean {near}?" if near else f"use {listed(_PRECISIONS)}"


def _check_device(root: Node, key: str, value: Any, findings: Findings) -> None:  # torch.device refuses what is none
    try:
        torch.device(value)
    except (RuntimeError, TypeError):
        if value is not None:
            _report(root, key, f"torch has no device {value!r}", findings, "write cpu, cuda or cuda:1")


def _check_language(root: Node, key: str, value: object, findings: Findings) -> None:
    """Refuse a language that no client of a server would ask for: its bundle would refuse all others."""
    if key in declared(root) and isinstance(value, str) and value not in LANGUAGE_CODE:
        _report(root, key, f"it is {value!r}, and must be {LANGUAGE_CODE}: the bundle's server answers clients that "
                "ask for this language only", findings,
                f"write its code in ISO 639, {UNKNOWN_LANGUAGE} if it has none, or {SEVERAL} for several languages")


def _check_class(root: Node, key: str, value: object, findings: Findings) -> None:
    """Check that a key names a class from which the run builds an object."""
    base, name, when, without, example = (
        ("Brain", "a Brain", "when the modules are there", "", "sbkit.tasks.ctc.CTC") if key == "brain" else
        ("Optimizer", "an optimizer", "with the parameters of the modules", ", without params", "torch.optim.AdamW"))
    tag = value.tag if isinstance(value, Node) else ""
    built = None
    if tag.startswith("!new:"):
        with contextlib.suppress(LookupError):  # reported where the name is checked
            built = locate(tag.removeprefix("!new:"))
    if any(cls.__name__ == base for cls in getattr(built, "__mro__", ())):  # a partial of one is right
        _report(root, key, f"the run builds it, {when}", findings, f"write !name:{tag.removeprefix('!new:')}{without}")
    elif not tag and value is not None:
        dotted = isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))
        _report(root, key, f"it is {_shown(value)}, not {name}", findings,
                f"write !name:{value if dotted else example}")


def _check_epochs(root: Node, key: str, value: Any, findings: Findings) -> None:  # a Node wherever it has a limit
    limit = value.value.get("limit") if isinstance(value, Node) and isinstance(value.value, dict) else None
    number = static(limit) if limit is not None else None
    if isinstance(number, (int, float)) and not isinstance(number, bool) and number < 1:
        findings.warning("setting", value.place_of("limit"), value.key_of("limit"),
                         f"it is {number!r}, so nothing would be trained", "set it to 1 or more")
    stops = isinstance(value, Node) and isinstance(value.value, dict) and value.tag.endswith(".EpochCounterWithStopper")
    given = value.value.get("direction") if stops else None
    metric = getattr(brain_class(root), "metric", None) if "brain" in root.value else None
    lower = getattr(metric, "lower_is_better", None)  # a Brain of the user's own may call anything so
    if given is not None and isinstance(lower, bool):
        best, which = ("min", "lower") if lower else ("max", "higher")
        if static(given) in {"min", "max"} - {best}:
            findings.error("setting", (given.source or given).place, (given.source or given).key,
                           f"it is {static(given)}, and a {which} {getattr(metric, 'name', '')} is better",
                           f"write {best}")
    epochs = static(root.value["number_of_epochs"]) if "number_of_epochs" in root.value else None
    if epochs in SIZE and isinstance(number, int) and number != epochs:
        advice = "write `limit: !ref <number_of_epochs>`"
        if not root.value["number_of_epochs"].place.line:  # a run's recipe has no references
            advice += f", or give --{value.key_of('limit')} {epochs} too"
        elif not value.place_of("limit").line:
            advice = f"give --number_of_epochs {number} instead"
        findings.error("setting", value.place_of("limit"), value.key_of("limit"),
                       f"it is {number}, and number_of_epochs is {epochs}", advice)


def _check_schedule(root: Node, key: str, value: object, findings: Findings) -> None:
    """Warn of an optimizer's rate that the schedule replaces, and of one that its limits were not made for."""
    optimizer = root.value.get("opt_class")
    lr = optimizer.value.get("lr") if optimizer is not None and isinstance(optimizer.value, dict) else None
    if not isinstance(value, Node) or not isinstance(value.value, dict) or "peak" not in value.value or \
            value.tag != "!new:sbkit.train.schedule.Schedule":
        return
    peak, limit = value.value["peak"], value.value.get("max_lr_at_chance")
    wanted, counts, most = (None if each is None else static(each) for each in (lr, peak, limit))
    if not isinstance(counts, (int, float)):
        return
    if lr is not None and isinstance(wanted, (int, float)) and wanted != counts:
        findings.warning("setting", lr.place, lr.key, f"it is {wanted:g}, and has no effect: the rate is the "
                         f"schedule's, up to {counts:g}", f"set {(peak.source or peak).key} to {wanted:g} instead")
    if isinstance(most, (int, float)) and counts > 20 * most:
        findings.warning("setting", (peak.source or peak).place, (peak.source or peak).key, f"it is {counts:g}, and "
                         f"schedule.max_lr_at_chance and max_rise_per_step hold the rate near {most:g}",
                         "for an optimizer with such rates, --schedule.max_lr_at_chance null "
                         "--schedule.max_rise_per_step null")


_CHECKS: dict[str, Callable[[Node, str, object, Findings], None]] = {
    "precision": _check_precision, "eval_precision": _check_precision, "device": _check_device,
    "language": _check_language,
    "brain": _check_class, "opt_class": _check_class, "epoch_counter": _check_epochs,
    "schedule": _check_schedule,
}


def option_number(name: str, value: object) -> int | float | None:
    """The number that a run option is given: as text, too, because SpeechBrain's parser leaves some so."""
    if value is None or (isinstance(value, (int, float)) and not isinstance(value, bool)):
        return value
    if isinstance(value, str):
        if value.strip().lower() in ("none", "null", ""):
            return None
        with contextlib.suppress(ValueError):
            if math.isfinite(number := NUMBERS[name](value)):
                return number
    raise SbkitError(f"--{name} is {value!r}, not a number")


def _is_number(name: str, value: object) -> bool:
    """Whether a run option accepts it."""
    with contextlib.suppress(SbkitError):
        option_number(name, value)
        return True
    return False


def _shown(value: object) -> str:
    if isinstance(value, Node):
        return value.tag or ("a list" if isinstance(value.value, list) else "a mapping")
    return "null" if value is None else f"the text {value!r}" if isinstance(value, str) else repr(value)


def _report(root: Node, key: str, message: str, findings: Findings, suggestion: str = "") -> None:
    """Add a finding about a key, and mark its value, so that references to it aren't reported again."""
    node = root.value[key]
    findings.error("setting", root.place_of(key), key, message, suggestion)
    findings.mark(node)
    findings.mark(node.source or node)
