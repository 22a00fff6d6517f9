"""Eight bits in the matrix products of a graph."""

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto
from onnx_text import write

from sbkit.export import graph


def test_products_of_bytes_saturate_on_no_processor(tmp_path):
    weights = np.concatenate([np.ones((512, 2)), -np.ones((512, 2))], axis=1, dtype=np.float32)
    write(tmp_path / "m.onnx", "float[frames, 512] x", "float[frames, 4] y", "y = MatMul(x, w)", w=weights)
    graph.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx")
    nodes = {node.op_type: node for node in onnx.load(tmp_path / "q.onnx").graph.node}
    assert "MatMul" not in nodes
    kinds = {each.name: each.data_type for each in onnx.load(tmp_path / "q.onnx").graph.initializer}
    assert kinds[nodes["MatMulInteger"].input[1]] == TensorProto.UINT8, "signed ones saturate where there is no VNNI"
    signal = np.linspace(0, 1, 3 * 512, dtype=np.float32).reshape(3, 512)[::-1]
    session = onnxruntime.InferenceSession(tmp_path / "q.onnx", providers=["CPUExecutionProvider"])
    np.testing.assert_allclose(session.run(None, {"x": signal})[0], signal @ weights, rtol=0.01)
