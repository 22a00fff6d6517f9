"""Allowed values of arguments of SpeechBrain's and torch's classes that check them late or not at all."""

from __future__ import annotations

import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.source import UNKNOWN, Findings, Node
from sbkit.recipe.values import looks_like_number, static
from sbkit.system.schema import COUNT, HERTZ, NOT_NEGATIVE, POSITIVE, SHARE, SIZE, Number

_LIBRARIES = ("speechbrain.", "torch.")
#: Allowed values of arguments, by the name of a class of these libraries; they also hold for their derived classes.
ARGUMENTS: dict[str, dict[str, tuple[str, ...] | Number]] = {
    "TransformerInterface": {
        "encoder_module": ("transformer", "conformer", "branchformer"),
        "attention_type": ("regularMHA", "RelPosMHAXL", "hypermixing", "RoPEMHA"),
        "d_model": SIZE, "nhead": SIZE, "d_ffn": SIZE, "kernel_size": SIZE, "csgu_linear_units": SIZE,
        "num_encoder_layers": COUNT, "num_decoder_layers": COUNT, "dropout": SHARE, "layerdrop_prob": SHARE,
        "input_size": SIZE, "tgt_vocab": SIZE,
    },
    "Linear": {"n_neurons": SIZE, "input_size": SIZE},
    "Fbank": {"n_mels": SIZE, "n_fft": SIZE, "sample_rate": HERTZ, "win_length": POSITIVE, "hop_length": POSITIVE},
    "Optimizer": {"lr": NOT_NEGATIVE, "weight_decay": NOT_NEGATIVE},
}


class Clash(NamedTuple):
    """A combination of arguments that doesn't work, although each by itself is allowed."""

    applies: Callable[[Mapping[str, Any]], bool]
    """Whether the arguments, with defaults, are such a combination; an exception means no.

    A value may be known only later, or have a wrong type.
    """
    key: str
    """The argument to blame."""
    message: str
    """Names of arguments in braces are replaced by their values."""
    suggestion: str | Callable[[Mapping[str, Any]], str]
    fails: bool = True
    """Whether it is an error; a warning if it runs anyway, or only the decoder fails."""


#: These combinations by the name of a class, as above; ``tests/recipe/test_choices.py`` tests them all.
CLASHES: dict[str, tuple[Clash, ...]] = {
    "TransformerInterface": (
        Clash(lambda a: (a["encoder_module"], a["attention_type"]) == ("branchformer", "RoPEMHA"), "attention_type",
              "SpeechBrain's Branchformer has no attention_type 'RoPEMHA', it has regularMHA, RelPosMHAXL, hypermixing",
              "write RelPosMHAXL, or encoder_module: conformer"),
        Clash(lambda a: isinstance(a["d_model"], int) and a["d_model"] % a["nhead"] != 0, "nhead",
              "each attention head gets an equal share of d_model, and nhead {nhead} doesn't divide {d_model}",
              lambda a: f"write nhead: {_near_heads(a['d_model'], a['nhead'])}, or choose another d_model"),
        Clash(lambda a: a["attention_type"] == "RoPEMHA" and a["d_model"] / a["nhead"] % 2 == 1, "nhead",
              "RoPEMHA rotates pairs of values, and d_model / nhead is an odd number",
              "choose nhead so that it is even, or attention_type: RelPosMHAXL"),
        Clash(lambda a: a["causal"] is True and a["attention_type"] == "hypermixing", "causal",
              "hypermixing sees all frames at once, causal or not: a frame depends on later ones",
              "write causal: false, or choose another attention_type", fails=False),
        Clash(lambda a: a["causal"] is True and a["attention_type"] != "hypermixing"
              and a["encoder_module"] == "branchformer", "causal",
              "the Branchformer's convolutions are not causal: a frame depends on later ones",
              "write causal: false, or encoder_module: conformer", fails=False),
        Clash(lambda a: a["encoder_module"] == "conformer" and a["causal"] is False and a["kernel_size"] % 2 == 0,
              "kernel_size", "with an even kernel_size the Conformer's convolutions drop a frame",
              "write an odd number"),
    ),
    "TransformerASR": (
        Clash(lambda a: a["attention_type"] == "regularMHA" and a["positional_encoding"] is None,
              "positional_encoding", "with attention_type 'regularMHA' TransformerASR fails without one",
              "write fixed_abs_sine, or attention_type: RelPosMHAXL"),
        Clash(lambda a: a["attention_type"] == "hypermixing" and a["positional_encoding"] is None
              and a["num_decoder_layers"] != 0,
              "positional_encoding",
              "with attention_type 'hypermixing' the decoder of TransformerASR fails without one",
              "write fixed_abs_sine, which changes nothing in the encoder, or num_decoder_layers: 0", fails=False),
    ),
    "Fbank": (
        Clash(lambda a: round(a["win_length"] * a["sample_rate"] / 1000) > a["n_fft"], "win_length",
              "a window has more samples than n_fft; win_length and hop_length are in milliseconds, n_fft in samples",
              "write win_length: 25 and hop_length: 10, or a larger n_fft"),
        Clash(lambda a: a["win_length"] < a["hop_length"] < math.inf, "hop_length",
              "windows are further apart than they are long, so that audio between them is lost; both are in "
              "milliseconds", "write hop_length: 10", fails=False),
    ),
}


