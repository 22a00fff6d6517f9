"""Reading audio: every format, exact places, high quality, and a clear word for whatever is broken."""

from __future__ import annotations

import io
import os
import pickle
import struct
from contextlib import nullcontext

import numpy as np
import pytest
import soundfile
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import CONTAINERS, FORMATS, contained, encoded, real_data, speechlike

from sbkit.data import audio, mp3
from sbkit.data.audio import AudioError, UnknownFormat, audio_info, read_audio, read_utterance
from sbkit.infer.recordings import Recording
from sbkit.serve.decoder_process import decode


def db(signal: np.ndarray) -> float:
    return 20 * np.log10(np.sqrt(np.mean(np.square(signal, dtype=np.float64))) + 1e-12)


# ---------------------------------------------------------------- formats


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("rate", [8000, 16000, 44100, 48000])
def test_every_format_and_rate_comes_out_as_16_khz_mono(kind, rate, tmp_path):
    if kind == "opus" and rate == 44100:
        pytest.skip("Opus knows no 44.1 kHz")
    sound = speechlike(1.5, rate)
    path = tmp_path / f"clip.{kind}"
    path.write_bytes(encoded(sound, rate, kind))
    signal = read_audio(path)
    assert signal.dtype == np.float32 and signal.ndim == 1
    assert abs(len(signal) - 24000) <= 0.03 * 16000
    expected = soxr.resample(sound, rate, 16000)
    n = min(len(signal), len(expected))
    assert np.corrcoef(signal[:n], expected[:n])[0, 1] > 0.99
    seconds, found, channels = audio_info(path)
    assert (found, channels) == (rate, 1) and abs(seconds - 1.5) < 0.03


@pytest.mark.parametrize("suffix", audio.SUFFIXES)
def test_files_that_a_folder_is_searched_for_can_be_read(suffix, tmp_path):
    kinds = {".aif": "AIFF", ".aifc": "AIFF", ".oga": "OGG", ".opus": "OGG", ".snd": "AU", ".sph": "NIST",
             ".wave": "WAV"}
    path = tmp_path / f"clip{suffix}"
    if suffix[1:] in CONTAINERS:
        path.write_bytes(contained(speechlike(0.5, 48000), 48000, suffix[1:]))
    else:
        soundfile.write(path, speechlike(0.5, 16000), 16000, format=kinds.get(suffix, suffix[1:].upper()),
                        subtype="OPUS" if suffix == ".opus" else None)
    assert abs(len(read_audio(path)) - 8000) <= 0.1 * 8000


def test_bytes_files_and_paths_give_the_same(tmp_path):
    data = encoded(speechlike(0.5, 48000), 48000, "mp3")
    path = tmp_path / "with a space, ümlaut.mp3"
    path.write_bytes(data)
    of_path = read_audio(str(path))
    assert np.array_equal(of_path, read_audio(data))
    assert np.array_equal(of_path, read_audio(io.BytesIO(data)))
    with open(path, "rb") as file:
        assert np.array_equal(of_path, read_audio(file))


@pytest.mark.parametrize("channels", [2, 3, 8])
def test_channels_are_averaged(channels):
    sound = np.stack([speechlike(0.3, seed=i) for i in range(channels)], 1)
    assert np.allclose(read_audio(encoded(sound, 16000)), sound.mean(1), atol=2 / 32768)


def test_opens_a_file_once(tmp_path, monkeypatch):
    path = tmp_path / "a.wav"
    path.write_bytes(encoded(speechlike(0.2), 16000))
    opened = []
    true_open = os.open
    monkeypatch.setattr(os, "open", lambda *a, **k: opened.append(a[0]) or true_open(*a, **k))
    read_audio(path)
    assert opened == [str(path)]


def test_leaves_no_file_open(tmp_path):
    good, bad = tmp_path / "a.wav", tmp_path / "b.wav"
    good.write_bytes(encoded(speechlike(0.1), 16000))
    bad.write_bytes(b"RIFF nothing")
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(20):
        read_audio(good)
        with refused("unknown-audio-format", kind=AudioError):
            read_audio(bad)
    assert len(os.listdir("/proc/self/fd")) == before


