"""Kaldi's filter bank against torchaudio's, and against the one that w2v-BERT was trained with."""

import pytest
import torch
import torchaudio

from sbkit.nn.kaldi import FilterBank


def waves(samples=16_000, rows=3):
    """Noise of changing loudness, not symmetric."""
    drawn = torch.Generator().manual_seed(0)
    loud = 1.1 + torch.sin(torch.arange(samples) * (2 * torch.pi * 3 / 16_000))
    return 0.1 * loud * torch.randn(rows, samples, generator=drawn) + 0.05


@pytest.mark.parametrize("given", [
    {}, {"n_mels": 23, "low": 60.0}, {"high": -400.0}, {"high": 7000.0, "preemphasis": 0.9},
    {"frame_length": 20.0, "frame_shift": 12.5}, {"sample_rate": 8_000, "n_mels": 40}, {"scale": 32768.0},
])
@pytest.mark.parametrize("samples", [400, 16_000, 12_345])
def test_it_is_torchaudios(given, samples):
    signals, layer = waves(samples), FilterBank(**given)
    found = layer(signals)
    for row, signal in enumerate(signals):
        expected = torchaudio.compliance.kaldi.fbank(
            signal[None] * given.get("scale", 1.0), dither=0.0, num_mel_bins=given.get("n_mels", 80),
            sample_frequency=given.get("sample_rate", 16_000), low_freq=given.get("low", 20.0),
            high_freq=given.get("high", 0.0), preemphasis_coefficient=given.get("preemphasis", 0.97),
            frame_length=given.get("frame_length", 25.0), frame_shift=given.get("frame_shift", 10.0))
        assert layer.frames(samples) == len(expected)
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def theirs(signal, **more):
    return torchaudio.compliance.kaldi.fbank(signal[None], dither=0.0, num_mel_bins=80, **more)


@pytest.mark.parametrize("dc", [True, False])
def test_mirrored_ends_are_each_utterances_own_in_a_batch(dc):
    """Torchaudio's reference computes one utterance alone."""
    lengths = torch.tensor([16_000, 12_345, 400, 401, 7_999, 8_080])
    signals, layer = waves(16_000, len(lengths)), FilterBank(snip_edges=False, remove_dc=dc)
    found, frames = layer(signals, lengths), layer.frames(lengths)
    assert found.shape[1] == layer.frames(16_000)
    for row, signal, length, count in zip(found, signals, lengths.tolist(), frames.tolist(), strict=True):
        expected = theirs(signal[:length], snip_edges=False, remove_dc_offset=dc)
        assert len(expected) == count == (length + 80) // 160
        torch.testing.assert_close(row[:count], expected, rtol=1e-4, atol=1e-4)


def test_what_is_shorter_than_its_mirror_image_is_mirrored_again():
    signal, layer = waves(90, 1), FilterBank(snip_edges=False)
    endless = torch.cat([signal.flip(1), signal] * 10, dim=1)  # its sample 990 is the first
    expected = FilterBank()(endless[:, 990 - 120: 990 + 280])
    torch.testing.assert_close(layer(signal), expected, rtol=1e-4, atol=1e-4)
    assert layer(signal).shape[1] == layer.frames(90) == 1


def test_a_quiet_frame_does_not_depend_on_a_loud_one():
    """SpeechBrain's features clip at so many dB below the loudest of the whole utterance."""
    quiet = waves(16_000, 1) * 1e-4
    loud = quiet.clone()
    loud[:, 12_000:] *= 1e4
    layer = FilterBank(snip_edges=False)
    torch.testing.assert_close(layer(loud)[:, :70], layer(quiet)[:, :70])


@pytest.mark.parametrize(("rate", "bands", "low", "high"), [(16_000, 80, 0.0, 0.0), (8_000, 40, 60.0, -200.0)])
def test_nemos_filters_and_window_are_librosas(rate, bands, low, high):
    layer = FilterBank(rate, bands, low=low, high=high, window="hann", mel="slaney", remove_dc=False)
    top = rate / 2 + high
    filters = torchaudio.functional.melscale_fbanks(
        layer.bins // 2 + 1, low, top, bands, rate, norm="slaney", mel_scale="slaney")
    torch.testing.assert_close(layer.mel, filters, rtol=1e-4, atol=1e-7)
    signals = waves(4_000, 2)
    frames = signals.unfold(1, layer.size, layer.hop)
    frames = frames - 0.97 * torch.cat([frames[..., :1], frames[..., :-1]], dim=2)
    power = torch.fft.rfft(frames * torch.hann_window(layer.size), layer.bins).abs() ** 2
    torch.testing.assert_close(layer(signals), (power @ filters).log(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("wrong, told", [({"window": "hanning"}, "window is 'hanning', but must be povey or hann"),
                                         ({"mel": "htk"}, "mel is 'htk', but must be kaldi or slaney")])
def test_an_unknown_window_or_scale_is_refused(wrong, told):
    with pytest.raises(ValueError, match=told):
        FilterBank(**wrong)


@pytest.mark.parametrize("wrong", [{"low": 9_000.0}, {"low": -5.0}, {"high": 20.0}, {"high": 9_000.0},
                                   {"high": -8_000.0}])
def test_bands_beyond_the_sound_are_refused(wrong):
    with pytest.raises(ValueError, match="must lie between 0 and half the sample rate, 8000 Hz"):
        FilterBank(**wrong)


def test_beside_a_loud_tone_it_is_nearer_to_the_truth_than_torchaudio():
    """In fp32 both lose digits of what is 60 dB below."""
    at = torch.arange(16_000) / 16_000
    signal = waves()[:1] * 0.05 + 0.3 * torch.sin(2 * torch.pi * 900 * at)
    true = theirs(signal[0].double())
    error = (FilterBank()(signal)[0] - true).abs().max()
    assert error < 2e-3 and error < 1.5 * (theirs(signal[0]) - true).abs().max()


def test_autocast_changes_nothing():
    signals, layer = waves(), FilterBank()
    with torch.autocast("cpu", torch.bfloat16):
        found = layer(signals)
    assert torch.equal(found, layer(signals))


def test_a_checkpoint_has_nothing_of_it():
    assert FilterBank().state_dict() == {}
