"""SpeechBrain's recurrent encoders and containers give what they give for an utterance alone, in any batch."""

import copy

import pytest
import torch
from host_syncs import HostSyncs
from refusals import refused
from speechbrain.lobes.models.CRDNN import CRDNN
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder
from speechbrain.nnet import RNN, containers
from speechbrain.nnet.linear import Linear
from torch import nn

from sbkit.nn import recurrent
from sbkit.nn.kaldi import FilterBank
from sbkit.recipe.speed import native_precision
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.graph import Graph

WIDTH = 12


def recurring(kind, layers=2):
    return kind(hidden_size=6, input_shape=[2, 10, WIDTH], num_layers=layers, bidirectional=True)


def crdnn(kind, **more):
    return CRDNN(input_shape=[2, 20, WIDTH], rnn_class=kind, rnn_layers=1, rnn_neurons=6, cnn_blocks=1,
                 cnn_channels=[3], dnn_blocks=1, dnn_neurons=8, dropout=0.0, **more)


def conformer():
    return ConformerEncoder(1, WIDTH, 16, 2, kernel_size=3, attention_type="regularMHA", dropout=0.0)


def appended(container):
    container.append(RNN.GRU, hidden_size=6, bidirectional=True)
    container.append(Linear, n_neurons=8)
    return container


#: An encoder, and its frames for 41, 30 and 17.
ENCODERS = {
    **{kind.__name__: (lambda kind=kind: recurring(kind), [41, 30, 17])
       for kind in (RNN.RNN, RNN.LSTM, RNN.GRU, RNN.LiGRU, RNN.SLiGRU)},
    "one direction": (lambda: RNN.LSTM(hidden_size=6, input_size=WIDTH), [41, 30, 17]),
    "CRDNN": (lambda: crdnn(RNN.LiGRU, time_pooling=True), [20, 15, 8]),
    "CRDNN, pooled in both dimensions": (lambda: crdnn(RNN.LSTM, using_2d_pooling=True), [20, 15, 8]),
    "Sequential": (lambda: appended(containers.Sequential(input_shape=[2, 10, WIDTH])), [41, 30, 17]),
    "LengthsCapableSequential": (lambda: appended(containers.LengthsCapableSequential(input_shape=[2, 10, WIDTH])),
                                 [41, 30, 17]),
    "ModuleList within one": (lambda: containers.Sequential(
        containers.ModuleList(recurring(RNN.LiGRU, 1), nn.Linear(12, 4))), [41, 30, 17]),
    "Conformer's encoder, by a mask": (conformer, [41, 30, 17]),
    "one within Sequential": (lambda: containers.Sequential(nn.Linear(WIDTH, WIDTH), conformer()), [41, 30, 17]),
}


@pytest.fixture(params=ENCODERS)
def case(request):
    """An encoder, a recogniser with it, and a batch: features, frames and those that the encoder makes."""
    torch.manual_seed(0)
    made, expected = ENCODERS[request.param]
    encoder, frames = made(), torch.tensor([41, 30, 17])
    feats = torch.randn(3, 41, WIDTH) * (torch.arange(41) < frames[:, None])[..., None]
    original = copy.deepcopy(encoder)
    return original, AcousticModel(nn.Identity(), encoder, nn.Linear(8, 4), n_features=WIDTH), feats, frames, expected


def test_an_utterance_is_the_same_alone_and_in_any_batch(case):
    original, model, feats, frames, expected = case
    assert list(model.encoder.state_dict()) == list(original.state_dict())
    for part in (original, model.encoder):
        part.eval()
    with torch.no_grad():
        together, counts = model.encode(feats, frames)
        assert counts.tolist() == expected and together.shape[1] == expected[0]
        for row, (size, count) in enumerate(zip(frames, expected, strict=True)):
            alone, _ = model.encode(feats[row : row + 1, :size], frames[row : row + 1])
            torch.testing.assert_close(together[row, :count], alone[0], atol=1e-5, rtol=1e-4)
        if not model.padding.get("guard"):  # else SpeechBrain's convolutions mirror the last frames
            theirs = original(feats[:1])
            torch.testing.assert_close(together[0], (theirs[0] if isinstance(theirs, tuple) else theirs)[0])


def test_all_of_it_learns_without_waiting_for_the_device(case):
    _, model, feats, frames, _ = case
    model.encoder.train()
    bf16 = native_precision(torch.device("cpu")) == "bf16"  # others have no LSTM in it
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16), HostSyncs() as syncs:
        states, _ = model.encode(feats, frames)
    assert not syncs.found
    states.float().square().sum().backward()
    assert all(each.grad is not None for each in model.encoder.parameters() if each.requires_grad)


@pytest.mark.parametrize("kind", [RNN.GRU, RNN.LSTM, RNN.RNN])
def test_it_is_what_speechbrain_packs(kind):
    original = recurring(kind)
    encoder = copy.deepcopy(original)
    recurrent.take_lengths(encoder)
    feats, lengths = torch.randn(2, 16, WIDTH), torch.tensor([1.0, 0.5])
    for part in (encoder, original):
        part(feats, lengths=lengths)[0][:, :8].square().sum().backward()
    torch.testing.assert_close(encoder(feats, lengths=lengths)[0][:, :8], original(feats, lengths=lengths)[0][:, :8])
    for mine, theirs in zip(encoder.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


@torch.no_grad()
def test_a_graph_is_the_recogniser_in_any_batch():
    """That runtimes give the same, too, is in tasks/recognise/test_graph.py, with a CRDNN."""
    encoder = crdnn(RNN.SLiGRU, time_pooling=True).eval()
    model = AcousticModel(FilterBank(n_mels=WIDTH, snip_edges=False), encoder, nn.Linear(8, 4), n_features=WIDTH)
    signals, samples = torch.randn(2, 8_000), torch.tensor([8_000, 5_100])
    found, counts = Graph(model)(signals, samples)
    for row, size in enumerate(samples):
        alone, [count] = model.outputs(signals[row : row + 1, :size], samples[row : row + 1])
        assert count == counts[row]
        torch.testing.assert_close(found[row, :count], alone[0], atol=1e-4, rtol=1e-4)


class Halved(nn.Module):
    def forward(self, x):
        return x[:, ::2]


def test_an_encoder_that_changes_the_number_of_frames_is_asked_for_it():
    model = AcousticModel(nn.Identity(), Halved(), n_features=WIDTH)
    with refused("unknown-lengths") as caught:
        model.encode(torch.randn(2, 20, WIDTH), torch.tensor([20, 15]))
    assert caught.value.hint.startswith("def frames(self, frames): return the number of its output frames")


class Told(nn.Module):
    """A user's encoder, which gets what SpeechBrain's names would take otherwise."""

    def forward(self, x, lengths):
        self.lengths = lengths
        return x


def test_an_encoder_of_ones_own_gets_numbers_of_frames():
    model, frames = AcousticModel(nn.Identity(), Told(), n_features=WIDTH), torch.tensor([20, 15])
    model.encode(torch.randn(2, 20, WIDTH), frames)
    assert model.encoder.lengths is frames
