"""What arguments of SpeechBrain's classes may be, where the class itself says it late, dimly or not at all."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.values import static


class Range(NamedTuple):
    """The numbers that a key may have."""

    least: float = -math.inf
    most: float = math.inf
    whole: bool = False

    def __contains__(self, value: Any) -> bool:
        kinds = int if self.whole else (int, float)
        return isinstance(value, kinds) and not isinstance(value, bool) and self.least <= value <= self.most

    def __str__(self) -> str:
        kind = "a whole number" if self.whole else "a number"
        if self.most < math.inf:
            return f"{kind} from {self.least:g} to {self.most:g}"
        return kind + (f", {self.least:g} or more" if self.least > -math.inf else "")


SIZE, COUNT, SHARE = Range(1, whole=True), Range(0, whole=True), Range(0, 1)
#: By the name of a class in SpeechBrain, those derived from it in SpeechBrain included: texts to choose from, numbers.
ARGUMENTS: dict[str, dict[str, tuple[str, ...] | Range]] = {
    "TransformerInterface": {
        "encoder_module": ("transformer", "conformer", "branchformer"),
        "attention_type": ("regularMHA", "RelPosMHAXL", "hypermixing", "RoPEMHA"),
        "d_model": SIZE, "nhead": SIZE, "d_ffn": SIZE, "kernel_size": SIZE, "csgu_linear_units": SIZE,
        "num_encoder_layers": COUNT, "num_decoder_layers": COUNT, "dropout": SHARE, "layerdrop_prob": SHARE,
        "input_size": SIZE, "tgt_vocab": SIZE,
    },
    "Linear": {"n_neurons": SIZE, "input_size": SIZE},
    "Fbank": {"n_mels": SIZE, "n_fft": SIZE, "sample_rate": SIZE},
}


def check_choices(target: Any, named: Mapping[Any, Node], node: Node, findings: Findings) -> None:
    """Tell of every named argument that its class can't use."""
    if not inspect.isclass(target) or not target.__module__.startswith("speechbrain."):
        return  # a class of one's own may know more
    for base in target.__mro__:
        wanted = ARGUMENTS.get(base.__name__, {}) if base.__module__.startswith("speechbrain.") else {}
        for key in wanted.keys() & named.keys():
            value = static(named[key])
            problem = None if named[key].spoilt else _problem(target.__name__, key, value, wanted[key])
            if problem:
                findings.error("wrong-value", node.place_of(key), node.key_of(key), *problem)
                node.wrong = True


def _problem(name: str, key: str, value: Any, wanted: tuple[str, ...] | Range) -> tuple[str, str] | None:
    """Message and suggestion; None where nothing is wrong, or where another check tells of its type."""
    if isinstance(wanted, Range):
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if number and not wanted.least <= value <= wanted.most:
            return f"{name} wants {key} to be {wanted}, this is {value!r}", ""
    elif isinstance(value, str) and value not in wanted:
        near = did_you_mean(value, wanted, cutoff=0.5)
        return f"{name} has no {key} {value!r}, it has {listed(wanted)}", f"did you mean {near}?" if near else ""
    return None
