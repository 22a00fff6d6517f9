"""Writes ONNX models from text, as onnx's own parser reads it, and constants."""

from __future__ import annotations

from pathlib import Path

import numpy as np

#: The end of any axis, for ``Slice``.
FAR = [np.iinfo(np.int64).max]


def write(path: Path, takes: str, gives: str, nodes: str, **constants: object) -> None:
    """Write a model.

    takes, gives : inputs and outputs, such as ``float[batch, samples] signals``
    nodes : one a line, such as ``at = Range(zero, longest, one)``
    constants : whole numbers become int64, others float
    """
    import onnx
    from onnx import numpy_helper

    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 18]> model ({takes}) => ({gives}) {{{nodes}}}')
    arrays = {name: np.asarray(value) for name, value in constants.items()}
    model.graph.initializer.extend(
        numpy_helper.from_array(array.astype(np.float32 if array.dtype.kind == "f" else np.int64), name)
        for name, array in arrays.items())
    onnx.checker.check_model(model)
    onnx.save(model, path)
