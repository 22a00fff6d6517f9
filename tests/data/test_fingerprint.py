"""A recording is found by its sound, whatever was done to it; what only says the same is not."""

from __future__ import annotations

import functools
import io

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sounds import encoded, real_data

from sbkit.data.audio import read_audio, resample
from sbkit.data.copies import RATE, STRIDE, Index, fingerprint
from sbkit.data.demo_voice import speak

pytest.importorskip("espeakng_loader")

SENTENCES = ("The old farmer opens the window before breakfast", "Nine students look for a yellow candle",
             "Her brother never closes that small green door")
VOICES = ("en-us+f2", "en-us+m3", "en-gb-scotland+m1", "en-us+croak")


@functools.cache
def spoken(sentence: int, voice: int) -> np.ndarray:
    signal, rate = speak(SENTENCES[sentence], VOICES[voice])
    return resample(signal, rate, 16_000)


@functools.cache
def index() -> Index:
    """All sentences of the first two voices, by number: 0 to 5."""
    found = Index()
    for voice in (0, 1):
        for sentence in range(3):
            found.add(fingerprint(resample(spoken(sentence, voice), 16_000, RATE)))
    return found


def find(signal: np.ndarray) -> int | None:
    return index().find(fingerprint(resample(signal, 16_000, RATE), STRIDE))


def decoded(signal: np.ndarray, kind: str, **options) -> np.ndarray:
    return read_audio(io.BytesIO(encoded(signal, 16_000, kind, **options)))


def noisy(signal: np.ndarray) -> np.ndarray:
    noise = np.random.default_rng(0).standard_normal(len(signal)) * signal.std()
    return (signal + 0.3 * noise).astype(np.float32)


@pytest.mark.parametrize("change", [
    lambda x: x, lambda x: decoded(x, "mp3"), lambda x: decoded(x, "mp3", compression_level=0.99),
    lambda x: decoded(x, "opus", compression_level=0.9), lambda x: decoded(x, "ogg", compression_level=0.99),
    lambda x: resample(resample(x, 16_000, 8_000), 8_000, 16_000), noisy, lambda x: np.clip(4 * x, -0.9, 0.9),
    lambda x: resample(x, 16_000, 16_100),
], ids=["itself", "mp3", "mp3 at its worst", "opus", "vorbis", "8 kHz", "noise", "clipped", "slower by 0.6 %"])
def test_a_copy_is_found(change):
    for sentence in range(3):
        assert find(change(spoken(sentence, 1))) == 3 + sentence


@settings(max_examples=60)
@given(st.integers(0, 5), st.integers(0, 16_000), st.integers(0, 12_000), st.floats(1e-4, 1.0), st.integers(0, 20_000))
def test_any_cut_of_at_least_half_at_any_loudness_is_found_with_silence_around_it(number, first, last, gain, quiet):
    signal = spoken(number % 3, number // 3)
    part = signal[min(first, len(signal) // 4) : len(signal) - min(last, len(signal) // 4)]
    assert find(np.pad(gain * part, (quiet, quiet)).astype(np.float32)) == number


def test_the_whole_of_which_a_part_is_searched_is_found():
    own = Index()
    own.add(fingerprint(resample(spoken(0, 0)[8_000:32_000], 16_000, RATE)))
    assert own.find(fingerprint(resample(spoken(0, 0), 16_000, RATE), STRIDE)) == 0


def test_other_voices_and_other_sentences_are_no_copies():
    assert [find(spoken(sentence, voice)) for sentence in range(3) for voice in (2, 3)] == [None] * 6
    own = Index()
    own.add(fingerprint(resample(spoken(0, 0), 16_000, RATE)))
    assert [own.find(fingerprint(resample(spoken(i, 0), 16_000, RATE), STRIDE)) for i in (1, 2)] == [None] * 2


def test_what_cannot_be_compared_is_no_copy():
    for signal in (np.zeros(0), np.zeros(48_000), np.zeros(100), spoken(0, 0)[8_000:16_000]):
        print_ = fingerprint(resample(signal.astype(np.float32), 16_000, RATE)) if len(signal) else fingerprint(signal)
        assert Index().find(print_[:, ::STRIDE]) is None
        index().add(print_)
        assert index().find(print_[:, ::STRIDE]) is None
    assert find(spoken(2, 1)) == 5, "others are found as before"


def test_a_sound_that_many_recordings_have_is_still_found():
    own = Index()
    for _ in range(200):
        own.add(fingerprint(resample(spoken(0, 0), 16_000, RATE)))
    assert own.find(fingerprint(resample(spoken(0, 0), 16_000, RATE), STRIDE)) is not None


def test_one_speaker_who_says_two_words_again_and_again_makes_no_copies():
    files = sorted((real_data("yesno") / "en" / "clips").iterdir())
    own = Index()
    for file in files:
        found = fingerprint(read_audio(file, sample_rate=RATE))
        assert own.find(found[:, ::STRIDE]) is None
        own.add(found)
