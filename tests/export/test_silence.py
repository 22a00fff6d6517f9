"""What a new recogniser's bundle is told to be worth: calibrated confidences, words where nobody speaks."""

import json
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from sounds import speechlike

from sbkit.data.manifest import Manifest
from sbkit.decode.spans import Word
from sbkit.export import layout
from sbkit.export.silence import try_behaviour
from sbkit.infer.transcript import Transcript

SAID = "one two three four"


class Doubtful:
    """A recogniser whose every fourth word is wrong, with a confidence of 0.6, and the others right with 0.7."""

    def transcriber(self, folder, rate):
        def transcribe(signals):
            return [Transcript("", SAID, [Word(text, 0.0, 0.1, 0.6 if text == "wrong" else 0.7)
                                          for text in ("one", "two", "three", "wrong")]) for _ in signals]
        return transcribe


@pytest.mark.parametrize("utterances, points", [(60, 2), (5, 0)])
def test_confidences_are_calibrated_on_dev_and_silence_where_there_are_words_enough(tmp_path, utterances, points):
    soundfile.write(tmp_path / "a.wav", speechlike(0.5), 16_000)
    Manifest(ids=[str(i) for i in range(utterances)], wavs=[str(tmp_path / "a.wav")] * utterances,
             texts=[SAID] * utterances, durations=[0.5] * utterances).write(tmp_path / "dev.csv")
    corpus = SimpleNamespace(manifest_path=lambda split: tmp_path / f"{split}.csv",
                             manifest=lambda split: Manifest.read(tmp_path / f"{split}.csv"))
    (tmp_path / "README.md").write_text("# A model\n")
    config = layout.Config(sample_rate=16_000, hop_samples=160, subsampling=4, vocabulary=5,
                           models={"onnx": "model.onnx"})
    assert "80.0 words a minute" in try_behaviour(tmp_path, config, Doubtful(), [], corpus)
    written = json.loads((tmp_path / "config.json").read_text())["reliability"]
    readme = (tmp_path / "README.md").read_text()
    if not points:
        assert written == [[0.0, 0.0], [1.0, 1.0]] and "How far to trust" not in readme
        return
    # Of 72 recordings 12 are silence, for which all words are wrong.
    np.testing.assert_allclose(written, [[0.6, 1 / 290], [0.7, 180 / 216]], atol=1e-9)
    assert "## How far to trust a word's confidence" in readme and "72 recordings of dev and of silence" in readme
    # A quarter of their 48 words has the lower confidence.
    assert "62.6 % on average for the 48 words that were written for silence." in readme
