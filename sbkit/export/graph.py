"""The exported function: waveforms in, log-probabilities out; traced once, written as ONNX and as torch.export."""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.export import features, layout
from sbkit.export.lobes import exportable
from sbkit.nn.lengths import LengthRule
from sbkit.nn.recognizer import GUARD_FRAMES, Recognizer

logger = logging.getLogger(__name__)

OPSET = 18
_EXAMPLE = (2, 24_000)  # a batch that is traced; sizes of 0 and 1 would count as constants
_UNUSED = ("decoder", "custom_tgt_module", "positional_encoding_decoder")  # of a transformer: CTC does without
_SPLIT_OFF = 1 << 30  # weights above this go into a file beside: a protobuf ends at 2 GiB


class Graph(nn.Module):
    """A recogniser as one function of waveforms, each utterance by itself whatever its batch is.

    Arguments
    ---------
    recognizer : whose parts it takes; they are copied, so the recogniser stays as it is
    """

    def __init__(self, recognizer: Recognizer):
        super().__init__()
        self.front_name = type(recognizer.compute_features).__name__
        self.features = features.express(recognizer.compute_features, recognizer.hop_samples)
        self.normalize = features.normalization(recognizer.normalize)
        parts = (recognizer.frontend, recognizer.encoder, recognizer.ctc_lin)
        self.frontend, self.encoder, self.ctc_lin = copy.deepcopy(nn.ModuleList(parts)).eval()
        for part in (self.frontend, self.encoder, self.ctc_lin):
            if part is not None:
                exportable(part)
        self.factor, self.shift = _closed_form(recognizer.frontend_rule)
        self.encodes = hasattr(self.encoder, "encode")
        for name in _UNUSED:
            if self.encodes and hasattr(self.encoder, name):
                delattr(self.encoder, name)
        self.requires_grad_(False)

    def _after(self, frames: Any) -> Any:
        """Frames behind the front end for frames before it; integers, symbols or tensors."""
        return (frames + self.shift) // self.factor

    def forward(self, signals: Tensor, lengths: Tensor) -> tuple[Tensor, Tensor]:
        """Waveforms [B, S] and sample counts [B] to log-probabilities [B, T, V] and frame counts [B]."""
        lengths = lengths.clamp(max=signals.shape[1])
        feats, frames = self.features(signals, lengths)
        if self.normalize is not None:
            feats = self.normalize(feats, frames)
        inside = torch.arange(feats.shape[1], device=feats.device)[None, :] < frames[:, None]
        feats = feats.masked_fill(~inside[..., None], 0.0)
        if self.frontend is not None:
            longest = self._after(feats.shape[1])
            feats = self.frontend(functional.pad(feats, (0, 0, 0, GUARD_FRAMES)))[:, :longest].flatten(2)
            frames = self._after(frames)
        encoded = self.encoder.encode(feats, frames / feats.shape[1]) if self.encodes else self.encoder(feats)
        encoded = encoded[0] if isinstance(encoded, tuple) else encoded
        return self.ctc_lin(encoded).float().log_softmax(-1), frames


