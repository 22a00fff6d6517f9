"""The bench of small corpora: its curve, its table, and which runs it makes."""

from __future__ import annotations

import sys

from tools.bench import real
from tools.bench.real import SHOWN, curve, table


def test_a_curve_is_by_minutes_of_training_without_those_of_validation():
    lines = [{"kind": "run"}, {"kind": "step", "loss": 3.0}, {"kind": "epoch", "train_seconds": 90.0},
             {"kind": "epoch", "valid_CER": 30.04}, {"kind": "epoch", "train_seconds": 60.0},
             {"kind": "epoch", "valid_CER": 17.26}, {"kind": "test", "test_CER": 18.5}]
    assert curve(lines) == [(1.5, 30.0), (2.5, 17.3)]


def test_a_long_curve_is_shown_by_some_points_and_its_end():
    points = [(float(i), 100.0 - i) for i in range(1, 41)]
    found = {"epochs": 40, "train_seconds": 2400.0, "wer": 50.04, "cer": 20.0, "curve": points}
    row = table([("cs", "nothing", 1, found)]).splitlines()[-1]
    assert row.startswith("| cs | nothing | 1 | 40 | 40.0 | 50.0 % | 20.0 % | ") and row.endswith("40: 60 % |")
    assert row.count(":") == SHOWN
    assert table([("cs", "speechbrain", 1, {**found, "curve": []})]).endswith("| 20.0 % |  |\n")


def test_runs_of_some_minutes_are_as_long_with_every_seed_and_no_result_is_taken_for_another(
        tmp_path, monkeypatch, capsys):
    ran = []

    def train(self, name, spec, way, seed, epochs):
        ran.append((way, seed, epochs))
        return {"wer": 50.0, "cer": 20.0, "epochs": epochs, "curve": [], "train_seconds": (10.0 + seed) * epochs}

    def bench(*words):
        monkeypatch.setattr(sys, "argv", ["real", "--out", str(tmp_path / "out"), "--corpora", f"cs={tmp_path}",
                                          "--minutes", "1", *words])
        return real.main()

    monkeypatch.setattr(real.Bench, "train", train)
    monkeypatch.setattr(real, "check_keys", lambda *_: None)
    assert bench("--ways", "nothing,demo", "--source", str(tmp_path)) == 0
    assert ran == [("nothing", 0, 1), ("nothing", 1, 6), ("demo", 1, 6), ("nothing", 2, 6), ("demo", 2, 6)]
    assert bench("--ways", "nothing,demo", "--source", str(tmp_path)) == 0 and len(ran) == 5
    assert "| demo | 2 | 6 | 1.2 | 50.0 % |" in (tmp_path / "out" / "real.md").read_text()
    (other := tmp_path / "other").mkdir()
    capsys.readouterr()
    assert bench("--ways", "demo", "--source", str(other)) == 2 and len(ran) == 5
    assert "was measured with other options" in capsys.readouterr().err