# ---------------------------------------------------------------- quality


@pytest.mark.parametrize("rate", [48000, 44100, 32000, 22050, 8000])
def test_below_7_khz_all_passes_unchanged_and_above_8_khz_it_is_98_db_down(rate):
    time = np.arange(rate // 2) / rate
    passed = np.linspace(60, min(7000, 0.42 * rate), 12)
    for frequency in (*passed, *(np.linspace(8150, rate / 2 - 100, 12) if rate > 16000 else ())):
        tone = np.sin(2 * np.pi * frequency * time).astype(np.float32)
        gain = db(audio.resample(tone, rate, 16000)[800:-800]) - db(tone)
        assert abs(gain) < 0.1 if frequency in passed else gain < -98, frequency


def test_speed_changes_length_and_pitch_together():
    time = np.arange(48000 * 2) / 48000
    data = encoded((0.5 * np.sin(2 * np.pi * 1000 * time)).astype(np.float32), 48000)
    for speed in (0.9, 1.1):
        signal = read_audio(data, speed=speed)
        assert abs(len(signal) - 32000 / speed) <= 1
        spectrum = np.abs(np.fft.rfft(signal))
        assert abs(spectrum.argmax() * 16000 / len(signal) - 1000 * speed) < 2


# ---------------------------------------------------------------- places


@pytest.mark.parametrize("kind", FORMATS)
def test_a_segment_is_what_the_whole_has_there(kind):
    data = encoded(speechlike(6, 16000), 16000, kind)
    whole = read_audio(data)
    for start, duration in ((0.5, 1.0), (2.345, 0.7), (5.5, 0.25)):
        part = read_audio(data, start=start, duration=duration)
        first = round(start * 16000)
        assert len(part) == round(duration * 16000)
        assert np.abs(part - whole[first : first + len(part)]).max() < 1e-4


@pytest.mark.parametrize("mode", ["CONSTANT", "VARIABLE", "AVERAGE"])
@pytest.mark.slow
def test_mp3_lengths_and_places_are_exact_with_and_without_a_tag(mode):
    rate = 48000
    time = np.arange(40 * rate) / rate
    sound = (np.sin(2 * np.pi * 200 * time) * (np.sin(2 * np.pi * 0.2 * time) > 0) * 0.3).astype(np.float32)
    sound += np.random.default_rng(0).normal(size=len(time)).astype(np.float32) * 0.05 * (time % 9 > 4)
    tagged = encoded(sound, rate, "mp3", bitrate_mode=mode, compression_level=0.5)
    untagged = tagged[tagged.index(b"\xff\xfb", 100) :]  # the first frame holds nothing but the tag
    assert not mp3.inspect(lambda n, at: untagged[at : at + n]).tagged
    for data in (tagged, untagged):
        whole = read_audio(data, sample_rate=None)
        assert abs(len(whole) / rate - 40) < 0.05
        assert abs(audio_info(data)[0] - len(whole) / rate) < 1e-6
        for start in (3.0, 21.0000208, 30.5, 38.9):
            part = read_audio(data, start=start, duration=0.5, sample_rate=None)
            first = round(start * rate)
            assert np.abs(part - whole[first : first + len(part)]).max() < 1e-4


def test_an_mp3_whose_only_frame_is_cut_off_has_none():
    data = bytearray(encoded(speechlike(1.0), 16_000, "mp3"))
    data[data.find(b"Xing") + 7] = 0  # the tag says nothing
    assert mp3.inspect(lambda size, at: bytes(data[at:at + size])).frames > 20
    assert mp3.inspect(lambda size, at: bytes(data[:144][at:at + size])) is None


def test_an_mp3_behind_an_id3_tag_is_found():
    data = encoded(speechlike(2, 48000), 48000, "mp3", bitrate_mode="VARIABLE")
    picture = bytes(9000)
    size = bytes((len(picture) >> shift) & 0x7F for shift in (21, 14, 7, 0))
    tagged = b"ID3\x04\x00\x00" + size + picture + data
    found = mp3.inspect(lambda n, at: tagged[at : at + n])
    assert found.tagged and found.first == len(picture) + 10
    assert len(read_audio(tagged)) == len(read_audio(data))


def test_reading_past_the_end_gives_what_there_is_and_starting_there_is_an_error():
    data = encoded(speechlike(1), 16000)
    assert len(read_audio(data, start=0.75, duration=10)) == 4000
    with refused("segment-outside-audio", kind=AudioError):
        read_audio(data, start=1.5)


# ---------------------------------------------------------------- shard members


def test_a_member_is_read_by_its_place(tmp_path):
    first, second = encoded(speechlike(0.5), 16000), encoded(speechlike(0.7, seed=1), 16000, "flac")
    shard = tmp_path / "shard-000000.tar"
    shard.write_bytes(bytes(512) + first + bytes(100) + second)
    for data, offset in ((first, 512), (second, 612 + len(first))):
        assert np.array_equal(read_audio(f"{shard}?offset={offset}&size={len(data)}"), read_audio(data))


def test_a_shard_that_ends_too_early_is_named(tmp_path):
    shard = tmp_path / "shard-000007.tar"
    shard.write_bytes(bytes(600))
    with refused("damaged-audio", kind=AudioError):
        read_audio(f"{shard}?offset=512&size=512")


def test_a_shard_written_anew_is_not_read_from_the_old_one(tmp_path):
    shard, wav = tmp_path / "s.tar", f"{tmp_path}/s.tar?offset=0&size="
    for seconds in (0.5, 0.25):
        data = encoded(speechlike(seconds), 16000)
        (tmp_path / "new").write_bytes(data)
        os.replace(tmp_path / "new", shard)
        assert len(read_audio(f"{wav}{len(data)}")) == seconds * 16000


def test_few_shards_stay_open(tmp_path):
    data = encoded(speechlike(0.1), 16000)
    shards = [f"{tmp_path.resolve()}/{i}.tar" for i in range(audio.OPEN_SHARDS + 5)]
    for shard in shards:
        with open(shard, "wb") as file:
            file.write(data)
        read_audio(f"{shard}?offset=0&size={len(data)}")
    still_open = {os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")}
    assert still_open.intersection(shards) == set(shards[5:])


# ---------------------------------------------------------------- damage


WAV = encoded(speechlike(1), 16000)
FLAC = encoded(speechlike(1), 16000, "flac")
MP3 = encoded(speechlike(4, 48000), 48000, "mp3")
BROKEN = {
    "empty": (b"", "empty-audio"),
    "garbage": (b"hello world" * 100, "unknown-audio-format"),
    "html": (b"<!DOCTYPE html><html>404 Not Found</html>", "unknown-audio-format"),
    "a header alone": (WAV[:44], "empty-audio"),
    "one sample a second": (WAV[:24] + struct.pack("<I", 1) + WAV[28:], "damaged-audio"),
    "a cut FLAC": (FLAC[: len(FLAC) // 2], "damaged-audio"),
    "a cut MP3": (MP3[: len(MP3) // 2], "damaged-audio"),
    "2^32 frames": (FLAC[:22] + b"\xff\xff\xff\xff" + FLAC[26:], "clip-too-long"),
    "no length": (FLAC[:22] + bytes(4) + FLAC[26:], "damaged-audio"),
}


@pytest.mark.parametrize("what", BROKEN)
def test_broken_audio_is_named_with_its_cause(what, tmp_path):
    data, code = BROKEN[what]
    path = tmp_path / f"{what}.wav"
    path.write_bytes(data)
    for wav in (path, data):
        file = path if wav is path else None
        # How many bytes an encoder writes, and how much of a cut file is read, is up to its version.
        with refused(code, wording=wav is path and "cut" not in what, kind=AudioError, file=file) as caught:
            read_audio(wav)
        assert caught.value.wav == (str(path) if wav is path else f"<{len(data)} bytes of audio>")
        assert isinstance(caught.value, UnknownFormat) == (what in ("garbage", "html"))


@pytest.mark.parametrize("rate", [16_000, 48_000])
@pytest.mark.parametrize("value, is_sound", [
    (np.nan, False), (np.inf, False), (-np.inf, False), (1e30, False), (-1e30, False), (3e38, False), (1.01e6, False),
    (1e6, True), (-32768, True)])
def test_training_transcription_and_serving_refuse_the_same_values(value, is_sound, rate):
    sound = speechlike(0.5, rate)
    sound[1000] = value
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format="WAV", subtype="FLOAT")
    data = file.getvalue()
    readers = {"training": lambda: read_audio(data), "transcription": lambda: Recording(data).samples(16_000)}
    for name, read in readers.items():
        with nullcontext() if is_sound else refused("bad-samples", kind=AudioError):
            assert np.isfinite(read()).all(), name
    assert ("code" in decode(io.BytesIO(data), io.BytesIO(), 16_000, 10.0)) != is_sound


@pytest.mark.parametrize("wav, code", [
    ("gone.mp3", "missing-audio"), ("gone.tar?offset=0&size=10", "missing-audio"), ("", "not-readable"),
    ("pipe.wav", "not-readable"), ("pipe.wav?offset=0&size=10", "not-readable")])
def test_refuses_missing_files_folders_and_pipes_at_once(tmp_path, wav, code):
    os.mkfifo(tmp_path / "pipe.wav")
    with refused(code, kind=AudioError) as caught:
        read_audio(str(tmp_path / wav))
    assert caught.value.wav == str(tmp_path / wav) and caught.value.exit_code == 2
    again = pickle.loads(pickle.dumps(caught.value))
    assert (str(again), again.cause) == (str(caught.value), caught.value.cause)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([WAV, FLAC, MP3]), st.data())
def test_any_damage_ends_in_audio_or_an_audio_error(data, draw):
    damaged = bytearray(data)
    for at in draw.draw(st.lists(st.integers(0, len(data) - 1), min_size=1, max_size=20)):
        damaged[at] = draw.draw(st.integers(0, 255))
    damaged = bytes(damaged[: draw.draw(st.integers(0, len(data)))])
    try:
        signal = read_audio(damaged)
    except AudioError:
        return
    assert len(signal) and np.isfinite(signal).all()


@pytest.mark.parametrize(("start", "duration", "samples"), [
    (0.0, 2.0, 32000), (0.0, 1.98, 32000), (0.0, 1.8, 32000),  # a list that rounds: nothing is cut off
    (0.0, 1.5, 24000), (0.0, 0.5, 8000),  # a segment that begins its file: exactly as long as it says
    (0.1, 1.8, 28800), (0.5, 1.0, 16000), (1.0, 0.95, 15200)])  # a start makes a segment, however near its end is
def test_only_segments_are_cut(tmp_path, start, duration, samples):
    path = tmp_path / "a.wav"
    path.write_bytes(encoded(speechlike(2), 16000))
    signal = read_utterance(str(path), start, duration)
    assert len(signal) == samples
    np.testing.assert_allclose(signal, speechlike(2)[round(start * 16000) :][:samples], atol=1e-4)
    assert len(read_utterance(str(path), start, duration, speed=0.8)) == samples / 0.8
    with refused("damaged-audio", kind=AudioError):
        read_utterance(str(path), start, 4.0)


# ---------------------------------------------------------------- real recordings


def test_real_common_voice_clips():
    clips = sorted((real_data("yesno") / "en" / "clips").glob("*.mp3"))
    assert clips
    for clip in clips[:10]:
        signal, (seconds, rate, channels) = read_audio(clip), audio_info(clip)
        assert (rate, channels) == (8000, 1) and abs(len(signal) / 16000 - seconds) < 0.001
        assert 0.01 < np.abs(signal).max() <= 1.5


def test_real_wavs():
    for wav in sorted((real_data("an4") / "wav").glob("*.wav"))[:10]:
        expected, rate = soundfile.read(wav, dtype="float32")
        assert rate == 16000 and np.array_equal(read_audio(wav), expected)
