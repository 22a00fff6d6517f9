"""Pretrained encoders that nobody imports with a head, as graphs of ONNX Runtime: any length, any batch, the same.

Of the other families export/test_imported.py compares whole models, in every format.
"""

import encoders
import numpy as np
import pytest
import torch

from sbkit.export import graph, runners
from sbkit.export.exported import INPUTS
from sbkit.nn.pretrained import Encoder, Head
from sbkit.tasks.recognise.graph import OUTPUTS, Graph, trace
from sbkit.tasks.recognise.recognizer import Recognizer

LENGTHS = (16_000, 12_345, 800, 37_000)


@pytest.mark.slow
@pytest.mark.parametrize("kind, layers", [("hubert-batch-norm", "num_hidden_layers"), ("whisper", "encoder_layers")])
def test_it_is_exported(tmp_path, kind, layers):
    encoder = Encoder(str(encoders.make(tmp_path / "encoder", kind, **{layers: 1})))
    encoder.load()
    model = Recognizer(None, encoder.eval(), Head(encoder, 30, kernel_size=5).eval(), hop_samples=1)
    program = trace(Graph(model))
    least = graph.least_samples(program)
    assert least < 1_000 and not any("fft" in str(node.target) for node in program.graph.nodes)
    graph.write_onnx(program, tmp_path / "m.onnx", INPUTS, OUTPUTS, {})
    graph.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx")
    signals = [0.1 * np.random.default_rng(i).standard_normal(n).astype(np.float32) for i, n in enumerate(LENGTHS)]
    for name, most in (("m.onnx", 1e-3), ("q.onnx", 0.2)):
        run = runners.on_waveforms(runners.open_runner("onnx", tmp_path / name), OUTPUTS, least)
        together = run(signals)
        for signal, found in zip(signals, together, strict=True):
            with torch.no_grad():
                expected, frames = model.outputs(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
            expected = expected[0, :int(frames[0])].numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=most)
            np.testing.assert_allclose(run([signal])[0], expected, rtol=0, atol=most)