def _near_heads(size: int, heads: int) -> str:
    """The one or two numbers of heads nearest to ``heads`` that divide ``size``; parts of an even size are even."""
    fit = (n for n in range(1, 257) if size % n == 0 and (size // n + size) % 2 == 0)
    return " or ".join(map(str, sorted(sorted(fit, key=lambda n: abs(n - heads))[:2])))


def check_choices(target: object, named: Mapping[Any, Node], node: Node, findings: Findings) -> None:
    """Add findings about named arguments that a class can't use, alone or in combination."""
    if not inspect.isclass(target) or not target.__module__.startswith((*_LIBRARIES, "sbkit.")):
        return  # a user's class may allow other values
    for base in target.__mro__:
        if base.__module__.startswith(_LIBRARIES):
            _check_each(target, ARGUMENTS.get(base.__name__, {}), named, node, findings)
    if not findings.is_reported(node):
        _check_clashes(target, named, node, findings)


def _check_each(target: type, allowed_values: Mapping[str, tuple[str, ...] | Number], named: Mapping[Any, Node],
                node: Node, findings: Findings) -> None:
    """Compare each argument with the values that are allowed for it; another check reports a wrong type."""
    for key, allowed in allowed_values.items():
        if key not in named or findings.unusable(named[key]):
            continue
        value = static(named[key])
        message = hint = ""
        if isinstance(allowed, Number):
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            is_word = isinstance(value, str) and looks_like_number(value) is None
            if is_word or (is_number and value not in allowed._replace(whole=False)):
                message = f"{target.__name__}'s {key} must be {allowed}, not {value!r}"
        elif isinstance(value, str) and value not in allowed:
            near = did_you_mean(value, allowed, cutoff=0.5)
            message = f"{target.__name__} has no {key} {value!r}, it has {listed(allowed)}"
            hint = f"did you mean {near}?" if near else ""
        if message:
            findings.error("wrong-value", findings.blame(node, key), node.key_of(key), message, hint)


def _check_clashes(target: type, named: Mapping[Any, Node], node: Node, findings: Findings) -> None:
    """Report combinations of arguments, with defaults for those that aren't named, that don't work."""
    clashes = [clash for base in target.__mro__ if base.__module__.startswith(_LIBRARIES)
               for clash in CLASHES.get(base.__name__, ())]
    if not clashes:
        return
    values: defaultdict[str, Any] = defaultdict(lambda: UNKNOWN)
    for name, parameter in inspect.signature(target).parameters.items():
        values[name] = parameter.default
    for key, child in named.items():
        values[key] = UNKNOWN if findings.unusable(child) else static(child)

    for clash in clashes:
        try:
            applies = clash.applies(values)
        except (TypeError, ValueError, ArithmeticError):
            continue
        if not applies:
            continue
        message = clash.message.format_map(values)
        hint = clash.suggestion if isinstance(clash.suggestion, str) else clash.suggestion(values)
        if clash.fails:
            findings.error("wrong-value", findings.blame(node, clash.key), node.key_of(clash.key), message, hint)
        else:
            findings.warning("wrong-value", node.place_of(clash.key), node.key_of(clash.key), message, hint)
