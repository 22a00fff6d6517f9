"""Augmentation: the named effect and no other, the same again for the same seed, epoch and utterance."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import encoded, speechlike
from speechbrain.augment import time_domain

from sbkit.data.augment import (
    AddNoise,
    AddReverb,
    ApplyCodec,
    Augment,
    BandPass,
    Crop,
    Gain,
    Overdrive,
    SpeedPerturb,
    planned_seconds,
)

SIGNAL = speechlike(1.0)


def rng(epoch: int = 1, name: str = "u", seed: int = 0) -> np.random.Generator:
    return Augment.rng(seed, epoch, name)


def db(signal: np.ndarray) -> float:
    return 10 * np.log10(np.mean(np.square(signal, dtype=np.float64)))


@pytest.fixture
def noises(tmp_path):
    """A folder with a long and a short noise, one of them deeper down, and files that are no audio."""
    folder = tmp_path / "noise"
    (folder / "deep").mkdir(parents=True)
    noise = np.random.default_rng(0).normal(size=16000 * 5).astype(np.float32) * 0.1
    (folder / "deep" / "long.WAV").write_bytes(encoded(noise, 16000))
    (folder / "short.flac").write_bytes(encoded(noise[:3000], 16000, "flac"))
    (folder / "README.txt").write_text("no audio")
    return folder


def test_a_generator_is_its_utterances_own():
    draws = {rng(*who).random() for who in itertools.product((1, 2), ("a", "b", "ü"), (0, 1))}
    assert len(draws) == 12
    assert rng(3, "a", 7).random() == rng(3, "a", 7).random()


def test_speeds_are_drawn_evenly_and_stretch_is_that_of_the_slowest():
    speeds = SpeedPerturb([0.9, 1.0, 1.1])
    draws = [speeds.draw(rng(name=str(i))) for i in range(3000)]
    for speed in (0.9, 1.0, 1.1):
        assert draws.count(speed) / 3000 == pytest.approx(1 / 3, abs=0.05)
    assert speeds.stretch == pytest.approx(1 / 0.9) and SpeedPerturb([1.1]).stretch == 1.0
    seldom = SpeedPerturb([1.1], prob=0.2)
    assert 0.15 < np.mean([seldom.draw(rng(name=str(i))) > 1 for i in range(2000)]) < 0.25


def test_an_augmentation_of_speechbrain_is_refused_as_a_stage():
    with refused("bad-value"):
        Augment([time_domain.SpeedPerturb(16000)])


def test_gain_stays_in_its_range_and_changes_nothing_else():
    gain = Gain(-6, 3)
    changes = []
    for i in range(50):
        louder = gain(SIGNAL, rng(name=str(i)))
        assert louder.dtype == np.float32 and np.corrcoef(louder, SIGNAL)[0, 1] > 0.99999
        changes.append(db(louder) - db(SIGNAL))
    assert -6.01 < min(changes) < -4 and 1.5 < max(changes) < 3.01


@pytest.mark.parametrize("seconds", [0.1, 1.0, 7.0])
def test_noise_is_mixed_in_at_the_ratio_drawn(noises, seconds):
    signal = speechlike(seconds)
    for i in range(10):
        noisy = AddNoise(str(noises), 5, 5, prob=1)(signal, rng(name=str(i)))
        assert noisy.shape == signal.shape and noisy.dtype == np.float32
        assert db(signal) - db(noisy - signal) == pytest.approx(5, abs=0.05)


def test_noise_comes_from_different_places(noises):
    add = AddNoise(str(noises), prob=1)
    noisy = [add(SIGNAL, rng(name=str(i))) - SIGNAL for i in range(6)]
    assert all(abs(np.corrcoef(a, b)[0, 1]) < 0.5 for i, a in enumerate(noisy) for b in noisy[:i])


def test_silence_stays_silent(noises):
    silence = np.zeros(16000, np.float32)
    assert not AddNoise(str(noises), prob=1)(silence, rng()).any()
    assert not AddReverb(str(noises), prob=1)(silence, rng()).any()


def test_reverberation_is_the_convolution_aligned_and_as_loud(tmp_path):
    response = np.zeros(4000, np.float32)
    response[[500, 900, 2500]] = 0.9, 0.4, -0.2  # 500 samples of delay before the direct sound
    (tmp_path / "room.wav").write_bytes(encoded(response, 16000))
    wet = AddReverb(str(tmp_path), prob=1)(SIGNAL, rng())
    expected = np.convolve(SIGNAL.astype(float), response[500:].astype(float))[:16000]
    expected *= np.sqrt(np.mean(SIGNAL.astype(float) ** 2) / np.mean(expected**2))
    assert wet.shape == SIGNAL.shape and wet.dtype == np.float32
    assert np.abs(wet - expected).max() < 1e-4
    assert db(wet) == pytest.approx(db(SIGNAL), abs=0.01)


CODECS = ApplyCodec().codecs


@pytest.mark.parametrize("name", CODECS)
def test_a_codec_leaves_the_speech_where_it_was_and_what_it_keeps_of_it(name):
    speech = speechlike(3.0)
    coded = ApplyCodec([name], prob=1)(speech, rng())
    assert coded.dtype == np.float32 and len(coded) == len(speech)
    assert not np.array_equal(coded, speech) and abs(db(coded) - db(speech)) < 3
    both = np.fft.irfft(np.fft.rfft(coded, 1 << 17) * np.conj(np.fft.rfft(speech, 1 << 17)))
    assert abs(int(np.argmax(both)) % (1 << 17)) in (0, 1, (1 << 17) - 1), "not delayed by more than a sample"
    power = np.square(np.abs(np.fft.rfft(coded)))
    above = power[np.fft.rfftfreq(len(coded), 1 / 16000) > 4200].sum() / power.sum()
    assert above < 1e-3 if name not in ("mp3", "opus", "vorbis") else above > 0


@settings(deadline=None, max_examples=40)
@given(st.sampled_from(CODECS), st.integers(0, 3000), st.floats(0, 4), st.sampled_from([8000, 16000, 22050, 48000]))
def test_a_codec_takes_any_length_loudness_and_rate(name, size, peak, rate):
    noise = np.float32(peak) * np.random.default_rng(size).uniform(-1, 1, size).astype(np.float32)
    coded = ApplyCodec([name], prob=1, sample_rate=rate)(noise, rng())
    assert coded.shape == noise.shape and coded.dtype == np.float32 and np.isfinite(coded).all()


def test_codecs_are_drawn_and_repeat_themselves():
    some = ApplyCodec(["ulaw", "gsm"], prob=0.5)
    made = [some(SIGNAL, rng(name=str(i))) for i in range(40)]
    assert len({each.tobytes() for each in made}) == 3  # neither, one, the other
    assert 10 < sum(np.array_equal(each, SIGNAL) for each in made) < 30
    assert np.array_equal(made[7], some(SIGNAL, rng(name="7")))


def test_peaks_are_cut_and_the_loudness_stays():
    cut = Overdrive(12, 12, prob=1)(SIGNAL, rng())
    assert db(cut) == pytest.approx(db(SIGNAL), abs=0.01) and cut.dtype == np.float32
    top = np.abs(cut).max()
    assert np.mean(np.abs(cut) > 0.999 * top) > 20 * np.mean(np.abs(SIGNAL) > 0.999 * np.abs(SIGNAL).max())
    silence = np.zeros(100, np.float32)
    assert np.array_equal(Overdrive(prob=1)(silence, rng()), silence)


def test_a_band_keeps_what_is_in_it():
    time = np.arange(16_000) / 16_000
    for pitch, kept in ((100, -76), (300, -3), (1000, 0), (3400, -3), (6800, -48)):
        tone = np.sin(2 * np.pi * pitch * time).astype(np.float32)
        passed = BandPass((300, 300), (3400, 3400), prob=1)(tone, rng())[2000:-2000]
        assert passed.dtype == np.float32 and db(passed) - db(tone) == pytest.approx(kept, abs=1)
    whole = BandPass((0, 0), (1e9, 1e9), prob=1)(SIGNAL, rng())
    assert np.abs(whole - SIGNAL).max() < 1e-6
    assert len({BandPass(prob=1)(SIGNAL, rng(name=str(i))).tobytes() for i in range(9)}) == 9


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 3000), st.floats(0, 4e3), st.floats(1, 1e5), st.sampled_from([8000, 16000, 48000]))
def test_a_band_takes_any_length_limits_and_rate(size, low, high, rate):
    noise = np.random.default_rng(size).uniform(-1, 1, size).astype(np.float32)
    passed = BandPass((low, low), (high, high), prob=1, sample_rate=rate)(noise, rng())
    assert passed.shape == noise.shape and passed.dtype == np.float32 and np.isfinite(passed).all()
    assert np.square(passed).sum() <= 1.001 * np.square(noise).sum()


def test_stages_run_in_order_and_repeat_themselves(noises):
    chain = Augment([SpeedPerturb(), Gain(), AddNoise(str(noises), prob=0.7)])
    again = Augment([SpeedPerturb(), Gain(), AddNoise(str(noises), prob=0.7)])
    results = []
    for chains in ((chain, again), (again, chain)):
        it = [(c.speed(r), c(SIGNAL, r)) for c in chains for r in [rng(4, "x")]]
        assert it[0][0] == it[1][0] and np.array_equal(it[0][1], it[1][1])
        results.append(it[0][1])
    assert np.array_equal(*results)
    assert not np.array_equal(chain(SIGNAL, rng(5, "x")), results[0])


def test_damaged_files_are_passed_over_and_named_once(noises, caplog):
    for i in range(2):
        (noises / f"broken{i}.wav").write_bytes(b"nothing")
    add = AddNoise(str(noises), prob=1)
    assert all(add(SIGNAL, rng(name=str(i))).any() for i in range(20))
    assert [caplog.text.count(f"AddNoise: skipped: {noises / f'broken{i}.wav'}") for i in range(2)] == [1, 1]
    for path in ("deep/long.WAV", "short.flac"):
        (noises / path).unlink()
    with refused("too-much-damaged-audio"):
        AddNoise(str(noises), prob=1)(SIGNAL, rng())


@pytest.mark.parametrize(("make", "code"), [
    (lambda: Augment([AddNoise("/nowhere/noise")]).check(), "no-such-path"),
    (lambda: Augment([Gain(), SpeedPerturb()]), "bad-value"), (lambda: SpeedPerturb([90, 110]), "bad-value"),
    (lambda: SpeedPerturb(0.9), "bad-value"), (lambda: Gain("quiet"), "bad-value"),
    (lambda: Gain(prob=5), "bad-value"),
    *((lambda wrong=wrong: ApplyCodec(wrong), "bad-value") for wrong in (["ulaw", "g729"], "ulaw", [])),
    *((lambda wrong=wrong: BandPass(high_hz=wrong), "bad-value")
      for wrong in ([300, 100], [0, 8000], 3400, ["low", "high"])),
    (lambda: Augment([AddReverb(Path(__file__).parent)]).check(), "no-audio-files"),
    (lambda: Augment([Gain(), AddNoise("x", sample_rate=16_000)]).set_sample_rate(8000), "conflicting-options"),
    (lambda: AddNoise("x", 20, 10), "bad-value"), (lambda: Crop(0), "bad-value")])
def test_mistakes_are_reported_before_the_first_batch(make, code):
    with refused(code):
        make()


def test_costs_little_beside_reading(noises):
    chain = Augment([Gain(), AddNoise(str(noises), prob=1), AddReverb(str(noises), prob=1)])
    signal = speechlike(6)
    chain(signal, rng())
    start = time.process_time()
    for i in range(20):
        chain(signal, rng(name=str(i)))
    assert (time.process_time() - start) / 20 < 0.05


@pytest.mark.parametrize("rate", [8000, 22_050])
def test_noise_and_rooms_come_at_the_rate_of_the_waveforms(tmp_path, rate):
    tone = np.sin(2 * np.pi * 1000 * np.arange(2 * 48_000) / 48_000).astype(np.float32)
    (tmp_path / "tone.wav").write_bytes(encoded(tone, 48_000))
    add, reverb = AddNoise(str(tmp_path), -60, -60, prob=1), AddReverb(str(tmp_path), prob=1)
    Augment([add, reverb]).set_sample_rate(rate)
    mixed = add(1e-6 * np.random.default_rng(0).standard_normal(rate).astype(np.float32), rng())
    assert np.argmax(np.abs(np.fft.rfft(mixed))) == pytest.approx(1000, abs=2)  # of one second: in hertz
    assert reverb.sample_rate == rate


def test_a_crop_is_a_stretch_of_its_length_from_anywhere_and_the_same_again_for_the_same_visit():
    ramp, crop = np.arange(16_000, dtype=np.float32), Crop(0.25)
    starts = []
    for visit in range(300):
        part = crop(ramp, rng(visit))
        assert len(part) == 4000 and np.array_equal(part, crop(ramp, rng(visit)))
        assert np.array_equal(part, ramp[int(part[0]):][:4000])
        starts.append(part[0])
    assert min(starts) < 400 and max(starts) > 11_600 and abs(np.mean(starts) - 6000) < 800


def test_a_crop_is_as_long_at_any_rate_and_what_is_shorter_stays_whole():
    assert np.array_equal(Crop(2.0)(SIGNAL, rng()), SIGNAL) and np.array_equal(Crop(1.0)(SIGNAL, rng()), SIGNAL)
    augment = Augment([Crop(0.25)])
    augment.set_sample_rate(8000)
    assert len(augment(SIGNAL, rng())) == 2000


def test_the_plan_is_made_from_what_augmentation_leaves_of_the_durations():
    durations = np.array([0.5, 2.0, 9.0])
    assert Augment([Gain()]).planned(durations) == pytest.approx([0.5, 2, 9])
    assert Augment([SpeedPerturb([0.5])]).planned(durations) == pytest.approx([1, 4, 18])
    assert Augment([SpeedPerturb([0.5]), Gain(), Crop(3.0)]).planned(durations) == pytest.approx([1, 3, 3])
    assert planned_seconds(Augment([Crop(3.0)]), durations) == pytest.approx(np.minimum(durations, 3))
    assert planned_seconds(None, durations) == pytest.approx(durations)
