"""Discriminators: each term's gradients go to its own side, padding has no effect, and off means that none is built."""

import pytest
import torch

from sbkit.nn.codec import Discriminators


@pytest.fixture
def sides():
    torch.manual_seed(0)
    samples = torch.tensor([4000, 1500])
    real = torch.arange(4000) < samples[:, None]
    return (Discriminators(1, sizes=[64, 128], channels=4), (torch.randn(2, 4000) * real).requires_grad_(),
            torch.randn(2, 4000) * real, samples)


def touched(module):
    return [name for name, each in module.named_parameters() if each.grad is not None and each.grad.any()]


def test_off_means_that_there_are_none():
    assert len(Discriminators(0)) == 0 and list(Discriminators(0).parameters()) == []


def test_fooling_them_trains_what_is_made_and_not_them(sides):
    against, made, wanted, samples = sides
    noticed, apart = against.generator_losses(made, wanted, samples)
    assert noticed.shape == apart.shape == (2,)
    (noticed + apart).sum().backward()
    assert made.grad.abs().sum() > 0 and touched(against) == []


def test_telling_apart_trains_them_and_not_what_is_made(sides):
    against, made, wanted, samples = sides
    against.discriminator_loss(made, wanted, samples).sum().backward()
    assert made.grad is None
    assert {name for name, _ in against.named_parameters()} - set(touched(against)) <= {
        "each.0.last.bias", "each.1.last.bias"}, "what is too high for the one is too low for the other"


@pytest.mark.slow
def test_they_learn_to_tell_two_kinds_of_sound_apart(sides):
    against, _, noise, samples = sides
    tone = torch.sin(0.3 * torch.arange(4000.0)).repeat(2, 1) * (noise != 0)
    optimizer = torch.optim.AdamW(against.parameters(), lr=3e-3)
    before = against.discriminator_loss(noise, tone, samples).mean().item()
    for _ in range(40):
        against.discriminator_loss(noise, tone, samples).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert against.discriminator_loss(noise, tone, samples).mean().item() < 0.3 * before
    fooled = [against.generator_losses(each, tone, samples)[0].mean() for each in (noise, tone)]
    assert fooled[0] > fooled[1]


def test_an_utterance_is_judged_as_if_it_were_alone(sides):
    against, made, wanted, samples = sides
    alone = [each[1:, :1500] for each in (made, wanted)]
    for judge in (against.discriminator_loss, lambda *given: torch.stack(against.generator_losses(*given))):
        torch.testing.assert_close(judge(made, wanted, samples)[..., 1:], judge(*alone, samples[1:]),
                                   atol=1e-5, rtol=1e-5)


def test_while_they_rest_each_parameter_has_a_gradient_of_zero(sides):
    against = sides[0]
    idle = against.idle()
    idle.backward()
    assert idle.item() == 0 and touched(against) == []
    assert all(each.grad is not None for each in against.parameters())
