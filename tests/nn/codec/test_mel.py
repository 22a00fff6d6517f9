"""Mel filters: each band has its place, none is empty, and each is a mean of bins."""

import pytest
import torch

from sbkit.nn.codec.fourier import mel_filters


@pytest.mark.parametrize(("size", "bands"), [(1024, 80), (640, 80), (256, 80), (64, 20)])
def test_no_band_is_empty_and_each_is_a_mean_of_bins_in_order(size, bands):
    weights = mel_filters(size, bands, 16_000)
    assert weights.shape == (size // 2 + 1, bands)
    torch.testing.assert_close(weights.sum(0), torch.ones(bands))
    centres = (weights * torch.arange(size // 2 + 1.0)[:, None]).sum(0)
    assert (centres.diff() >= 0).all() and (centres.diff()[bands // 2:] > 0).all()


@pytest.mark.parametrize("hertz", [300, 1000, 3000, 7000])
def test_a_tone_is_in_the_band_of_its_mel(hertz):
    weights = mel_filters(1024, 80, 16_000)
    top = weights[round(hertz / 16_000 * 1024)].argmax().item()
    scale = 2595 * torch.log10(torch.tensor([1 + hertz / 700, 1 + 8000 / 700]))
    assert abs(top + 1 - 81 * (scale[0] / scale[1]).item()) <= 1
