"""How a run uses the cores of a CPU: tried once, kept by the run and for its model, and never changed by a restart."""

import json
import logging
import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import run_folders
import torch
from processes import ON_A_CPU, command, killed, program, sbkit
from trained_runs import metrics, weights

from sbkit.recipe import arguments
from sbkit.runs import cpu_layout, cpu_trial
from sbkit.runs.cpu_trial import Timing
from sbkit.runs.run_config import RunConfig
from sbkit.score.run_files import CPU_LAYOUT
from sbkit.system.cores import Layout
from sbkit.train.trainer import Trainer

ROOT = Path(__file__).parents[2]
SMALL = ROOT / "tests" / "recipe" / "small.yaml"


@pytest.fixture
def machine(tmp_path, monkeypatch):
    """A machine of four cores where nobody has set threads; a run there, and what its trials would find."""
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(cpu_layout, "usable_cores", lambda: 4)
    found = SimpleNamespace(seconds={Layout(1, 1): 0.3, Layout(1, 2): 0.4, Layout(2, 2): 0.1}, computing=0.99, tried=[])

    def measure(command, layouts):
        found.tried.append(list(layouts))
        return [Timing(layout, seconds, 2**30, found.computing) for layout, seconds in found.seconds.items()]

    monkeypatch.setattr(cpu_trial, "measure", measure)
    return found


def config_of(tmp_path, *words, device="cpu", run="run"):
    command = arguments.parse([str(SMALL), "--output_folder", str(tmp_path / run), *words])
    (tmp_path / run).mkdir(exist_ok=True)
    return RunConfig.of(command, torch.device(device))


def test_the_fastest_is_taken_and_told_in_one_line(tmp_path, machine, caplog):
    caplog.set_level(logging.INFO)
    assert cpu_layout.choose(config_of(tmp_path)) == Layout(2, 2)
    (told,) = [record.message for record in caplog.records if "the fastest on this machine" in record.message]
    assert told == ("Training with 2 ranks of 2 threads, the fastest on this machine: 100 ms a step, 1.0 GiB each "
                    "(slower: 1 thread 300 ms, 2 threads 400 ms). Set --cpu_ranks, --cpu_threads or OMP_NUM_THREADS to "
                    "choose yourself")
    assert machine.tried[0][0] == Layout(1, 1) and Layout(4, 1) in machine.tried[0]


def test_the_next_run_of_the_same_model_tries_nothing_whatever_its_folder_seed_and_epochs(tmp_path, machine):
    first = cpu_layout.choose(config_of(tmp_path))
    again = cpu_layout.choose(config_of(tmp_path, "--seed", "5", "--number_of_epochs", "9", run="other"))
    assert again == first and len(machine.tried) == 1
    assert json.loads((tmp_path / "other" / CPU_LAYOUT).read_text()) == {"ranks": 2, "threads": 2}


@pytest.mark.parametrize("words", [("--d_model", "8"), ("--precision", "bf16"), ("--batching.step_seconds", "30")])
def test_another_model_precision_or_size_of_a_step_is_tried_again(tmp_path, machine, words):
    cpu_layout.choose(config_of(tmp_path))
    cpu_layout.choose(config_of(tmp_path, *words, run="other"))
    assert len(machine.tried) == 2


def test_what_is_fastest_beside_other_programs_is_kept_by_the_run_but_not_for_others(tmp_path, machine):
    machine.computing = 0.5
    assert cpu_layout.choose(config_of(tmp_path)) == Layout(2, 2)
    assert (tmp_path / "run" / CPU_LAYOUT).exists()
    cpu_layout.choose(config_of(tmp_path, run="other"))
    assert len(machine.tried) == 2


def test_a_run_that_is_resumed_goes_on_as_it_began(tmp_path, machine, monkeypatch):
    cpu_layout.choose(config_of(tmp_path))
    machine.seconds = {Layout(1, 1): 0.1, Layout(2, 2): 0.2}
    monkeypatch.setenv("SBKIT_CACHE", str(tmp_path / "empty"))
    monkeypatch.setattr(cpu_layout.initial, "fresh", lambda keys: False)
    assert cpu_layout.choose(config_of(tmp_path)) == Layout(2, 2) and len(machine.tried) == 1
    monkeypatch.setattr(cpu_layout, "usable_cores", lambda: 2)  # where it can't, it is tried anew
    assert cpu_layout.choose(config_of(tmp_path)) == Layout(1, 1)


def test_a_run_that_began_without_a_layout_goes_on_without(tmp_path, machine, monkeypatch):
    monkeypatch.setattr(cpu_layout.initial, "fresh", lambda keys: False)
    assert cpu_layout.choose(config_of(tmp_path)) is None and not machine.tried


