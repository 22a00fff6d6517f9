"""The distance of waveforms: none to itself, more with more noise, and each utterance's own."""

import pytest
import torch

from sbkit.nn.codec import MelDistance, SpectralLoss


@pytest.fixture(params=[SpectralLoss, MelDistance])
def measure(request):
    return request.param()


@pytest.fixture
def sounds():
    torch.manual_seed(0)
    samples = torch.tensor([16_000, 9_000, 700])
    real = torch.arange(16_000) < samples[:, None]
    return 0.1 * torch.randn(3, 16_000) * real, torch.randn(3, 16_000) * real, samples


def test_it_is_nothing_for_the_same_and_grows_with_what_is_added(measure, sounds):
    wanted, noise, samples = sounds
    apart = torch.stack([measure(wanted + level * noise, wanted, samples) for level in (0.0, 0.01, 0.1, 0.5)])
    assert not apart[0].any() and (apart.diff(dim=0) > 0).all()


def test_an_utterance_has_its_own_whatever_its_batch(measure, sounds):
    wanted, noise, samples = sounds
    together = measure(noise, wanted, samples)
    for i, count in enumerate(samples.tolist()):
        alone = measure(noise[i:i + 1, :count], wanted[i:i + 1, :count], samples[i:i + 1])
        torch.testing.assert_close(together[i:i + 1], alone, atol=1e-5, rtol=1e-5)


def test_twice_as_loud_is_six_decibels(sounds):
    wanted, _, samples = sounds
    apart = MelDistance()(10 * wanted, 5 * wanted, samples)
    torch.testing.assert_close(apart, torch.full((3,), 2.0).log(), atol=1e-3, rtol=0)


def test_gradients_go_to_what_was_made_and_are_finite_for_silence(measure, sounds):
    wanted, _, samples = sounds
    made = torch.zeros_like(wanted, requires_grad=True)
    measure(made, wanted, samples).sum().backward()
    assert torch.isfinite(made.grad).all()


def test_without_weight_for_bins_only_mel_bands_count(sounds):
    wanted, noise, samples = sounds
    plain = SpectralLoss(sizes=[640], bins=0.0)(noise, wanted, samples)
    torch.testing.assert_close(plain, MelDistance()(noise, wanted, samples))
