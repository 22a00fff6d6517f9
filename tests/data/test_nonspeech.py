"""Silence in training: the same for the same draw, of any length, finite, at its level, with the right texts."""

import numpy as np
import pytest
import soundfile
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import speechlike

from sbkit.data.batch import SAMPLE_RATE
from sbkit.data.loader import TrainLoader
from sbkit.data.manifest import Manifest
from sbkit.data.nonspeech import SILENCES, NonSpeech
from sbkit.data.plan import Batching, Plan


def manifest(durations, shares=None, wav="a.wav"):
    """A corpus of these durations whose texts are its row numbers; a mixture of two parts with shares."""
    count = len(durations)
    part = [list(shares)[i % 2] for i in range(count)] if shares else []
    return Manifest(ids=[f"{part[i]}:{i}" if shares else str(i) for i in range(count)], durations=durations,
                    wavs=[wav] * count, texts=[f"row {i}" for i in range(count)], shares=shares,
                    meta={"corpus": part} if shares else None)


@pytest.mark.parametrize("kind", SILENCES)
@settings(max_examples=10, deadline=None)
@given(size=st.integers(1, 20_000), seed=st.integers(0, 2**31), rate=st.sampled_from([8000, 16_000, 48_000]))
def test_each_kind_has_any_length_and_is_finite_and_seeded(kind, size, seed, rate):
    found, again = (SILENCES[kind](np.random.default_rng(seed), size, rate) for _ in range(2))
    assert found.shape == (size,) and np.isfinite(found).all()
    np.testing.assert_array_equal(found, again)


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(size=st.integers(1, 30_000), seed=st.integers(0, 2**31), spoken=st.lists(st.integers(1, 8000), max_size=2))
def test_silence_has_its_size_is_quiet_and_holds_the_utterances_in_order(size, seed, spoken):
    utterances = [speechlike(2.0, 16_000, i)[:length].astype(np.float32) for i, length in enumerate(spoken)]

    def draw():
        return NonSpeech().signal(size, 16_000, np.random.default_rng(seed), utterances, lambda: speechlike(1.0))

    found = draw()
    np.testing.assert_array_equal(found, draw())
    assert found.dtype == np.float32 and found.shape == (size,) and np.isfinite(found).all()
    if not spoken:
        assert np.sqrt(np.mean(found.astype(float) ** 2)) <= 10 ** (-11.9 / 20) or size < 4000
    elif sum(spoken) <= size and min(spoken) > 4000:
        rest = np.sum(found.astype(float) ** 2) / sum(np.sum(each.astype(float) ** 2) for each in utterances)
        assert 0.3 < rest < 3  # all that is spoken, over a background that is at most as loud


def test_levels_reach_from_digital_zero_to_loud():
    levels = [20 * np.log10(np.std(NonSpeech().signal(8000, 16_000, np.random.default_rng(i))) + 1e-9)
              for i in range(200)]
    assert min(levels) == pytest.approx(-180) and np.percentile(levels, 20) < -75 and np.percentile(levels, 90) > -25


def test_steady_sounds_often_swell_and_fade_so_that_this_is_no_sign_of_speech(monkeypatch):
    monkeypatch.setattr("sbkit.data.nonspeech.SILENCES", dict.fromkeys(
        SILENCES, lambda rng, size, rate: rng.standard_normal(size)))
    swell = 0
    for seed in range(100):
        found = NonSpeech().signal(32_000, 16_000, np.random.default_rng(seed)).astype(float)
        levels = np.sqrt(np.mean(found.reshape(20, -1) ** 2, axis=1))
        swell += levels.max() > 1.5 * (np.mean(levels) + 1e-12)
    assert 15 <= swell <= 50


@settings(max_examples=40, deadline=None)
@given(st.lists(st.floats(0.5, 20), min_size=40, max_size=200), st.floats(0, 0.9), st.booleans())
def test_rows_have_their_share_of_the_audio_and_the_texts_of_what_is_heard(durations, share, mixed):
    shares = {"a": 0.3, "b": 0.7} if mixed else None
    train, silence = manifest(durations, shares), NonSpeech(share)
    rows = silence.added_to(train, 7)
    assert rows.digest() == silence.added_to(train, 7).digest()
    assert list(rows.ids[:len(train)]) == list(train.ids) and len(set(rows.ids)) == len(rows)
    made = rows.select(np.arange(len(train), len(rows)))
    longest = max(durations)
    assert abs(made.hours - share * rows.hours) * 3600 <= 2 * longest + 0.01 and rows.durations.max() <= longest + 0.01
    for row in made:
        like, *spoken = silence.rows_of(row.wav)
        assert row.duration == train.durations[like] and row.text == " ".join(train.texts[i] for i in spoken)
        assert sum(train.durations[i] for i in spoken) <= row.duration
        if mixed:
            assert len({row.meta["corpus"], *(train.column("corpus")[i] for i in spoken)}) == 1


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_even_the_smallest_corpus_has_a_row_of_silence_alone_in_each_part(count, mixed):
    for seed in range(5):
        train = manifest([3.0] * count * (1 + mixed), {"a": 0.5, "b": 0.5} if mixed else None)
        made = [row for row in NonSpeech().added_to(train, seed) if NonSpeech.rows_of(row.wav)]
        assert [row.text for row in made] == [""] * (1 + mixed)
        assert len(NonSpeech(0).added_to(train, seed)) == len(train)


