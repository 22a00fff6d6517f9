"""A voice from a corpus of levels: labelled, trained, scored, exported, and speaking.

The toy recogniser hears which letter a level spells, so that labels are known; what the voice says is noise, because
the codec's decoder is only drawn.
"""

import json
import random

import bundles
import numpy as np
import pytest
import soundfile
import torch
import toy_codec
from processes import sbkit
from safetensors.torch import load_file, save_file
from trained_runs import here, metrics, saved, weights

from sbkit import infer
from sbkit.codes import Codes
from sbkit.nn.codec import CodecDecoder, FiniteScalars, WaveHead
from sbkit.nn.codec.coder import definition

pytestmark = pytest.mark.slow
pytest.importorskip("onnxruntime", reason="bundles' ONNX models need the extra 'export'")

SIZES = (30, 30)
TINY = ("--size 16 --hidden 24 --frame_size 20 --frame_hidden 24 --text_encoder.layers 1 --durations.size 12 "
        "--durations.hidden 16 --durations.layers 1 --frame_decoder.layers 1 --quantiser.levels [6,5] "
        "--decoder.input_size 4 --decoder.size 12 --decoder.hidden 16 --decoder.slow_layers 1 --decoder.fast_layers 1 "
        "--head.input_size 12 --step_seconds 8 --min_steps 0 --max_batch_seconds 6 --number_of_epochs 3 --lr 0.01 "
        "--num_workers 1 --precision fp32 --noprogressbar --ckpt_interval_minutes 0 --ckpt_interval_steps 2").split()


class Place:
    """A corpus, and the bundles that label it."""

    def __init__(self, folder):
        self.folder, self.data = folder, folder / "data"
        self.data.mkdir()
        rng = random.Random(0)
        for split, count in (("train", 40), ("dev", 6), ("test", 8)):
            self.write(self.data / f"{split}.csv", {f"{split}{i}": _text(rng) for i in range(count)})
        torch.manual_seed(0)
        parts = torch.nn.ModuleDict({"decoder": CodecDecoder(4, 12, 16, 1, 1, fold=2), "head": WaveHead(12, 160, 640)})
        (folder / "codec").mkdir()
        defined = {name: definition(part) for name, part in
                   {**parts, "quantiser": FiniteScalars([6, 5], 2)}.items()}
        save_file(parts.state_dict(), folder / "codec" / "model.safetensors", {"definition": json.dumps(defined)})
        toy_codec.make(folder / "codec", SIZES, books=list(SIZES))
        bundles.make(folder / "recogniser")

    def write(self, path, texts):
        lines = ["ID,wav,wrd"]
        for name, text in texts.items():
            soundfile.write(path.parent / f"{name}.wav", bundles.say(text), bundles.RATE, subtype="FLOAT")
            lines.append(f"{name},{path.parent / name}.wav,{text}")
        path.write_text("\n".join(lines) + "\n")

    def words(self, out, *more):
        return ("train", "hparams/tts.yaml", *TINY, "--codec", self.folder / "codec", "--recogniser",
                self.folder / "recogniser", "--data_folder", self.data, "--output_folder", out, *more)

    def train(self, out, *more, **how):
        return sbkit(*self.words(out, *more), **how)


def _text(rng):
    return " ".join("".join(rng.choices("abcde", k=rng.randint(1, 4))) for _ in range(rng.randint(2, 3)))


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(tmp_path_factory.mktemp("place"))


@pytest.fixture(scope="module")
def run(place):
    out = place.folder / "run"
    here(*place.words(out))
    return out


def test_it_learns_codes_and_durations_and_leaves_the_codecs_decoder_as_it_is(place, run):
    epochs = [line for line in metrics(run, "epoch") if "valid_loss" in line]
    assert len(epochs) == 3 and epochs[2]["valid_loss"] < 0.9 * epochs[0]["valid_loss"]
    assert epochs[2]["valid_right_choices"] > epochs[0]["valid_right_choices"]
    assert {"brain", "optimizer", "model", "counter", "train_logger"} <= saved(run)
    learnt = weights(run)
    for name, value in load_file(place.folder / "codec" / "model.safetensors").items():
        part, rest = name.split(".", 1)
        assert torch.equal(learnt[f"{ {'decoder': 5, 'head': 6}[part]}.{rest}"], value), name


