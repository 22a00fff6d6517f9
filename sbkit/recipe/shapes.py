"""The model's forward on stand-in tensors: shapes, frames per second, and whether everything meets on one device.

Stand-ins (torch's FakeTensor) have shapes, types and devices and no memory, so neither data nor a GPU is
needed, and a model of any size takes no room.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import traceback
import warnings
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import torch
from speechbrain.lobes.models.transformer.Transformer import TransformerInterface
from speechbrain.nnet import attention
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from sbkit.errors import SbkitError
from sbkit.nn.recognizer import Recognizer
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section, listed
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.values import static

#: Seconds of the two utterances that are sent through.
LENGTHS = (3.0, 1.7)
_TOKENS = 9
NEEDED = ("compute_features", "ctc_lin")
#: Keys whose code the forward runs.
PATH = frozenset(("compute_features", "normalize", "CNN", "Transformer", "encoder", "ctc_lin", "seq_lin"))
# (what came, what was wanted) in torch's words.
_MISMATCHES = (
    re.compile(r"got \[\d+, (?P<got>\d+)\] X \[(?P<wanted>\d+), \d+\]"),
    re.compile(r"\(\d+x(?P<got>\d+) and (?P<wanted>\d+)x\d+\)"),
    re.compile(r"to have (?P<wanted>\d+) channels, but got (?P<got>\d+) channels"),
    re.compile(r"shape \[\*, (?P<wanted>\d+)\], but got input of size\s?\[.*?(?P<got>\d+)\]"),
)
_OTHER_DEVICE = re.compile(r"two different devices (\S+), (\S+)|Expected all tensors to be on the same device")


class Trace:
    """What a forward showed."""

    def __init__(self) -> None:
        self.stages: list[tuple[str, str, tuple[int, ...]]] = []
        """(what, key, shape)"""
        self.recognizer: Recognizer | None = None
        self.tried = False
        self.complete = False
        self.note = ""
        """Why the forward ended early, where that is no mistake."""

    def shape(self, what: str) -> tuple[int, ...] | None:
        """The shape of a stage, where the forward came that far."""
        return next((shape for name, _, shape in self.stages if name == what), None)


@contextlib.contextmanager
def stand_ins() -> Iterator[FakeTensorMode]:
    """Within it, tensors have shapes and no memory; real weights count as if they had none."""
    told = logging.root.manager.disable
    logging.disable(logging.ERROR)  # torch logs a traceback for each mismatch, which is told better below
    # SpeechBrain keeps rotary tables for the process: a stand-in left there would reach the run that follows.
    tables = attention._get_precomputed_values.memo
    attention._get_precomputed_values.memo = {}
    try:
        with warnings.catch_warnings(), FakeTensorMode(allow_non_fake_inputs=True) as mode:
            warnings.simplefilter("ignore")
            yield mode
    finally:
        attention._get_precomputed_values.memo = tables
        logging.disable(told)


def encoder_key(hparams: Mapping[str, Any]) -> str | None:
    """The key of the encoder, by the names that recipes use."""
    return next((key for key in ("Transformer", "encoder") if hparams.get(key) is not None), None)


def lacking(built: Built) -> str:
    """Why no forward can be run; empty where it can."""
    keys = [key for key in NEEDED if built.hparams.get(key) is None]
    if encoder_key(built.hparams) is None:
        keys.append("Transformer")
    return f"the forward: {', '.join(keys)} {'is' if len(keys) == 1 else 'are'} missing or not built" if keys else ""


def trace(built: Built, findings: Findings) -> Trace:
    """Run features, front end, encoder, heads and decoder on stand-ins; the first mismatch is told with its line."""
    found = Trace()
    found.note = lacking(built)
    if not found.note:
        found.tried = True
        with _telling(found, built, findings), torch.no_grad():
            hparams = SimpleNamespace(**built.hparams)
            if not _front_end_fits(built, hparams, findings) or not _has_its_decoder(built, findings):
                return found
            found.recognizer = Recognizer.from_hparams(hparams)
            with stand_ins():
                _run(found, hparams, encoder_key(built.hparams), "cpu")
    return found


def trace_moved(built: Built, before: Trace, modules: nn.ModuleDict, findings: Findings) -> Trace:
    """The same forward with the modules on stand-ins of a GPU: it fails where something was left behind.

    modules: all that a Brain moves, on the ``meta`` device; they end as stand-ins
    """
    found = Trace()
    found.recognizer = before.recognizer
    # Without cuDNN: an LSTM would ask it, and so a driver that may not be there, how to lay out its weights.
    with _telling(found, built, findings), torch.no_grad(), stand_ins(), torch.backends.cudnn.flags(enabled=False):
        modules.to_empty(device="cuda:0")
        _run(found, SimpleNamespace(**built.hparams), encoder_key(built.hparams), "cuda:0")
    return found


@functools.cache
def gpu_stand_ins() -> bool:
    """Whether tensors can pretend to be on a GPU here: torch 2.9 and older need a driver for that."""
    real = torch.ones(1)
    try:
        with stand_ins():
            real.to("cuda:0")
    except RuntimeError:
        return False
    return True


@contextlib.contextmanager
def _telling(found: Trace, built: Built, findings: Findings) -> Iterator[None]:
    """What goes wrong inside becomes a finding, or a note where it's no mistake."""
    try:
        yield
    except DataDependentOutputException as error:
        node, _ = _blame(error, built)
        where = node.key if node else "the features"
        found.note = (f"the forward behind {where}, which reads values of tensors on the host (.item() or the like; "
                      "that also makes a GPU wait)")
    except Exception as error:  # whatever a layer says to a shape it can't take
        _tell(error, built, findings, found.stages[-1][0] if found.stages else "features")


