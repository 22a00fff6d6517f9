"""Ranks of one machine sum tensors in memory that they share, or go on with gloo where they can't."""

from __future__ import annotations

import errno
import logging
import os
import random
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import outcomes, programs, results

from sbkit.errors import SbkitError
from sbkit.system import processes
from sbkit.train.distributed import failures, ranks, shared_memory, shared_sums
from sbkit.train.distributed.failures import PeerFailed
from sbkit.train.distributed.run_group import group
from sbkit.train.distributed.shared_sums import PART_BYTES, SharedSums

pytestmark = [pytest.mark.slow, pytest.mark.skipif(sys.platform != "linux", reason="it is written for Linux")]

TYPES = [torch.float32, torch.float64, torch.bfloat16, torch.int32, torch.int64]
#: Up to more than two parts of every type.
SIZES = [0, 1, 15, 17, 1000, PART_BYTES // 8, PART_BYTES + 13]


def join():
    ranks.init(torch.device("cpu"))
    assert isinstance(group.sums, SharedSums)


def values(seed, size, dtype):
    made = torch.randn(size, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 1000
    return made.to(dtype)


def added(tensors):
    """Their sum in the order of ranks, rounded once."""
    wide = torch.float32 if tensors[0].dtype == torch.bfloat16 else tensors[0].dtype
    total = tensors[0].to(wide)
    for tensor in tensors[1:]:
        total = total + tensor.to(wide)
    return total.to(tensors[0].dtype)


def summed():
    join()
    wrong = []
    for size in SIZES:
        for dtype in TYPES:
            of_ranks = [values(100 * size + rank, size, dtype) for rank in range(ranks.world_size())]
            own = of_ranks[ranks.rank()].clone()
            ranks.sum_in_place(own)
            if not torch.equal(own, added(of_ranks)):
                wrong.append((size, dtype))
    return wrong


@pytest.mark.parametrize("world", [2, 3, 4])
def test_sums_are_those_in_the_order_of_ranks_to_the_bit(world):
    assert results(summed, world=world) == [[]] * world


def beside_gloo():
    join()
    different = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64):
        tensor = values(ranks.rank(), 12345, dtype)
        tensor[:3] = torch.tensor([0.0, -0.0, 1e4]).to(dtype)
        here = ranks.sum_across(tensor)
        dist.all_reduce(tensor)
        if not torch.equal(here.view(torch.uint8), tensor.view(torch.uint8)):
            different.append(dtype)
    columns = values(ranks.rank(), 40, torch.float32).view(5, 8).T
    total = ranks.sum_across(columns)
    return different, torch.equal(total.flatten(), ranks.sum_across(columns.flatten()))


def test_two_ranks_get_the_bits_of_gloo():
    assert results(beside_gloo) == [([], True)] * 2


def with_pauses(rounds):
    """Many sums of any size, in some of which a rank is late by more than a look at the others."""
    join()
    sizes, pauses = random.Random(1), random.Random(ranks.rank())
    wrong = []
    for number in range(rounds):
        size = int(10 ** sizes.uniform(0, 6))
        if pauses.random() < 0.1:
            time.sleep(pauses.choice([1e-5, 1e-3, 0.03, 0.3]) * pauses.random())
        tensor = torch.full((size,), float(number + ranks.rank()))
        started = ranks.start_sum(tensor)
        others = ranks.any_of({"odd": number % 2 == 1 and ranks.rank() == 0})
        started.wait()
        world = ranks.world_size()
        if not bool((tensor == number * world + world * (world - 1) / 2).all()) or others["odd"] != (number % 2 == 1):
            wrong.append(number)
    return wrong


@pytest.mark.parametrize("world, rounds", [(2, 300), (3, 200), (4, 100)])
def test_ranks_may_come_late(world, rounds):
    assert results(with_pauses, rounds, world=world) == [[]] * world


def others_sum():
    join()
    with pytest.raises(AssertionError, match="other ranks sum another tensor than"):
        ranks.sum_in_place(torch.ones(3 + ranks.rank()))
    with pytest.raises(AssertionError, match="other ranks sum another tensor than"):  # there can't be another one
        ranks.sum_in_place(torch.ones(3))


def test_sums_of_different_tensors_are_an_error_on_all_ranks():
    results(others_sum, world=3)


# ------------------------------------------------------------------ memory


def memory_of(process):
    return [line for line in Path(f"/proc/{process}/maps").read_text().splitlines() if "memfd:sbkit" in line]


def open_files():
    links = [f"/proc/self/fd/{name}" for name in os.listdir("/proc/self/fd")]
    return [os.readlink(link) for link in links if os.path.lexists(link)]


def joined_and_left():
    join()
    during = len(memory_of(os.getpid()))
    ranks.sum_across(torch.ones(3))
    ranks.shutdown()
    return during, len(memory_of(os.getpid())), [path for path in open_files() if "pidfd" in path or "sbkit-" in path]


def test_memory_has_no_name_and_is_given_back_when_a_rank_leaves():
    assert results(joined_and_left) == [(1, 0, [])] * 2
    assert not [name for name in os.listdir("/dev/shm") if "sbkit" in name]


def joined_twice():
    sums = []
    for _ in range(2):
        join()
        sums.append(ranks.sum_across(torch.tensor(1.0 + ranks.rank())).item())
        ranks.barrier()
        ranks.shutdown()
        os.environ["MASTER_PORT"] = str(int(os.environ["MASTER_PORT"]) + 1)
    return sums


def test_a_process_may_join_again():
    assert results(joined_twice) == [[3.0, 3.0]] * 2


def without_it(obstacle):
    """What rank 0 logs where something stands in the way on one rank."""
    if obstacle == "namespace" and os.environ["RANK"] == "1":
        processes.namespace = lambda: "pid:[1]"
    if obstacle == "number" and os.environ["RANK"] == "1":  # of its process, in a namespace of the same name
        shared_memory._mapped = lambda main, *rest, mapped=shared_memory._mapped: mapped(
            main._replace(process=os.getpid(), descriptor=0), *rest)
    if obstacle == "memory" and os.environ["RANK"] == "0":
        def refuse(*_):
            raise OSError(errno.ENOSPC, "No space left on device")
        os.posix_fallocate = refuse
    if obstacle == "compiler" and os.environ["RANK"] == "1":
        os.environ["SBKIT_KERNELS"] = "0"
    logged = []
    shared_sums.logger.setLevel(logging.INFO)
    shared_sums.logger.info = lambda text, *values: logged.append(text % values)
    ranks.init(torch.device("cpu"))
    assert not isinstance(group.sums, SharedSums)
    return ranks.sum_across(torch.ones(2)).tolist(), logged


@pytest.mark.parametrize("obstacle, reason", [
    ("namespace", "rank 1 can't open rank 0's memory (it is on another machine or in another container)"),
    ("number", "rank 1 can't open rank 0's memory (/proc/"),
    ("memory", "rank 0 can't make memory to share ([Errno 28] No space left on device)"),
    ("compiler", "SBKIT_KERNELS=0"),
])
def test_all_go_on_with_gloo_if_one_rank_can_not(obstacle, reason):
    first, second = results(without_it, obstacle)
    assert first[0] == second[0] == [2.0, 2.0] and second[1] == []
    [line] = first[1]
    assert line.startswith("Ranks sum by gloo, and not in shared memory, which would be faster: " + reason)


# ------------------------------------------------------------------ while others wait


def interrupted():
    """A rank handles a signal while it waits in a sum, and the sum goes on."""
    join()
    received = []
    signal.signal(signal.SIGTERM, lambda *_: received.append(time.monotonic()))
    if ranks.rank() == 0:
        began = time.monotonic()
        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGTERM))
        signal.setitimer(signal.ITIMER_REAL, 0.3)
    else:
        time.sleep(1.5)
    total = ranks.sum_across(torch.ones(5))
    return total.tolist() == [2.0] * 5, received[0] - began if received else None


