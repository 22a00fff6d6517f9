"""What the model of a script is, found from its objects and from runs of its ``compute_forward``.

A name is only believed where objects agree with it. What can't be told is an error with the lines to add, in the YAML
or as an attribute of the Brain's class::

    sbkit_export:
        output: 0
        tokenizer: !ref <tokenizer>
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from speechbrain.core import Stage
from torch import Tensor, nn

from sbkit.compat.script_forward import Place, ScriptForward, Traced, tensors_in
from sbkit.compat.script_test_set import TestSet
from sbkit.compat.script_tokens import (
    ScriptTexts,
    ScriptTokens,
    Tokenizer,
    open_tokens,
    size_of,
    tokenizers_of,
)
from sbkit.errors import SbkitError, shown
from sbkit.train.batches import DataSource

Brain = Any  # an sbkit.Brain
Declared = Any  # what a script says of itself, of any type
DECLARATION = "sbkit_export"
_DECLARED = ("output", "tokenizer", "blank", "text", "signal", "stage", "sample_rate")
_STAGES = {"test": Stage.TEST, "valid": Stage.VALID}
#: Rows that the model is run on to find its outputs: the shortest of those evenly chosen by length.
_TRIED_ROWS, _CHOSEN_FROM = 3, 9
#: The largest log of a sum of probabilities that rounding gives, in fp32.
_ROUNDING = 1e-3
_TIMES_LONGER = 2  # the audio of the second run
_RATE_TOLERANCE = 0.02  # lists have rounded durations


@dataclass
class ScriptRecogniser:
    """A CTC recogniser that a script has trained.

    forward : runs it as far as its log-probabilities [B, T, V]
    modules : those that ``compute_forward`` calls
    normalized : whether the outputs are log-probabilities already, and not scores
    """

    brain: Brain
    test_set: TestSet
    forward: ScriptForward
    modules: Sequence[nn.Module]
    tokens: ScriptTokens
    texts: ScriptTexts
    blank: int
    sample_rate: int
    normalized: bool

    def log_probs(self, outputs: Tensor) -> Tensor:
        """Return the outputs as log-probabilities in fp32."""
        return outputs.float() if self.normalized else outputs.float().log_softmax(-1)

    def describe(self) -> list[tuple[str, str]]:
        """Say what was found, for the screen: what, and its value."""
        place = "".join(f"[{step!r}]" for step in self.forward.place) or "itself"
        return [("log-probabilities", f"compute_forward's result {place}, at Stage.{self.forward.stage.name}"),
                ("tokens", f"{len(self.tokens.symbols)}, of which {self.blank} is the blank"),
                ("waveforms", f"batch.{self.test_set.signal_key}, {self.sample_rate} Hz"),
                ("texts", self.texts.describe())]


def find_recogniser(brain: Brain, loader: DataSource) -> ScriptRecogniser:
    """Find the CTC recogniser in a script's Brain.

    loader : of its test set
    """
    declared = _declaration(brain)
    test_set = TestSet(loader, declared.get("signal"))
    stage = _STAGES[declared.get("stage", "test")]
    forward = ScriptForward(brain, test_set, stage)
    tokenizers = _tokenizers(brain, declared)
    short, long = _runs(forward, test_set)
    place, output, name = _find_output(short, long, tokenizers, declared.get("output"))
    origin = short.origin(output)
    forward.output_is(place, origin)
    tokens, texts = open_tokens(tokenizers[name], test_set, declared.get("text"))
    sample_rate = _find_sample_rate(brain, short.modules, declared.get("sample_rate"))
    _check_sample_rate(sample_rate, test_set)
    return ScriptRecogniser(brain, test_set, forward, short.modules, tokens, texts,
                            _find_blank(brain, tokens, declared.get("blank")), sample_rate, _are_log_probs(output))


# ------------------------------------------------------------------ what the script says


def _declaration(brain: Brain) -> Mapping[str, Declared]:
    """Return what the script says about its export: in its YAML, or in its class."""
    declared = vars(brain.hparams).get(DECLARATION, getattr(brain, DECLARATION, None))
    if declared is None:
        return {}
    if not isinstance(declared, Mapping):
        raise SbkitError("script-declaration", f"{DECLARATION} is {shown(declared)}, and must be a mapping",
                         key=DECLARATION, hint=f"its keys are {', '.join(_DECLARED)}")
    unknown = sorted(set(declared) - set(_DECLARED))
    if unknown:
        raise SbkitError("script-declaration", f"{DECLARATION} has unknown keys: {', '.join(unknown)}", key=unknown[0],
                         hint=f"its keys are {', '.join(_DECLARED)}")
    stage = declared.get("stage", "test")
    if stage not in _STAGES:
        raise SbkitError("script-declaration", f"{DECLARATION}: stage is {shown(stage)}", key="stage", value=stage,
                         hint=f"write {' or '.join(_STAGES)}: Stage.TRAIN augments")
    return declared


def _lines(**keys: str) -> str:
    """The declaration to add, for a hint."""
    values = ", ".join(f"{name}: {value}" for name, value in keys.items())
    return f"add to the YAML (or to the class, as a dict): {DECLARATION}: {{{values}}}"


def _tokenizers(brain: Brain, declared: Mapping[str, Declared]) -> dict[str, Tokenizer]:
    """Return the tokenizers that may be the model's, by name."""
    wanted = declared.get("tokenizer")
    if wanted is not None:
        inner = getattr(wanted, "sp", wanted)
        try:
            size_of(inner)
        except AttributeError:
            raise SbkitError("script-tokenizer", f"{DECLARATION}: tokenizer is a {type(wanted).__name__}",
                             key="tokenizer", hint="SpeechBrain's SentencePiece, CTCTextEncoder, TextEncoder and "
                             "CategoricalEncoder are supported, and sentencepiece's processor") from None
        return {"tokenizer": inner}
    found = tokenizers_of(brain)
    if not found:
        raise SbkitError("script-tokenizer", f"{type(brain).__name__} has no tokenizer among its attributes, its "
                         "hparams and what its methods use", key="tokenizer",
                         hint=f"set it, as SpeechBrain's recipes do: brain.tokenizer = ..., or "
                              f"{_lines(tokenizer='!ref <tokenizer>')}")
    return found


