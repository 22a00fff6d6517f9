"""What is done to a graph before it is written: values stay, and an onnxscript that can't be used is named."""

import sys
from importlib import metadata

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from refusals import refused
from torch import nn

import sbkit.export
from sbkit.export import graph


def exported(module, *example):
    dims = {f"x{number}": (0,) for number in range(len(example))}
    program = graph.trace_module(module, example, dims)
    return graph.to_onnx(program, list(dims), ["out"])


def run(model, *inputs):
    session = onnxruntime.InferenceSession(model.SerializeToString())
    return session.run(None, {each.name: value for each, value in zip(session.get_inputs(), inputs, strict=True)})[0]


class NearlyNothing(nn.Module):
    def __init__(self, operation):
        super().__init__()
        self.operation = operation

    def forward(self, x0):
        return self.operation(x0)


@pytest.mark.parametrize(("operation", "value", "expected"), [
    (lambda x: torch.log(x + 1e-8), 0.0, np.log(1e-8)), (lambda x: torch.log(1e-8 + x), 0.0, np.log(1e-8)),
    (lambda x: torch.log(x - -1e-8), 0.0, np.log(1e-8)),
    (lambda x: x * (1 + 1e-6) - x, 1024.0, 1024.0 * (np.float32(1 + 1e-6) - 1)),
    (lambda x: x / (1 - 1e-6) - x, 1024.0, 1024.0 / np.float32(1 - 1e-6) - 1024.0),
])
def test_what_changes_a_value_by_little_is_kept(operation, value, expected):
    found = run(exported(NearlyNothing(operation), torch.ones(3, 2)), np.full((3, 2), value, np.float32))
    np.testing.assert_allclose(found, expected, rtol=1e-3)


class Foldable(nn.Module):
    """Casts, reshapes and constants that a simplified graph lacks."""

    def forward(self, x0):
        again = x0.to(torch.float32).reshape(-1, 4).reshape(-1, 2, 2).transpose(1, 2).transpose(1, 2)
        return again.clamp(min=0).clamp(max=6) * (torch.arange(2) + torch.ones(2)).sqrt()


def test_a_graph_is_simplified_and_computes_the_same():
    x = torch.randn(3, 4)
    model = exported(Foldable(), x)
    onnx.checker.check_model(model)
    np.testing.assert_allclose(run(model, x.numpy()), Foldable()(x).numpy(), rtol=1e-6)
    operations = [node.op_type for node in model.graph.node]
    assert not {"Cast", "Transpose", "Sqrt", "Range"} & set(operations), operations
    assert operations.count("Reshape") == 1, operations


def test_an_onnxscript_of_another_interface_is_named_with_what_to_do(monkeypatch):
    from onnxscript.rewriter.rules import common

    monkeypatch.delitem(sys.modules, "sbkit.export.onnx_passes", raising=False)
    monkeypatch.delattr(sbkit.export, "onnx_passes", raising=False)
    monkeypatch.delattr(common, "cast_cast_rule")
    with refused("wrong-version", wording=False, value=metadata.version("onnxscript")) as error:
        graph.check_onnx_tools()
    assert "cast_cast_rule" in error.value.message
