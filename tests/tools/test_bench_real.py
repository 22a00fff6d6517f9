"""The bench of real recordings: its curve and its table, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tools.bench.real import SHOWN, curve, table

ROOT = Path(__file__).parents[2]


def test_a_curve_is_by_minutes_of_training_without_those_of_validation():
    lines = [{"kind": "run"}, {"kind": "step", "loss": 3.0}, {"kind": "epoch", "train_seconds": 90.0},
             {"kind": "epoch", "valid_CER": 30.04}, {"kind": "epoch", "train_seconds": 60.0},
             {"kind": "epoch", "valid_CER": 17.26}, {"kind": "test", "test_CER": 18.5}]
    assert curve(lines) == [(1.5, 30.0), (2.5, 17.3)]


def test_a_long_curve_is_shown_by_some_points_and_its_end():
    points = [(float(i), 100.0 - i) for i in range(1, 41)]
    found = {"epochs": 40, "train_seconds": 2400.0, "wer": 50.04, "cer": 20.0, "curve": points}
    row = table([("cs", "nothing", "1", found)]).splitlines()[-1]
    assert row.startswith("| cs | nothing | 1 | 40 | 40.0 | 50.0 % | 20.0 % | ") and row.endswith("40: 60 % |")
    assert row.count(":") == SHOWN
    assert table([("cs", "speechbrain", "1", {**found, "curve": []})]).endswith("| 20.0 % |  |\n")


def test_a_way_that_does_not_exist_and_a_folder_that_is_missing_are_refused(tmp_path):
    for words, said in ((["--ways", "parrot"], "there is no way parrot"), (["--ways", "demo"], "--source RUN"),
                        ([], "--corpora cs: there is no such folder")):
        command = [sys.executable, "-m", "tools.bench.real", "--out", tmp_path, "--encoder", tmp_path, "--corpora",
                   f"cs={tmp_path / 'nowhere'}", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 2 and said in done.stderr, done.stderr
