"""Checks the keys that a run reads by name: values of declared keys, run options, and kinds of classes."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

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
#: A peak that is this many times its limit was chosen for an optimizer with other rates.
FAR_ABOVE = 20
_MINIMUM = {ACCUMULATION: 1, "nonfinite_patience": 0, "max_grad_norm": 0}


def check_settings(root: Node, findings: Findings) -> None:
    """Add findings about keys with values that a run would refuse."""
    declarations = declared(root)
    keys_class = getattr(brain_class(root) if declarations else None, "Keys", Keys)
    for key, node in root.value.items():
        value = static(node)
        if value is UNKNOWN or findings.unusable(node) or not isinstance(key, str):
            continue
        if key in _CHECKS:
            _CHECKS[key](root, key, value, findings)
        if findings.unusable(node):
            continue
        if key in declarations:
            _check_declared(root, declarations[key], node, value, keys_class, findings)
        elif key in NUMBERS and not _is_number(key, value):
            _report(root, key, f"it is {_shown(value)}, and must be a number", findings)
        elif _too_low(key, value):
            _report_too_low(root.place_of(key), key, key, value, findings)
    if "average_checkpoints" in declarations:
        _check_average(root, declarations, findings)


def _check_declared(root: Node, declaration: Declared, node: Node, value: object, keys_class: type[Keys],
                    findings: Findings) -> None:
    """Compare the value of a key with its declaration.

    value : of the node, as ``static`` has it
    """
    key = declaration.name
    plain = data(value) if isinstance(value, Node) else value
    if plain is UNKNOWN:  # an object, or a list of them: neither a number nor a text
        if declaration.plain:
            _report(root, key, f"it is {_shown(value)}, and must be {declaration.wanted}", findings)
        elif declaration.built and node.tag.startswith("!new:speechbrain.tokenizers."):
            _check_without_building(root, key, node, keys_class, findings)
        return

    problem = "" if key in BY_PART else declaration.problem(plain)
    if problem:
        hint = ""
        if plain is None and declaration.needed:
            hint = COMPLETE
        elif plain is True:
            hint = f"it sets: {declaration.what}"
        _report(root, key, f"it {problem}", findings, hint)
    elif declaration.built and isinstance(value, (str, bool)) and value != "None":  # check_text reports "None"
        or_null = "" if declaration.needed else " or null"
        means_null = or_null and str(value).lower() in ("false", "none")
        findings.error("setting", root.place_of(key), key, f"it is {_shown(value)}, and must be an object{or_null}",
                       "write null" if means_null else f"write !new: and its class{or_null}")


def _check_without_building(root: Node, key: str, node: Node, keys_class: type[Keys], findings: Findings) -> None:
    """Compare the class of an object with the declared one; for SpeechBrain's tokenizers, which train when built."""
    with contextlib.suppress(LookupError):  # reported where the name is checked
        for _, message, hint, _ in keys_class.misfits({key: locate(node.tag.removeprefix("!new:"))}):
            if hint != ONLY_NAMED:
                _report(root, key, message, findings, hint)


def _check_average(root: Node, declarations: Mapping[str, Declared], findings: Findings) -> None:
    """Check that enough checkpoints are kept to average, and that their weights aren't moving averages already."""
    key = "average_checkpoints"
    value = _static_value(root, declarations[key])
    if not isinstance(value, (int, str)):
        return
    average = average_of(value)
    if not average.several:
        return
    if _averages_weights(root.value.get("ema")):
        _report(root, key, "ema averages weights as well", findings, f"use one of them: ema_decay: 0, or {key}: 1")
        return
    newest = _static_value(root, declarations["keep_checkpoints"])
    for_good = _static_value(root, declarations["keep_every"])
    if isinstance(newest, int) and not for_good and newest < average.count:
        _report(root, key, f"it is {average}, but keep_checkpoints is {newest}: fewer are kept", findings,
                f"set keep_checkpoints to {average.count} or more")


