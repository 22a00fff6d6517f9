"""Traces a module once and writes the result as ONNX and as torch.export."""

from __future__ import annotations

import contextlib
import io
import logging
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._logging import structured

from sbkit.errors import SbkitError, summary
from sbkit.system.environment import version_of

if TYPE_CHECKING:
    import onnx

logger = logging.getLogger(__name__)

OPSET = 18
_TORCH_FOLDER = f"{Path(torch.__file__).parent}/"
_MAX_BYTES = 1 << 30  # larger models get a separate file of weights, since a protobuf is limited to 2 GiB


def trace_module(module: nn.Module, example: tuple[Tensor, ...],
                 dynamic_dims: Mapping[str, tuple[int, ...] | list[tuple[int, ...]]]) -> torch.export.ExportedProgram:
    """Trace a module; ``dynamic_dims`` are the dynamic dimensions of each input, a list of them for ``*inputs``."""
    dynamic: Any = torch.export.Dim.DYNAMIC  # torch's, which no type declares
    shapes: dict[str, Any] = {}
    for name, dims in dynamic_dims.items():
        if isinstance(dims, list):
            shapes[name] = tuple(dict.fromkeys(dims_of_input, dynamic) for dims_of_input in dims)
        else:
            shapes[name] = dict.fromkeys(dims, dynamic)
    try:
        with torch.no_grad(), _quiet(), _without_cache():
            program = torch.export.export(module, example, dynamic_shapes=shapes, strict=False)
    except Exception as error:
        # The line of the model's code that raised the error, unless torch raised it.
        frames = [frame for frame in traceback.extract_tb(_origin(error).__traceback__)[1:]
                  if _TORCH_FOLDER not in frame.filename and frame.filename != __file__]
        if frames:
            line = f" ({frames[-1].filename}, line {frames[-1].lineno}: {frames[-1].line})"
        else:
            line = _line_of_fixed_size(module, example, shapes)
        raise SbkitError("not-traceable", f"the model can't be traced{line}: {summary(_origin(error))}",
                         hint="look for a branch on values, a size that becomes a number (len(tensor), int(...)) or "
                         "a loop over frames") from error
    return program


def _line_of_fixed_size(module: nn.Module, example: tuple[Tensor, ...], shapes: Any) -> str:  # torch.export's
    """Return the line that turned a dynamic size into a constant, which torch.export's error doesn't name.

    torch's draft export continues after such a line and reports it.
    """
    try:
        with torch.no_grad(), _quiet():
            draft: Any = torch.export.draft_export(  # torch's, with a report that no type declares
                module, example, dynamic_shapes=shapes, strict=False)
        paths = {number: path for path, number in structured.INTERN_TABLE.items()}
        for failure in draft._report.failures:
            stack = failure.data.get("user_stack", ())
            outside_torch = [frame for frame in stack if _TORCH_FOLDER not in paths[frame["filename"]]]
            if outside_torch:
                frame = outside_torch[-1]
                return f" ({paths[frame['filename']]}, line {frame['line']}: {frame['loc']})"
    except Exception as error:  # the report has no public form yet; without it the message names no line
        logger.debug("no draft of the export: %s", error)
    return ""


def min_samples(program: torch.export.ExportedProgram, signals: str = "signals") -> int:
    """Return the smallest number of samples that the traced graph accepts."""
    for node in program.graph.find_nodes(op="placeholder", sort=True):
        value = node.meta.get("val")
        if isinstance(value, Tensor) and node.name == signals:
            size: Any = value.shape[1]  # a symbol
            return max(1, int(program.range_constraints[size.node.expr].lower))
    return 1


def write_torch(program: torch.export.ExportedProgram, path: Path) -> None:
    """Write ``model.pt2``, which has the graph as JSON and the weights as bytes, and no pickle."""
    program.example_inputs = None  # would be saved as a pickle
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                node.meta.pop("stack_trace", None)  # has paths of this machine
    with open(path, "wb") as file:  # so that a full disk raises OSError, which torch would hide
        torch.export.save(program, file)


def check_onnx_tools() -> None:
    """Raise if a package that writes or tries ONNX models is missing, or has another interface than sbkit uses."""
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise SbkitError("missing-package", f"ONNX export needs {', '.join(missing)}",
                         hint="pip install 'sbkit[export]'", value=missing[0])
    try:
        import sbkit.export.onnx_passes  # noqa: F401
    except (ImportError, AttributeError) as error:
        version = version_of("onnxscript")
        raise SbkitError("wrong-version", f"sbkit can't use this onnxscript ({version}): {summary(error)}",
                         hint="pip install 'sbkit[export]' installs one that it can use", value=version) from error


