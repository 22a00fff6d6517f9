"""Transforms as matrices: the spectra that torch computes, frames that add up to the signal they were cut from, and mel
bands, each of which has its place."""

import pytest
import torch

from sbkit.nn.codec import LogMel, WaveHead, fourier


def test_the_analysis_is_torchs_transform_of_windowed_frames():
    frames = torch.randn(3, 64)
    real, imaginary = (frames @ fourier.analysis(64)).chunk(2, dim=1)
    window = torch.hann_window(64)
    wanted = torch.fft.rfft(frames * window) / window.square().sum().sqrt()
    torch.testing.assert_close(torch.complex(real, imaginary), wanted, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("size", "hop"), [(640, 160), (64, 16), (96, 16)])
def test_spectra_of_a_signal_give_it_back(size, hop):
    """Where all the frames that overlap are there."""
    signal = torch.randn(2, 40 * hop)
    around = (size - hop) // 2
    frames = torch.nn.functional.pad(signal, (around, around)).unfold(1, size, hop)
    spectra = torch.fft.rfft(frames * fourier.window(size).float())
    head = WaveHead(4, hop, size)
    sound = head.overlapped(torch.cat([spectra.real, spectra.imag], 2) @ head.basis)
    assert sound.shape == signal.shape
    torch.testing.assert_close(sound[:, size:-size], signal[:, size:-size], atol=1e-4, rtol=1e-4)


def test_white_noise_has_the_same_level_in_all_mel_bands():
    noise = 0.1 * torch.randn(1, 160_000, generator=torch.Generator().manual_seed(0))
    levels = LogMel()(noise, torch.tensor([160_000]))[0].exp().mean((0, 1))
    assert levels.shape == (80,) and ((levels > 0.008) & (levels < 0.012)).all()


@pytest.mark.parametrize("made", [lambda: LogMel(hop=160, size=400), lambda: WaveHead(4, 15, 30)])
def test_frames_that_do_not_overlap_evenly_are_refused(made):
    with pytest.raises(ValueError, match="a multiple of hop"):
        made()


@pytest.mark.parametrize(("size", "bands"), [(1024, 80), (640, 80), (256, 80), (64, 20)])
def test_no_band_is_empty_and_each_is_a_mean_of_bins_in_order(size, bands):
    weights = fourier.mel_filters(size, bands, 16_000)
    assert weights.shape == (size // 2 + 1, bands)
    torch.testing.assert_close(weights.sum(0), torch.ones(bands))
    centres = (weights * torch.arange(size // 2 + 1.0)[:, None]).sum(0)
    assert (centres.diff() >= 0).all() and (centres.diff()[bands // 2:] > 0).all()


@pytest.mark.parametrize("hertz", [300, 1000, 3000, 7000])
def test_a_tone_is_in_the_band_of_its_mel(hertz):
    weights = fourier.mel_filters(1024, 80, 16_000)
    top = weights[round(hertz / 16_000 * 1024)].argmax().item()
    scale = 2595 * torch.log10(torch.tensor([1 + hertz / 700, 1 + 8000 / 700]))
    assert abs(top + 1 - 81 * (scale[0] / scale[1]).item()) <= 1
