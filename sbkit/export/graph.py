"""A module as a program of others: traced once, written as ONNX and as torch.export."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError

logger = logging.getLogger(__name__)

OPSET = 18
_SPLIT_OFF = 1 << 30  # weights above this go into a file beside: a protobuf ends at 2 GiB


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


def least_samples(program: torch.export.ExportedProgram, signals: str = "signals") -> int:
    """The shortest signals that the traced function takes; shorter ones are padded with zeros."""
    samples = program.graph.find_nodes(op="placeholder", sort=True)
    for node in samples:
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.name == signals:
            size: Any = value.shape[1]  # a symbol
            return max(1, int(program.range_constraints[size.node.expr].lower))
    return 1


def write_torch(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write ``model.pt2``: the graph as JSON and the weights as bytes; no pickle is in it."""
    program.example_inputs = None  # they would be one
    with open(path, "wb") as file:  # a full disk stays an OSError
        torch.export.save(program, file)


def write_onnx(program: torch.export.ExportedProgram, path: Path, inputs: Mapping[str, tuple[str, ...]],
               outputs: Mapping[str, tuple[str, ...]], metadata: dict[str, str]) -> None:
    """Write ``model.onnx``, with names for inputs and outputs and for their open dimensions."""
    save(to_onnx(program, list(inputs), list(outputs)), path, metadata, {**inputs, **outputs})


def to_onnx(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> Any:
    """A traced module as an ONNX model."""
    try:
        with torch.no_grad(), _quiet():
            made = torch.onnx.export(program, dynamo=True, opset_version=OPSET, input_names=list(inputs),
                                     output_names=list(outputs), verbose=False)
            assert made is not None, "it was asked for by no file's name"
            return made.model_proto
    except Exception as error:
        raise SbkitError(f"the model can't be written as ONNX: {_first_line(error)}") from error


def save(model: Any, path: Path, metadata: dict[str, str], dimensions: Mapping[str, tuple[str, ...]]) -> None:
    """Write an ONNX model with names for its open dimensions."""
    import onnx

    for value in (*model.graph.input, *model.graph.output):
        for dimension, name in zip(value.type.tensor_type.shape.dim, dimensions[value.name], strict=False):
            dimension.dim_param = name
    del model.graph.value_info[:]  # they speak of the tracer's symbols
    _forget_origins(model.graph)
    onnx.helper.set_model_props(model, metadata)
    model.doc_string = "made by sbkit"
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
