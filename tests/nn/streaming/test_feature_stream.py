"""Features of a waveform in pieces, against those of the whole."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.nn.kaldi import FilterBank
from sbkit.nn.streaming.features import FeatureStream

BANKS = [
    {"snip_edges": False}, {"snip_edges": True}, {"snip_edges": False, "frame_length": 8.0, "frame_shift": 12.5},
    {"snip_edges": False, "remove_dc": False, "window": "hann", "mel": "slaney", "low": 0.0},
    {"snip_edges": False, "sample_rate": 8_000, "n_mels": 23},
]


def wave(samples):
    return 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(samples)) + 0.02


def whole(bank, signal):
    count = max(0, bank.frames(len(signal)))
    return bank(signal[None])[0] if count else torch.zeros(0, bank.mel.shape[1])


@pytest.mark.parametrize("options", BANKS)
@given(st.integers(0, 3_000), st.lists(st.integers(0, 3_000), max_size=12))
@settings(max_examples=25, deadline=None)
def test_for_any_split_they_are_those_of_the_whole(options, samples, cuts):
    bank, signal = FilterBank(**options), wave(samples)
    stream = FeatureStream(bank)
    places = sorted(min(cut, samples) for cut in cuts)
    pieces = [stream(piece) for piece in torch.tensor_split(signal, places)]
    assert stream.given == sum(map(len, pieces))
    found = torch.cat([*pieces, stream.flush()])
    torch.testing.assert_close(found, whole(bank, signal), rtol=1e-4, atol=1e-4)


def test_sample_by_sample_each_frame_comes_as_soon_as_its_last_sample():
    stream = FeatureStream(FilterBank(snip_edges=False))
    came = [n for n, sample in enumerate(wave(1_000).split(1), 1) for _ in stream(sample)]
    assert came == [280, 440, 600, 760, 920] and len(stream.flush()) == 1


def test_its_state_is_small_however_long_the_waveform():
    stream = FeatureStream(FilterBank(snip_edges=False))
    for _ in range(50):
        stream(wave(1_600))
        assert len(stream._kept) <= 800
    assert stream.seen == 80_000


def test_after_its_end_another_waveform_begins():
    bank = FilterBank(snip_edges=False)
    stream, signal = FeatureStream(bank), wave(2_000)
    stream(wave(777))
    stream.flush()
    torch.testing.assert_close(torch.cat([stream(signal), stream.flush()]), whole(bank, signal), rtol=1e-4, atol=1e-4)
    stream(wave(777))
    stream.reset()
    assert (stream.seen, stream.given) == (0, 0) and len(stream.flush()) == 0


def test_numpy_will_do_and_nothing_is_kept_for_a_gradient():
    bank, signal = FilterBank(snip_edges=False), wave(2_000)
    stream = FeatureStream(bank)
    found = stream(signal.numpy().astype(np.float64))
    torch.testing.assert_close(found, whole(bank, signal)[:len(found)], rtol=1e-4, atol=1e-4)
    assert not FeatureStream(bank)(signal.requires_grad_()).requires_grad


def test_several_channels_are_refused():
    with pytest.raises(ValueError, match=r"\[2, 500\]"):
        FeatureStream(FilterBank())(wave(1_000).view(2, 500))
