"""A recording whose header says another length than its file holds is found, whatever its format and where it ends."""

from __future__ import annotations

import io
import re
import struct

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data import mp3
from sbkit.data.audio import AudioError, audio_info, read_audio

RATE = 16_000
SIGNAL = speechlike(10.0)


def file_of(format: str, subtype: str = "PCM_16", signal: np.ndarray = SIGNAL, **options) -> bytes:
    out = io.BytesIO()
    soundfile.write(out, signal, RATE, format=format, subtype=subtype, **options)
    return out.getvalue()


WAV, FLAC = file_of("WAV"), file_of("FLAC")


def flac_that_says(samples: int, data: bytes = FLAC) -> bytes:
    facts = int.from_bytes(data[18:26], "big") >> 36 << 36 | samples
    return data[:18] + facts.to_bytes(8, "big") + data[26:]


def wav_that_says(size: int) -> bytes:
    return WAV[:40] + struct.pack("<I", size) + WAV[44:]


@pytest.mark.parametrize("format", ["WAV", "WAVEX", "AIFF", "AU", "W64", "RF64", "FLAC"])
def test_a_file_cut_in_half_is_cut_off(format):
    data = file_of(format)
    assert audio_info(data, whole=True)[0] == 10.0
    with refused("damaged-audio", kind=AudioError, wording=False) as caught:
        audio_info(data[: len(data) // 2], whole=True)
    assert re.fullmatch(r"cut off: [45]\.\d+ of (10\.0|9\.99?)\d* s can be read", caught.value.cause)
    audio_info(data[: len(data) // 2])  # whoever wants a stretch may find it there


@pytest.mark.parametrize("data", [
    flac_that_says(RATE), flac_that_says(RATE) + bytes(1_000_000),
    b"ID3\4\0\0\0\0\1\0" + bytes(128) + flac_that_says(RATE)])
def test_refuses_a_flac_longer_than_its_header(data):
    with refused("damaged-audio", kind=AudioError, wording=False) as caught:
        audio_info(data, whole=True)
    assert "its header says 1.00 s, but it goes on to 10.00 s" in caught.value.cause


@pytest.mark.parametrize("subtype", ["PCM_S8", "PCM_16", "PCM_24"])
@pytest.mark.parametrize("level", [0.0, 1.0])
@pytest.mark.parametrize("signal", [SIGNAL, np.stack([SIGNAL, 0.3 * SIGNAL[::-1]], 1), 0 * SIGNAL, SIGNAL[:100]])
def test_the_end_of_any_flac_is_found(subtype, level, signal):
    data = file_of("FLAC", subtype, signal, compression_level=level)
    assert audio_info(data, whole=True)[0] == len(signal) / RATE
    with refused("damaged-audio", kind=AudioError, wording=False):
        audio_info(flac_that_says(len(signal) + 100 * RATE, data), whole=True)


@pytest.mark.parametrize("data", [
    *map(wav_that_says, (0xFFFFFFFF, 0xFFFFFFF0, 0x7FFFFFFF, 0x7FFFF000)),  # written into a pipe
    WAV + b"LIST" + struct.pack("<I", 40_000) + bytes(40_000), WAV + bytes(100_000), WAV + b"\r\n",
    wav_that_says(0), wav_that_says(0)[:4] + bytes(4) + wav_that_says(0)[8:],  # never completed
    FLAC + b"TAG" + bytes(125)])
def test_ignores_bytes_that_are_not_audio(data):
    assert audio_info(data, whole=True)[0] == 10.0


def test_a_wav_is_read_as_far_as_its_header_says():
    data = wav_that_says(2 * RATE)
    assert audio_info(data, whole=True)[0] == 1.0
    np.testing.assert_array_equal(read_audio(data), read_audio(WAV)[:RATE])
    np.testing.assert_array_equal(read_audio(wav_that_says(0)), read_audio(WAV))
    with refused("empty-audio", kind=AudioError):
        audio_info(WAV[:40] + bytes(4) + b"LIST" + struct.pack("<I", 4) + b"INFO")


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([WAV, wav_that_says(0), FLAC, encoded(SIGNAL, RATE, "mp3"), file_of("AIFF")]), st.data())
def test_a_damaged_file_has_a_length_or_a_cause(data, draw):
    damaged = bytearray(data)
    for at in draw.draw(st.lists(st.integers(0, 200) | st.integers(0, len(data) - 1), min_size=1, max_size=20)):
        damaged[at] = draw.draw(st.integers(0, 255))
    try:
        seconds, _, _ = audio_info(bytes(damaged[: draw.draw(st.integers(0, len(data)))]), whole=True)
    except AudioError:
        return
    assert seconds > 0


FRAME = bytes.fromhex("fffb9000").ljust(417, b"\0")  # MPEG 1, 128 kbit/s, 44.1 kHz, stereo: 1152 samples


@pytest.mark.parametrize("data, found", [
    (b"\0" * 500, None), (b"\xff" * 500, None), (b"", None), (b"ID3" + FRAME * 2, (1, False)),
    (FRAME * 4, (4, False)), (FRAME * 4 + FRAME[:100], (4, False)), (FRAME * 2 + b"TAG" + b"x" * 125, (2, False)),
    (FRAME * 3 + b"\xff\xf1" * 50 + FRAME * 2, (5, False)), (FRAME * 3 + b"x" * 5000 + FRAME * 2, (3, False)),
    (FRAME[:36] + b"VBRI" + bytes(10) + (77).to_bytes(4, "big") + FRAME[54:] + FRAME, (77, True)),
    *((bytes((0xff, second, third, 0)).ljust(417, b"\0") * 2, None) for second, third in (
        (0xeb, 0x90), (0xfb, 0x00), (0xfb, 0xf0), (0xfb, 0x9c), (0xfd, 0x90))),  # of no version, rate, layer III
    (bytes.fromhex("fff39000").ljust(261, b"\0") * 3, (3, False)),
])
def test_frames_of_an_mp3_are_counted_whatever_lies_between(data, found):
    mp3_ = mp3.inspect(lambda count, offset: data[offset:offset + count])
    assert found == (mp3_ and (mp3_.frames, mp3_.tagged))