def test_nothing_is_tried_where_something_else_decides(tmp_path, machine, monkeypatch):
    assert cpu_layout.choose(config_of(tmp_path, device="meta")) is None
    assert cpu_layout.choose(config_of(tmp_path, "--cpu_ranks", "3", "--cpu_threads", "1")) == Layout(3, 1)
    assert cpu_layout.choose(config_of(tmp_path, "--debug")) is None
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "3")
        assert cpu_layout.choose(config_of(tmp_path)) is None
    with monkeypatch.context() as patch:
        patch.setenv("RANK", "0")
        patch.setenv("LOCAL_RANK", "0")
        assert cpu_layout.choose(config_of(tmp_path)) is None
    monkeypatch.setattr(cpu_layout, "usable_cores", lambda: 1)
    assert cpu_layout.choose(config_of(tmp_path)) == Layout(1, 1)
    assert not machine.tried


def test_what_fails_in_a_trial_is_left_to_the_run(tmp_path, machine):
    machine.seconds = {}
    assert cpu_layout.choose(config_of(tmp_path)) is None
    assert not (tmp_path / "run" / CPU_LAYOUT).exists()


# ------------------------------------------------------------ for real

WORDS = ["train", "hparams/ctc.yaml", "--device", "cpu", "--no-check", "--noprogressbar", "--precision", "fp32",
         "--number_of_epochs", "2", "--ckpt_interval_minutes", "0", "--ckpt_interval_steps", "2", "--step_seconds", "6",
         *(f"--{name}={value}" for name, value in run_folders.TINY.items() if name != "num_workers"), "--num_workers=1"]
FREE = {"OMP_NUM_THREADS": ""}


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return run_folders.corpus(tmp_path_factory.mktemp("data"), 3.0, train=12, dev=3, test=3)


def words_of(data, out, *more):
    return [*WORDS, "--data_folder", data, "--output_folder", out, *more]


@pytest.fixture(scope="module")
def torchrun(data, tmp_path_factory):
    """The weights of a run of two ranks as torchrun starts them."""
    out = tmp_path_factory.mktemp("torchrun") / "run"
    sbkit(*words_of(data, out, "--num_workers=0"), ranks=2)
    return weights(out)


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.slow
def test_two_ranks_in_one_command_train_as_those_of_torchrun_to_the_bit(data, torchrun, tmp_path):
    done = sbkit(*words_of(data, tmp_path / "run", "--cpu_ranks", "2", "--cpu_threads", "1"), **FREE)
    assert equal(weights(tmp_path / "run"), torchrun)
    assert done.stdout.count("test WER") == 1
    assert metrics(tmp_path / "run", "run")[-1]["devices"] == 2


@pytest.mark.slow
def test_two_ranks_in_one_command_resume_to_the_bit_after_a_kill(data, torchrun, tmp_path):
    words = words_of(data, tmp_path / "run", "--cpu_ranks", "2", "--cpu_threads", "1")
    assert killed(lambda: any((tmp_path / "run" / "save").glob("CKPT*/CKPT.yaml")), *words, **FREE)
    sbkit(*words, **FREE)
    assert equal(weights(tmp_path / "run"), torchrun)


def stopped_at_step_3(*words):
    """A run whose rank 0 alone is asked to stop."""
    begin = Trainer.open_next_step

    def signalled(trainer):
        if trainer.state.optimizer_step == 3:
            os.kill(os.getpid(), signal.SIGTERM)
        begin(trainer)

    Trainer.open_next_step = signalled
    command(str(ROOT), *words)


@pytest.mark.slow
def test_two_ranks_in_one_command_resume_to_the_bit_after_a_stop(data, torchrun, tmp_path):
    words = list(map(str, words_of(data, tmp_path / "run", "--cpu_ranks", "2", "--cpu_threads", "1")))
    done = program(stopped_at_step_3, *words, **ON_A_CPU | FREE)
    assert done.returncode == 128 + signal.SIGTERM and "checkpoint saved at" in done.stderr, done.stderr
    sbkit(*words, **FREE)
    assert equal(weights(tmp_path / "run"), torchrun)


@pytest.mark.slow
def test_a_trial_times_threads_and_ranks_and_leaves_nothing(data, tmp_path, monkeypatch):
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    command = arguments.parse(list(map(str, words_of(data, tmp_path / "run")[1:])))
    found = cpu_trial.measure(command, [Layout(1, 1), Layout(1, 2), Layout(2, 1)])
    assert [timing.layout for timing in found][:2] == [Layout(1, 1), Layout(1, 2)]
    assert all(0 < timing.seconds < 30 and timing.memory > 2**26 and timing.computing > 0 for timing in found)
    assert not (tmp_path / "run").exists() and "RANK" not in os.environ
    assert not list(temporary.glob("sbkit-*"))


@pytest.mark.slow
def test_a_trial_that_fails_keeps_nobody_waiting(tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("brain: !name:sbkit.tasks.ctc.CTC\n")  # which lacks all else
    command = arguments.parse([str(recipe), "--output_folder", str(tmp_path / "run")])
    began = time.monotonic()
    assert cpu_trial.measure(command, [Layout(2, 1)]) == []
    assert time.monotonic() - began < 60
