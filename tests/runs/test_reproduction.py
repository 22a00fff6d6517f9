"""A run can be had again from what it recorded, and whatever differs is named."""

import json
import os
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import processes
import pytest
import run_folders
import soundfile
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import BatchNorm1d

from sbkit.cli import main
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.recipe import flops
from sbkit.runs import lock, reproduction
from sbkit.train.checkpoint.adapted import hash_of

RECIPE = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
SMALL = {**run_folders.TINY, "number_of_epochs": 4, "precision": "fp32", "step_seconds": 3, "max_batch_seconds": 3,
         "least_steps": 0, "num_workers": 0, "device": "cpu"}


@pytest.fixture
def manifest(tmp_path):
    rng = np.random.default_rng(0)
    for row in range(4):
        soundfile.write(tmp_path / f"{row}.wav", rng.normal(0, 0.1, 1600), 16_000)
    return Manifest(ids=[f"clip{row}" for row in range(4)], durations=[0.1] * 4, texts=["one", "two", "three", "four"],
                    wavs=[str(tmp_path / f"{row}.wav") for row in range(4)])


def recorded(manifest):
    return {"corpus": {"train": reproduction.hashes(manifest, "train")}}


def test_the_weights_that_a_run_begins_with_may_be_numbers_too():
    counted = BatchNorm1d(2).state_dict()  # how many batches it has seen is one
    assert hash_of(counted) != hash_of({**counted, "num_batches_tracked": torch.tensor(1)})


