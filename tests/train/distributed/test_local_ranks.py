"""Ranks that a run starts by itself: they work as torchrun's, and none outlives the others, however one ends."""

import os
import signal
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist

from sbkit.errors import SbkitError
from sbkit.train.distributed import ranks
from sbkit.train.distributed.local_ranks import LocalRanks


def summed(folder):
    """What each rank does: join, add its rank and its number of threads to those of the others, and leave a file."""
    ranks.init(torch.device("cpu"))
    total = torch.tensor([ranks.rank(), torch.get_num_threads()])
    dist.all_reduce(total)
    with open(os.path.join(folder, f"rank{ranks.rank()}"), "w") as out:
        out.write(f"{os.getpid()} {total.tolist()}")
    ranks.shutdown()


def by_itself(function, *arguments):
    """Call a function of this file in a program of its own, whose further ranks write where it does."""
    code = f"import sys; sys.path[:0] = {sys.path!r}; import {__name__} as t; t.{function.__name__}(*{arguments!r})"
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120,
                          env={**os.environ, "GLOO_SOCKET_IFNAME": "lo"})


def sums_in(folder, world, threads):
    """A run's main process."""
    with LocalRanks(world, threads, summed, folder):
        summed(folder)
    assert "RANK" not in os.environ and "WORLD_SIZE" not in os.environ


@pytest.mark.slow
@pytest.mark.parametrize(("world", "threads"), [(2, 1), (3, 2)])
def test_further_ranks_join_with_their_threads_and_the_variables_end_with_the_context(tmp_path, world, threads):
    done = by_itself(sums_in, str(tmp_path), world, threads)
    assert done.returncode == 0, done.stderr
    left = [(tmp_path / f"rank{rank}").read_text().split(maxsplit=1) for rank in range(world)]
    assert {total for _, total in left} == {str([sum(range(world)), world * threads])}
    assert len({pid for pid, _ in left}) == world


def test_one_rank_starts_no_process_and_only_sets_its_threads(monkeypatch):
    before = torch.get_num_threads()
    try:
        with LocalRanks(1, 1, summed, "nowhere"):
            assert torch.get_num_threads() == 1 and not ranks.launched()
    finally:
        torch.set_num_threads(before)


def waits(folder, rank_that_ends, how):
    """Join, then one rank ends, while the others wait for it in a collective or for a key of the store."""
    ranks.init(torch.device("cpu"))
    with open(os.path.join(folder, f"pid{ranks.rank()}"), "w") as out:
        out.write(str(os.getpid()))
    try:
        with ranks.failing_together():
            if ranks.rank() == rank_that_ends:
                time.sleep(0.5)
                if how == "killed":
                    os.kill(os.getpid(), signal.SIGKILL)
                raise SbkitError("no-recordings", "this rank has no more recordings")
            if how == "killed":
                dist.all_reduce(torch.ones(1))
            else:
                ranks.run_on_main(time.sleep, 60)
    finally:
        ranks.shutdown()


def waiting_run(folder, rank_that_ends, how):
    with LocalRanks(2, 1, waits, folder, rank_that_ends, how):
        waits(folder, rank_that_ends, how)


def gone(folder, rank, seconds=20.0):
    """Whether the process of a rank ends in time."""
    pid = int((folder / f"pid{rank}").read_text())
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_and_is_named(tmp_path):
    done = by_itself(waiting_run, str(tmp_path), 1, "killed")
    assert done.returncode == 1
    assert "Rank 1 was killed by SIGKILL" in done.stderr and "run the same command to resume" in done.stderr


@pytest.mark.slow
def test_a_killed_rank_0_takes_the_others_with_it(tmp_path):
    done = by_itself(waiting_run, str(tmp_path), 0, "killed")
    assert done.returncode == -signal.SIGKILL
    assert gone(tmp_path, 1)


@pytest.mark.slow
def test_a_rank_that_fails_ends_the_run_with_its_message(tmp_path):
    done = by_itself(waiting_run, str(tmp_path), 1, "fails")
    assert done.returncode == SbkitError.exit_code
    assert "Rank 1 failed: this rank has no more recordings [no-recordings]" in done.stderr
    assert gone(tmp_path, 1)