def _closed_form(rule: LengthRule) -> tuple[int, int]:
    """(factor, shift) with ``rule(t) == (t + shift) // factor`` for every t above 0."""
    for shift in range(-4 * rule.factor, 4 * rule.factor):
        if all((t + shift) // rule.factor == rule.outputs[t] for t in range(1, len(rule.outputs))):
            return rule.factor, shift
    raise SbkitError("the front end makes of T frames no (T + a) // b frames, so its lengths can't be exported",
                     hint="convolutions with padding 'same' do")


def trace(graph: Graph) -> torch.export.ExportedProgram:
    """The graph with batch and time left open."""
    batch, samples = _EXAMPLE
    example = (torch.randn(batch, samples) * 0.1, torch.tensor([samples, samples * 2 // 3]))
    program = trace_module(graph, example, {"signals": (0, 1), "lengths": (0,)})
    if isinstance(graph.features, features.Traced):
        features.refuse_transforms(program, graph.front_name)
    return program


def trace_module(module: nn.Module, example: tuple[Tensor, ...],
                 open_: dict[str, tuple[int, ...]]) -> torch.export.ExportedProgram:
    """Trace any module, with the dimensions of each input that are named left open."""
    shapes = {name: dict.fromkeys(dims, torch.export.Dim.DYNAMIC) for name, dims in open_.items()}
    try:
        with torch.no_grad(), _quiet():
            program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        raise SbkitError(f"the model can't be traced: {_first_line(error)}",
                         hint="branches on values, sizes turned into numbers and loops over frames can't be exported") \
            from error
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # paths and lines of this machine are nobody else's
    return program


def least_samples(program: torch.export.ExportedProgram) -> int:
    """The shortest signals that the traced function takes; shorter ones are padded with zeros."""
    samples = program.graph.find_nodes(op="placeholder", sort=True)
    for node in samples:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.name == layout.INPUTS[0]:
            symbol = value.shape[1].node.expr
            return max(1, int(program.range_constraints[symbol].lower))
    return 1


def write_torch(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write ``model.pt2``: the graph as JSON and the weights as bytes; no pickle is in it."""
    program.example_inputs = None  # they would be one
    with open(path, "wb") as file:  # a full disk stays an OSError
        torch.export.save(program, file)


def write_onnx(program: torch.export.ExportedProgram, path: Path, metadata: dict[str, str]) -> None:
    """Write ``model.onnx``."""
    model = to_onnx(program, layout.INPUTS, layout.OUTPUTS)
    save(model, path, metadata, {"signals": ("batch", "samples"), "lengths": ("batch",),
                                 "log_probs": ("batch", "frames"), "frames": ("batch",)})


def to_onnx(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """A traced module as an ONNX model."""
    try:
        with torch.no_grad(), _quiet():
            return torch.onnx.export(program, dynamo=True, opset_version=OPSET, input_names=list(inputs),
                                     output_names=list(outputs), verbose=False).model_proto
    except Exception as error:
        raise SbkitError(f"the model can't be written as ONNX: {_first_line(error)}") from error


def save(model: Any, path: Path, metadata: dict[str, str], dimensions: dict[str, tuple[str, ...]]) -> None:
    """Write an ONNX model with names for its open dimensions."""
    import onnx

    for value in (*model.graph.input, *model.graph.output):
        for dimension, name in zip(value.type.tensor_type.shape.dim, dimensions[value.name], strict=False):
            dimension.dim_param = name
    del model.graph.value_info[:]  # they speak of the tracer's symbols
    _forget_origins(model.graph)
    onnx.helper.set_model_props(model, metadata)
    model.doc_string = "waveforms to log-probabilities of CTC; made by sbkit"
    beside = model.ByteSize() > _SPLIT_OFF
    onnx.save_model(model, path, save_as_external_data=beside, location=f"{path.name}.data" if beside else None)


def _forget_origins(graph: Any) -> None:
    """Drop what each node says of the code and the module that it came from, two thirds of a small model's size."""
    del graph.metadata_props[:]
    for node in graph.node:
        del node.metadata_props[:]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    _forget_origins(inner)


def quantize(path: Path, to: Path) -> None:
    """Write the ONNX model with 8-bit weights in its matrix products; convolutions, features among them, stay fp32."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    with _quiet():
        quantize_dynamic(path, to, op_types_to_quantize=["MatMul"], weight_type=QuantType.QInt8, per_channel=True,
                         use_external_data_format=path.with_name(f"{path.name}.data").exists())


def _first_line(error: BaseException) -> str:
    """Of the cause: exporters wrap it in advice of their own."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Exporters tell of their own doings; what goes wrong comes as an exception."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export", "root")]
    levels = [each.level for each in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for each in loggers:
            each.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for each, level in zip(loggers, levels, strict=True):
                each.setLevel(level)
