"""Blocks of a recording are what reading it whole gives, in every format; what was cut off or damaged is named."""

import re

import numpy as np
import pytest
import soundfile
import torch
from refusals import refused
from sounds import FORMATS, encoded, speechlike

from sbkit.data.audio import AudioError, read_audio
from sbkit.infer import recordings
from sbkit.infer.recordings import Recording


def made(kind, rate, seconds=7.3, channels=1, **options):
    """The bytes of a file of this kind."""
    signal = speechlike(seconds, rate)
    return encoded(np.stack([signal * (1 + 0.2 * i) for i in range(channels)], 1).squeeze(), rate, kind, **options)


def joined(recording, rate=16_000):
    return np.concatenate(list(recording.blocks(rate)))


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr(recordings, "BLOCK_SECONDS", 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("rate, channels", [(16_000, 1), (48_000, 2), (44_100, 1), (8_000, 1)])
@pytest.mark.parametrize("kind", FORMATS)
def test_blocks_join_to_the_recording(kind, rate, channels, tmp_path):
    if kind == "opus" and rate == 44_100:
        pytest.skip("Opus has no such rate")
    data = made(kind, rate, channels=channels)
    whole = read_audio(data)
    path = tmp_path / "clip"
    path.write_bytes(data)
    for source in (data, str(path)):
        found = joined(Recording(source))
        assert abs(len(found) - len(whole)) <= 2, "a resampler in blocks may end a sample earlier"
        size = min(len(found), len(whole)) - 50
        np.testing.assert_allclose(found[:size], whole[:size], atol=2e-4)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE", "AVERAGE"])
def test_mp3s_of_any_bit_rate_are_read_without_gaps(mode):
    """soundfile seeks after each read, and libsndfile lands elsewhere in MP3s of variable bit rate."""
    data = made("mp3", 48_000, seconds=20.0, bitrate_mode=mode, compression_level=0.5)
    whole, found = read_audio(data), joined(Recording(data))
    size = min(len(found), len(whole)) - 50
    assert size > 19.9 * 16_000
    np.testing.assert_allclose(found[:size], whole[:size], atol=2e-4)


@pytest.mark.parametrize("kind", ["wav", "mp3", "ogg"])
def test_start_and_duration_are_exact(kind):
    data = made(kind, 48_000, seconds=12.0)
    expected = read_audio(data, start=3.1, duration=4.0)
    found = joined(Recording(data, start=3.1, duration=4.0))
    size = min(len(found), len(expected)) - 200
    assert size > 3.9 * 16_000
    # At its edges a stretch lacks what a resampler wants to see on the other side.
    np.testing.assert_allclose(found[200:size], expected[200:size], atol=2e-3)


def test_seconds_are_read_from_the_header():
    data = made("wav", 8_000, seconds=3.0)
    assert Recording(data).seconds(16_000) == pytest.approx(3.0)
    assert Recording(data, start=1.0).seconds(16_000) == pytest.approx(2.0)
    assert Recording(data, start=9.0).seconds(16_000) == 0.0
    assert Recording(data, duration=0.5).seconds(16_000) == 0.5
    assert Recording(np.zeros(8_000, np.float32)).seconds(16_000) == 0.5


@pytest.mark.parametrize("audio, start, code", [
    (made("flac", 16_000, seconds=10.0), 11.0, "segment-outside-audio"), ("missing.wav", 0.0, "missing-audio"),
    (b"", 0.0, "empty-audio"), (b"not audio at all", 0.0, "unknown-audio-format"),
    (np.full(400, np.nan, np.float32), 0.0, "bad-samples"), (np.full(400, 12e3, np.float32), 0.0, "not-samples"),
    (np.zeros(0, np.float32), 0.0, "not-samples"), (np.zeros(400, np.int32), 0.0, "not-samples"),
    (np.zeros((2, 400), np.float32), 0.0, "not-samples"),
])
def test_unreadable_audio_is_named(audio, start, code):
    with refused(code, kind=AudioError, wording=False):
        joined(Recording(audio, start=start))


def test_a_tensor_of_torch_is_an_array_and_a_number_is_no_recording():
    samples = torch.rand(400)
    assert (joined(Recording.of(samples)) == samples.numpy()).all()
    for wrong in (None, 5, [0.0, 0.0]):
        with pytest.raises(TypeError, match=f"an array of samples, not {type(wrong).__name__}"):
            Recording.of(wrong)


@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "ogg"])
@pytest.mark.parametrize("rate", [16_000, 8_000])
@pytest.mark.parametrize("share", [0.3, 0.6, 0.9])
def test_a_truncated_file_is_read_with_a_warning(kind, rate, share, monkeypatch):
    monkeypatch.undo()  # with blocks as they are: one has all of it
    data = made(kind, rate, seconds=10.0)
    whole, cut = joined(Recording(data)), Recording(data[:int(share * len(data))])
    found = joined(cut)
    assert len(found) > 16_000
    np.testing.assert_allclose(found[:-4000], whole[: len(found) - 4000], atol=2e-3)
    if kind == "ogg":  # whose length is that of what is there
        assert cut.warning is None
        return
    seconds = float(re.match(r"cut off: ([\d.]+) of (10\.0|9\.99?)\d* s can be read", cut.warning)[1])
    assert seconds == pytest.approx(len(found) / 16_000, abs=0.02)


