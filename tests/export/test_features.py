"""Features as matrix products are SpeechBrain's, and each utterance's own in any batch."""

import numpy as np
import pytest
import torch
from refusals import refused
from speechbrain.lobes.features import MFCC, Fbank
from speechbrain.processing.features import InputNormalization

from sbkit.export import graph
from sbkit.export.features import Features, Normalization, express, normalization, refuse_transforms
from sbkit.nn.accelerate import accelerate

FRONT_ENDS = {
    "fbank": lambda: Fbank(n_mels=80, n_fft=400),
    "long window": lambda: Fbank(n_mels=40, n_fft=512, win_length=32, hop_length=10),
    "8 kHz, other bounds": lambda: Fbank(sample_rate=8000, n_mels=23, n_fft=256, f_min=60, f_max=3800),
    "gaussian": lambda: Fbank(n_mels=20, filter_shape="gaussian"),
    "rectangular": lambda: Fbank(n_mels=20, filter_shape="rectangular"),
    "learned filters": lambda: Fbank(n_mels=20, requires_grad=True),
    "deltas": lambda: Fbank(n_mels=16, deltas=True),
    "context": lambda: Fbank(n_mels=10, context=True, left_frames=3, right_frames=2),
    "mfcc": lambda: MFCC(n_mfcc=13),
    "mfcc alone": lambda: MFCC(n_mfcc=20, n_mels=40, deltas=False, context=False),
}


def signal(seconds, rate, seed=0, quiet=False):
    rng = np.random.default_rng(seed)
    time = np.arange(int(seconds * rate)) / rate
    tones = sum(np.sin(2 * np.pi * f * time) for f in rng.uniform(80, rate / 3, 5))
    wave = 0.1 * tones * (1 + np.sin(7 * time)) + 0.001 * rng.standard_normal(len(time))
    if quiet:
        wave[len(wave) // 2 :] = 0.0  # digital silence: what top_db is for
    return torch.tensor(wave, dtype=torch.float32)


@pytest.mark.parametrize("name", FRONT_ENDS)
def test_equal_to_speechbrains_alone_and_in_a_batch(name):
    front = FRONT_ENDS[name]().eval()
    rate, hop = front.compute_STFT.sample_rate, front.compute_STFT.hop_length
    mine = Features(front, hop).eval()
    signals = [signal(seconds, rate, i, quiet=i == 1) for i, seconds in enumerate((0.9, 0.33, 0.61))]
    lengths = torch.tensor([len(each) for each in signals])
    batch = torch.nn.utils.rnn.pad_sequence(signals, batch_first=True)
    batch[1, lengths[1] :] = 5.0  # what stands behind an utterance must not matter
    with torch.no_grad():
        together, frames = mine(batch, lengths)
        for row, alone, count in zip(together, signals, frames.tolist(), strict=True):
            expected = front(alone[None])[0]
            assert count == len(expected)
            # Decibels: silence lies at the bottom, where the rounding of two transforms shows most.
            torch.testing.assert_close(row[:count], expected, atol=2e-2, rtol=1e-3)
            if name == "fbank":
                torch.testing.assert_close(row[:count], expected, atol=2e-3, rtol=1e-4)


def test_settings_with_another_meaning_are_refused():
    for what, value in (("center", False), ("pad_mode", "reflect"), ("onesided", False)):
        front = Fbank()
        setattr(front.compute_STFT, what, value)
        with refused("not-exportable", key=what, value=value):
            Features(front, 160)
    with refused("not-exportable", key="hop_length"):
        Features(Fbank(hop_length=12.5), 160)


class OfTransforms(torch.nn.Module):
    def forward(self, wav):
        return torch.stft(wav, 400, 160, window=torch.ones(400), return_complex=True).abs().transpose(1, 2).log1p()


class OfConvolutions(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = torch.nn.Conv1d(1, 8, 400, 160, padding=200)

    def forward(self, wav):
        return self.conv(wav[:, None]).relu().transpose(1, 2)


class OfHands(torch.nn.Module):
    def forward(self, wav):
        return wav[:, : int(wav.abs().max() * 100)]


def _traced(front):
    return graph.trace_module(
        express(front, 160), (torch.randn(2, 16000), torch.tensor([16000, 9000])), {"signals": (0, 1), "samples": (0,)})


def test_other_front_ends_are_traced_or_refused_with_the_reason():
    program = _traced(OfConvolutions())
    refuse_transforms(program, "OfConvolutions")
    with refused("not-exportable", wording=False):  # torch's versions name the operation differently
        refuse_transforms(_traced(OfTransforms()), "OfTransforms")
    with refused("not-traceable", wording=False):
        _traced(OfHands())


@pytest.mark.parametrize("options", [{"norm_type": "sentence"}, {"norm_type": "sentence", "std_norm": False},
                                     {"norm_type": "global"}, {"norm_type": "global", "std_norm": False}])
def test_normalisation_is_speechbrains(options):
    theirs = InputNormalization(**options)
    feats = torch.randn(4, 60, 7) * 3 + 5
    if options["norm_type"] == "global":
        theirs.train()(feats, torch.ones(4))
    theirs.eval()
    mine = Normalization(theirs)
    frames = torch.tensor([60, 13, 41, 1])
    found = mine(feats, frames)
    for row, each, count in zip(found, feats, frames.tolist(), strict=True):
        expected = theirs(each[None, :count], torch.ones(1))[0]
        torch.testing.assert_close(row[:count], expected, atol=1e-4, rtol=1e-4)


def test_the_normalisation_of_a_run_which_swapped_its_class_is_known():
    norm = InputNormalization(norm_type="sentence")
    assert accelerate(norm)
    assert isinstance(normalization(norm), Normalization)


def test_normalisation_that_is_no_function_of_one_waveform_is_refused():
    with refused("not-exportable", key="normalize"):
        normalization(InputNormalization(norm_type="batch"))
    with refused("no-statistics", key="normalize"):
        normalization(InputNormalization(norm_type="global"))
    assert normalization(None) is None