def _averages_weights(ema: Node | None) -> bool:
    """Whether the recipe's moving average has any effect, as far as that is known before it is built."""
    if ema is None or static(ema) is None or static(ema) is UNKNOWN:
        return False
    written_decay = ema.value.get("decay") if isinstance(ema.value, dict) else None
    decay = 1 if written_decay is None else static(written_decay)
    return isinstance(decay, (int, float)) and decay > 0


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
    name = ACCUMULATION
    if name in getattr(run_opts, "overridden_args", ()):
        place = Place()
        written = f"--{name}"
        value = getattr(run_opts, name)
    elif name in root.value and not findings.unusable(root.value[name]):
        place = root.place_of(name)
        written = name
        value = static(root.value[name])
    else:
        return
    if value is None or not _is_number(name, value) or _too_low(name, value):  # the last two are reported already
        return
    if option_number(name, value) == 1:
        return
    key = "step_seconds" if "step_seconds" in root.value else "batching.step_seconds"
    findings.error("setting", place, written, f"it is {value}, but a task sets the size of an update in seconds of "
                   "audio, and the number of micro-batches follows from it",
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


def _static_value(root: Node, declaration: Declared) -> object:
    """The value of a key; None if it is known only later, or already reported as wrong."""
    value = static(root.value[declaration.name]) if declaration.name in root.value else declaration.default
    return None if value is UNKNOWN or isinstance(value, Node) or declaration.problem(value) else value


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
        _report(root, key, f"it is {value!r}, and must be {LANGUAGE_CODE}: a server of the exported bundle would "
                "refuse clients that ask for another language", findings,
                f"write its code in ISO 639, {UNKNOWN_LANGUAGE} if it has none, or {SEVERAL} for several languages")


class _NamedClass(NamedTuple):
    """A key that names a class from which the run builds an object."""

    base: str
    """The name of its base class."""
    name: str
    built: str
    """When the run builds it."""
    without: str
    """What the run adds to its arguments."""
    example: str


_NAMED_CLASSES = {
    "brain": _NamedClass("Brain", "a Brain", "when the modules are there", "", "sbkit.tasks.ctc.CTC"),
    "opt_class": _NamedClass("Optimizer", "an optimizer", "with the parameters of the modules", ", without params",
                             "torch.optim.AdamW"),
}


def _check_class(root: Node, key: str, value: object, findings: Findings) -> None:
    """Check that a key names a class instead of building an object."""
    wanted = _NAMED_CLASSES[key]
    tag = value.tag if isinstance(value, Node) else ""
    built = None
    if tag.startswith("!new:"):
        with contextlib.suppress(LookupError):  # reported where the name is checked
            built = locate(tag.removeprefix("!new:"))
    bases = getattr(built, "__mro__", ())  # a partial of such a class has none, and is right
    if any(base.__name__ == wanted.base for base in bases):
        _report(root, key, f"the run builds it, {wanted.built}", findings,
                f"write !name:{tag.removeprefix('!new:')}{wanted.without}")
    elif not tag and value is not None:
        dotted = isinstance(value, str) and "." in value and all(part.isidentifier() for part in value.split("."))
        _report(root, key, f"it is {_shown(value)}, not {wanted.name}", findings,
                f"write !name:{value if dotted else wanted.example}")


def _check_epochs(root: Node, key: str, value: Any, findings: Findings) -> None:  # a Node wherever it has a limit
    """Check the epoch counter: its limit, whether that is number_of_epochs, and what a stopper takes as better."""
    if not isinstance(value, Node) or not isinstance(value.value, dict):
        return
    limit = static(value.value["limit"]) if "limit" in value.value else None
    if isinstance(limit, (int, float)) and not isinstance(limit, bool) and limit < 1:
        findings.warning("setting", value.place_of("limit"), value.key_of("limit"),
                         f"it is {limit!r}, so nothing would be trained", "set it to 1 or more")
    if value.tag.endswith(".EpochCounterWithStopper") and "direction" in value.value:
        _check_direction(root, value.value["direction"], findings)

    epochs = static(root.value["number_of_epochs"]) if "number_of_epochs" in root.value else None
    if epochs in SIZE and isinstance(limit, int) and limit != epochs:
        advice = "write `limit: !ref <number_of_epochs>`"
        if not root.value["number_of_epochs"].place.line:  # a run's recipe has no references
            advice += f", or give --{value.key_of('limit')} {epochs} too"
        elif not value.place_of("limit").line:
            advice = f"give --number_of_epochs {limit} instead"
        findings.error("setting", value.place_of("limit"), value.key_of("limit"),
                       f"it is {limit}, and number_of_epochs is {epochs}", advice)


def _check_direction(root: Node, direction: Node, findings: Findings) -> None:
    """Refuse a stopper that takes the worse values of the task's metric as better."""
    metric = getattr(brain_class(root), "metric", None) if "brain" in root.value else None
    lower_is_better = getattr(metric, "lower_is_better", None)
    if not isinstance(lower_is_better, bool):  # a Brain of the user's own may call anything metric
        return
    best, which = ("min", "lower") if lower_is_better else ("max", "higher")
    if static(direction) in {"min", "max"} - {best}:
        written = direction.source or direction
        findings.error("setting", written.place, written.key,
                       f"it is {static(direction)}, and a {which} {getattr(metric, 'name', '')} is better",
                       f"write {best}")


def _check_schedule(root: Node, key: str, value: object, findings: Findings) -> None:
    """Warn of an optimizer's rate that the schedule replaces, and of one that its limits were not made for."""
    if not isinstance(value, Node) or value.tag != "!new:sbkit.train.schedule.Schedule" or \
            not isinstance(value.value, dict) or "peak" not in value.value:
        return
    peak = value.value["peak"]
    peak_rate = static(peak)
    if not isinstance(peak_rate, (int, float)):
        return
    written_peak = peak.source or peak

    optimizer = root.value.get("opt_class")
    lr = optimizer.value.get("lr") if optimizer is not None and isinstance(optimizer.value, dict) else None
    own_rate = None if lr is None else static(lr)
    if lr is not None and isinstance(own_rate, (int, float)) and own_rate != peak_rate:
        findings.warning("setting", lr.place, lr.key, f"it is {own_rate:g}, and has no effect: the schedule sets "
                         f"the learning rate, up to {peak_rate:g}", f"set {written_peak.key} to {own_rate:g} instead")

    limit = static(value.value["max_lr_at_chance"]) if "max_lr_at_chance" in value.value else None
    if isinstance(limit, (int, float)) and peak_rate > FAR_ABOVE * limit:
        findings.warning("setting", written_peak.place, written_peak.key, f"it is {peak_rate:g}, but "
                         "schedule.max_lr_at_chance and max_rise_per_step keep the learning rate near "
                         f"{limit:g}",
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
    raise SbkitError("bad-value", f"--{name} is {value!r}, not a number", key=name, value=value,
                     hint="write a number, such as 1")


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
