"""Validation of run options and hparams before SpeechBrain's constructor reads them."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from speechbrain.utils.run_opts import RunOptions
from torch.optim import Optimizer

from sbkit.errors import SbkitError
from sbkit.nn.guard import guard_loss
from sbkit.recipe.settings import NO_DATA_PARALLEL, NUMBERS, option_number
from sbkit.recipe.speed import native_precision
from sbkit.recipe.values import unwrapped
from sbkit.train import device as devices

_ORDER = "its arguments are Brain(modules, opt_class, hparams, run_opts, checkpointer)"
_FACTOR = "grad_accumulation_factor"
_PRECISIONS = ("fp32", "bf16", "fp16")


def clean(run_opts: RunOptions | Mapping[str, Any] | None, hparams: Mapping[str, Any] | None,
          ) -> tuple[RunOptions, dict[str, Any] | None]:
    """Return copies of both, with numbers instead of texts and a usable ``device``, or raise an error."""
    opts = _with_numbers(_run_options(run_opts))
    values = _checked_hparams(hparams)
    device = devices.resolve(pick(opts, values, "device"))
    _refuse_data_parallel(opts, values)
    opts, values = _with_precisions(opts, values, device)
    _check_accumulation(opts, values)
    values = _with_one_interval(opts, values)
    return _with_device(opts, values, str(device))


def _run_options(run_opts: RunOptions | Mapping[str, Any] | None) -> RunOptions:
    if isinstance(run_opts, RunOptions):
        return run_opts
    unknown = sorted(set(run_opts or ()) - {field.name for field in dataclasses.fields(RunOptions)})
    if unknown:
        raise SbkitError("unknown-key",
                         f"run_opts has unknown keys: {', '.join(unknown)}",
                         hint="keys of the recipe go into hparams",
                         key=unknown[0])
    return RunOptions() if run_opts is None else RunOptions.from_dictionary(dict(run_opts))


def _checked_hparams(hparams: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Return a copy whose run options are numbers, and whose losses check the labels that they get."""
    if hparams is None:
        return None
    if not isinstance(hparams, Mapping):
        raise SbkitError("bad-value", f"hparams is of {type(hparams).__name__}, not a mapping", hint=_ORDER,
                         key="hparams")
    values = {name: guard_loss(value) for name, value in hparams.items()}
    values.update({name: option_number(name, values[name]) for name in NUMBERS if name in values})
    return values


def _with_numbers(opts: RunOptions) -> RunOptions:
    """Return options with numbers instead of texts."""
    return dataclasses.replace(opts, **{name: option_number(name, opts[name]) for name in NUMBERS})


def _refuse_data_parallel(opts: RunOptions, values: dict[str, Any] | None) -> None:
    """Refuse torch's DataParallel on a machine without a GPU, as SpeechBrain's Brain does."""
    if pick(opts, values, "data_parallel_backend") and torch.cuda.device_count() == 0:
        raise SbkitError("device-unavailable", f"data_parallel_backend is {NO_DATA_PARALLEL[0]}",
                         hint=NO_DATA_PARALLEL[1], key="data_parallel_backend")


def _with_precisions(opts: RunOptions, values: dict[str, Any] | None, device: torch.device,
                     ) -> tuple[RunOptions, dict[str, Any] | None]:
    """Return both with the device's own precision in place of ``auto``, or raise an error for an unknown one."""
    for name in ("precision", "eval_precision"):
        if pick(opts, values, name) == "auto":
            opts, values = _with_value(opts, values, name, native_precision(device))
        precision = pick(opts, values, name)
        if precision not in _PRECISIONS:
            raise SbkitError("bad-value", f"{name} is {precision!r}",
                             hint=f"choose one of auto, {', '.join(_PRECISIONS)}", key=name, value=precision)
    return opts, values


def _check_accumulation(opts: RunOptions, values: dict[str, Any] | None) -> None:
    factor = option_number(_FACTOR, pick(opts, values, _FACTOR))
    if factor is not None and factor < 1:
        raise SbkitError("bad-value", f"{_FACTOR} is {factor}, and must be 1 or more", key=_FACTOR, value=factor)


def _with_device(opts: RunOptions, values: dict[str, Any] | None, device: str,
                 ) -> tuple[RunOptions, dict[str, Any] | None]:
    """Return both with this device, where SpeechBrain looks for it."""
    chosen = set(opts.overridden_args)
    if values is not None and "device" in values:
        values = {**values, "device": device}
    else:
        chosen.add("device")  # otherwise SpeechBrain would choose a device again
    return dataclasses.replace(opts, device=device, overridden_args=chosen), values


def _with_value(opts: RunOptions, hparams: dict[str, Any] | None, name: str, value: object,
                ) -> tuple[RunOptions, dict[str, Any] | None]:
    """Replace an option's value where ``pick`` finds it."""
    if name in opts.overridden_args or hparams is None:
        return dataclasses.replace(opts, **{name: value}), hparams
    return opts, {**hparams, name: value}


