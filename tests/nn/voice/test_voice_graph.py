"""A voice: a text sounds the same alone and in any batch, at any speed, and what is no number is seen to be none."""

import numpy as np
import pytest
import torch

from sbkit.nn.codec import CodecDecoder, FiniteScalars, ResidualVectors, WaveHead
from sbkit.nn.voice import CodeHead, Durations, FrameDecoder, TextEncoder
from sbkit.nn.voice.voice import VoiceModel

SYMBOLS, SPEAKERS, STRIDE = 12, 3, 2 * 40
TEXTS = [[1, 5, 3], [7], [2, 2, 9, 11, 4, 6, 1, 8], [10, 3]]
SPEEDS = [1.0, 0.5, 1.7, 3.0]


def voice(quantiser=None, seed=0):
    torch.manual_seed(seed)
    quantiser = quantiser or FiniteScalars([4, 3], 2)
    made = VoiceModel(TextEncoder(SYMBOLS, 16, 24, 2, speakers=SPEAKERS), Durations(16, 12, 16, 1),
                      FrameDecoder(16, 20, 24, 2), CodeHead(20, quantiser), quantiser,
                      CodecDecoder(quantiser.size, 12, 16, 1, 1, fold=2), WaveHead(12, 40, 160))
    with torch.no_grad():
        made.durations.last.bias += 1.2  # about two frames for each symbol
        made.durations.last.weight *= 3
    return made.eval()


@torch.no_grad()
def said(made, texts, speakers, speeds, beyond=0):
    """What is made of texts together, with ``beyond`` columns more than they need: (samples, frames of symbols)."""
    lengths = torch.tensor([len(text) for text in texts])
    ids = torch.zeros(len(texts), int(lengths.max()) + beyond, dtype=torch.int64)
    for row, text in zip(ids, texts, strict=True):
        row[:len(text)] = torch.tensor(text)
    audio, samples, frames = made(ids, lengths, torch.tensor(speakers), torch.tensor(speeds))
    assert audio.shape == (len(texts), samples.max()) and frames.shape == ids.shape
    for i, length in enumerate(lengths):
        assert not audio[i, samples[i]:].any() and not frames[i, length:].any(), "padding is silent and takes no time"
        assert frames[i].sum() * STRIDE == samples[i] > 0
    return [(audio[i, :samples[i]].numpy(), frames[i, :length].numpy()) for i, length in enumerate(lengths)]


@pytest.mark.parametrize("quantiser", [FiniteScalars([4, 3], 2), ResidualVectors(4, 2, 6, 3)], ids=["scalars", "books"])
@pytest.mark.parametrize("beyond", [0, 5])
def test_a_text_has_the_same_durations_and_sound_alone_and_in_a_batch(quantiser, beyond):
    made, speakers = voice(quantiser), [0, 1, 2, 0]
    together = said(made, TEXTS, speakers, SPEEDS, beyond)
    for i, (sound, frames) in enumerate(together):
        [(alone, own)] = said(made, TEXTS[i:i + 1], speakers[i:i + 1], SPEEDS[i:i + 1])
        assert np.array_equal(frames, own) and alone.shape == sound.shape
        np.testing.assert_allclose(sound, alone, atol=1e-5)
    assert len({len(sound) for sound, _ in together}) > 1, "or it would be no test of padding"


def test_speakers_differ_and_a_slower_text_takes_longer():
    made = voice()
    text = TEXTS[2:3]
    (first, _), (second, _) = (said(made, text, [speaker], [1.0])[0] for speaker in (0, 1))
    assert len(first) != len(second) or not np.allclose(first, second)
    (_, normal), (_, slow) = (said(made, text, [0], [speed])[0] for speed in (1.0, 0.5))
    assert abs(slow.sum() - 2 * normal.sum()) <= 2


def test_a_place_far_from_both_ends_still_tells_a_long_text_from_a_longer_one():
    made = voice()
    short, long = ([3] * size for size in (60, 90))
    states = [made.encoder(torch.tensor([text]), torch.tensor([len(text)]), torch.tensor([0]))[0, 45]
              for text in (short, long)]
    assert not torch.allclose(*states, atol=1e-4)


def test_teaching_and_speaking_see_the_same_frames():
    """With the durations that it predicts itself, what a voice is taught by is what it speaks by."""
    made = voice()
    text, lengths, speaker = torch.tensor([TEXTS[2]]), torch.tensor([8]), torch.tensor([0])
    states = made.encoder(text, lengths, speaker)
    from sbkit.nn.voice.voice import rounded

    frames = rounded(made.durations(states, lengths + 2), lengths + 2, torch.ones(1))
    taught, durations = made.teacher_forced(text, lengths, speaker, frames, int(frames.sum()))
    assert taught.shape == (1, frames.sum(), 20) and durations.shape == (1, 10)
    torch.testing.assert_close(taught, made.frame_decoder(states, frames, int(frames.sum())))


@pytest.mark.parametrize("part", ["encoder.table", "durations.last", "frame_decoder.norm", "code_head.linear"])
def test_a_weight_that_is_no_number_is_heard_as_none(part):
    """Never as the sound of codes that exist."""
    made = voice()
    with torch.no_grad():
        made.get_submodule(part).weight.fill_(torch.nan)
        audio, _, frames = made(torch.tensor([[1, 2]]), torch.tensor([2]), torch.tensor([0]), torch.ones(1))
    assert audio.isnan().any() or (frames < 0).any()


@pytest.mark.parametrize(("symbols", "speakers"), [(1, 1), (5, 0)])
def test_a_text_encoder_without_symbols_or_speakers_is_refused(symbols, speakers):
    with pytest.raises(ValueError, match=f"symbols is {symbols} and speakers {speakers}"):
        TextEncoder(symbols, speakers=speakers)
