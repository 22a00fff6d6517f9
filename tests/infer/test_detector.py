"""Silero's detector: speech is found in noise and silence, and words that a model writes elsewhere are left out."""

import importlib.util

import bundles
import numpy as np
import pytest
from refusals import refused

from sbkit.data.audio import resample
from sbkit.data.demo_voice import speak
from sbkit.export.layout import Config, TransducerConfig
from sbkit.infer import detector
from sbkit.infer.detector import SpeechDetector
from sbkit.infer.kinds import load
from sbkit.infer.pipeline import Options
from sbkit.score.behaviour import silences

VALUES = {"hop_samples": 160, "subsampling": 4, "vocabulary": 3, "models": {}}


@pytest.mark.parametrize("rate", [8_000, 16_000])
def test_detects_speech_in_noise(rate):
    found = SpeechDetector(Config(sample_rate=rate, **VALUES))
    said, own = speak("the old farmer opens the window", "en-us")
    said, rng = resample(said, own, rate), np.random.default_rng(0)
    signal = 0.01 * rng.standard_normal(4 * rate + len(said) + 17).astype(np.float32)
    signal[2 * rate:2 * rate + len(said)] += said
    frame = rate // 25
    spoken = found(signal, frame)
    assert len(spoken) == -(-len(signal) // frame)
    seconds = np.flatnonzero(spoken) / 25 - 2
    assert -0.5 < seconds[0] < 0.2 and -0.4 < seconds[-1] - len(said) / rate < 0.5 and spoken.sum() > 25
    assert np.mean([found(each.signal, frame).mean() for each in silences(rate, seconds=2.0, times=1)]) < 0.05


def test_detector_refuses_a_missing_package_other_rates_and_transducers(monkeypatch):
    for config in (Config(sample_rate=22_050, **VALUES), TransducerConfig(
            sample_rate=16_000, **VALUES, joint_size=3, context=2, decoder="a", joiner="b")):
        with refused("unsupported-vad"):
            SpeechDetector(config)
    monkeypatch.setattr(detector, "find_spec", lambda name: importlib.util.find_spec(f"{name}_is_missing"))
    with refused("missing-package") as caught:
        SpeechDetector(Config(sample_rate=16_000, **VALUES))
    assert caught.value.hint == "pip install 'sbkit[vad]'"


def test_hallucinated_words_are_left_out(bundle):
    """The model writes words for levels, which aren't speech."""
    signal = np.concatenate([bundles.say("hello there"), np.zeros(40 * bundles.RATE, np.float32), bundles.say("you")])
    with load(bundle, options=Options(vad=True)) as heard, load(bundle) as all_of_it:
        assert all_of_it.transcribe(signal).text == "hello there you"
        found = heard.transcribe(signal)
    assert found.text == "" and found.duration == pytest.approx(len(signal) / bundles.RATE, abs=0.05)
