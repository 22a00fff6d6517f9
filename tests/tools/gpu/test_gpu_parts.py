"""What checks read out of traces, results and runs."""

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import processes
import pytest
import soundfile
import torch

from sbkit.nn import ctc
from tools.gpu import corpus, pair, runs, speed, values
from tools.gpu.bench import Bench


def kernel(name, start, length, cat="kernel"):
    return {"ph": "X", "cat": cat, "name": name, "ts": start, "dur": length}


def test_overlap_is_communication_with_another_kernel_beside_it():
    events = [kernel("ncclDevKernel_AllReduce_Sum_f32", 0, 10), kernel("gemm", 4, 3), kernel("gemm", 5, 20),
              kernel("ncclDevKernel_AllReduce_Sum_f32", 30, 10), kernel("aten::mm", 30, 10, "cpu_op"),
              {"ph": "i", "name": "nothing", "ts": 3}]
    assert pair.overlap(events) == (20, 6)


def test_without_cards_it_is_of_operations():
    assert pair.overlap([kernel("gloo:all_reduce", 0, 10, "user_annotation"), kernel("aten::mm", 8, 10, "cpu_op")]) == \
        (10, 2)


def test_the_layers_leave_nothing_where_the_user_started(monkeypatch, tmp_path):
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    values.flagship("cpu", True, tmp_path / "home")
    assert not list(here.iterdir())


def test_kernels_are_tried_for_each_number_of_labels(monkeypatch):
    asked = mock.create_autospec(ctc.kernels_work.__wrapped__, side_effect=lambda device, block: block < 2048)
    monkeypatch.setattr(ctc, "kernels_work", asked)
    assert values._used("cuda:0", (5, 300)) and not values._used("cuda:0", (5, 1023))
    assert [call.args[1] for call in asked.call_args_list] == [32, 1024, 32, 2048]


@pytest.mark.long
def test_gradients_of_many_labels_may_be_as_far_off_as_fp32_makes_torchs_own():
    _, apart = values.ctc_apart("cpu", 1023)
    assert values.GRADIENTS < apart < values.max_apart(1023)


def test_the_ratio_is_of_the_best_precisions():
    assert speed.ratio({"stock fp32": [10, 12, 11], "stock bf16": [20], "sbkit fp32": [30], "sbkit bf16": [50, 60, 40]}
                       ) == 2.5


@pytest.mark.parametrize("losses, skipped, good", [
    ([3.0, 2.0], [0, 0], True), ([3.0, 3.1], [0, 0], False), ([3.0, 2.0], [1, 0], False), ([3.0, None], [0, 0], False)])
def test_a_run_learns_where_its_loss_falls_and_no_step_was_skipped(losses, skipped, good):
    lines = [{"train_loss": loss, "skipped_steps": count} for loss, count in zip(losses, skipped, strict=True)]
    assert runs.learns(lines)[0] is good


def test_outcomes_of_a_junit_file(tmp_path):
    path = tmp_path / "junit.xml"
    path.write_text("<testsuites><testsuite><testcase name='a'/><testcase name='b'><skipped/></testcase>"
                    "<testcase name='c'><failure/></testcase><testcase name='d'><error/></testcase></testsuite>"
                    "</testsuites>")
    assert runs.outcomes(path) == ({"passed": 1, "failed": 2, "skipped": 1}, ["c", "d"])


def test_the_cost_is_found_in_what_the_check_printed():
    printed = 'a warning\n{\n "sections": {"x": {"values": {}}, "y": {"values": {"weights_bytes": 7}}}\n}\nthe end\n'
    assert speed.cost_in(printed) == {"weights_bytes": 7}


def test_the_corpus_of_tones_is_as_long_as_was_asked_and_the_same_each_time(tmp_path):
    made = [corpus.write(tmp_path / name, {"train": 0.005, "test": 0.001}, longest=3.0) for name in ("one", "two")]
    tables = [(folder / "train.csv").read_text().replace(str(folder), "") for folder in made]
    assert tables[0] == tables[1]
    rows = [line.split(",") for line in tables[0].splitlines()[1:]]
    assert 18 <= sum(float(row[1]) for row in rows) < 22 and len({row[0] for row in rows}) == len(rows)
    signal, rate = soundfile.read(made[0] / "clips" / f"{rows[0][0]}.wav")
    assert rate == 16_000 and abs(len(signal) / rate - float(rows[0][1])) < 1e-6 and abs(signal).max() > 0.05


def test_a_corpus_of_other_hours_has_the_same_recordings_again_as_other_utterances(tmp_path):
    once = corpus.write(tmp_path / "once", {"train": 0.005, "dev": 0.001, "test": 0.001}, longest=3.0)
    first = [line.split(",") for line in (once / "train.csv").read_text().splitlines()[1:]]
    for hours in (0.002, 0.012):
        lines = (corpus.repeated(once, tmp_path / str(hours), hours) / "train.csv").read_text().splitlines()
        rows = [line.split(",") for line in lines[1:]]
        assert 0 <= sum(float(row[1]) for row in rows) - 3600 * hours < 3 and len({row[0] for row in rows}) == len(rows)
        assert {row[2] for row in rows} <= {row[2] for row in first}
    assert len(rows) > len(first) and (tmp_path / "0.012" / "dev.csv").read_text() == (once / "dev.csv").read_text()


@pytest.mark.parametrize("stopped, again, verdict", [(0.0, None, "as expected"), (3.0, 1.0, "as expected"),
                                                     (6.0, 1.0, "short")])
def test_a_resumed_run_may_be_off_by_some_times_what_two_runs_are_that_were_not_stopped(tmp_path, stopped, again,
                                                                                         verdict):
    class Runs(Bench):
        def needed(self, words):
            return self.program(words)

        def program(self, words, **environment):
            folder = Path(words[words.index("--output_folder") + 1])
            moved = {"whole": 0.0, "first": stopped, "again": again}[folder.name]
            (folder / "save" / "CKPT+1").mkdir(parents=True, exist_ok=True)
            torch.save({"weight": torch.full((3,), 1.0 + moved)}, folder / "save" / "CKPT+1" / "model.ckpt")
            return mock.Mock(code=143)

        def call(self, function, *args):
            return function(*args)

    corpus.write(tmp_path / "corpus", {"train": 0.001, "dev": 0.001, "test": 0.001})
    runs.resume(Runs("resume", "cuda:0", False, 1, 141.0, tmp_path, tmp_path))
    lines = (tmp_path / "seen.jsonl").read_text().splitlines()
    assert [json.loads(line)["verdict"] for line in lines if "verdict" in line] == \
        ["as expected", verdict]


@pytest.mark.long
def test_a_server_that_forks_never_asks_the_driver():
    """CUDA would work in none of the processes that are forked from one that has asked."""
    code = ("import torch, sys; asked = []; torch._C._cuda_getDeviceCount = lambda: asked.append(1) or 0\n"
            "torch._C._cuda_init = lambda: asked.append(1)\n"
            f"import {', '.join(processes.PRELOAD)}; assert 'speechbrain' in sys.modules; sys.exit(len(asked))")
    path = os.pathsep.join(each for each in sys.path if each)
    assert subprocess.run([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}).returncode == 0
