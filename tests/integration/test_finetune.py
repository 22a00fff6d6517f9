"""hparams/finetune.yaml from the command line: trained, scored and shipped, without its source."""

import contextlib
import json
import sys

import encoders
import numpy as np
import processes
import pytest
import soundfile
import torch
from trained_runs import ROOT, copied, different, go_on, here, tone, tones, weights

from sbkit import infer

pytestmark = pytest.mark.slow

RECIPE = ROOT / "hparams" / "finetune.yaml"
DRAWING = ("--dropout 0.1 --head_dropout 0.1 --mask_time_prob 0.3 --mask_time_length 3 --mask_feature_prob 0.1 "
           "--layer_decay 0.9 --freeze.encoder 2").split()
STILL = ("--dropout 0 --head_dropout 0 --mask_time_prob 0 --mask_feature_prob 0 --number_of_epochs 1 "
         "--freeze.encoder 3").split()
SMALL = ("--num_workers 1 --min_steps 0 --step_seconds 4 --number_of_epochs 2 --noprogressbar --precision fp32 "
         "--no-check --data_folder data --language und").split()


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a corpus and an encoder."""
    folder = tmp_path_factory.mktemp("finetune")
    tones(folder / "data", 48, 8, shortest=0.5)
    encoders.make(folder / "encoder", "wav2vec2-group", normalizes=True)
    return folder


def sbkit(home, *words, code=0):
    """In this process, which has transformers."""
    return here(*words, cwd=home, code=code)


def words(to, *more):
    return "train", RECIPE, "--encoder_source", "encoder", "--output_folder", f"results/{to}", *SMALL, *more


@contextlib.contextmanager
def away(home):
    """The source is elsewhere."""
    (home / "encoder").rename(home / "away")
    try:
        yield
    finally:
        (home / "away").rename(home / "encoder")


@pytest.fixture(scope="module")
def trained(home):
    said = sbkit(home, *words("run", *DRAWING))
    assert "tensors loaded" in said and "test WER" in said
    return home / "results" / "run"


@pytest.mark.slow
def test_without_an_encoder_the_recipe_says_what_to_give(home):
    said = sbkit(home, "check", RECIPE, code=1)
    assert "finetune.yaml:" in said and "encoder.source: source names no pretrained encoder; give its folder, or " \
        "its name on the Hugging Face Hub: --encoder_source" in said


def test_a_source_that_will_not_do_is_an_error_of_the_recipe(home):
    said = processes.sbkit("check", RECIPE, "--encoder_source", "someone/nothing", "--json", cwd=home, code=1).stdout
    (error,) = json.loads(said)["errors"]
    assert (error["key"], error["file"]) == ("encoder_source", "command line") and "HF_HUB_OFFLINE" in error["message"]


def test_the_encoder_learns_but_for_its_first_layers(home, trained):
    one = weights(trained)
    start = encoders.start(home / "encoder", "wav2vec2-group")
    assert sum(not torch.equal(one[f"0.network.{name}"], start[name]) for name in start
               if f"0.network.{name}" in one) > 20, "the encoder learns"
    assert all(torch.equal(start[name], one[f"0.network.{name}"]) for name in start if "feature_extractor" in name)


def heard(bundle, *clips):
    """What a bundle hears where there is no transformers."""
    sys.modules["transformers"] = None
    with infer.load(bundle, model="torch") as model:
        assert len(model.transcribe(list(clips))) == len(clips)


def test_it_is_scored_and_shipped_without_its_source_and_heard_without_transformers(home, trained):
    """export/test_imported.py has such encoders in ONNX, whose runtime knows no Python."""
    with away(home):
        assert "WER" in sbkit(home, "evaluate", trained, "--split", "dev")
        sbkit(home, "export", trained, "--to", "bundle", "--formats", "torch", "--clips", 3)
    parity = json.loads((home / "bundle" / "parity.json").read_text())
    assert set(parity["formats"]) == {"checkpoint", "torch"}
    clips = [str(home / "data" / "wavs" / f"test{i}.wav") for i in range(2)]
    done = processes.program(heard, str(home / "bundle"), *clips)
    assert done.returncode == 0, done.stderr


@pytest.mark.long
def test_sherpa_onnx_hears_it_too(home, trained):
    sbkit(home, "export", trained, "--to", "for-sherpa", "--target", "sherpa", "--formats", "onnx", "--clips", 3)
    assert "sherpa" in json.loads((home / "for-sherpa" / "parity.json").read_text())["formats"]


@pytest.mark.long
def test_whisper_hears_recordings_that_are_longer_than_its_window(home):
    encoders.make(home / "whisper", "whisper", encoder_layers=1)
    command = [{"encoder": "whisper"}.get(word, word) for word in words("whisper", *STILL)]
    sbkit(home, *command)
    sbkit(home, "export", "results/whisper", "--to", "hears", "--formats", "torch")
    assert json.loads((home / "hears" / "config.json").read_text())["longest_seconds"] == 30
    soundfile.write(home / "long.wav", np.concatenate([tone("low", 33, 1), tone("high", 33, 2)]), 16_000)
    assert "1 of 1 recordings, 66.0 s of audio" in sbkit(home, "transcribe", "hears", "long.wav",
                                                             "--model", "torch")
    assert "the model takes at most 30 s at once" in \
        sbkit(home, "transcribe", "hears", "long.wav", "--chunk-seconds", "60", "--model", "torch", code=2)


def test_a_step_that_is_not_finite_is_replayed(home):
    """tests/train/test_bad_batch.py has what breaks of any model."""
    command = "train", LORA, *words("bad")[2:]
    assert "is not finite" in sbkit(home, *command, "--lr", "1e25", "--max_grad_norm", "0", code=1)
    said = sbkit(home, "rerun", "results/bad")
    assert "Weights: those of that step." in said and "the first that is not finite is" in said
    wrong = next(line for line in said.splitlines() if line.startswith(">"))
    assert "lora" in wrong, "what learns has gone wrong"


LORA = ROOT / "recipes" / "CommonVoice" / "ASR" / "CTC" / "hparams" / "lora.yaml"


@pytest.mark.long
def test_lora_trains_a_little_saves_little_and_goes_on_and_ships_without_its_source(home):
    run, killed = home / "results" / "lora", home / "results" / "killed"
    command = ("train", LORA, "--encoder_source", "encoder", *SMALL, *STILL, "--number_of_epochs", "2",
               "--adapters.dropout", "0")
    with copied(run, 1, killed):
        sbkit(home, *command, "--output_folder", run)
    with away(home):
        go_on(killed, *command, "--output_folder", killed, cwd=home)
    one = weights(run)
    assert different(weights(killed), one) == []
    assert one.pop("base")
    start = encoders.start(home / "encoder", "wav2vec2-group")
    assert not any(name.removeprefix("model.0.network.") in start for name in one if name.endswith("weight"))
    assert all(value.any() for name, value in one.items() if ".lora.2." in name), "each of them has learnt"
    assert len(list((run / "save").glob("base-*.safetensors"))) == 1
    with away(home):
        sbkit(home, "export", "results/lora", "--to", "lora-bundle", "--formats", "torch", "--clips", 3)
    names = torch.export.load(home / "lora-bundle" / "model.pt2").state_dict
    assert names and not any("lora" in name for name in names), "merged"