def test_texts_of_a_script_without_spaces_are_joined_without_one():
    train = manifest([1.0] * 300 + [10.0] * 300)
    train = train.replace(texts=[text.replace(" ", "") for text in train.texts])
    assert not any(" " in text for text in NonSpeech(0.5).added_to(train, 0).texts)


class Letters:
    def encode(self, text):
        return list(text.encode())


def test_any_number_of_ranks_and_any_first_step_hear_the_same(tmp_path):
    soundfile.write(tmp_path / "a.wav", speechlike(2.0, SAMPLE_RATE), SAMPLE_RATE)
    silence = NonSpeech(0.5)
    rows = silence.added_to(manifest([0.5, 2.0] * 20, wav=str(tmp_path / "a.wav")), 3)
    plan = Plan.of(rows, Batching(max_batch_seconds=8, seed=3), None, 1)

    def heard(world, first=0):
        found = {}
        for rank in range(world):
            loader = TrainLoader(rows, Letters(), plan, rank=rank, world=world, workers=0, nonspeech=silence)
            for batch in loader.at(2, first):
                for name, signal, length, text in zip(batch.ids, batch.signals, batch.signal_lengths, batch.texts,
                                                      strict=True):
                    if batch.weight:
                        found[batch.step, name] = signal[:length].numpy().tobytes(), text
        return found

    alone = heard(1)
    assert alone == heard(2) and {key: alone[key] for key in alone if key[0] >= 5} == heard(1, first=5)
    assert any(text == "" for _, text in alone.values()) and len({signal for signal, _ in alone.values()}) > 30


@pytest.mark.parametrize("under, least, most", [(0.0, 0, 0), (0.4, 15, 45), (1.0, 55, 95)])
def test_it_is_heard_under_a_share_of_the_utterances_too_at_no_more_than_their_level(under, least, most, tmp_path):
    utterance = speechlike(0.5, SAMPLE_RATE).astype(np.float32)
    soundfile.write(tmp_path / "a.wav", utterance, SAMPLE_RATE, subtype="FLOAT")
    rows = manifest([0.5] * 100, wav=str(tmp_path / "a.wav"))
    plan = Plan.of(rows, Batching(max_batch_seconds=8, min_steps=0), None, 1)
    with TrainLoader(rows, Letters(), plan, workers=0, nonspeech=NonSpeech(0, under=under)) as loader:
        heard = {name: (signal[:length].numpy(), text) for batch in loader.at(1) for name, signal, length, text in zip(
            batch.ids, batch.signals, batch.signal_lengths, batch.texts, strict=True)}
    assert {name: text for name, (_, text) in heard.items()} == dict(zip(rows.ids, rows.texts, strict=True))
    added = [signal - utterance for signal, _ in heard.values()]
    noisy = sum(np.abs(each).max() > 2e-5 for each in added)  # more than what is rounded as a file has it
    assert least <= noisy <= most, "in some draws it is digital zero, or silent under the utterance"
    assert max(np.std(each) for each in added) < 1.1 * np.std(utterance)


@pytest.mark.parametrize("make, code", [
    (lambda folder: NonSpeech(share=1), "bad-value"),
    (lambda folder: NonSpeech(share=-0.1), "bad-value"),
    (lambda folder: NonSpeech(under=30), "bad-value"),
    (lambda folder: NonSpeech(folder=str(folder)).added_to(manifest([1.0]), 0), "no-audio-files"),
    (lambda folder: NonSpeech(folder=str(folder / "x")).added_to(manifest([1.0]), 0), "no-such-path"),
])
def test_bad_options_are_refused(tmp_path, make, code):
    with refused(code):
        make(tmp_path)


def test_a_folder_of_noises_is_heard(tmp_path):
    tone = np.sin(2 * np.pi * 1000 * np.arange(3000) / SAMPLE_RATE)
    soundfile.write(tmp_path / "tone.wav", 0.5 * tone, SAMPLE_RATE)
    silence = NonSpeech(folder=str(tmp_path))
    tonal = 0
    for seed in range(40):
        found = np.abs(np.fft.rfft(silence.signal(16_000, SAMPLE_RATE, np.random.default_rng(seed)))) ** 2
        tonal += found[950:1050].sum() > 0.8 * found.sum() > 0
    assert 12 <= tonal <= 32  # half of the draws, and a tone that is synthesised may lie there
