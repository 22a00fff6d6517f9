"""Files of sound that are sent as samples are detected by their first bytes, in pieces too."""

import io

import numpy as np
import soundfile

from sbkit.infer.sound_sources import FileSniffer


def test_a_file_is_known_in_whatever_pieces_it_comes():
    written, sound = io.BytesIO(), 0.1 * np.random.default_rng(0).normal(size=48_000)
    soundfile.write(written, sound, 16_000, format="MP3", subtype="MPEG_LAYER_III")
    data, sniffer = written.getvalue(), FileSniffer()
    assert "MP3" in [sniffer.kind(data[i : i + 7]) for i in range(0, 1_443, 7)]


def test_what_comes_later_is_never_a_file():
    sniffer = FileSniffer()
    assert sniffer.kind(bytes(2_000)) is None and sniffer.kind(b"RIFF") is None
