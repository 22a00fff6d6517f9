"""Audio for the data room's tests: synthesised on the spot, and the real recordings where they are."""

from __future__ import annotations

import io
import os
from pathlib import Path

import numpy as np
import pytest
import soundfile

FORMATS = {
    "wav": ("WAV", "PCM_16"), "flac": ("FLAC", "PCM_16"), "mp3": ("MP3", "MPEG_LAYER_III"),
    "ogg": ("OGG", "VORBIS"), "opus": ("OGG", "OPUS"),
}


def speechlike(seconds: float, rate: int = 16000, seed: int = 0) -> np.ndarray:
    """Harmonics with a syllable rhythm and a little noise, float32 [S], all below 4 kHz."""
    rng = np.random.default_rng(seed)
    time = np.arange(round(seconds * rate)) / rate
    tone = sum(np.sin(2 * np.pi * 110 * k * time + rng.uniform(0, 6)) / k for k in range(1, 20))
    return (0.05 * tone * (1.1 + np.sin(2 * np.pi * 4 * time + seed))).astype(np.float32)


def encoded(signal: np.ndarray, rate: int, kind: str = "wav", **options) -> bytes:
    """The bytes of an audio file."""
    file = io.BytesIO()
    format, subtype = FORMATS[kind]
    with soundfile.SoundFile(file, "w", rate, 1 if signal.ndim == 1 else signal.shape[1], format=format,
                             subtype=subtype, **options) as out:
        for start in range(0, len(signal), rate):  # a long Vorbis block overflows libsndfile's stack
            out.write(signal[start : start + rate])
    return file.getvalue()


#: How the package av writes the kinds of ``sbkit.data.container``: format and codec, by suffix.
CONTAINERS = {"m4a": ("ipod", "aac"), "mp4": ("mp4", "aac"), "webm": ("webm", "libopus"), "aac": ("adts", "aac")}


def contained(signal: np.ndarray, rate: int, suffix: str, video: bool = False) -> bytes:
    """The bytes of a phone's or a browser's recording of a signal [S]; the test is skipped without the package av."""
    av = pytest.importorskip("av", reason="the package av, which reads and writes such files, is not installed")
    kind, codec = CONTAINERS[suffix]
    file = io.BytesIO()
    with av.open(file, "w", format=kind) as out:
        picture = out.add_stream("mpeg4", rate=5, width=16, height=16, pix_fmt="yuv420p") if video else None
        stream = out.add_stream(codec, rate=rate, layout="mono")
        convert = av.AudioResampler(format=stream.codec_context.format, layout="mono", rate=rate)
        if picture is not None:
            out.mux(picture.encode(av.VideoFrame(16, 16, "yuv420p")) + picture.encode(None))
        for start in range(0, len(signal), 4096):
            block = av.AudioFrame.from_ndarray(signal[None, start : start + 4096], "fltp", "mono")
            block.sample_rate, block.pts = rate, start
            for frame in convert.resample(block):
                out.mux(stream.encode(frame))
        out.mux(stream.encode(None))
    return file.getvalue()


def real_data(name: str) -> Path:
    """A folder of real recordings; the test is skipped where it is absent."""
    beside = Path(__file__).resolve().parents[2] / "shared" / "data"
    folder = Path(os.environ.get("SBKIT_TEST_DATA", beside)) / name
    if not folder.is_dir():
        pytest.skip(f"no real recordings in {folder} (SBKIT_TEST_DATA names their folder)")
    return folder