def _run(found: Trace, hparams: Any, encoder: str, device: str) -> None:
    for stage, key, shape in _stages(found.recognizer, hparams, encoder, device):
        found.stages.append((stage, key, tuple(shape)))
    found.complete = True


def _front_end_fits(built: Built, hparams: Any, findings: Findings) -> bool:
    """Whether it takes the features; the Recognizer then finds its subsampling by trying it."""
    frontend, node = getattr(hparams, "CNN", None), built.nodes.get("CNN")
    if frontend is None or node is None:
        return True
    with stand_ins():
        samples = round(max(LENGTHS) * getattr(hparams, "sample_rate", 16000))
        feats = hparams.compute_features(torch.empty(1, samples))
        shape = node.value.get("input_shape") if isinstance(node.value, dict) else None
        width = static(shape.value[-1]) if shape is not None and isinstance(shape.value, list) and shape.value else None
        if isinstance(width, int) and width != feats.shape[-1]:
            findings.error("shape-mismatch", node.place_of("input_shape"), node.key_of("input_shape"),
                           f"it expects {width} features, compute_features makes {feats.shape[-1]}",
                           "write `input_shape: [8, 10, !ref <n_mels>]`")
            return False
        frontend(feats)
    return True


def _has_its_decoder(built: Built, findings: Findings) -> bool:
    """Whether joint training finds a decoder in the encoder's class, where that is SpeechBrain's."""
    node = built.nodes[encoder_key(built.hparams)]
    layers = node.value.get("num_decoder_layers") if isinstance(node.value, dict) else None
    weight = built.hparams.get("ctc_weight", 1.0)
    theirs = isinstance(built.hparams[encoder_key(built.hparams)], TransformerInterface)
    if not theirs or built.hparams.get("seq_lin") is None or weight >= 1 or layers is None or static(layers) != 0:
        return True
    findings.error("forward", built.nodes["ctc_weight"].place, "ctc_weight",
                   f"it is {weight:g}, so the attention decoder trains, but {node.key}.num_decoder_layers is 0",
                   "write ctc_weight: 1.0, or give the decoder layers")
    return False


def _stages(model: Recognizer, hparams: Any, encoder: str, device: str) -> Iterator[tuple[str, str, torch.Size]]:
    """The path of a batch, stage by stage."""
    rate = getattr(hparams, "sample_rate", 16000)
    samples = torch.tensor([round(seconds * rate) for seconds in LENGTHS], device=device)
    signals = torch.empty(len(LENGTHS), round(max(LENGTHS) * rate), device=device)
    yield "waveforms", "", signals.shape
    feats, frames = model.features(signals, samples)
    yield "features", "compute_features", feats.shape
    if model.frontend is not None:
        yield "front end", "CNN", model.embed(feats, frames)[0].shape
    decoded = None
    if getattr(hparams, "seq_lin", None) is None or getattr(hparams, "ctc_weight", 1.0) >= 1.0:
        encoded, _ = model.encode(feats, frames)
    else:
        tokens = torch.ones(len(LENGTHS), _TOKENS, dtype=torch.long, device=device)
        encoded, _, decoded = model.encode_and_decode(feats, frames, tokens)
    yield "encoder", encoder, encoded.shape
    yield "CTC head", "ctc_lin", model.ctc_lin(encoded).shape
    if decoded is not None:
        yield "decoder", encoder, decoded.shape
        yield "attention head", "seq_lin", hparams.seq_lin(decoded).shape


