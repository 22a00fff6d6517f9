"""The flagship, stopped in every way: the same command goes on, and ends as the run that was never stopped."""

import os
import signal
import subprocess
import sys
import time

import pytest
from processes import ON_A_CPU, ROOT
from trained_runs import different, go_on, kill_after, outcome, saved_step

#: A line for each step: after 10 s, it would be others on a slow machine.
TINY = ("--corpus.demo_hours 0.06 --number_of_epochs 2 --d_model 16 --nhead 2 --d_ffn 16 --num_encoder_layers 1 "
        "--cnn_first_channels 4 --cnn_channels 4 --num_workers 1 --precision fp32 --noprogressbar --no-check "
        "--ckpt_interval_minutes 0 --ckpt_interval_steps 2 --max_batch_seconds 16 --step_seconds 16 --least_steps 0 "
        "--log_interval 0").split()


def begin(out, cache, ranks=1):
    """Start training as a user does."""
    launch = ["-m", "torch.distributed.run", f"--nproc_per_node={ranks}", "--standalone"] if ranks > 1 else []
    command = [sys.executable, *launch, str(ROOT / "train.py"), "hparams/ctc.yaml", *TINY, "--output_folder", str(out)]
    env = {**os.environ, **ON_A_CPU, "SBKIT_CACHE": str(cache)}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                            start_new_session=True)


def end(process, timeout=400):
    out, err = process.communicate(timeout=timeout)
    return process.returncode, out, err


def stop_after(process, out, step, signum, to_all=False):
    """Send a signal some time after the checkpoint of a step, or of a later one."""
    deadline = time.monotonic() + 300
    while saved_step(out) < step:
        assert process.poll() is None and time.monotonic() < deadline, end(process)
        time.sleep(0.02)
    (os.killpg if to_all else os.kill)(process.pid, signum)
    return end(process)


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
    code, _, err = end(begin(out, cache))
    assert code == 0, err[-3000:]
    return everything(out)


def words(out):
    return "train", "hparams/ctc.yaml", *TINY, "--output_folder", out


def finished(out, cache, ranks=1):
    go_on(out, *words(out), ranks=ranks, SBKIT_CACHE=str(cache))
    return everything(out)


@pytest.mark.slow
def test_killed_twice(never_stopped, cache, tmp_path):
    out = tmp_path / "out"
    for share in (1 / 4, 2 / 3):
        kill_after(int(never_stopped["steps"] * share), out, *words(out), SBKIT_CACHE=str(cache))
    assert different(finished(out, cache), never_stopped) == []


@pytest.mark.slow
def test_stopped_by_ctrl_c(never_stopped, cache, tmp_path):
    """Which a terminal sends to the workers, too."""
    out = tmp_path / "out"
    returned, _, err = stop_after(begin(out, cache), out, never_stopped["steps"] // 3, signal.SIGINT, to_all=True)
    last = err.strip().splitlines()[-1]
    assert returned == 130 and "stopped by SIGINT after step " in last, err[-3000:]
    assert "run the same command to resume" in last and "Traceback" not in err
    assert different(finished(out, cache), never_stopped) == []


@pytest.mark.slow
def test_two_processes_stopped_through_torchrun(cache, tmp_path):
    out = tmp_path / "two"
    returned, _, err = stop_after(begin(out, cache, 2), out, 4, signal.SIGTERM)
    assert returned != 0 and err.count("stopped by SIGTERM after step ") == 1, err[-3000:]
    assert finished(out, cache, 2)["wer"].startswith("%WER")