def test_a_signal_is_handled_while_a_rank_waits():
    (first, seconds), (second, _) = results(interrupted)
    assert first and second
    assert 0.2 < seconds < 1.2


def raised(fails):
    join()
    with ranks.failing_together():
        ranks.sum_across(torch.ones(1))
        if ranks.rank() == fails:
            raise ValueError("a damaged clip")
        ranks.sum_across(torch.ones(1))


@pytest.mark.parametrize("fails", [0, 2])
def test_an_error_on_one_rank_ends_those_that_wait(fails):
    ends = outcomes(raised, fails, world=3)
    assert isinstance(ends.pop(fails).error, ValueError)
    for end in ends:
        assert isinstance(end.error, PeerFailed) and end.error.code == 1 and end.seconds < 15


def leaves_by_an_error():
    join()
    failures._GRACE_SECONDS = 0.0
    if ranks.rank() == 1:
        try:
            with ranks.failing_together():
                raise SbkitError("disk-full", "no disk", exit_code=3)
        except SbkitError:
            return None
    with pytest.raises(PeerFailed):
        ranks.sum_across(torch.ones(1))
    with pytest.raises(PeerFailed) as again:  # as a step may try to finish its exchange after an error
        ranks.sum_across(torch.ones(1))
    return again.value.code


def test_a_sum_that_was_left_is_not_followed_by_another():
    assert results(leaves_by_an_error)[0] == 3


def killed_program(victim, when):
    """A program: one of its ranks is killed, before a sum or within one, while others wait for it."""
    join()
    try:
        with ranks.failing_together():
            for number in range(3000):
                if ranks.rank() == int(victim) and number == 2000:
                    if when == "in a sum":
                        signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGKILL))
                        signal.setitimer(signal.ITIMER_REAL, 0.05)
                    else:
                        os.kill(os.getpid(), signal.SIGKILL)
                ranks.sum_in_place(torch.ones(100 if number % 100 else 1_000_000))
    except SbkitError as error:
        if ranks.rank() == 0:  # as commands do
            print(error, file=sys.stderr)
        sys.exit(error.exit_code)


@pytest.mark.parametrize("when", ["before a sum", "in a sum"])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_is_one_line_of_those_that_waited_for_it(victim, when):
    began = time.monotonic()
    ended = programs(3, killed_program, str(victim), when)
    assert [each.returncode for each in ended] == [-signal.SIGKILL if i == victim else 1 for i in range(3)]
    said = "".join(each.stderr for each in ended)
    assert f"lost the connection to another rank (the process of rank {victim} has ended)" in said, said
    assert "Traceback" not in said, said
    assert time.monotonic() - began < 40
