"""The flagship, stopped by signals: the same command goes on, and ends as the run that was never stopped."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import pytest
from processes import ON_A_CPU, ROOT, command, program, programs
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from trained_runs import different, go_on, here, outcome, saved_step

#: A line for each step: after 10 s, it would be others on a slow machine.
TINY = ("--corpus.demo_hours 0.06 --number_of_epochs 2 --d_model 16 --nhead 2 --d_ffn 16 --num_encoder_layers 1 "
        "--cnn_first_channels 4 --cnn_channels 4 --num_workers 1 --precision fp32 --noprogressbar --no-check "
        "--ckpt_interval_minutes 0 --ckpt_interval_steps 2 --max_batch_seconds 16 --step_seconds 16 --least_steps 0 "
        "--log_interval 0").split()


def stopped(send, signum, out, step, start, *words):
    """``start(*words)``, and a signal to this process or its group after the checkpoint of a step or a later one."""
    os.setsid()

    def stop():
        while saved_step(Path(out)) < int(step):
            time.sleep(0.02)
        getattr(os, send)(os.getpid(), int(signum))

    threading.Thread(target=stop, daemon=True).start()
    {"command": command, "two": two}[start](str(ROOT), *words)


def two(*words):
    """The same on two ranks under torchrun's agent, which passes its signal on."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="stopped", rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", monitor_interval=0.2, start_method="fork")
    elastic_launch(config, command)(*words)


def everything(out):
    """All that training left, but for times."""
    return outcome(out, "valid_WER", "test_WER", kinds=("step", "epoch", "test")) | {
        "log": (out / "train_log.txt").read_text(), "wer": (out / "wer_test.txt").read_text()}


@pytest.fixture(scope="module")
def cache(cache):
    pytest.importorskip("espeakng_loader", reason="the demo corpus needs the extra 'demo'")
    return cache


@pytest.fixture(scope="module")
def never_stopped(cache, tmp_path_factory):
    out = tmp_path_factory.mktemp("never") / "out"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("SBKIT_CACHE", str(cache))
        here(*words(out))
    return everything(out)


def words(out):
    return "train", "hparams/ctc.yaml", *TINY, "--output_folder", out


def stop(send, signum, out, step, start, cache):
    given = send, int(signum), out, step, start, *words(out)
    return program(stopped, *map(str, given), **ON_A_CPU, SBKIT_CACHE=str(cache))


def finished(out, cache, ranks=1):
    go_on(out, *words(out), ranks=ranks, SBKIT_CACHE=str(cache))
    return everything(out)


@pytest.mark.slow
def test_stopped_by_ctrl_c(never_stopped, cache, tmp_path):
    """Which a terminal sends to the workers, too."""
    out = tmp_path / "out"
    returned, _, err = stop("killpg", signal.SIGINT, out, never_stopped["steps"] // 3, "command", cache)
    last = err.strip().splitlines()[-1]
    assert returned == 130 and "stopped by SIGINT after step " in last, err[-3000:]
    assert "run the same command to resume" in last and "Traceback" not in err
    assert different(finished(out, cache), never_stopped) == []


@pytest.mark.slow
def test_two_processes_stopped_through_torchrun(cache, tmp_path):
    out = tmp_path / "two"
    returned, _, err = stop("kill", signal.SIGTERM, out, 4, "two", cache)
    assert returned != 0 and err.count("stopped by SIGTERM after step ") == 1, err[-3000:]
    assert finished(out, cache, 2)["wer"].startswith("%WER")


def dying(seconds, victim, *words):
    """Train, and kill the one process at a moment that nothing chose."""
    if os.environ.get("RANK", "0") == victim:
        timer = threading.Timer(float(seconds), os.kill, (os.getpid(), signal.SIGKILL))
        timer.daemon = True
        timer.start()
    command(str(ROOT), *words)


@pytest.mark.long
@pytest.mark.timeout(2400)  # some minutes on cores that are free
@pytest.mark.parametrize("ranks", [1, 2])
def test_killed_at_random_twenty_times(cache, tmp_path, ranks):
    draw, began = random.Random(ranks), time.monotonic()
    expected = finished(tmp_path / "whole", cache, ranks)
    span, kills, runs = time.monotonic() - began, [], 0
    while len(kills) < 20:
        runs += 1
        out, codes = tmp_path / str(runs), None
        while len(kills) < 20 and codes != {0}:
            seconds, victim = draw.uniform(0.0, span), draw.randrange(ranks)
            given = f"{seconds}", f"{victim}", *map(str, words(out))
            ended = programs(ranks, dying, *given, timeout=300, **ON_A_CPU, SBKIT_CACHE=str(cache))
            codes = {each.returncode for each in ended}
            if codes != {0}:
                assert ended[victim].returncode == -signal.SIGKILL, ended[victim].stderr[-3000:]
                kills.append((runs, victim, round(seconds, 1), saved_step(out)))
        assert different(finished(out, cache, ranks), expected) == []
    print(f"{ranks} processes, {expected['steps']} steps, {span:.0f} s: {len(kills)} kills in {runs} runs "
          f"(run, process, seconds, step of its last checkpoint): {kills}")
