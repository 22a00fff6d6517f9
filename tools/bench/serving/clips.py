"""Recordings to send: those of a user, noise, and a signal that varies about as much as speech."""

from __future__ import annotations

import io
from collections.abc import Sequence

import numpy as np
import soundfile

from tools.bench.serving.models import RATE

_SYLLABLES = 4.0  # per second
_PHRASE, _PAUSE = 3.0, 0.8  # seconds


def make_clips(count: int) -> list[tuple[bytes, float]]:
    """Make clips of noise, of one to twelve seconds, as FLAC; returns each with its seconds."""
    rng = np.random.default_rng(1)
    clips = []
    for seconds in rng.uniform(1, 12, count):
        file = io.BytesIO()
        noise = 0.1 * rng.standard_normal(int(seconds * RATE)).astype(np.float32)
        soundfile.write(file, noise, RATE, format="FLAC", subtype="PCM_16")
        clips.append((file.getvalue(), float(seconds)))
    return clips


def read_clips(names: list[str], count: int) -> list[tuple[bytes, float]]:
    """Read whole recordings from files, folders and manifests; returns each with its seconds."""
    from sbkit.data.audio import audio_info, read_bytes
    from sbkit.infer.inputs import collect

    files = [str(each.audio) for each in collect(names)[:count]]
    return [(read_bytes(file), audio_info(file)[0]) for file in files]


def speech_like(seconds: float) -> np.ndarray:
    """Make int16 samples [S] of noise and hum that come in syllables, with a pause after every few seconds."""
    rng = np.random.default_rng(2)
    at = np.arange(int(seconds * RATE)) / RATE
    pitch = np.cumsum(120 + 30 * np.sin(0.7 * at)) / RATE
    voice = sum(np.sin(2 * np.pi * k * pitch) / k for k in range(1, 12))
    loud = np.clip(np.sin(2 * np.pi * _SYLLABLES * at + 2 * np.sin(1.3 * at)), 0.0, 1.0)
    loud *= at % (_PHRASE + _PAUSE) < _PHRASE
    sound = loud * (0.1 * voice + 0.05 * rng.standard_normal(len(at))) + 0.001 * rng.standard_normal(len(at))
    return np.asarray(np.clip(sound, -1, 1) * 32767, np.int16)


def speech(names: Sequence[str] | None, most_seconds: float) -> np.ndarray:
    """Read recordings as int16 samples [S] at this rate, one after the other; without any, make something alike."""
    if not names:
        return speech_like(most_seconds)
    from sbkit.infer.inputs import collect

    parts, seconds = [], 0.0
    for each in collect(list(names)):
        parts += list(each.blocks(RATE))
        seconds = sum(map(len, parts)) / RATE
        if seconds >= most_seconds:
            break
    return np.asarray(np.clip(np.concatenate(parts), -1, 1) * 32767, np.int16)