def test_its_labels_are_the_codecs_codes_and_when_the_recogniser_heard_what(run):
    facts = json.loads((run / "labels" / "labels.json").read_text())
    assert facts["codec"] == toy_codec.HASH
    assert facts["splits"]["train"] == {"rows": 40, "kept": 40, "left_out": 0}
    durations = load_file(run / "labels" / "test" / "durations.safetensors")
    for utterance, frames in zip(Codes(run / "labels" / "test" / "codes"),
                                 durations["frames"].tensor_split(durations["ends"][:-1]), strict=True):
        said = np.pad(bundles.say(utterance.text), (0, toy_codec.STRIDE))[:len(utterance.codes) * toy_codec.STRIDE]
        assert np.array_equal(utterance.codes[:, 0], np.round(said[::toy_codec.STRIDE] * (SIZES[0] - 1)))
        assert frames[1:-1].tolist()[1:-1] == [6] * (len(utterance.text) - 2), "a letter and a blank: 120 ms"


def test_started_again_it_labels_nothing_anew_and_is_done(place, run):
    labelled = (run / "labels" / "labels.json").stat().st_mtime_ns
    assert "nothing left to do" in here(*place.words(run)), "its clips to listen to are there"
    assert (run / "labels" / "labels.json").stat().st_mtime_ns == labelled


def test_a_run_is_not_resumed_with_another_codec(place, run, tmp_path):
    other = toy_codec.make(tmp_path / "codec", SIZES, books=list(SIZES), codec="b" * 64)
    said = place.train(run, "--codec", other, "--number_of_epochs", "4", code=2)
    assert "on which the checkpoints depend" in said.stderr + said.stdout


def test_it_is_scored_again_and_a_corpus_without_labels_has_no_loss(place, run):
    said = sbkit("evaluate", run, "--device", "cpu", "--workers", "0")
    assert "WER %" in said.stdout
    facts = json.loads((run / "evaluations" / "test-best" / "result.json").read_text())
    tested = json.loads((run / "test_results.json").read_text())["stats"]
    assert facts["right_choices"] == pytest.approx(tested["right_choices"], rel=1e-4)
    assert facts["WER_of_recordings"] == 0 and facts["WER"] == pytest.approx(tested["WER"])
    place.write(place.folder / "more.csv", {"test0": "ed cba", "more": "a bz"})
    said = sbkit("evaluate", run, "--data_folder", place.folder / "more.csv", "--device", "cpu", "--workers", "0")
    assert "leaves them out: 'z'" in said.stderr
    facts = json.loads((run / "evaluations" / "more-best" / "result.json").read_text())
    assert facts["utterances"] == 2 and "loss" not in facts and "right_choices" not in facts and "WER" in facts


def test_exported_it_speaks_with_the_times_of_its_words(run, tmp_path):
    sbkit("export", run, "--to", tmp_path / "voice", "--formats", "onnx", "--clips", 2)
    parity = json.loads((tmp_path / "voice" / "parity.json").read_text())
    assert {"checkpoint", "onnx"} <= parity["formats"].keys() and parity["formats"]["onnx"]["difference"] < 0.2
    config = json.loads((tmp_path / "voice" / "config.json").read_text())
    assert config["codec"] == toy_codec.HASH and config["books"] == list(SIZES) and config["frame_seconds"] == 0.02
    sbkit("speak", tmp_path / "voice", "Bad, cab?", "--to", tmp_path / "said.wav")
    sound, rate = soundfile.read(tmp_path / "said.wav")
    with infer.load(tmp_path / "voice", device="cpu") as voice:
        speech = voice.speak("Bad, cab?")
    assert rate == 16_000 and len(sound) == len(speech.samples) and sound.any()
    np.testing.assert_allclose(sound, speech.samples, atol=1e-4)
    first, second = speech.words
    assert (first.text, second.text) == ("bad,", "cab?")
    assert 0 <= first.start < first.end < second.start < second.end <= len(sound) / rate
