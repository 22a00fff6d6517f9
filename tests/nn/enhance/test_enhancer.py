"""An enhancer gives an utterance the same samples alone, in a batch and in pieces of any size."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.nn.enhance import CausalConvolutions, Enhancer, FourierFrames, LearnedFrames

#: How far samples may be from those of the whole, of signals around 0.1: sums of other orders.
TOLERANCE = 1e-5
TRANSFORMS = {"stft": lambda: FourierFrames(48, 16), "half": lambda: FourierFrames(32, 16),
              "learned": lambda: LearnedFrames(20, 10, 12)}


def enhancer(name="stft", ahead=0):
    torch.manual_seed(0)
    transform = TRANSFORMS[name]()
    made = Enhancer(transform, CausalConvolutions(transform, size=6, hidden=8, layers=3, cycle=2), ahead)
    with torch.no_grad():
        for weight in made.mask_network.parameters():
            weight.add_(0.1 * torch.randn_like(weight))
    return made.eval()


def noise(*shape):
    return 0.1 * torch.randn(*shape)


@pytest.mark.parametrize("size, hop", [(48, 16), (64, 16), (32, 16), (512, 256)])
def test_the_inverse_gives_the_signal_back(size, hop):
    transform, signal = FourierFrames(size, hop), noise(2, 40 * hop)
    again = transform.synthesise(transform.analyse(signal))
    inside = slice(size - hop, -(size - hop))
    assert torch.allclose(again[:, inside], signal[:, inside], atol=1e-6)


def test_it_is_torchs_short_time_fourier_transform():
    transform, signal = FourierFrames(480, 160), noise(1, 1600)
    window = torch.hann_window(480).sqrt()
    known = torch.stft(signal, 480, 160, window=window, center=False, return_complex=True)[0].T
    real, imaginary = transform.analyse(signal)[0].chunk(2, dim=1)
    scale = window.square().sum().sqrt()
    assert torch.allclose(torch.complex(real, imaginary) * scale, known, atol=1e-4)


@pytest.mark.parametrize("size, hop", [(50, 16), (16, 16), (0, 0)])
def test_frames_that_do_not_add_up_are_refused(size, hop):
    with pytest.raises(ValueError, match="size is"):
        FourierFrames(size, hop)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_masks_are_complex_or_real(name):
    transform = TRANSFORMS[name]()
    coefficients = transform.analyse(noise(1, 640))
    assert transform.features(coefficients).shape[2] == transform.features_size
    masks = torch.zeros(*coefficients.shape[:2], transform.masks_size)
    assert torch.equal(transform.masked(coefficients, masks), coefficients), "0 leaves all as it is"
    masks[..., : masks.shape[2] // 2 if name != "learned" else None] = -1  # of real parts
    assert not transform.masked(coefficients, masks).any()


@settings(max_examples=40)
@given(st.sampled_from(sorted(TRANSFORMS)), st.integers(0, 3), st.lists(st.integers(1, 400), min_size=1, max_size=4),
       st.integers(0, 100), st.integers(0, 2**31))
@torch.no_grad()
def test_an_utterance_is_the_same_alone_and_in_a_batch(name, ahead, lengths, further, seed):
    model, lengths = enhancer(name, ahead), torch.tensor(lengths)
    torch.manual_seed(seed)
    signals = noise(len(lengths), int(lengths.max()) + further)  # also behind the end, which has no effect
    together = model(signals, lengths)
    assert together.shape == signals.shape
    for row, sound, length in zip(signals, together, lengths.tolist(), strict=True):
        alone = model(row[None, :length], torch.tensor([length]))[0]
        assert torch.allclose(sound[:length], alone, atol=TOLERANCE) and not sound[length:].any()


@settings(max_examples=40)
@given(st.sampled_from(sorted(TRANSFORMS)), st.integers(0, 3), st.lists(st.integers(1, 8), min_size=1, max_size=6),
       st.integers(0, 2**31))
@torch.no_grad()
def test_pieces_of_any_size_are_the_whole_a_delay_later(name, ahead, frames, seed):
    model = enhancer(name, ahead)
    torch.manual_seed(seed)
    signal = noise(1, sum(frames) * model.hop)
    whole = model(signal, torch.tensor([signal.shape[1]]))
    found, state = [], model.state(1)
    for piece in signal.split([count * model.hop for count in frames], dim=1):
        sound, *state = model.step(piece, tuple(state))
        assert sound.shape == piece.shape
        found.append(sound)
    later = torch.cat(found, dim=1)[:, model.delay:]
    assert torch.allclose(later, whole[:, : later.shape[1]], atol=TOLERANCE)


@pytest.mark.parametrize("ahead", [0, 2])
@torch.no_grad()
def test_what_comes_later_changes_nothing_but_the_delay(ahead):
    model, signal = enhancer(ahead=ahead), noise(1, 640)
    changed, lengths = signal.clone(), torch.tensor([640])
    changed[:, 400:] = noise(1, 240)
    same = 400 - model.delay - model.hop
    before, after = model(signal, lengths), model(changed, lengths)
    assert torch.allclose(before[:, :same], after[:, :same], atol=TOLERANCE)
    assert not torch.allclose(before[:, 400 - model.delay : 400], after[:, 400 - model.delay : 400], atol=1e-4)


@pytest.mark.parametrize("name", TRANSFORMS)
def test_silence_stays_finite_in_training(name):
    model = enhancer(name).train()
    sound = model(torch.zeros(2, 320), torch.tensor([320, 10]))
    sound.square().sum().backward()
    assert sound.isfinite().all() and all(weight.grad.isfinite().all() for weight in model.parameters())


def test_a_learned_transform_learns_and_a_fourier_transform_does_not():
    assert {"analysis", "synthesis"} <= dict(LearnedFrames().named_parameters()).keys()
    assert list(FourierFrames().parameters()) == []
