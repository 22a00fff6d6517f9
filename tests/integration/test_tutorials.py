"""The tutorials as notebooks: their cells are run in order, on a small corpus with a small model."""

import json
import os
import re
import shlex
import shutil
import subprocess
import sys

import encoders
import processes
import pytest
import soundfile
from processes import ON_A_CPU
from trained_runs import ROOT, TONES, here, tone, tones

from tools import notebooks

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


def follow(name, home, python="", run=here, **given):
    """Run the cells of a tutorial's notebook; what they said, by command.

    python : goes before their Python
    run : runs sbkit, here or in a process of its own
    given : what is added to each command of that name
    """
    said = {}
    environment = {**os.environ, **ON_A_CPU, "PYTHONPATH": f"{home}{os.pathsep}{ROOT}"}
    for source in [cell["source"] for cell in notebooks.notebook(page(name))["cells"] if cell["cell_type"] == "code"]:
        if source.startswith("%%writefile "):
            file, _, text = source.removeprefix("%%writefile ").partition("\n")
            (home / file).write_text(text + "\n")
            continue
        lines = source.split("\n") if source.startswith("!") else []
        for program, command, *words in [shlex.split(line[1:], comments=True) for line in lines]:
            added = shlex.split(given.get(command if program == "sbkit" else program, LESS.get(command, "")))
            words = [str(ROOT / word) if word.startswith("hparams/") else word for word in words]
            if program == "sbkit":
                said.setdefault(command, []).append(run(command, *words, *added, cwd=home))
            elif program != "pip":
                start = ["-m", "torch.distributed.run"] if program == "torchrun" else []
                subprocess.run([sys.executable, *start, command, *words, *added], cwd=home, env=environment, check=True)
        if not lines:
            done = subprocess.run([sys.executable, "-c", f"{python}\n{source}"], cwd=home, env=environment, check=True,
                                  capture_output=True, text=True)
            said.setdefault("python", []).append(done.stdout)
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
    small = f"{SMALL} --encoder_source encoder --data_folder mine.csv --freeze.encoder 2 --language und"
    monkeypatch.setattr(sys.modules[__name__], "page", lambda name, read=page: read(name).replace(
        "/data/new", "new"))
    said = follow("language", tmp_path, prepare=small, check=f"{small} --no-run", train=small)
    assert "train" in said["prepare"][0] and "test WER" in said["train"][0] and "tuned" in said["evaluate"][0]
    assert [path.stem for path in (tmp_path / "transcripts").glob("*.txt")] == ["talk"]


@pytest.mark.long
def test_a_model_that_listens(tmp_path):
    tones(tmp_path / "data", 24, 4)
    heard = "import soundfile\nmicrophone = [soundfile.read('data/wavs/test0.wav', dtype='float32')[0].repeat(3)]"
    said = follow("live", tmp_path, train=f"{CONFORMER} --data_folder data", python=heard)
    assert " | " in said["python"][0]
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
    stock = files["train.py"].replace("import sbkit  # new\n", "")
    stock = stock.replace("sbkit.Brain):  # it was: sb.Brain", "sb.Brain):")
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


@pytest.mark.long
@pytest.mark.slow
def test_the_speechbrain_notebook_runs_on_one_device_and_on_two(tmp_path):
    tones(tmp_path / "data", 18, 6, shortest=1.0)
    follow("speechbrain", tmp_path, python="--device=cpu --noprogressbar --number_of_epochs=1",
           torchrun="--device=cpu --noprogressbar --distributed_backend=gloo")
    assert (tmp_path / "results" / "tones.txt").read_text().count("VALID") == 3, "one epoch, then the other two"


@pytest.mark.long
@pytest.mark.slow
def test_from_a_speechbrain_recipe_to_a_served_model(tmp_path):
    tones(tmp_path / "data", 18, 6, shortest=1.0)
    shutil.copy(tmp_path / "data" / "wavs" / "test0.wav", tmp_path / "clip.wav")
    said = follow("from-speechbrain", tmp_path, run=lambda *words, cwd: processes.sbkit(*words, cwd=cwd).stdout)
    assert "WER" in said["evaluate"][0] and "compute_forward" in said["export"][0]
    assert (tmp_path / "results/mine/evaluations/test-best/report.html").is_file()
    served = [words for command, *words in steps("from-speechbrain") if command == "serve"]
    assert served == [["bundle"]] and (tmp_path / "bundle" / "model.onnx").exists()


@pytest.mark.long
@pytest.mark.slow
def test_a_task_of_ones_own_from_its_notebook(tmp_path):
    tones(tmp_path / "data", 60, 15)
    shutil.copy(tmp_path / "data" / "wavs" / "test0.wav", tmp_path / "clip.wav")
    said = follow("own-task", tmp_path, run=lambda *words, cwd: processes.sbkit(*words, cwd=cwd).stdout,
                  train="--noprogressbar", torchrun="--noprogressbar --device cpu")
    assert said["python"][0].strip() in TONES