def _with_one_interval(opts: RunOptions, hparams: dict[str, Any] | None) -> dict[str, Any] | None:
    """Return hparams in which one of the two intervals of checkpoints is 0: one of the command line replaces the other.
    """
    minutes, batches = "ckpt_interval_minutes", "ckpt_interval_steps"
    for asked, other in ((minutes, batches), (batches, minutes)):
        is_replaced = asked in opts.overridden_args and other not in opts.overridden_args
        if hparams is not None and is_replaced and other in hparams:
            hparams = {**hparams, other: 0}
    if float(pick(opts, hparams, minutes)) > 0 and int(pick(opts, hparams, batches)) > 0:
        raise SbkitError("conflicting-options", f"{minutes} and {batches} are both set", hint="set one of them to 0",
                         key=minutes)
    return hparams


def pick(run_opts: RunOptions, hparams: Mapping[str, Any] | None, name: str) -> Any:  # each option's own
    """Return the option's value; ``run_opts`` takes precedence over ``hparams``, and both over the default."""
    if name not in run_opts.overridden_args and hparams is not None and name in hparams:
        return hparams[name]
    return run_opts[name]


def precisions(run_opts: RunOptions, hparams: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the precision of training and of evaluation, from the options or SpeechBrain's two old switches."""
    training = pick(run_opts, hparams, "precision")
    for switch, name in (("auto_mix_prec", "fp16"), ("bfloat16_mix_prec", "bf16")):
        training = name if pick(run_opts, hparams, switch) else training
    return training, pick(run_opts, hparams, "eval_precision")


def hide_fp16(run_opts: RunOptions, hparams: Mapping[str, Any] | None, device_type: str) -> RunOptions:
    """Return options without fp16 on a CPU: SpeechBrain refuses it there, though recent torch supports it."""
    if device_type != "cpu" or "fp16" not in precisions(run_opts, hparams):
        return run_opts
    hidden = {"precision": "fp32", "eval_precision": "fp32", "auto_mix_prec": False}
    return dataclasses.replace(run_opts, overridden_args=run_opts.overridden_args | set(hidden), **hidden)


def check_opt_class(opt_class: Callable[..., Optimizer] | None) -> Callable[..., Optimizer] | None:
    """Return what makes the optimizer, or raise an error if it can't."""
    if opt_class is None:
        return None
    if isinstance(opt_class, Optimizer):
        raise SbkitError("bad-optimizer",
                         "opt_class is an optimizer, not a class",
                         hint="write !name: instead of !new:",
                         key="opt_class")
    if not callable(opt_class):
        given = repr(opt_class) if isinstance(opt_class, str) else f"of {type(opt_class).__name__}"
        raise SbkitError("bad-optimizer",
                         f"opt_class is {given}, not a class",
                         hint=_ORDER if isinstance(opt_class, Mapping) else
                         "write !name: and its name, such as !name:torch.optim.AdamW", key="opt_class")
    inner, named = unwrapped(opt_class)
    if isinstance(inner, type) and issubclass(inner, Optimizer):
        try:
            inspect.signature(inner).bind([], **named)
        except TypeError as error:
            known = [name for name in inspect.signature(inner).parameters if name != "params"]
            raise SbkitError("bad-optimizer",
                             f"opt_class: {inner.__name__} {error}",
                             hint=f"it takes {', '.join(known)}",
                             key="opt_class") from None
        for name in {"lr", "weight_decay", "momentum", "eps"} & named.keys():
            if isinstance(named[name], str):
                raise SbkitError("bad-optimizer",
                                 f"opt_class: {name} is the text {named[name]!r}",
                                 hint="write it without quotes",
                                 key="opt_class")
    return opt_class


def check_modules(modules: Mapping[str, Any] | None) -> dict[str, torch.nn.Module]:
    """Return the modules without null ones; raise an error for objects of other types and for unusable names."""
    if not isinstance(modules, (Mapping, torch.nn.ModuleDict, type(None))):
        raise SbkitError("bad-modules",
                         f"modules is of {type(modules).__name__}, not a mapping",
                         hint="give it names: {'model': ...}")
    checked = {key: module for key, module in (modules or {}).items() if module is not None}
    for key, module in checked.items():
        if isinstance(module, torch.nn.Module):
            continue
        hint = "only torch.nn.Module objects can be trained and saved"
        if isinstance(module, (list, tuple)):
            hint = "write a list of layers as !new:torch.nn.ModuleList"
        elif isinstance(module, type):
            hint = "it is a class: write !new: instead of !name:"
        elif isinstance(module, functools.partial):
            hint = "it was never built: write !new: instead of !name:"
        kind = type(module).__name__
        raise SbkitError("bad-modules",
                         f"modules: '{key}' is {'an' if kind[0].lower() in 'aeiou' else 'a'} {kind}, not a module",
                         hint=hint, key=key)
    for key in checked:
        if not isinstance(key, str) or not key or "." in key or hasattr(torch.nn.ModuleDict(), key):
            raise SbkitError("bad-modules", f"modules: '{key}' can't be the name of a module",
                             hint="choose a word without dots that is not a method of torch.nn.ModuleDict",
                             key=str(key))
    return checked
