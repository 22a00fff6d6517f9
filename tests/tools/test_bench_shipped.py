"""The comparison of systems as their authors ship them: turns of a real training, cores, and the table."""

import io
import json
import os
import signal
import sys

import pytest

from sbkit.score.run_files import METRICS
from tools.bench import train
from tools.bench.turns import ALL_AUDIO, Turns

WORKER = """
import json, os, sys
for line in sys.stdin:
    print("not an answer")
    found = {"seconds": float(os.environ["TOOK"]), "audio": len(os.sched_getaffinity(0))}
    print(json.dumps({part: found for part in line.strip().split("+")}), flush=True)
"""


def test_an_epoch_of_a_training_begins_with_its_turn_and_its_metrics_are_the_answer(tmp_path, monkeypatch, capsys):
    lines = [{"time": 100.0, "kind": "epoch", "epoch": 1, "train_seconds": 50.0, "audio_s_per_s": 25.0},
             {"time": 103.0, "kind": "epoch", "epoch": 1, "valid_loss": 1.0},
             {"time": 160.0, "kind": "epoch", "epoch": 2, "train_seconds": 40.0},
             {"time": 162.0, "kind": "epoch", "epoch": 2, "valid_loss": 0.9},
             {"time": 162.5, "kind": "warning", "what": "chance"}]
    (tmp_path / METRICS).write_text("".join(json.dumps(line) + "\n" for line in lines))
    requests = io.StringIO("epoch+validation\n" * 2)
    monkeypatch.setattr(sys, "stdin", requests)
    turns = Turns(9, str(tmp_path), {"epoch": 1000.0, "validation": 100.0})

    assert next(turns) == 1
    assert not capsys.readouterr().out and requests.readline(), "one line was read, and nothing is known yet"
    requests.seek(0)
    assert next(turns) == 2
    assert json.loads(capsys.readouterr().out) == {"epoch": {"seconds": 50.0, "audio": 1000.0},
                                                   ALL_AUDIO: {"seconds": 50.0, "audio": 1250.0},
                                                   "validation": {"seconds": 3.0, "audio": 100.0}}


def test_a_training_ends_as_if_stopped_when_no_turns_are_left(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    stopped = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: stopped.append(number))
    try:
        next(Turns(9, str(tmp_path), {}))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert stopped == [signal.SIGTERM]


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="this system doesn't bind processes to cores")
def test_sides_take_turns_on_their_cores_and_are_compared_with_each_peer():
    cores = os.sched_getaffinity(0)
    took = {"stock fp32": "4", "stock bf16": "3", "nemo bf16": "2", "sbkit bf16": "1"}
    sides = {name: train.Side([sys.executable, "-c", WORKER], {**os.environ, "TOOK": seconds}, 1)
             for name, seconds in took.items()}
    speeds = {}
    try:
        train.alternate(sides, "epoch+validation", 2, speeds, "1 core: ")
    finally:
        for side in sides.values():
            side.end()
    assert os.sched_getaffinity(0) == cores, "this process keeps its own"
    assert speeds["1 core: epoch"] == speeds["1 core: validation"]
    assert speeds["1 core: epoch"]["nemo bf16"] == [0.5, 0.5], "its process has one core"

    facts = {"cpu": "a CPU", "torch": "2", "speechbrain": "1"}
    _, head, *_, ours = train.show({"audio_s_per_s": speeds, "environment": facts}).splitlines()
    assert head.split("  ")[-1].strip() == "to NeMo's best"
    assert ours.split()[-4:] == ["3.00x", "3.00x", "2.00x", "2.00x"], "sbkit in bf16 with stock, then with NeMo"
    assert "4.00x" not in ours
