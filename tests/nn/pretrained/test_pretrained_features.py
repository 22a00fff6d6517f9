"""Features that are made on the device are those that transformers' extractors make, utterance by utterance."""

import encoders
import numpy as np
import pytest
import torch
import transformers

from sbkit.nn.pretrained import Encoder
from sbkit.nn.pretrained.networks import normalized
from sbkit.nn.pretrained.whisper import WhisperLogMel


def waves(samples):
    """Noise of changing loudness, and zeros behind it."""
    drawn, counts = torch.Generator().manual_seed(0), torch.tensor(samples)
    at = torch.arange(max(samples))
    loud = 1.1 + torch.sin(at * (2 * torch.pi * 3 / 16_000))
    signals = 0.1 * loud * torch.randn(len(samples), max(samples), generator=drawn)
    return signals.masked_fill(at >= counts[:, None], 0.0), counts


SAMPLES = [16_000, 12_345, 16_159, 720, 560]


def test_waveforms():
    signals, counts = waves(SAMPLES)
    found = normalized(signals + 0.1, counts)
    extractor = transformers.Wav2Vec2FeatureExtractor(do_normalize=True)
    for row, samples in enumerate(SAMPLES):
        expected = extractor(signals[row, :samples].numpy() + np.float32(0.1), sampling_rate=16_000).input_values[0]
        torch.testing.assert_close(found[row, :samples], torch.from_numpy(expected), rtol=0, atol=1e-4)
        assert not found[row, samples:].any()


def test_w2v_bert(tmp_path):
    network = Encoder(str(encoders.make(tmp_path, "w2v-bert"))).network
    extractor = transformers.AutoFeatureExtractor.from_pretrained(tmp_path)
    signals, counts = waves(SAMPLES)
    found, frames = network.normalized_features(signals, counts)
    for row, samples in enumerate(SAMPLES):
        given = extractor(signals[row, :samples].numpy(), sampling_rate=16_000, return_tensors="pt")
        expected = given["input_features"][0, given["attention_mask"][0].bool()]
        assert int(frames[row]) == len(expected) == network.frames(samples)
        torch.testing.assert_close(found[row, :len(expected)], expected, rtol=0, atol=1e-3)


@pytest.mark.parametrize("bands", [80, 128])
def test_whisper(bands):
    layer, extractor = WhisperLogMel(bands), transformers.WhisperFeatureExtractor(feature_size=bands)
    signals, _ = waves(SAMPLES)
    found = layer(signals, more=2)
    assert found.shape == (len(SAMPLES), layer.frames(max(SAMPLES)) + 2, bands)
    for row, samples in enumerate(SAMPLES):
        given = extractor(signals[row, :samples].numpy(), sampling_rate=16_000, return_tensors="pt")
        expected = given["input_features"][0].t()[:found.shape[1]]
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-4)
    whole = layer(torch.nn.functional.pad(signals[:1], (0, 480_000 - signals.shape[1])))
    assert whole.shape[1] == 3000


def test_parakeets_are_the_same_in_a_graph_where_bands_are_empty(tmp_path):
    """As those above 4 kHz of a telephone; normalisation makes their rounding as loud as speech."""
    network = Encoder(str(encoders.make(tmp_path, "parakeet"))).network.float()  # as an export does
    signals, counts = torch.zeros(2, 16_000), torch.tensor([16_000, 12_000])
    for row, samples in enumerate(counts):
        at = torch.arange(int(samples)) / 16_000
        signals[row, :samples] = 0.5 * torch.sin(2 * torch.pi * (300 + 200 * row) * at) * torch.hann_window(len(at))

    class Features(torch.nn.Module):
        forward = staticmethod(network.features)

    found = torch.export.export(Features(), (signals, counts)).module()(signals, counts)
    expected = network.features(signals, counts)
    torch.testing.assert_close(found, expected, rtol=0, atol=2e-3)