# ---------------------------------------------------------------------------------------------- what went wrong


def _blame(error: BaseException, built: Built) -> tuple[Node | None, nn.Module | None]:
    """The innermost object of the recipe whose code was running, and the innermost layer."""
    node, layer = None, None
    for frame, _ in traceback.walk_tb(error.__traceback__):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            layer = owner
            node = built.origin(owner) or node
    return node, layer


def _tell(error: Exception, built: Built, findings: Findings, stage: str) -> None:
    node, layer = _blame(error, built)
    place, key = (node.place, node.key) if node is not None else (Place(built.nodes["modules"].place.file), stage)
    inside = f" (in its {type(layer).__name__})" if layer is not None and built.origin(layer) is not node else ""
    text = " ".join(str(error).split())
    if _OTHER_DEVICE.search(text) and any(f.code == "not-owned" and f.key == key for f in findings):
        return  # that is why
    if _OTHER_DEVICE.search(text):
        findings.error("device-mismatch", place, key,
                       f"a tensor stays on the CPU while the rest is on a device{inside}",
                       "hold it as a buffer, or move it in forward with .to(x.device)")
        return
    if isinstance(error, SbkitError):
        findings.error("forward", place, key, error.message, error.hint or "")
        return
    for pattern in _MISMATCHES:
        if match := pattern.search(text):
            got, wanted = int(match["got"]), int(match["wanted"])
            message = f"{got} values a frame come in and {wanted} are expected{inside}"
            argument = _argument(node, wanted)
            if argument is not None:
                place, key = node.place_of(argument), node.key_of(argument)
                suggestion = f"set {argument} to {got}, or make what comes before it give {wanted}"
            else:
                suggestion = f"make what comes before it give {wanted}"
            findings.error("shape-mismatch", place, key, message, suggestion)
            return
    findings.error("forward", place, key, f"the forward fails{inside}: {type(error).__name__}: {text[:300]}",
                   "compare its arguments with the shapes that come in" if isinstance(error, RuntimeError) else
                   _texts(node))


def _texts(node: Node | None) -> str:
    """Options among the arguments of a layer, one of which may be misspelt."""
    given = node.value.items() if node is not None and isinstance(node.value, dict) else ()
    shown = [f"{key} {value!r}" for key, child in given if isinstance(value := static(child), str)]
    return f"it gets {listed(shown)}" if shown else "look at its arguments"


def _argument(node: Node | None, value: int) -> str | None:
    """The argument of a layer that has this value."""
    if node is None or not isinstance(node.value, dict):
        return None
    found = [key for key, child in node.value.items() if static(child) == value and isinstance(key, str)]
    return next((key for key in found if "in" in key), found[0] if found else None)


# ---------------------------------------------------------------------------------------------- the table


def section(found: Trace, hparams: dict[str, Any]) -> Section | None:
    """Stages and shapes, and how much time a frame is."""
    if not found.stages:
        return None
    rows = [[what, key, f"[{', '.join(['B', *map(str, shape[1:])])}]"] for what, key, shape in found.stages]
    remarks: list[str] = []
    values: dict[str, Any] = {what: list(shape) for what, _, shape in found.stages}
    model = found.recognizer
    if model is not None and found.shape("encoder") is not None:
        rate = hparams.get("sample_rate", 16000)
        hop = 1000 * model.hop_samples / rate
        values |= {"subsampling": model.subsampling, "frames_per_second": 1000 / (hop * model.subsampling)}
        remarks.append(f"features every {hop:g} ms, subsampled by {model.subsampling}: an encoder frame every "
                       f"{hop * model.subsampling:g} ms, {1000 / (hop * model.subsampling):g} a second")
    remarks.append("T is of an utterance of 3 seconds")
    return Section("Shapes", ["stage", "key", "output"], rows, remarks, values)
