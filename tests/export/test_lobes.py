"""SpeechBrain's encoders through ONNX Runtime give what they give in torch, at lengths and batches not traced with."""

import copy

import numpy as np
import onnxruntime
import pytest
import torch
from conformers import conformer
from speechbrain.lobes.models.CRDNN import CRDNN
from speechbrain.nnet import RNN
from speechbrain.nnet.pooling import Pooling1d
from torch import nn

from sbkit.export import graph
from sbkit.export.lobes import exportable
from sbkit.nn.accelerate import accelerate

pytestmark = pytest.mark.slow

FEATURES = 12
#: (batch, frames): others than the example's, shorter and longer.
SHAPES = [(2, 37), (1, 24), (3, 61), (1, 140), (5, 33)]


def _transformer(**changes):
    return conformer(FEATURES, 7, **{"num_encoder_layers": 1, "dropout": 0.0, **changes})


class Encode(nn.Module):
    """A transformer's encoder, or a plain one, with absolute lengths."""

    def __init__(self, encoder):
        super().__init__()
        self.encoder = encoder

    def forward(self, feats, frames):
        if hasattr(self.encoder, "encode"):
            return self.encoder.encode(feats, frames / feats.shape[1])
        out = self.encoder(feats)
        return out[0] if isinstance(out, tuple) else out


def _session(module, tmp_path, examples):
    program = graph.trace_module(module, examples, {"feats": (0, 1), "frames": (0,)})
    model = graph.to_onnx(program, ["feats", "frames"], ["out"])
    graph.save(model, tmp_path / "m.onnx", {}, {"feats": ("b", "t"), "frames": ("b",), "out": ("b", "u")})
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    return onnxruntime.InferenceSession(str(tmp_path / "m.onnx"), options)


def _compare(encoder, tmp_path, masked=True, tolerance=2e-5):
    torch.manual_seed(0)
    for parameter in encoder.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    reference = Encode(encoder).eval()
    exported = copy.deepcopy(reference)
    found = exportable(exported)
    exported.requires_grad_(False)
    session = _session(exported, tmp_path, (torch.randn(2, 40, FEATURES), torch.tensor([40, 29])))
    for batch, frames in SHAPES:
        feats = torch.randn(batch, frames, FEATURES)
        lengths = torch.linspace(frames, frames // 2 + 1, batch).long() if masked else torch.full((batch,), frames)
        with torch.no_grad():
            expected = reference(feats, lengths).numpy()
        actual = session.run(None, {"feats": feats.numpy(), **({} if len(session.get_inputs()) < 2 else
                                                                {"frames": lengths.numpy()})})[0]
        assert actual.shape == expected.shape
        for row, length in enumerate((lengths * expected.shape[1] // frames).tolist()):
            np.testing.assert_allclose(actual[row, :length], expected[row, :length], atol=tolerance, rtol=1e-4)
    return found


@pytest.mark.parametrize("kind, attention, layers, fast", [
    pytest.param("transformer", "regularMHA", 2, True, marks=pytest.mark.long),
    ("branchformer", "RelPosMHAXL", 1, False)])
def test_transformers(kind, attention, layers, fast, tmp_path):
    """With sbkit's layers and with SpeechBrain's own, whose convolutions see the padding, in torch as in the graph.

    Conformers are exported whole by export/test_bundle.py and tasks/recognise/test_graph.py, there a causal one.
    """
    encoder = _transformer(encoder_module=kind, attention_type=attention, num_encoder_layers=layers)
    if fast:
        accelerate(encoder)
    assert _compare(encoder, tmp_path)["TransformerASR"] == 1


def test_longer_than_the_table_of_positions(tmp_path):
    """A table of 50 positions ends the original at 50 frames; the graph goes on with the same sinusoids."""
    short = _transformer(encoder_module="transformer", attention_type="regularMHA", max_length=50)
    long = _transformer(encoder_module="transformer", attention_type="regularMHA", max_length=500)
    long.load_state_dict({**short.state_dict(), **{k: v for k, v in long.state_dict().items() if k.endswith(".pe")}})
    exported = Encode(copy.deepcopy(short)).eval()
    exportable(exported)
    feats, frames = torch.randn(1, 120, FEATURES), torch.tensor([120])
    with torch.no_grad():
        torch.testing.assert_close(exported(feats, frames), Encode(long).eval()(feats, frames), atol=2e-5, rtol=1e-4)


class Recurrent(nn.Module):
    """A GRU, an LSTM and, in a CRDNN that pools features and time, a stabilised one of two layers, all both ways.

    Side by side, since one behind the other makes much of how each rounds.
    """

    def __init__(self):
        super().__init__()
        self.crdnn = CRDNN(
            input_shape=[4, 40, FEATURES], rnn_class=RNN.SLiGRU, rnn_layers=2, rnn_neurons=10, cnn_blocks=1,
            cnn_channels=[6], inter_layer_pooling_size=[2], dnn_blocks=1, dnn_neurons=9, dropout=0.0,
            time_pooling=True, time_pooling_size=2)
        self.gru, self.lstm = (kind(hidden_size=6, input_shape=[4, 40, FEATURES], num_layers=layers, dropout=0.0,
                                    bidirectional=True) for kind, layers in ((RNN.GRU, 2), (RNN.LSTM, 1)))
        self.pool = Pooling1d("max", 2, input_dims=3, pool_axis=1)

    def forward(self, feats):
        both = torch.cat([self.gru(feats)[0], self.lstm(feats)[0]], -1)
        return torch.cat([self.pool(both), self.crdnn(feats)], -1)


@pytest.mark.long
def test_what_recurs(tmp_path):
    torch.manual_seed(0)
    assert len(_compare(Recurrent(), tmp_path, masked=False)) >= 3


def test_a_light_gru_is_a_stabilised_one_without_its_norm():
    """Which is what is exported above."""
    encoder = RNN.LiGRU(hidden_size=10, input_shape=[4, 40, FEATURES], num_layers=2, dropout=0.0, bidirectional=True)
    encoder, feats = encoder.eval(), torch.randn(3, 25, FEATURES)
    with torch.no_grad():
        expected = encoder(feats)[0]
        assert exportable(encoder)
        torch.testing.assert_close(encoder(feats)[0], expected, atol=2e-5, rtol=1e-4)
