"""The table and the JSON of the doctor, of this machine and of findings that are bad."""

import json
import os
import subprocess
import sys

import pytest

from sbkit.cli import main
from sbkit.doctor import examination, probe
from sbkit.doctor.finding import IN_THE_WAY, NOTE, MachineFinding

BAD = [
    MachineFinding("torch", "2.11.0, built for CUDA 13.0"),
    MachineFinding("NVIDIA driver",
                   "550.54, for CUDA up to 12.4; torch is built for CUDA 13.0, which needs 580 or newer",
                   IN_THE_WAY, "update the driver to 580, or install a torch for an older CUDA"),
    MachineFinding("shared memory", "/dev/shm: 0.06 of 0.06 GiB free", NOTE,
                   "docker run --shm-size=8g, or fewer workers"),
]


@pytest.mark.slow
def test_this_machine_is_told_in_a_table_of_80_columns_without_importing_torch():
    code = "import sys; from sbkit.cli import main; sys.exit(main(['doctor']) or 'torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], env=os.environ | {"COLUMNS": "80"}, capture_output=True,
                          text=True)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) <= 80
    for what in ("Python", "packages", "torch", "torchaudio", "NVIDIA driver", "onnxruntime", "C compiler", "cores",
                 "memory", "shared memory", "open files", "locale", "temporary", "output"):
        assert any(f"  {what}  " in line for line in lines), what
    assert lines[-1].startswith("nothing is in the way of sbkit")


def test_what_is_in_the_way_ends_with_1_and_says_what_to_do(capsys, monkeypatch):
    monkeypatch.setattr(examination, "examine", lambda data, run: BAD)
    monkeypatch.setenv("COLUMNS", "80")
    assert main(["doctor"]) == 1
    assert capsys.readouterr().out == """\
ok          torch          2.11.0, built for CUDA 13.0
in the way  NVIDIA driver  550.54, for CUDA up to 12.4; torch is built for CUDA
                           13.0, which needs 580 or newer
                           -> update the driver to 580, or install a torch for
                              an older CUDA
note        shared memory  /dev/shm: 0.06 of 0.06 GiB free
                           -> docker run --shm-size=8g, or fewer workers

1 in the way of sbkit, 1 note
"""


def test_the_same_for_programs(capsys, monkeypatch):
    monkeypatch.setattr(examination, "examine", lambda data, run: BAD)
    assert main(["doctor", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["in_the_way"] == 1
    assert [each["verdict"] for each in report["findings"]] == ["ok", "in the way", "note"]
    assert report["findings"][2]["fix"] == "docker run --shm-size=8g, or fewer workers"


def test_no_library_that_is_probed_is_imported_from_the_working_directory(tmp_path, monkeypatch):
    for name in ("onnxruntime", "numpy", "json"):
        (tmp_path / f"{name}.py").write_text("open('ran', 'w').close(); raise ImportError('not this one')")
    monkeypatch.chdir(tmp_path)
    probe.inspect_library.cache_clear()
    assert "not this one" not in str(probe.inspect_library("onnxruntime")) and not (tmp_path / "ran").exists()
    probe.inspect_library.cache_clear()