def write_onnx(program: torch.export.ExportedProgram, path: Path, inputs: Mapping[str, tuple[str, ...]],
               outputs: Mapping[str, tuple[str, ...]], metadata: dict[str, str]) -> None:
    """Write a traced module as ONNX; ``inputs`` and ``outputs`` map names to names of dynamic dimensions."""
    save(to_onnx(program, list(inputs), list(outputs)), path, metadata, {**inputs, **outputs})


def to_onnx(program: torch.export.ExportedProgram, inputs: Sequence[str], outputs: Sequence[str]) -> onnx.ModelProto:
    """Convert a traced module to an ONNX model.

    For each node without a stack trace, torch records the current one: a fifth of the time.
    """
    check_onnx_tools()
    from sbkit.export.onnx_passes import simplify

    try:
        with torch.no_grad(), _quiet(), _without_cache():
            exported = torch.onnx.export(program, dynamo=True, opset_version=OPSET, input_names=list(inputs),
                                         output_names=list(outputs), optimize=False, verbose=False)
            assert exported is not None, "torch returns None only where it is given a file name"
            simplify(exported.model)
            # An input that is an output too has lost its name to it.
            graph = exported.model.graph
            for value, name in (*zip(graph.inputs, inputs, strict=True), *zip(graph.outputs, outputs, strict=True)):
                if value.name != name:
                    value.name = name
            return exported.model_proto
    except Exception as error:
        raise SbkitError("format-failed", f"the model can't be written as ONNX: {summary(_origin(error))}") from error


def save(model: onnx.ModelProto, path: Path, metadata: dict[str, str], dimensions: Mapping[str, tuple[str, ...]]
         ) -> None:
    """Write an ONNX model, with metadata and with names for its dynamic dimensions."""
    import onnx

    for value in (*model.graph.input, *model.graph.output):
        for dimension, name in zip(value.type.tensor_type.shape.dim, dimensions[value.name], strict=False):
            dimension.dim_param = name
    del model.graph.value_info[:]  # uses the tracer's names of dimensions
    _drop_origins(model.graph)
    onnx.helper.set_model_props(model, metadata)
    model.doc_string = "made by sbkit"
    external = model.ByteSize() > _MAX_BYTES
    onnx.save_model(model, path, save_as_external_data=external, location=f"{path.name}.data" if external else None)


def _drop_origins(graph: onnx.GraphProto) -> None:
    """Remove each node's source line and module path, two thirds of a small model's size."""
    del graph.metadata_props[:]
    for node in graph.node:
        del node.metadata_props[:]
        for attribute in node.attribute:
            for inner in (attribute.g, *attribute.graphs):
                if inner.node:
                    _drop_origins(inner)


def quantize(path: Path, to: Path) -> None:
    """Write an ONNX model with 8-bit weights in matrix products; convolutions, and so features, stay in fp32.

    Weights are unsigned, like activations: on a processor without VNNI, ONNX Runtime sums products of unsigned and
    signed bytes in 16 bits, which saturates, so a bundle would recognise other words there. Products that only move
    numbers stay exact, as rotary positions need.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_dynamic

    model = onnx.load(path).graph
    moving = set()  # square matrices of zeros and ones
    for matrix in model.initializer:
        square = len(matrix.dims) == 2 and matrix.dims[0] == matrix.dims[1]
        if square and np.isin(onnx.numpy_helper.to_array(matrix), (0, 1)).all():
            moving.add(matrix.name)
    exact = [node.name for node in model.node if node.op_type == "MatMul" and node.input[1] in moving]
    with _quiet():
        quantize_dynamic(path, to, op_types_to_quantize=["MatMul"], weight_type=QuantType.QUInt8, per_channel=True,
                         nodes_to_exclude=exact,
                         use_external_data_format=path.with_name(f"{path.name}.data").exists())


def _origin(error: BaseException) -> BaseException:
    """Return the first error, which exporters wrap in generic advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _without_cache() -> contextlib.AbstractContextManager[None]:
    """Trace without torch's cache of what operations return: with dynamic sizes it is hardly ever hit, and filling it
    takes half of a trace's time."""
    from torch._dynamo import config

    return config.patch(fake_tensor_cache_enabled=False)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence the exporters' logs, warnings and prints; failures raise anyway."""
    loggers = [logging.getLogger(name) for name in ("torch.onnx", "onnxscript", "onnx_ir", "torch.export", "root")]
    levels = [exporter.level for exporter in loggers]
    with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
        warnings.simplefilter("ignore")
        for exporter in loggers:
            exporter.setLevel(logging.ERROR)
        try:
            yield
        finally:
            for exporter, level in zip(loggers, levels, strict=True):
                exporter.setLevel(level)
