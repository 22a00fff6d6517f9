"""Files of sound that are sent as samples are known by their beginning, in pieces too; samples are no file."""

import io

import numpy as np
import pytest
import soundfile
from hypothesis import assume, given
from hypothesis import strategies as st

from sbkit.infer.sound_sources import Beginning, file_of

SOUND = 0.1 * np.random.default_rng(0).normal(size=48_000)


def file(rate, kind, subtype=None, **options):
    written = io.BytesIO()
    soundfile.write(written, SOUND, rate, format=kind, subtype=subtype, **options)
    return written.getvalue()


@pytest.mark.parametrize(("kind", "subtype", "told"), [
    ("WAV", None, "WAV"), ("RF64", None, "WAV"), ("FLAC", None, "FLAC"), ("OGG", "VORBIS", "Ogg (Vorbis, Opus)"),
    ("OGG", "OPUS", "Ogg (Vorbis, Opus)"), ("AIFF", None, "AIFF"), ("CAF", None, "CAF"), ("AU", None, "AU"),
])
def test_files_are_known_by_their_first_bytes(kind, subtype, told):
    assert file_of(file(48_000, kind, subtype)[:16]) == told


@pytest.mark.parametrize("rate", [8_000, 11_025, 12_000, 16_000, 22_050, 24_000, 32_000, 44_100, 48_000])
@pytest.mark.parametrize("level", [0.0, 0.5, 0.99])
def test_an_mp3_is_known_by_two_of_its_frames_at_any_rate(rate, level):
    data = file(rate, "MP3", "MPEG_LAYER_III", compression_level=level)
    assert data[:1] == b"\xff" and file_of(data[:4]) is None and file_of(data[:1_443]) == "MP3"


@pytest.mark.parametrize(("data", "told"), [
    (b"ID3\x04\0\0", "MP3"), (b"\x1a\x45\xdf\xa3\x9f", "WebM"), (b"\0\0\0\x20ftypisom", "MP4"),
])
def test_so_are_those_that_soundfile_does_not_write(data, told):
    assert file_of(data) == told


def test_a_file_is_known_in_whatever_pieces_it_comes():
    data, beginning = file(16_000, "MP3", "MPEG_LAYER_III"), Beginning()
    assert "MP3" in [beginning.file(data[i : i + 7]) for i in range(0, 1_443, 7)]


@given(st.binary(max_size=3_000))
def test_samples_that_begin_like_a_frame_of_an_mp3_are_samples(data):
    assume(not data.startswith(b"ftyp"))  # that would be an MP4's beginning
    assert file_of(b"\xff\xfb\x90\xc4" + data.replace(b"\xff", b"\0")) is None


def test_what_comes_later_is_never_a_file():
    beginning = Beginning()
    assert beginning.file(bytes(2_000)) is None and beginning.file(b"RIFF") is None
