"""The tutorials' commands, in order, on a small corpus with a small model; the task's are in test_extend.py."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import encoders
import pytest
import soundfile
from processes import ON_A_CPU
from trained_runs import ROOT, TONES, here, tone, tones

SMALL = "--num_workers 0 --min_steps 0 --step_seconds 4 --number_of_epochs 1 --noprogressbar --precision fp32"
CONFORMER = f"{SMALL} --d_model 16 --nhead 2 --num_encoder_layers 1 --d_ffn 16 --cnn_channels 4 --nonspeech null"
#: What makes each command small.
LESS = {"export": "--formats onnx --clips 3", "evaluate": "--workers 0"}


def page(name):
    return (ROOT / "docs" / "tutorials" / f"{name}.md").read_text(encoding="utf-8")


def steps(name):
    """The commands of a tutorial; a program whose output is piped in is left to the reader."""
    lines = [line.rpartition("| ")[2] for line in re.findall(r"^ {4}((?:sbkit|arecord) .*)$", page(name), re.M)]
    return [shlex.split(line)[1:] for line in lines]


def follow(name, home, **given):
    """Run a tutorial's commands, each with what ``given`` adds to it, but those that wait for somebody."""
    said = {}
    for command, *words in steps(name):
        if command in ("serve", "listen"):
            continue
        words = [str(ROOT / word) if word.startswith("hparams/") else word for word in words]
        said.setdefault(command, []).append(here(command, *words, *shlex.split(
            given.get(command, LESS.get(command, ""))), cwd=home))
    return said


@pytest.mark.long
def test_from_nothing_to_a_bundle_that_a_page_can_use(tmp_path):
    tones(tmp_path / "data", 24, 4)
    data = f"{CONFORMER} --num_decoder_layers 1 --data_folder data --cnn_first_channels 4"
    said = follow("demo", tmp_path, check=f"{data} --no-run", train=data)
    assert "test WER" in said["train"][0] and len(list((tmp_path / "results/first/transcripts").glob("*.txt"))) == 4
    assert (tmp_path / "results/first/report.html").exists()
    served = [words for command, *words in steps("demo") if command == "serve"]
    assert served == [["results/first/bundle"]] and (tmp_path / served[0][0] / "model.onnx").exists()


@pytest.mark.long
def test_a_pretrained_encoder_and_one_list(tmp_path, monkeypatch):
    encoders.make(tmp_path / "encoder", normalizes=True)
    lines = ["wav,text"]
    for i in range(60):
        words = [TONES[i % 3], TONES[i // 3 % 3], TONES[i // 9 % 3]]
        path = tmp_path / f"clip{i}.wav"
        soundfile.write(path, tone(words[0], 0.5 + 0.05 * (i % 7), i), 16_000)
        lines.append(f"{path.name},{' '.join(words)}")
    (tmp_path / "mine.csv").write_text("\n".join(lines) + "\n")
    (tmp_path / "new").mkdir()
    shutil.copy(path, tmp_path / "new" / "talk.wav")
    small = f"{SMALL} --encoder_source encoder --data_folder mine.csv --freeze.encoder 2 --language none"
    monkeypatch.setattr(sys.modules[__name__], "page", lambda name, read=page: read(name).replace(
        "/data/new", "new"))
    said = follow("language", tmp_path, prepare=small, check=f"{small} --no-run", train=small)
    assert "train" in said["prepare"][0] and "test WER" in said["train"][0] and "tuned" in said["evaluate"][0]
    assert [path.stem for path in (tmp_path / "transcripts").glob("*.txt")] == ["talk"]


@pytest.mark.long
def test_a_model_that_listens(tmp_path):
    tones(tmp_path / "data", 24, 4)
    said = follow("live", tmp_path, train=f"{CONFORMER} --data_folder data")
    assert "320" in said["evaluate"][0] and "latency" in said["evaluate"][0]
    assert [words[0] for command, *words in steps("live") if command in ("listen", "serve")] == \
        3 * ["results/live/bundle"]
    assert json.loads((tmp_path / "results/live/bundle/config.json").read_text())["streaming"]["models"]


@pytest.mark.long
@pytest.mark.slow
def test_a_speechbrain_script_needs_one_other_name(tmp_path):
    """It learns the same as with SpeechBrain's Brain, and what it has left is resumed by the same command."""
    tones(tmp_path / "data", 18, 6, shortest=1.0)
    files = dict(re.findall(r"```(?:python|yaml)\n# (\S+)\n(.*?)```", page("speechbrain"), re.S))
    stock = re.sub(r"import sbkit  # it was: (.*)", r"\1", files["train.py"]).replace("sbkit.", "sb.")
    assert "sbkit" not in stock
    (tmp_path / "train.yaml").write_text(files["train.yaml"])
    losses = {}
    for name, text in (("ours", files["train.py"]), ("stock", stock)):
        (tmp_path / f"{name}.py").write_text(text)
        for epochs in (1, 3):  # it ends after the first, and goes on
            done = subprocess.run(
                [sys.executable, f"{name}.py", "train.yaml", f"--output_folder=results/{name}", "--device=cpu",
                 "--noprogressbar", f"--number_of_epochs={epochs}"],
                cwd=tmp_path, env={**os.environ, **ON_A_CPU}, capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
        losses[name] = (tmp_path / f"results/{name}.txt").read_text()
    assert losses["ours"] == losses["stock"] and losses["stock"].count("VALID") == 3
