"""A pretrained encoder of each family as a graph of other programs: any length, any batch, the same outputs."""

import encoders
import numpy as np
import pytest
import torch

from sbkit.export import graph, runners
from sbkit.nn.pretrained import Encoder, Head
from sbkit.tasks.recognise.graph import INPUTS, OUTPUTS, Graph, trace
from sbkit.tasks.recognise.recognizer import Recognizer

LENGTHS = (16_000, 12_345, 800, 37_000)
#: One layer is as another, but for WavLM's, of which all take the positions of the first.
LAYERS = {"wavlm-layer": {}, "whisper": {"encoder_layers": 1}}
TORCH = ("wav2vec2-group", "w2v-bert")  # reading it back takes long, and it is the program that the ONNX is made from


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["wav2vec2-group", "hubert-batch-norm", "wavlm-layer", "w2v-bert", "whisper"])
def test_every_family_is_exported(tmp_path, kind):
    encoder = Encoder(str(encoders.make(tmp_path / "encoder", kind, **LAYERS.get(kind, {"num_hidden_layers": 1}))))
    encoder.load()
    model = Recognizer(None, encoder.eval(), Head(encoder, 30, kernel_size=5).eval(), hop_samples=1)
    program = trace(Graph(model))
    least = graph.least_samples(program)
    assert least < 1_000 and not any("fft" in str(node.target) for node in program.graph.nodes)
    graph.write_onnx(program, tmp_path / "m.onnx", INPUTS, OUTPUTS, {})
    graph.quantize(tmp_path / "m.onnx", tmp_path / "q.onnx")
    formats = [("m.onnx", runners.onnx, 1e-3), ("q.onnx", runners.onnx, 0.2)]
    if kind in TORCH:
        graph.write_torch(program, tmp_path / "m.pt2")
        formats.append(("m.pt2", runners.exported, 1e-3))
    signals = [0.1 * np.random.default_rng(i).standard_normal(n).astype(np.float32) for i, n in enumerate(LENGTHS)]
    for name, run, most in formats:
        run = run(tmp_path / name, OUTPUTS, least)
        together = run(signals)
        for signal, found in zip(signals, together, strict=True):
            with torch.no_grad():
                expected, frames = model.outputs(torch.from_numpy(signal)[None], torch.tensor([len(signal)]))
            expected = expected[0, :int(frames[0])].numpy()
            np.testing.assert_allclose(found, expected, rtol=0, atol=most)
            np.testing.assert_allclose(run([signal])[0], expected, rtol=0, atol=most)