# ------------------------------------------------------------------ the output


def _runs(forward: ScriptForward, test_set: TestSet) -> tuple[Traced, Traced]:
    """Run the whole ``compute_forward`` on some of the test's rows, and on the same with longer audio."""
    signals = [test_set.signal(row) for row in test_set.evenly_by_length(_CHOSEN_FROM)[:_TRIED_ROWS]]
    longest = max(map(len, signals))
    lengths = torch.tensor([len(signal) / longest for signal in signals])
    padded = torch.stack([nn.functional.pad(signal, (0, longest - len(signal))) for signal in signals])
    return forward.whole(padded, lengths), forward.whole(padded.repeat(1, _TIMES_LONGER), lengths)


def _find_output(short: Traced, long: Traced, tokenizers: Mapping[str, Tokenizer], declared: Declared,
                 ) -> tuple[Place, Tensor, str]:
    """Find the scores of tokens, one row for each frame of the audio, and the tokenizer that they are for.

    short, long : the results for the same batch, with longer audio in the second
    declared : which output it is, if the script says so: its index or key

    Returns the output's place, the output, and the tokenizer's name.
    """
    outputs = dict(tensors_in(short.result))
    longer = dict(tensors_in(long.result))
    described = ", ".join(f"{_named(place)} {[*tensor.shape]}" for place, tensor in outputs.items()) or "no tensor"
    if declared is not None:
        wanted = [place for place in outputs if place == (declared,) or (declared == 0 and not place)]
        if not wanted:
            raise SbkitError("script-output", f"{DECLARATION}: output is {declared!r}, but compute_forward returns "
                             f"{described}", key="output", value=declared, hint="write the index or the key of one")
        outputs = {place: outputs[place] for place in wanted}

    framewise = {place: tensor for place, tensor in outputs.items()
                 if tensor.ndim == 3 and tensor.is_floating_point() and _grows(tensor, longer.get(place))}
    fitting = [(place, tensor, name) for place, tensor in framewise.items() for name, tokenizer in tokenizers.items()
               if tensor.shape[2] == size_of(tokenizer) and (declared is not None or _are_log_probs(tensor))]
    if len(fitting) == 1:
        return fitting[0]
    sizes = ", ".join(f"{name} with {size_of(tokenizer)}" for name, tokenizer in tokenizers.items())
    if fitting:
        places = dict.fromkeys(_named(place) for place, _, _ in fitting)
        names = dict.fromkeys(name for _, _, name in fitting)
        raise SbkitError("script-ambiguous", f"several outputs or tokenizers may be the recogniser's: "
                         f"{', '.join(places)}, and {', '.join(names)}",
                         hint=_lines(output=next(iter(places)).removeprefix("output "),
                                     tokenizer=f"!ref <{next(iter(names))}>") + ", with those that are meant")
    raise _no_output(outputs, framewise, described, sizes)


