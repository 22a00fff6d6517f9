"""The path from waveforms to scores gives each utterance the same, alone and in a batch."""

import pytest
import torch
from conformers import conformer
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.convolution import ConvolutionFrontEnd
from speechbrain.processing.features import InputNormalization

from sbkit.nn.accelerate import accelerate
from sbkit.nn.causal import CausalFrontEnd
from sbkit.nn.global_norm import GlobalNorm
from sbkit.nn.kaldi import FilterBank
from sbkit.tasks.recognise import acoustic_model
from sbkit.tasks.recognise.acoustic_model import AcousticModel


@pytest.fixture(scope="module", params=["SpeechBrain's", "causal"])
def model(request):
    """A recogniser with SpeechBrain's features and front end, and one with those of streaming.yaml."""
    torch.manual_seed(0)
    live = request.param == "causal"
    frontend = CausalFrontEnd(80, [8, 4]) if live else ConvolutionFrontEnd(
        input_shape=(8, 10, 80), num_blocks=2, num_layers_per_block=1, out_channels=(8, 4), kernel_sizes=(3, 3),
        strides=(2, 2), residuals=(False, False),
    )
    encoder = conformer(80, 12, d_model=32, nhead=4, activation=torch.nn.GELU)
    head = torch.nn.Linear(32, 12)
    layers = torch.nn.ModuleList([frontend, encoder, head]).eval()
    accelerate(layers)
    if not live:
        return AcousticModel(Fbank(n_mels=80), encoder, head, frontend, InputNormalization(norm_type="sentence"))
    norm = GlobalNorm(80, "nowhere")
    norm.set_statistics(torch.full((80,), -8.0), torch.full((80,), 3.0))
    return AcousticModel(FilterBank(snip_edges=False), encoder, head, frontend, norm)


@torch.no_grad()
def test_an_utterance_scores_the_same_alone_and_in_any_batch(model):
    samples = [48000, 16007, 31111, 8000]
    signals = torch.zeros(4, 48000)
    for row, n in enumerate(samples):
        signals[row, :n] = 0.1 * torch.randn(n)
    together, frames = model.outputs(signals, torch.tensor(samples))
    for row, n in enumerate(samples):
        alone, [count] = model.outputs(signals[row : row + 1, :n], torch.tensor([n]))
        assert count == frames[row] == alone.shape[1]
        torch.testing.assert_close(together[row, :count], alone[0], atol=1e-4, rtol=1e-4)


@torch.no_grad()
def test_a_batch_in_pieces_comes_out_as_the_whole(model, monkeypatch):
    signals, samples = 0.1 * torch.randn(5, 16000), torch.tensor([16000, 16000, 9000, 8000, 16000])
    whole, _ = model.outputs(signals, samples)
    seen, features = [], model.compute_features.forward
    monkeypatch.setattr(model.compute_features, "forward",
                        lambda rows, *lengths: seen.append(len(rows)) or features(rows, *lengths))
    monkeypatch.setattr(acoustic_model, "FRAMES_AT_ONCE", 250)  # two utterances of a second
    pieces, _ = model.outputs(signals, samples)
    assert seen == [2, 2, 1]
    torch.testing.assert_close(pieces, whole, atol=1e-5, rtol=1e-5)


@torch.no_grad()
def test_a_graph_of_features_serves_every_size():
    class Pieces(torch.nn.Module):
        def forward(self, x):
            return acoustic_model.by_rows(torch.sin, 4000, x)

    any_size = torch.export.Dim.DYNAMIC
    graph = torch.export.export(Pieces(), (torch.zeros(2, 50, 4),), dynamic_shapes=({0: any_size, 1: any_size},))
    assert graph.module()(torch.zeros(7, 5000, 4)).shape == (7, 5000, 4)


def test_frames_of_a_number_of_samples(model):
    assert model.subsampling == 4
    expected = [26, 1] if model.features_take_lengths is False else [25, 1]  # Fbank makes a frame more
    assert model.frames(16000) == expected[0]
    assert model.frames(torch.tensor([16000, 160])).tolist() == expected


@torch.no_grad()
def test_log_probs_are_normalised_fp32(model):
    scores, _ = model.outputs(torch.randn(1, 8000), torch.tensor([8000]))
    assert scores.dtype == torch.float32
    torch.testing.assert_close(scores.exp().sum(-1), torch.ones(scores.shape[:2]))


@torch.no_grad()
@pytest.mark.parametrize("attention", ["RoPEMHA", "RelPosMHAXL", "regularMHA"])
def test_the_decoder_takes_no_token_for_padding(attention):
    """Its states are those that a search sees, whatever stands behind the tokens and whichever these are."""
    torch.manual_seed(0)
    encoder = conformer(8, 12, num_encoder_layers=1, num_decoder_layers=2, attention_type=attention)
    accelerate(encoder.eval())
    model = AcousticModel(torch.nn.Identity(), encoder, torch.nn.Linear(16, 12))
    feats, frames = torch.randn(2, 9, 8), torch.tensor([9, 6])
    spoken = [torch.tensor([1, 4, 0, 0, 5]), torch.tensor([1, 0, 7])]
    expected, _ = model.encode(feats, frames)
    for filling in (0, 3, 11):
        tokens = torch.nn.utils.rnn.pad_sequence(spoken, batch_first=True, padding_value=filling)
        encoded, _, decoded = model.encode_and_decode(feats, frames, tokens)
        torch.testing.assert_close(encoded, expected)
        for row, (said, count) in enumerate(zip(spoken, frames.tolist(), strict=True)):
            alone = model.decode(said[None], encoded[row : row + 1, :count], frames[row : row + 1])
            torch.testing.assert_close(decoded[row, : len(said)], alone[0], atol=1e-5, rtol=1e-4)
