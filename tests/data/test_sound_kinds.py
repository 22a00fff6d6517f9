"""A file of sound is known by how it begins; samples are no file."""

import io

import numpy as np
import pytest
import soundfile
from hypothesis import assume, given
from hypothesis import strategies as st

from sbkit.data.tar import kind_of

SOUND = 0.1 * np.random.default_rng(0).normal(size=48_000)


def file(rate, kind, subtype=None, **options):
    written = io.BytesIO()
    soundfile.write(written, SOUND, rate, format=kind, subtype=subtype, **options)
    return written.getvalue()


def name(begin):
    found = kind_of(begin)
    return None if found is None else found.name


@pytest.mark.parametrize(("kind", "subtype", "expected"), [
    ("WAV", None, "WAV"), ("RF64", None, "WAV"), ("FLAC", None, "FLAC"), ("OGG", "VORBIS", "Ogg (Vorbis, Opus)"),
    ("OGG", "OPUS", "Ogg (Vorbis, Opus)"), ("AIFF", None, "AIFF"), ("CAF", None, "CAF"), ("AU", None, "AU"),
])
def test_files_are_known_by_their_first_bytes(kind, subtype, expected):
    assert name(file(48_000, kind, subtype)[:16]) == expected


@pytest.mark.parametrize("rate", [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("level", [0.0, 0.5, 0.99])
def test_an_mp3_is_known_by_two_of_its_frames_at_any_rate(rate, level):
    data = file(rate, "MP3", "MPEG_LAYER_III", compression_level=level)
    assert data[:1] == b"\xff" and name(data[:4]) is None and name(data[:1_443]) == "MP3"


@pytest.mark.parametrize(("data", "expected"), [
    (b"\xff\xf1\x50\x40\x01\x1f\xfc\0\xff\xf1", "AAC"), (b"\xff\xf1\x50\x40\x01\x1f\xfc\0\0\0", None),
    (b"ID3\x04\0\0", "MP3"), (b"\x1a\x45\xdf\xa3\x9f", "WebM"), (b"\0\0\0\x20ftypisom", "MP4"),
])
def test_so_are_those_that_soundfile_does_not_write(data, expected):
    assert name(data) == expected


@given(st.binary(max_size=3_000))
def test_samples_that_begin_like_a_frame_of_an_mp3_are_samples(data):
    assume(not data.startswith(b"ftyp"))  # that would be an MP4's beginning
    assert name(b"\xff\xfb\x90\xc4" + data.replace(b"\xff", b"\0")) is None