def _no_output(outputs: Mapping[Place, Tensor], framewise: Mapping[Place, Tensor], described: str, sizes: str
               ) -> SbkitError:
    """Say why no output is a CTC recogniser's."""
    what = f"compute_forward returns {described}; there is the tokenizer {sizes} entries"
    if any(tensor.ndim == 4 for tensor in outputs.values()):
        return SbkitError("script-not-ctc", f"{what}: an output [B, T, U, V] is a transducer's, which can't be "
                          "exported from a script yet", hint="a task of sbkit's can: hparams/transducer.yaml")
    if framewise:
        return SbkitError("script-output", f"{what}: no output with a row for each frame has log-probabilities of as "
                          "many tokens as a tokenizer has", hint=f"if one is right all the same, {_lines(output='0')}")
    return SbkitError("script-not-ctc", f"{what}: none grows with the audio and has an entry for each token, as "
                      "CTC's log-probabilities [B, T, V] do. Attention decoders alone, classifiers, embeddings and "
                      "enhancement can't be exported from a script yet",
                      hint="a recogniser with CTC beside a decoder returns its log-probabilities at Stage.TEST or, "
                           f"if it does so in validations alone, {_lines(stage='valid')}")


def _named(place: Place) -> str:
    return f"output {'.'.join(map(str, place))}" if place else "output 0"


def _grows(tensor: Tensor, longer: Tensor | None) -> bool:
    """Whether an output has more frames for longer audio."""
    return longer is not None and longer.ndim == tensor.ndim and longer.shape[1] > tensor.shape[1]


def _are_log_probs(tensor: Tensor) -> bool:
    return bool(tensor.float().logsumexp(-1).abs().max() < _ROUNDING)


# ------------------------------------------------------------------ blank and sample rate


def _find_blank(brain: Brain, tokens: ScriptTokens, declared: Declared) -> int:
    """Find the id of the blank, about which all that know it must agree."""
    if declared is not None:
        if not isinstance(declared, int) or not 0 <= declared < len(tokens.symbols):
            raise SbkitError("script-blank", f"{DECLARATION}: blank is {shown(declared)}, and must be an id of one of "
                             f"the {len(tokens.symbols)} tokens", key="blank", value=declared, hint="write its number")
        return declared
    hparams = vars(brain.hparams)
    sources: dict[str, int] = {}
    if tokens.blank is not None:
        sources["the tokenizer"] = tokens.blank
    if isinstance(hparams.get("blank_index"), int):
        sources["blank_index"] = hparams["blank_index"]
    for name, value in hparams.items():
        if isinstance(value, functools.partial) and isinstance(value.keywords.get("blank_index"), int):
            sources[name] = value.keywords["blank_index"]
    # SpeechBrain counts a negative one from the end.
    values = {blank % len(tokens.symbols) for blank in sources.values()}
    if len(values) == 1:
        return values.pop()
    if not values:
        problem = "neither the tokenizer, nor blank_index, nor a loss says which token is the blank"
    else:
        problem = "the blank is " + ", but ".join(f"{blank} for {name}" for name, blank in sources.items())
    raise SbkitError("script-blank", problem, key="blank", hint=_lines(blank="0"))


def _find_sample_rate(brain: Brain, modules: Sequence[nn.Module], declared: Declared) -> int:
    """Find the samples per second of the waveforms in a batch."""
    if declared is not None:
        return int(declared)
    hparams = vars(brain.hparams)
    if isinstance(hparams.get("sample_rate"), int):
        return int(hparams["sample_rate"])
    rates = {rate for module in modules if isinstance(rate := getattr(module, "sample_rate", None), int)}
    if len(rates) != 1:
        raise SbkitError("script-sample-rate", "the sample rate of the waveforms is unknown: the YAML has no "
                         "sample_rate", key="sample_rate", hint="add to the YAML: sample_rate: 16000")
    return rates.pop()


def _check_sample_rate(sample_rate: int, test_set: TestSet) -> None:
    """Raise if waveforms have another number of samples than their durations, where the script's list has these."""
    for row in test_set.evenly_by_length(_TRIED_ROWS):
        seconds = test_set.duration(row)
        samples = len(test_set.signal(row))
        if seconds and abs(samples / seconds - sample_rate) > _RATE_TOLERANCE * sample_rate:
            raise SbkitError("script-sample-rate", f"{test_set.id(row)} lasts {seconds:g} s by the script's list and "
                             f"has {samples:,} samples in a batch, which isn't {sample_rate:,} a second",
                             key="sample_rate", value=sample_rate,
                             hint=_lines(sample_rate=str(round(samples / seconds))) + ", if the list is right")
