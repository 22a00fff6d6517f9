"""A new recogniser is tried beyond its test set: calibrated confidences, hallucinated words on non-speech."""

from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from sounds import speechlike

from sbkit.data.manifest import Manifest
from sbkit.decode.spans import Word
from sbkit.export import confidence, layout
from sbkit.export.behaviour_trial import try_out
from sbkit.infer.transcript import Transcript

SAID = "one two three four"


class Doubtful:
    """A recogniser whose every fourth word is wrong, with a confidence of 0.6, and the others right with 0.7.

    It takes some seconds for each signal.
    """

    def __init__(self, seconds=0.0):
        self.seconds = seconds
        self.now = 0.0
        self.signals = 0

    def transcriber(self, folder, rate):
        def transcribe(signals):
            self.now += self.seconds * len(signals)
            self.signals += len(signals)
            return [Transcript("", SAID, [Word(text, 0.0, 0.1, 0.6 if text == "wrong" else 0.7)
                                          for text in ("one", "two", "three", "wrong")]) for _ in signals]
        return transcribe


def bundle(folder, utterances, wav=None):
    """Return the configuration of a bundle in ``folder``, and a corpus with ``utterances`` in its split dev."""
    soundfile.write(folder / "a.wav", speechlike(0.5), 16_000)
    Manifest(ids=[str(i) for i in range(utterances)], wavs=[wav or str(folder / "a.wav")] * utterances,
             texts=[SAID] * utterances, durations=[0.5] * utterances).write(folder / "dev.csv")
    corpus = SimpleNamespace(manifest_path=lambda split: folder / f"{split}.csv",
                             manifest=lambda split: Manifest.read(folder / f"{split}.csv"))
    return layout.Config(sample_rate=16_000, hop_samples=160, subsampling=4, vocabulary=5,
                         models={"onnx": "model.onnx"}), corpus


@pytest.mark.parametrize("utterances, points", [(60, 2), (5, 0)])
def test_calibrates_confidences_on_dev_and_silence_if_there_are_enough_words(tmp_path, utterances, points):
    config, corpus = bundle(tmp_path, utterances)
    trial = try_out(tmp_path, config, Doubtful(), [], corpus)
    assert trial.line.startswith("hallucinated words per minute on non-speech: 80.0 ")
    trial.add_to(config)
    assert config.trained["behaviour"]["behaviour.silence"] == pytest.approx(80.0)
    written = config.reliability
    readme = trial.sections
    if not points:
        assert written == [[0.0, 0.0], [1.0, 1.0]]
        assert "not calibrated, because the model wrote 24 words for dev, and 200 are needed" in readme
        return
    # Of 72 recordings 12 are silence, for which all words are wrong.
    np.testing.assert_allclose(written, [[0.6, 1 / 290], [0.7, 180 / 216]], atol=1e-9)
    assert "## How far to trust a word's confidence" in readme and "72 recordings of dev and of silence" in readme
    # A quarter of their 48 words has the lower confidence.
    assert "62.6 % on average for the 48 words that were written for silence." in readme


@pytest.mark.parametrize("seconds, calibrated", [(0.5, 60), (2.0, 24)])
def test_calibration_stops_after_half_a_minute(tmp_path, monkeypatch, seconds, calibrated):
    config, corpus = bundle(tmp_path, 100)
    slow = Doubtful(seconds)
    monkeypatch.setattr(confidence.time, "monotonic", lambda: slow.now)
    written = try_out(tmp_path, config, slow, [], corpus).sections
    assert (f"{calibrated} recordings of dev and of silence" in written) == (4 * calibrated >= 200)
    assert slow.signals - calibrated <= 16  # what follows is at most two thirds of the trials


def test_calibration_downloads_nothing(tmp_path, monkeypatch):
    config, corpus = bundle(tmp_path, 60, "https://example.org/a.wav")
    monkeypatch.setattr(confidence, "clips_of", None)
    trial = try_out(tmp_path, config, Doubtful(), [], corpus)
    assert trial.reliability is None
    assert "not calibrated, because the recordings of dev are not on this machine" in trial.sections


def test_a_recogniser_that_is_not_tried_says_that_it_is_not_calibrated(tmp_path):
    config, corpus = bundle(tmp_path, 60)
    assert "not calibrated, because" in try_out(tmp_path, config, None, [], corpus).sections
    config.models = {"torch": "model.pt2"}
    assert "only if its user asks for it" in try_out(tmp_path, config, Doubtful(), [], corpus).sections
    assert not (tmp_path / "config.json").exists()
