"""A corpus of tones, made in seconds: each letter has its tone, so that a model learns it within a few steps."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np

RATE = 16_000
LETTERS = "abcdefghijklmnopqrst"
LETTER_SECONDS, GAP_SECONDS = 0.07, 0.03
#: Seconds of a clip, distributed as in Common Voice.
SHORTEST, LONGEST = 1.5, 11.0


def repeated(once: Path, folder: Path, hours: float) -> Path:
    """Make a corpus with these hours of the recordings of another; above its own, they are repeated."""
    if not folder.exists():
        head, *rows = (once / "train.csv").read_text(encoding="utf-8").splitlines()
        lines, seconds = [head], 0.0
        while seconds < 3600 * hours:
            turn, row = divmod(len(lines) - 1, len(rows))
            lines.append(f"again{turn}-{rows[row]}")
            seconds += float(rows[row].split(",")[1])
        folder.mkdir()
        (folder / "train.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
        for name in ("dev.csv", "test.csv"):
            (folder / name).write_text((once / name).read_text(encoding="utf-8"), encoding="utf-8")
    return folder


def write(folder: Path, hours: dict[str, float], longest: float = LONGEST, seed: int = 1234, words: int = 2000) -> Path:
    """Write this many hours of each split, in a language of so many words: SpeechBrain's CSVs, 16-bit WAV files."""
    import soundfile

    drawn, lexicon = np.random.default_rng(seed), _lexicon(random.Random(seed), words)
    tones = {letter: _tone(i) for i, letter in enumerate(LETTERS)} | {" ": np.zeros(_samples(GAP_SECONDS * 2))}
    gap = np.zeros(_samples(GAP_SECONDS))
    for split, amount in hours.items():
        (folder / "clips").mkdir(parents=True, exist_ok=True)
        lines, seconds = ["ID,duration,wav,spk_id,wrd"], 0.0
        while seconds < 3600 * amount:
            text = _sentence(drawn, lexicon, drawn.uniform(SHORTEST, longest))
            parts = [part for letter in text for part in (tones[letter], gap)]
            signal = np.concatenate([gap, *parts]) * drawn.uniform(0.1, 0.5)
            signal = signal + 0.003 * drawn.standard_normal(len(signal), dtype=np.float32)
            name = f"{split}{len(lines):06d}"
            soundfile.write(folder / "clips" / f"{name}.wav", signal.astype(np.float32), RATE, subtype="PCM_16")
            length = len(signal) / RATE
            lines.append(f"{name},{length},{folder / 'clips' / name}.wav,speaker{len(lines) % 7},{text}")
            seconds += length
        (folder / f"{split}.csv").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _lexicon(rng: random.Random, size: int) -> list[str]:
    return ["".join(rng.choices(LETTERS, k=rng.randint(2, 7))) for _ in range(size)]


def _sentence(drawn: np.random.Generator, words: list[str], seconds: float) -> str:
    most = int(seconds / (LETTER_SECONDS + GAP_SECONDS))
    text = words[drawn.integers(len(words))]
    while len(longer := f"{text} {words[drawn.integers(len(words))]}") <= most:
        text = longer
    return text


def _tone(place: int) -> np.ndarray:
    """Make a tone, from 300 Hz up in steps of a tenth, with faded ends."""
    samples = _samples(LETTER_SECONDS)
    return np.sin(2 * np.pi * 300 * 1.12**place * np.arange(samples) / RATE) * np.hanning(samples) ** 0.25


def _samples(seconds: float) -> int:
    return round(seconds * RATE)