def flip(path):
    """Change the last byte of a file."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def test_the_same_rows_are_the_same_wherever_they_lie(manifest, tmp_path):
    was = recorded(manifest)
    (tmp_path / "moved").mkdir()
    wavs = [shutil.copy(wav, tmp_path / "moved") for wav in manifest.wavs]
    assert reproduction.compare_corpus(was, {"train": manifest.replace(wavs=wavs)}) == []


@pytest.mark.parametrize("whole", [4, 3], ids=["whole", "a block of each of very many"])
def test_a_changed_byte_of_a_recording_is_named(manifest, tmp_path, monkeypatch, whole):
    monkeypatch.setattr(reproduction, "WHOLE", whole)
    was = recorded(manifest)
    assert reproduction.compare_corpus(was, {"train": manifest}) == []
    flip(tmp_path / "2.wav")
    with pytest.raises(SbkitError, match=r"train, row 3: the audio of clip2 differs"):
        reproduction.compare_corpus(was, {"train": manifest})


def test_a_changed_text_and_a_missing_row_are_named(manifest):
    was = recorded(manifest)
    with pytest.raises(SbkitError, match=r"row 2: the id, speaker or text of clip1 differs"):
        reproduction.compare_corpus(was, {"train": manifest.replace(texts=["one", "tow", "three", "four"])})
    with pytest.raises(SbkitError, match=r"3 rows instead of 4(.|\n)*row 1: the id, speaker or text of clip1"):
        reproduction.compare_corpus(was, {"train": manifest.select([1, 2, 3])})
    with pytest.raises(SbkitError, match="train: the corpus lacks it"):
        reproduction.compare_corpus(was, {})


def test_recordings_behind_urls_are_said_not_to_be_compared(manifest):
    remote = manifest.replace(wavs=["https://example.org/a.wav"] * 4)
    assert reproduction.compare_corpus(recorded(remote), {"train": manifest}) == [
        "the audio of train, which is behind URLs"]


@pytest.mark.slow
@given(st.lists(st.text(max_size=5), min_size=1, max_size=8), st.data())
def test_any_changed_text_is_named(texts, data):
    rows = len(texts)
    before = Manifest(ids=list(map(str, range(rows))), durations=[1.0] * rows, texts=texts, wavs=["https://a/b"] * rows)
    row = data.draw(st.integers(0, rows - 1))
    other = data.draw(st.text(max_size=5).filter(lambda text: text != texts[row]))
    with pytest.raises(SbkitError, match=f"row {row + 1}: the id, speaker or text of {row} differs"):
        reproduction.compare_corpus(recorded(before), {"train": before.replace(
            texts=[*texts[:row], other, *texts[row + 1:]])})


@pytest.mark.parametrize(("change", "problem"), [
    (lambda found: found.pop("losses"), "is not what a run records"),
    (lambda found: found.update(losses={}), "it lacks losses"),
    (lambda found: found.update(format=9), "has format 9, and this sbkit reads 1"),
    (lambda found: found["corpus"]["train"].update(texts="AAAA"), "is not what a run records"),
    (lambda found: found["recipe"].__setitem__(1, "lr: 0.5"), "line 2 of its recipe was changed since the run: 'lr"),
    (lambda found: found["losses"].update({"2": 10**400}), "is not what a run records"),
    (lambda found: found["recipe"].append("\ud800"), "is not what a run records"),
    (lambda found: found["recipe"].pop(), "its recipe has 1 lines instead of 2"),
    (lambda found: found.pop("threads"), "it lacks a number of threads from 1 to 4096"),
    (lambda found: found.update(options=0.5), "its options is 0.5"),
    (lambda found: found.update(device={}), "its device is {}"),
    (lambda found: found.update(environment=["a"]), "its environment is "),
    (lambda found: found.update(processes=10**9), "it lacks a number of processes from 1 to 4096"),
])
def test_a_file_that_is_not_what_a_run_wrote_is_refused(manifest, tmp_path, capsys, change, problem):
    found = {"format": 1, "recipe": ["seed: 1", "lr: 0.1"], "recipe_lines": "10e55796 a281b6ba", "losses": {"1": 2.0},
             "options": {}, "device": "cpu", "processes": 1, "threads": 1, "precision": "fp32", "environment": {},
             "figures": {}, **recorded(manifest)}
    path = tmp_path / "reproduce.json"
    path.write_text(json.dumps(found))
    assert reproduction.read(path)["losses"] == {1: 2.0}
    assert main(["reproduce", str(path), "--output_folder", f"{tmp_path}/again"]) == 2
    assert not (tmp_path / "again").exists()
    assert f"{path} has a recipe, which is code that would run here; read its lines" in capsys.readouterr().err
    change(found)
    path.write_text(json.dumps(found))
    with pytest.raises(SbkitError, match=problem):
        reproduction.read(path)


RECORDED = {"lr": "0.003", "layers": "4", "ema": "false", "betas": "[0.9, 0.98]", "encoder": "!new:torch.nn.Linear",
            "data_folder": "/data/cv/en", "corpus.source": "/data/cv/en", "corpus.exclude": "/data/cv/en/bad.csv",
            "corpus.data_root": "null", "init_from": "null", "older": "../run1"}


@pytest.mark.parametrize(("given", "words"), [
    ("data_folder=/cv", ["--data_folder=/cv", "--corpus.source=/cv", "--corpus.exclude=/cv/bad.csv"]),
    ("corpus.data_root=/cv", ["--corpus.data_root=/cv"]), ("corpus.exclude=mine.csv", ["--corpus.exclude=mine.csv"]),
    ("older=/runs/one", ["--older=/runs/one"]),
    ("lr=0.01", "--set lr: it is 0.003, not a path"), ("layers=5", "layers: it is 4, not a path"),
    ("ema=true", "ema: it is false, not a path"), ("betas=[1]", "betas: it is "),
    ("encoder=x", "encoder: it is !new"), ("init_from", "write KEY=PLACE"),
    ("init_form=x", "the recorded recipe has no key init_form; did you mean init_from")])
def test_a_place_is_set_wherever_the_recipe_has_it_and_nothing_else_is(given, words):
    if isinstance(words, list):
        assert reproduction.path_options(RECORDED, [given]) == words
    else:
        with pytest.raises(SbkitError, match=re.escape(words)):
            reproduction.path_options(RECORDED, [given])


def test_another_machine_is_compared_within_rounding(manifest):
    was = {"environment": {"torch": "2.11", "cpu": "A, 1 core"}, "device": "cpu", "threads": 2, "processes": 1}
    here = reproduction.TrainingLaunch("cpu", 1, 2)
    assert reproduction.not_to_the_bit(was, {"torch": "2.11", "cpu": "A, 64 cores"}, here) == []
    assert reproduction.not_to_the_bit(was, {"torch": "2.11", "cpu": "B, 64 cores"}, here._replace(threads=1)) == [
        "cpu B, recorded with A", "threads 1, recorded with 2"]
    reproduction.require_same("the loss", 2.0, 2.01, exact=False)
    reproduction.require_same("a rate of nothing", float("nan"), float("nan"), exact=True)
    for found, exact in ((2.0 + 1e-12, True), (2.5, False), (float("nan"), False)):
        with pytest.raises(SbkitError, match=r"the loss is .*, recorded as 2.0: not the same"):
            reproduction.require_same("the loss", 2.0, found, exact)
    with pytest.raises(SbkitError, match="its earlier values are not recorded"):
        reproduction.require_same("the loss", 2.0, 2.5, exact=True, cause=reproduction.RESUMED)


ENDED = SimpleNamespace(poll=lambda: 0, wait=lambda: 0, returncode=0)


def forked(command, **how):
    """A training with its imports done, which has ended."""
    ended = processes.program(processes.command, os.getcwd(), *command[command.index("sbkit") + 1:])
    assert ended.returncode == 0, ended.stderr
    return ENDED


@pytest.mark.long
@pytest.mark.slow
def test_a_run_is_had_again_to_the_bit_and_a_changed_recording_is_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(flops, "operations_per_second", lambda *_: 1e6)  # a fifth of what such a run takes
    run_folders.corpus(tmp_path / "data", train=16, dev=2, test=2)
    words = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    assert main(["train", str(RECIPE), *words, "--data_folder", f"{tmp_path}/data", "--output_folder",
                 f"{tmp_path}/out", "--no-check"]) == 0
    again = ["reproduce", f"{tmp_path}/out/reproduce.json", "--output_folder", f"{tmp_path}/again", "--trust-code"]
    shutil.copytree(tmp_path / "data", tmp_path / "elsewhere")  # lists, which name the same recordings
    again += ["--source", f"{tmp_path}/elsewhere"]
    assert main([*again, "--steps", "0"]) == 2  # nothing was prepared yet
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbkit.commands.prepare.run", None)  # nothing is prepared for what is refused
        assert main([*again, "--output_folder", f"{tmp_path}/out"]) == 2
        assert f"--output_folder: {tmp_path}/out is the folder of a run" in capsys.readouterr().err
    monkeypatch.setattr(lock, "PATIENCE", 0.1)
    with lock.RunLock(tmp_path / "again"):
        assert main(again) == 2
    said = capsys.readouterr().err
    assert f"again is in use by another run: process {os.getpid()} " in said
    assert "another place with --output_folder\n" in said
    assert main([*again, "--steps", "10"]) == 0
    said = capsys.readouterr().out
    # A step that takes long, as the first one may, is recorded too.
    assert re.search(r"comparing the recorded losses of step(s 1,)? 10\n", said)
    assert re.search(r"to the bit: the recorded loss of step(s 1,)? 10\n$", said) and "another command" not in said
    assert main([*again, "--steps", "10"]) == 2  # of an earlier call's losses nothing follows
    said = capsys.readouterr().err
    assert "has the run of an earlier call, so" in said and "--full continues" in said
    mine = tmp_path / "again" / "recipe.yaml"
    text = mine.read_text()
    mine.write_text(f"{text}# of another run\n")
    assert main([*again, "--full"]) == 2
    assert f"{tmp_path}/again holds the run of another reproduce.json" in capsys.readouterr().err
    assert mine.read_text() != text
    mine.write_text(text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", forked)
        assert main([*again, "--full"]) == 0  # goes on from there
    assert "and the test" in capsys.readouterr().out
    assert main([*again, "--full"]) == 2
    assert "the finished run of an earlier call, so nothing would be trained; remove it or choose another --to\n" in (
        capsys.readouterr().err)
    other = json.loads((tmp_path / "out" / "reproduce.json").read_text()) | {"weights": "of another file"}
    (tmp_path / "other.json").write_text(json.dumps(other))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(subprocess, "Popen", lambda *_, **__: shutil.copytree(  # what it would write
            tmp_path / "out", tmp_path / "fourth" / "run", dirs_exist_ok=True) and ENDED)
        assert main(["reproduce", f"{tmp_path}/other.json", "--output_folder", f"{tmp_path}/fourth", *again[4:]]) == 1
    said = capsys.readouterr().err
    assert "the run starts from other weights than the recorded one" in said and "--set init_from=PLACE" in said
    recording = next(path for path in (tmp_path / "data").rglob("*.wav"))
    flip(recording)
    assert main(again) == 1
    assert f"the audio of {recording.stem}" in capsys.readouterr().err
    monkeypatch.setattr("sys.orig_argv", ["sbkit", "train", "--lr", "0.5"])
    assert main(["train", str(RECIPE), *words, "--data_folder", f"{tmp_path}/data", "--output_folder",
                 f"{tmp_path}/out", "--no-check", "--lr", "0.5", "--number_of_epochs", "5"]) == 0
    capsys.readouterr()
    monkeypatch.setattr(reproduction, "train", None)
    with pytest.raises(TypeError):
        main([*again, "--output_folder", f"{tmp_path}/third", "--steps", "10"])
    assert "resumed with another command, and this is the recipe of the last one" in capsys.readouterr().out


def test_the_machine_and_the_commands_are_those_of_starts_that_trained(tmp_path):
    (tmp_path / "hyperparams.yaml").write_text("lr: 1\n")
    keys = SimpleNamespace(folder=tmp_path, corpus=SimpleNamespace(load=dict))
    request = SimpleNamespace(run_opts=SimpleNamespace(overridden_args=()))

    def start(command, device="cuda:0"):
        return {"kind": "run", "command": command, "device": device, "devices": 2, "precision": "bf16",
                "threads": 3, "environment": {}}

    trained = [start("train"), {"kind": "loss", "step": 1, "loss": 4.0}, {"kind": "epoch"}]
    for log, device, commands in ((trained, "cuda", 1), ([*trained, start("train --test_only", "cpu")], "cuda", 1),
                                  ([start("killed"), *trained], "cuda", 2), ([start("all", "cpu")], "cpu", 1),
                                  ([{**start("train"), "threads": 2}, *trained], "cuda", 1)):
        (tmp_path / "reproduce.json").unlink(missing_ok=True)
        reproduction.record(keys, request, SimpleNamespace(stats={}), log)
        made = json.loads((tmp_path / "reproduce.json").read_text())
        assert (made["device"], made["commands"], made["threads"]) == (device, commands, 3)
        assert made["machines"] == (2 if log[0].get("threads") == 2 else 1)
    (tmp_path / "hyperparams.yaml").write_text("lr: 2\n")
    reproduction.record(keys, request, SimpleNamespace(stats={"WER": 1}), [*log, start("train --lr 2")])
    assert json.loads((tmp_path / "reproduce.json").read_text()) == made, "a test alone is of what was trained"
