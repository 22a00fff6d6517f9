"""Ratios of signals to noise, against SpeechBrain's and by what defines them."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from speechbrain.nnet.losses import cal_si_snr

from sbkit.nn.enhance.enhancer import si_snr, snr

FULL = torch.tensor([4000, 4000])


def pair(seed=0, level=0.3):
    torch.manual_seed(seed)
    clean = 0.1 * torch.randn(2, 4000)
    return clean + level * 0.1 * torch.randn(2, 4000), clean


def test_it_is_speechbrains():
    noisy, clean = pair()
    known = -cal_si_snr(clean.T[..., None], noisy.T[..., None])  # of sources [S, B, 1]
    assert si_snr(noisy, clean, FULL) == pytest.approx(known.flatten().numpy(), abs=1e-3)


@given(st.floats(-10, 30), st.floats(0.1, 10))
def test_noise_of_so_many_decibels_is_found_whatever_the_scale(decibels, scale):
    torch.manual_seed(0)
    clean, noise = torch.randn(2, 4000), torch.randn(2, 4000)
    clean, noise = (each - each.mean(1, keepdim=True) for each in (clean, noise))
    noise -= clean * (noise * clean).sum(1, keepdim=True) / clean.square().sum(1, keepdim=True)
    noise *= (clean.square().sum(1, keepdim=True) / noise.square().sum(1, keepdim=True)).sqrt() * 10 ** (-decibels / 20)
    for found in (si_snr(scale * (clean + noise), clean, FULL), snr(clean + noise, clean, FULL)):
        assert found.tolist() == pytest.approx([decibels] * 2, abs=0.05)
    if abs(scale - 1) > 0.05:
        assert (snr(scale * clean, clean, FULL) < 30).all(), "the plain ratio tells a scale"


@given(st.integers(1, 3999))
def test_what_is_behind_the_end_does_not_count(length):
    noisy, clean = pair()
    short = torch.tensor([length, 4000])
    for ratio in (snr, si_snr):
        alone = ratio(noisy[:1, :length], clean[:1, :length], short[:1])
        assert ratio(noisy, clean, short)[0].item() == pytest.approx(alone.item(), abs=1e-3)


def test_a_limit_is_what_a_perfect_estimate_is_given():
    _, clean = pair()
    assert snr(clean, clean, FULL).min() > 60
    for ratio in (snr, si_snr):
        assert ratio(clean, clean, FULL, 30.0).tolist() == pytest.approx([30.0, 30.0], abs=0.01)


def test_silence_is_finite_and_so_are_its_gradients():
    estimate = torch.zeros(2, 4000, requires_grad=True)
    for ratio in (snr, si_snr):
        found = ratio(estimate, torch.zeros(2, 4000), FULL, 30.0)
        found.sum().backward()
        assert found.isfinite().all() and estimate.grad.isfinite().all()