@pytest.mark.parametrize("start, duration, missing", [
    (0.0, None, r"cut off: (4.99|5.00) of 10\.00 s"), (4.0, None, r"cut off: (0.99|1.00) of 6\.00 s"),
    (4.0, 2.0, r"cut off: (0.99|1.00) of 2\.00 s"), (1.0, 2.0, None)])
def test_a_wav_cut_in_half_is_read_with_a_warning(start, duration, missing):
    data = made("wav", 16_000, seconds=10.0)
    recording = Recording(data[: len(data) // 2], start=start, duration=duration)
    joined(recording)
    assert recording.warning is None if missing is None else re.match(missing, recording.warning)


def test_a_flac_longer_than_its_header_says_is_read_with_a_warning():
    data = made("flac", 16_000, seconds=10.0)
    short = (int.from_bytes(data[18:26], "big") >> 36 << 36 | 16_000).to_bytes(8, "big")
    recording = Recording(data[:18] + short + data[26:])
    assert len(joined(recording)) == 16_000
    assert recording.warning.startswith("damaged: its header says 1.00 s, but it goes on to 10.00 s")


def test_a_wav_is_read_to_its_headers_length_or_to_its_end():
    data = made("wav", 16_000, seconds=10.0)
    longer, open_end = (Recording(data[:40] + size.to_bytes(4, "little") + data[44:]) for size in (32_000, 0))
    assert len(joined(longer)) == 16_000
    assert longer.warning.startswith("its header says 1.00 s, but it goes on to 10.00 s")
    assert len(joined(open_end)) == 160_000 and open_end.warning is None


@pytest.mark.parametrize("start, duration", [(15.0, 2.0), (15.0, 0.2), (15.0, None)])
@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE"])
def test_a_part_beyond_the_end_of_a_truncated_mp3_is_an_error(mode, start, duration):
    """What lies before a stretch is decoded where the bit rate varies, and there it never came to the stretch."""
    data = made("mp3", 16_000, seconds=20.0, bitrate_mode=mode, compression_level=0.5)
    with refused("damaged-audio", kind=AudioError, wording=False):
        joined(Recording(data[: len(data) * 2 // 5], start=start, duration=duration))


def test_nan_in_a_file_is_refused(tmp_path):
    signal = speechlike(2.0, 16_000)
    signal[9_000] = np.nan
    soundfile.write(tmp_path / "a.wav", signal, 16_000, subtype="FLOAT")
    with refused("bad-samples", kind=AudioError):
        joined(Recording(str(tmp_path / "a.wav")))
