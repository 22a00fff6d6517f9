"""What phones and browsers record: read like any other file, within the same limits, or refused in plain words."""

import functools
import io
import struct
import sys
import zlib

import numpy as np
import pytest
import soxr
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import CONTAINERS, contained, speechlike

from sbkit.data.audio import AudioError, audio_info, read_audio
from sbkit.infer.recordings import Recording
from sbkit.serve.decoder_process import decode


@pytest.mark.parametrize("suffix", CONTAINERS)
@pytest.mark.parametrize("rate", [16_000, 44_100, 48_000])
def test_its_samples_are_where_they_were_recorded(suffix, rate, tmp_path):
    if (suffix, rate) == ("webm", 44_100):
        pytest.skip("Opus knows no 44.1 kHz")
    sound = speechlike(2.0, rate)
    (tmp_path / "clip").write_bytes(contained(sound, rate, suffix))
    seconds, found, channels = audio_info(tmp_path / "clip", whole=True)
    delay = 0 if suffix != "aac" else 1024 / rate  # the encoder's, which bare AAC has no place to write down
    assert abs(seconds - 2.0 - delay) < 0.1 and (found, channels) == (48_000 if suffix == "webm" else rate, 1)
    signal, expected = read_audio(tmp_path / "clip")[round(16_000 * delay) :], soxr.resample(sound, rate, 16_000)
    assert np.corrcoef(signal[800:28_000], expected[800:28_000])[0, 1] > 0.97
    blocks = Recording(tmp_path / "clip", start=delay).samples(16_000)
    assert np.corrcoef(blocks[800:28_000], expected[800:28_000])[0, 1] > 0.97
    part = read_audio(tmp_path / "clip", start=0.75 + delay, duration=0.5)
    assert len(part) == 8000 and np.corrcoef(part[100:-100], expected[12_100:19_900])[0, 1] > 0.97


def test_a_video_is_read_for_its_sound():
    seconds, rate, _ = audio_info(contained(speechlike(1.0, 16_000), 16_000, "mp4", video=True))
    assert abs(seconds - 1) < 0.1 and rate == 16_000


@pytest.mark.parametrize("suffix", ["m4a", "mp4", "webm"])
def test_one_that_was_cut_off_is_refused_from_a_corpus(suffix):
    data = contained(speechlike(4.0, 48_000), 48_000, suffix)
    with refused("damaged-audio", kind=AudioError, wording=False):
        audio_info(data[: len(data) * 6 // 10], whole=True)


def test_what_is_there_of_a_webm_that_was_cut_off_is_transcribed_with_a_warning():
    data = contained(speechlike(4.0, 48_000), 48_000, "webm")
    recording = Recording(data[: len(data) * 6 // 10])
    assert 32_000 < len(recording.samples(16_000)) < 48_000 and "cut off: 2" in recording.warning


@pytest.mark.parametrize("suffix", CONTAINERS)
@pytest.mark.slow
def test_the_servers_decoder_refuses_one_that_is_too_long_before_it_decodes_it(suffix, monkeypatch):
    """Silence takes few bytes: an hour of it is an upload of some hundred kilobytes."""
    data = contained(np.zeros(48_000 * 120, np.float32), 48_000, suffix)
    assert len(data) < 500_000
    monkeypatch.setattr(Recording, "blocks", lambda *_: pytest.fail("it was decoded"))
    assert decode(io.BytesIO(data), io.BytesIO(), 16_000, 60)["code"] == "audio_too_long"


def test_the_servers_decoder_writes_its_samples():
    out = io.BytesIO()
    reply = decode(io.BytesIO(contained(speechlike(1.0, 48_000), 48_000, "webm")), out, 16_000, 60)
    assert abs(reply["samples"] - 16_000) < 1000 and len(out.getvalue()) == 4 * reply["samples"]


def test_an_mp4_that_claims_packets_without_end_takes_no_memory_for_them():
    data = bytearray(contained(speechlike(1.0, 16_000), 16_000, "m4a"))
    sizes, chunks = data.index(b"stsz"), data.index(b"stsc")
    data[sizes + 8 : sizes + 16] = struct.pack(">II", 1, 60_000_000)  # of a byte each: two gigabytes of FFmpeg's index
    data[chunks + 16 : chunks + 20] = struct.pack(">I", 60_000_000)
    with refused("damaged-audio", kind=AudioError, wording=False):
        audio_info(bytes(data))
    size = len(data) * 3 // 4  # each less than the bytes, and both together more
    data[sizes + 8 : sizes + 16] = struct.pack(">II", 1, size)
    data += struct.pack(">I4sIII", 20, b"stsz", 0, 1, size)
    with refused("damaged-audio", kind=AudioError, wording=False):
        audio_info(bytes(data))
    at = data.index(b"moov")  # the same list, compressed
    packed = zlib.compress(data[at - 4 : at - 4 + int.from_bytes(data[at - 4 : at], "big")])
    moov = [(b"dcom", b"zlib"), (b"cmvd", struct.pack(">I", len(data)) + packed)]
    inside = b"".join(struct.pack(">I4s", 8 + len(each), name) + each for name, each in moov)
    hidden = data[: at - 4] + struct.pack(">I4sI4s", 16 + len(inside), b"moov", 8 + len(inside), b"cmov") + inside
    with refused("damaged-audio", kind=AudioError, wording=False):
        audio_info(bytes(hidden))


def test_a_title_is_not_taken_for_a_claim_and_a_box_may_claim_any_length(tmp_path):
    data = contained(speechlike(1.0, 16_000), 16_000, "m4a")
    titled = data + struct.pack(">I4s32s", 40, b"udta", b"my trunk is strong and destruntes")
    assert audio_info(titled) == audio_info(data)
    for length in (1 << 40, 1 << 62, (1 << 64) - 1):
        (tmp_path / "long.m4a").write_bytes(long := data[:32] + struct.pack(">I4sQ", 1, b"moov", length) + data[32:])
        for each in (long, tmp_path / "long.m4a"):
            with refused("damaged-audio", kind=AudioError, wording=False):
                audio_info(each)


def test_without_the_package_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "av", None)
    with refused("missing-package", kind=AudioError):
        audio_info(b"\0\0\0\x20ftypM4A \0\0\0\0")


@pytest.mark.parametrize("data", [b"#EXTM3U\n#EXTINF:1,\nfile:///etc/hostname\n",
                                  b"ffconcat version 1.0\nfile 'a.wav'\n"])
def test_lists_of_other_files_are_not_opened(data, tmp_path):
    (tmp_path / "list.m4a").write_bytes(data)
    with refused("unknown-audio-format", kind=AudioError):
        audio_info(tmp_path / "list.m4a")


@functools.cache
def short(suffix):
    return contained(speechlike(0.3, 16_000), 16_000, suffix)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(sorted(CONTAINERS)), st.data())
def test_a_damaged_one_is_read_or_refused(suffix, data):
    whole = bytearray(short(suffix))
    for _ in range(data.draw(st.integers(1, 8))):
        whole[data.draw(st.integers(8, len(whole) - 1))] = data.draw(st.integers(0, 255))
    try:
        signal = read_audio(bytes(whole[: data.draw(st.integers(len(whole) // 2, len(whole)))]))
    except AudioError:
        return
    assert np.isfinite(signal).all() and len(signal) < 10 * 16_000
