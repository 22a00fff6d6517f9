"""The codec as a whole: an utterance's codes and sound are its own."""

import pytest
import torch

from sbkit.nn.codec import CodecDecoder, CodecEncoder, Coder, FiniteScalars, LogMel, ResidualVectors, WaveHead

SIZE = {"size": 16, "hidden": 24}


def coder(quantiser=None):
    torch.manual_seed(0)
    quantiser = quantiser or FiniteScalars([8, 5, 5, 5], codebooks=2)
    made = Coder(LogMel(n_mels=20), CodecEncoder(20, quantiser.size, **SIZE, layers=2), quantiser,
                 CodecDecoder(quantiser.size, **SIZE, slow_layers=2, fast_layers=1), WaveHead(16))
    return made.eval()


@pytest.fixture
def utterances():
    torch.manual_seed(1)
    return [0.1 * torch.randn(samples) for samples in (5000, 1, 320, 321, 16_000)]


def batched(utterances, beyond=0):
    width = max(map(len, utterances)) + beyond
    return (torch.stack([torch.nn.functional.pad(each, (0, width - len(each))) for each in utterances]),
            torch.tensor([len(each) for each in utterances]))


@pytest.mark.parametrize("quantiser", [None, ResidualVectors(12, codebooks=2, entries=64)])
@pytest.mark.parametrize("beyond", [0, 777])
def test_an_utterance_has_the_same_codes_and_sound_alone_and_in_a_batch(utterances, beyond, quantiser):
    codec = coder(quantiser)
    with torch.no_grad():
        codes, frames = codec.encode(*batched(utterances, beyond))
        sound = codec.decode(codes, frames)
        for i, each in enumerate(utterances):
            own, count = codec.encode(each[None], torch.tensor([len(each)]))
            assert count.item() == frames[i] == -(-len(each) // 320)
            assert torch.equal(codes[i, :count], own[0]) and not codes[i, count:].any()
            torch.testing.assert_close(sound[i, :count * 320], codec.decode(own, count)[0], atol=1e-5, rtol=1e-5)
            assert not sound[i, count * 320:].any()


def test_what_stands_beyond_an_utterances_end_has_no_effect(utterances):
    codec, (signals, samples) = coder(), batched(utterances, 1000)
    real = torch.arange(signals.shape[1]) < samples[:, None]
    with torch.no_grad():
        clean = codec(signals, samples)
        dirty = codec(torch.where(real, signals, torch.tensor(9.0)), samples)
    assert torch.equal(clean.quantised.codes, dirty.quantised.codes) and torch.equal(clean.sound, dirty.sound)


def test_a_stretch_has_the_codes_of_the_whole_where_it_is_far_from_its_ends(utterances):
    codec, whole = coder(), utterances[-1]
    reach = 2 * 3 + 1  # frames that the encoder sees to each side
    with torch.no_grad():
        codes = codec.encode(whole[None], torch.tensor([16_000]))[0]
        part = codec.encode(whole[None, 3200:12_800], torch.tensor([9600]))[0]
    assert torch.equal(part[:, reach:-reach], codes[:, 10 + reach:40 - reach])


def test_it_says_how_many_bits_it_takes():
    assert coder().bit_rate == pytest.approx(996.58, abs=0.01)


def test_a_gradient_reaches_every_parameter(utterances):
    codec = coder().train()
    codec(*batched(utterances)).sound.square().sum().backward()
    assert [name for name, each in codec.named_parameters() if each.grad is None or not each.grad.any()] == []
