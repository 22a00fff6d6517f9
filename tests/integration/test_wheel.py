"""sbkit from a wheel, in an empty folder, with no checkout: a starter is written, checked, trained and shipped."""

import email
import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("sbkit", "hparams", "recipes", "train.py", "setup.cfg", "pyproject.toml", "README.md", "LICENSE", "Makefile")
TINY = (
    "--data_folder ../data --number_of_epochs 1 --d_model 16 --nhead 2 --num_encoder_layers 1 --d_ffn 16 "
    "--cnn_first_channels 4 --cnn_channels 4 --num_workers 1 --precision fp32 --device cpu --noprogressbar "
    "--step_seconds 30 --min_steps 0 --output_folder results/tiny"
).split()

#: Runs commands one after another with one start of Python, which takes longer than they do.
EACH = ("import json, os, sys; from sbkit.cli import main; print(main.__code__.co_filename); "
        "words = map(json.loads, sys.argv[1:]); "
        "sys.exit(max([os.chdir(to) or 0 if name == 'cd' else main([name, to, *more]) for name, to, *more in words]))")


def run(words, cwd, **variables):
    env = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", **variables}
    done = subprocess.run([sys.executable, *map(str, words)], cwd=cwd, env=env, capture_output=True, text=True,
                          timeout=300)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """Built by ``make dist`` from a copy, so that nothing is left in the checkout and nothing there gets into it."""
    home = tmp_path_factory.mktemp("built")
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, home / "src" / name, symlinks=True,
                            ignore=shutil.ignore_patterns("__pycache__"))
        else:
            (home / "src").mkdir(exist_ok=True)
            shutil.copy(ROOT / name, home / "src")
    subprocess.run(["make", "-s", "-C", home / "src", "dist", f"PYTHON={sys.executable}"], check=True, timeout=300)
    [found] = (home / "src" / "dist").glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory):
    """An otherwise empty folder with the package, to stand first on PYTHONPATH."""
    home = tmp_path_factory.mktemp("installed")
    run(["-m", "pip", "install", "-q", "--no-deps", "--target", home, wheel], home)
    return home


@pytest.mark.slow
def test_the_wheel_holds_every_file_of_the_package_and_the_recipes(wheel):
    packed = {name: zipfile.ZipFile(wheel).read(name) for name in zipfile.ZipFile(wheel).namelist()}
    files = [path for path in (ROOT / "sbkit").rglob("*") if path.is_file() and path.suffix != ".pyc"]
    wanted = {str(path.relative_to(ROOT)): path.read_bytes() for path in files}
    for folder in ("hparams", "recipes"):
        wanted |= {f"sbkit/starter/{path.relative_to(ROOT)}": path.read_bytes()
                   for path in (ROOT / folder).rglob("*.yaml")}
    assert {"sbkit/serve/page.html", "sbkit/score/report/page.html", "sbkit/runs/log-config.yaml",
            "sbkit/nn/native/kernels.c", "sbkit/nn/native/rows.h", "sbkit/rehearsal/fake_gpu/crt/host_config.h",
            "sbkit/starter/hparams/ctc.yaml"} <= set(wanted)
    assert {name: len(text) for name, text in packed.items() if ".dist-info/" not in name} == {
        name: len(text) for name, text in wanted.items()}
    assert all(packed[name] == text for name, text in wanted.items())


@pytest.mark.slow
def test_the_wheel_says_what_it_is(wheel):
    archive = zipfile.ZipFile(wheel)
    [name] = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
    told = email.message_from_string(archive.read(name).decode())
    assert told["Name"] == "sbkit"
    assert "Apache-2.0" in (told["License"], told["License-Expression"])
    assert told.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip()
    assert told["Description-Content-Type"] == "text/markdown"
    assert set(told.get_all("Provides-Extra")) >= {"demo", "export", "serve", "tensorboard"}
    assert any(name.endswith("/LICENSE") for name in archive.namelist())


@pytest.mark.long
@pytest.mark.slow
def test_a_starter_is_checked_trained_exported_and_transcribed(installed, tmp_path):
    pytest.importorskip("espeakng_loader", reason="the clips are synthesised with the extra 'demo'")
    pytest.importorskip("onnxruntime", reason="the bundle needs the extra 'export'")

    alone = {"PYTHONPATH": str(installed), "SBKIT_CACHE": str(tmp_path / "cache")}
    large = "recipes/CommonVoice/ASR/CTC/hparams/large.yaml"
    said = run(["-c", EACH, *map(json.dumps, (
        ["demo-data", "data", "--hours", "0.04", "--workers", "1"], ["new", "mine"], ["cd", "mine"],
        ["check", "hparams/ctc.yaml", "--json", *TINY],
        ["check", large, "--no-run", "--data_folder", "../data", "--language", "fr"]))], tmp_path, **alone)
    assert Path(said.splitlines()[0]).is_relative_to(installed) and "mine/hparams/ctc.yaml" in said
    told, end = json.JSONDecoder().raw_decode(said, said.index("\n{") + 1)
    assert told["errors"] == [] and "nothing wrong" in said[end:]

    trained = run(["train.py", "hparams/ctc.yaml", *TINY, "--no-check"], tmp_path / "mine", **alone)
    assert "test WER" in trained and (tmp_path / "mine/results/tiny/report.html").exists()
    clip = next((tmp_path / "data").rglob("*.wav"), None) or next((tmp_path / "data").rglob("*.mp3"))
    commands = (["export", "results/tiny", "--to", "bundle", "--formats", "onnx", "--clips", "2"],
                ["transcribe", "bundle", str(clip), "--format", "json"])
    shown = run(["-c", EACH, *map(json.dumps, commands)], tmp_path / "mine", **alone)
    assert "text" in json.JSONDecoder().raw_decode(shown, shown.rindex("\n{") + 1)[0]
