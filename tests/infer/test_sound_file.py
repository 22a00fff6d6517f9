"""Sound in each format, as a file and as a stream of bytes: read by others it is as long and as loud as it was."""

import io
import struct
import sys
import wave

import numpy as np
import pytest
import soundfile
from refusals import refused

from sbkit.infer import sound_file
from sbkit.infer.sound_file import KINDS, SoundStream, SoundWriter, kind_of


def tone(seconds=1.0, rate=16_000, hertz=500, gain=0.5):
    return (gain * np.sin(2 * np.pi * hertz * np.arange(round(seconds * rate)) / rate)).astype(np.float32)


def read(data, kind):
    if kind == "pcm":
        return np.frombuffer(data, "<i2") / 32768.0, 24_000
    return soundfile.read(io.BytesIO(data))


def sounds(samples, rate, hertz=500, gain=0.5):
    """Whether it is the tone, apart from its ends."""
    inside = samples[rate // 5 : -rate // 5]
    peak = np.abs(np.fft.rfft(inside * np.hanning(len(inside)))).argmax() * rate / len(inside)
    return abs(peak - hertz) < 2 and abs(np.abs(inside).max() / gain - 1) < 0.1


@pytest.mark.parametrize("rate", [8_000, 16_000, 22_050, 24_000, 44_100, 50_000])
@pytest.mark.parametrize("taken", ["as they come", "at the end"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_stream_decodes_to_its_samples(kind, taken, rate):
    stream, data = SoundStream(kind, rate), b""
    for part in np.split(tone(3.0, rate), 10):
        stream.add(part)
        if taken == "as they come":
            data += stream.take()
            assert bool(data) or not KINDS[kind].streams
    stream.end()
    samples, found = read(data + stream.take(), kind)
    assert found == 24_000 if kind == "pcm" else found >= min(rate, 48_000)
    frames = 0 if taken == "at the end" or kind != "mp3" else 4  # of silence, which its beginning doesn't tell of
    assert -0.001 < len(samples) / found - 3.0 < 0.001 + frames * 576 / found * (1 + (found > 24_000))
    assert sounds(samples, found)


def test_a_wav_streams_header_has_an_unknown_length():
    stream = SoundStream("wav", 16_000)
    stream.add(tone())
    data = stream.take()
    assert [struct.unpack_from("<I", data, at)[0] for at in (4, 40)] == [0xFFFFFFFF] * 2
    stream.add(tone())
    stream.end()
    data += stream.take()
    assert len(data) == 44 + 4 * 16_000
    whole = SoundStream("wav", 16_000)
    whole.add(tone())
    whole.end()
    with wave.open(io.BytesIO(whole.take())) as file:
        assert (file.getnframes(), file.getframerate(), file.getnchannels()) == (16_000, 16_000, 1)


@pytest.mark.parametrize("kind", KINDS)
def test_loud_samples_are_clipped(kind):
    stream = SoundStream(kind, 24_000)
    stream.add(np.full(24_000, 1.7, dtype=np.float32))
    stream.end()
    samples, rate = read(stream.take(), kind)
    assert samples[: rate // 100].max() > 0.9 and samples[: rate // 100].min() > -0.7


@pytest.mark.parametrize("suffix", sound_file.SUFFIXES)
def test_the_suffix_chooses_the_format(tmp_path, suffix):
    path = tmp_path / f"a{suffix.upper()}"
    with path.open("wb") as file:
        writer = SoundWriter(file, kind_of(path), 22_050)
        writer.add(tone(2.0, 22_050))
        writer.end()
    samples, rate = soundfile.read(path)
    assert abs(len(samples) / rate - 2.0) < 0.001 and sounds(samples, rate)
    assert soundfile.info(path).format == KINDS[kind_of(path)].format


@pytest.mark.parametrize("name", ["a.aac", "a", "a.pcm"])
def test_unknown_suffixes_are_refused(tmp_path, name):
    with refused("bad-option"):
        kind_of(tmp_path / name)


def test_a_format_that_this_machine_lacks_is_not_offered(monkeypatch, tmp_path):
    monkeypatch.setattr(sound_file.soundfile, "available_subtypes", lambda format: [] if format == "MP3" else [
        each.subtype for each in KINDS.values()])
    assert "mp3" not in sound_file.kinds() and "wav" in sound_file.kinds()
    with refused("bad-option"):
        kind_of(tmp_path / "a.mp3")


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="a disk that is always full is Linux's")
@pytest.mark.parametrize("kind", ["wav", "flac", "mp3", "opus"])
def test_a_full_disk_is_an_error(kind):
    with open("/dev/full", "wb", buffering=0) as full, pytest.raises(OSError, match="No space left"):
        writer = SoundWriter(full, kind, 16_000)
        writer.add(tone(20.0))
        writer.end()
