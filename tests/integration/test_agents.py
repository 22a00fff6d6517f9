"""What AGENTS.md tells a coding assistant to type runs, on a small corpus, and prints the fields that it lists."""

import contextlib
import json
import re
import shlex
import shutil

import pytest
from processes import ROOT
from trained_runs import tones

from sbkit.cli import COMMANDS, main
from sbkit.recipe import flops

PAGE = (ROOT / "AGENTS.md").read_text(encoding="utf-8")
SMALL = ("--num_workers 0 --min_steps 0 --step_seconds 4 --number_of_epochs 1 --noprogressbar --precision fp32 "
         "--d_model 16 --nhead 2 --num_encoder_layers 1 --num_decoder_layers 1 --d_ffn 16 --cnn_channels 4 "
         "--cnn_first_channels 4 --nonspeech null")
#: What makes each command small.
LESS = {"check": SMALL, "train": f"{SMALL} --device cpu", "export": "--formats onnx --clips 3",
        "evaluate": "--workers 0 --device cpu"}
#: One epoch of a model of this size gets most words wrong.
CODES = {"evaluate": 1}


def commands():
    return [shlex.split(line)[1:] for line in re.findall(r"^ {4}(sbkit .*)$", PAGE, re.MULTILINE)]


def fields(row):
    """The fields of a row of the page's table, without those in parentheses."""
    [cells] = re.findall(rf"^\| {re.escape(row)} \| (.*) \|$", PAGE, re.MULTILINE)
    return set(re.findall(r"`(\w+)`", re.sub(r"\([^)]*\)", "", cells)))


@pytest.fixture
def typed(tmp_path, monkeypatch, capfd):
    """Run commands of the page, and return the JSON that each prints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(flops, "operations_per_second", lambda *_: 1e6)

    def run(words, code=0):
        words = [str(ROOT / word) if word.startswith("hparams/") else word for word in words]
        capfd.readouterr()
        assert main([*words, *shlex.split(LESS.get(words[0], ""))]) == code, capfd.readouterr().err
        return capfd.readouterr().out

    return run


@pytest.mark.slow
def test_each_command_prints_the_fields_that_the_page_lists(typed, tmp_path):
    tones(tmp_path / "data", 24, 4)
    for name, source in (("talk", "test0"), ("other", "test1")):
        shutil.copy(tmp_path / "data" / "wavs" / f"{source}.wav", tmp_path / f"{name}.wav")

    printed = {}
    for words in commands():
        output = typed(words, CODES.get(words[0], 0))
        printed[" ".join(words[:2])] = [json.loads(line) for line in output.splitlines()] \
            if words[0] == "transcribe" else json.loads(output) if "--json" in words else output

    assert printed["doctor --json"].keys() == fields("`doctor`")
    checked = printed["check hparams/ctc.yaml"]
    assert checked["ok"] and fields("`check`") <= checked.keys()
    trained = printed["train hparams/ctc.yaml"]
    assert trained == printed["info results/run"]
    assert trained.keys() == fields("`train`, `info` of a run")
    assert trained["state"] == "finished" and trained["epochs"] == 1 and trained["results"]["WER"] > 0
    evaluated = printed["evaluate results/run"]
    assert evaluated.keys() == fields("`evaluate`")
    [result] = evaluated["results"]
    assert {"WER", "checkpoint", "folder", "utterances", "hours"} <= result.keys() and len(evaluated["missed"]) == 1
    exported = printed["export results/run"]
    assert exported.keys() == fields("`export`, `info` of a bundle") - {"export"}
    bundle = printed["info results/run/bundle"]
    assert exported == {**bundle, "parity": exported["parity"]} and bundle["models"].keys() == {"onnx"}
    transcripts = printed["transcribe results/run/bundle"]
    assert [transcript["id"] for transcript in transcripts] == ["talk", "other"]
    assert all(fields("`transcribe`") <= transcript.keys() for transcript in transcripts)
    assert printed["explain no-such-path"].keys() == fields("`explain`")


@pytest.mark.parametrize("words", [
    "info nowhere", "evaluate nowhere", "export nowhere --to bundle", "check nowhere.yaml", "train nowhere.yaml",
    "tune nowhere.yaml", "transcribe . nowhere.wav", "explain nowhere", "doctor nowhere"])
def test_an_error_of_a_command_with_json_is_json_of_the_fields_that_the_page_lists(words, typed):
    error = json.loads(typed([*words.split(), "--json"], code=2))
    assert error.keys() == {"error"}
    assert {"code", "message"} <= error["error"].keys() <= fields("any, if it fails") - {"error"}


def test_the_table_has_each_command_that_takes_json(capsys):
    listed = set(re.findall(r"^\| (`.*?) \|", PAGE, re.MULTILINE))
    named = {name for cell in listed for name in re.findall(r"`(\w+)`", cell)}
    takes_json = set()
    for command in COMMANDS:
        with contextlib.suppress(SystemExit):  # argparse's way of ending after its help
            main([command, "--help"])
        if "--json" in capsys.readouterr().out:
            takes_json.add(command)
    assert named == takes_json
