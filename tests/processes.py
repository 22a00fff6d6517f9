"""Run a function in several processes that are ranks of one job on this machine, as torchrun would, or as a program."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch.distributed import TCPStore

from sbkit.rehearsal import fake_gpu
from sbkit.system.processes import free_port, torchrun_environment

# A server that has imported everything forks the ranks: the first launch is slow, the others are not.
CONTEXT = multiprocessing.get_context("forkserver")
# No process that is forked from one that has asked for cards can use CUDA.
PRELOAD = ["tools.gpu.preload", "processes", "warm", "settled"]
CONTEXT.set_forkserver_preload(PRELOAD)
_SERVER: Any = forkserver.ensure_running.__self__
# The store is outside of the ranks, as with torchrun: the first may end while another still asks.
AGENT = {"TORCHELASTIC_USE_AGENT_STORE": "True"}
ROOT = Path(__file__).resolve().parents[1]
#: Of a command of sbkit that may use CUDA cards, and of one that may not.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
ON_A_CPU = {**ENVIRONMENT, "CUDA_VISIBLE_DEVICES": ""}


def start_server() -> None:
    """Start the server if it doesn't run yet."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CALLERS_PYTHONPATH", os.environ.get("PYTHONPATH", ""))  # settled gives it back to what is forked
        patch.setenv("PYTHONPATH", os.pathsep.join(map(os.path.abspath, sys.path)))  # all it has before Python 3.12.3
        _SERVER.ensure_running()


def share_server() -> None:
    """Start it for this process and for all that are forked from it, which could only ask after a child of theirs."""
    start_server()
    os.register_at_fork(after_in_child=lambda: setattr(_SERVER, "ensure_running", lambda: None))


def _started(fn: Callable[..., None], *args: object) -> BaseProcess:
    start_server()
    process = CONTEXT.Process(target=fn, args=args)
    process.start()
    return process


class Outcome(NamedTuple):
    """How one rank ended: what it returned, or what it raised."""

    value: Any
    error: BaseException | None
    seconds: float


def outcomes(fn, *args, world: int = 2, timeout: float = 120) -> list[Outcome]:
    """Each rank's end; ``fn(*args)`` is a function at the top of its module."""
    port, pipes, processes = free_port(), [], []
    for rank in range(world):
        ours, theirs = CONTEXT.Pipe()
        processes.append(_started(_run, theirs, rank, world, port, fn, args))
        theirs.close()
        pipes.append(ours)
    found: dict[int, Outcome] = {}
    until = time.monotonic() + timeout
    try:
        for rank, pipe in enumerate(pipes):
            if pipe.poll(max(0.0, until - time.monotonic())):
                found[rank] = Outcome(*pickle.loads(pipe.recv_bytes()))
        hanging = [rank for rank in range(world) if rank not in found]
        assert not hanging, f"ranks {hanging} of {world} hang in {fn.__name__}; others: {found}"
    finally:
        for pipe in pipes:
            pipe.close()
        for process in processes:
            process.join(timeout=1 if len(found) < world else 20)
            if process.is_alive():
                process.kill()
    return list(found.values())


def results(fn, *args, **kwargs) -> list:
    """What each rank returned; the first failure is raised."""
    found = outcomes(fn, *args, **kwargs)
    for outcome in found:
        if outcome.error is not None:
            raise outcome.error
    return [outcome.value for outcome in found]


def environment_of(rank: int, world: int, port: int) -> dict[str, str]:
    return torchrun_environment(rank, world, port) | {"GLOO_SOCKET_IFNAME": "lo"}


def _run(pipe, rank, world, port, fn, args) -> None:
    os.environ.update(environment_of(rank, world, port))
    torch.set_num_threads(1)
    multiprocessing.set_start_method("fork", force=True)  # of its own children, as in a program that nobody forked
    if fake_gpu.active():
        from sbkit.rehearsal import no_values

        no_values.install()
    start = time.monotonic()
    value = error = None
    try:
        value = fn(*args)
    except BaseException as raised:
        error = raised
        error.add_note("".join(traceback.format_exception(raised))) if hasattr(error, "add_note") else None
    try:
        message = pickle.dumps((value, error, time.monotonic() - start))
    except Exception:
        message = pickle.dumps((None, RuntimeError(f"rank {rank}: {error!r}, {value!r}"), 0.0))
    pipe.send_bytes(message)  # plain pickle: torch's own would share memory that ends with this process
    from sbkit.train.distributed import ranks

    if error is None:
        pipe.poll(5)  # until all ranks are done, as some may still read the store, which rank 0 holds
        ranks.shutdown()
    os._exit(0)


class Ended(NamedTuple):
    """How a program ended: its exit code (negative: the signal that killed it) and what it said."""

    returncode: int
    stdout: str
    stderr: str


def program(fn, *args: str, timeout: float = 120, **environment: str) -> Ended:
    """``fn(*args)`` as a program whose imports are done already; what it started may outlive it, as after a kill."""
    (ended,) = programs(1, fn, *args, timeout=timeout, **environment)
    return ended


def programs(world: int, fn, *args: str, timeout: float = 120, **environment: str) -> list[Ended]:
    """The same in several processes at once that are ranks of one job."""
    with tempfile.TemporaryDirectory() as folder:
        streams = [(Path(folder, f"out{rank}"), Path(folder, f"err{rank}")) for rank in range(world)]
        store, processes = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False), []
        for rank, (out, err) in enumerate(streams):
            job = environment_of(rank, world, store.port) | AGENT if world > 1 else {}
            processes.append(_started(_program, str(out), str(err), job | environment, fn, args))
        until = time.monotonic() + timeout
        for process in processes:
            process.join(max(0.0, until - time.monotonic()))
        hanging = [rank for rank, process in enumerate(processes) if process.exitcode is None]
        for rank in hanging:
            processes[rank].kill()
            processes[rank].join()
        if hanging:
            raise AssertionError(f"{fn.__name__}{args} hangs:\n{streams[hanging[0]][1].read_text()}")
        return [Ended(process.exitcode, out.read_text(), err.read_text())
                for process, (out, err) in zip(processes, streams, strict=True)]


def _program(out, err, environment, fn, args) -> None:
    for stream, path in ((sys.stdout, out), (sys.stderr, err)):
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, stream.fileno())
        os.close(handle)
    os.environ.update(environment)
    multiprocessing.set_start_method("fork", force=True)  # of its own children, as in a program that nobody forked
    fn(*args)


def sbkit(*words: object, cwd: Path = ROOT, ranks: int = 1, code: int = 0, timeout: float = 400, cards: bool = False,
          **environment: str) -> Ended:
    """``python -m sbkit WORDS`` with its imports done already, as one process or as several ranks; what they all said.

    They share one Python's hashes of texts: compare with a Python of its own what must not depend on them.

    cards : whether it sees this machine's CUDA cards
    """
    environment = (ENVIRONMENT if cards else ON_A_CPU) | environment
    done = programs(ranks, command, str(cwd), *map(str, words), timeout=timeout, **environment)
    said = Ended(done[0].returncode, *("".join(streams) for streams in zip(*(rank[1:] for rank in done), strict=True)))
    assert {rank.returncode for rank in done} == {code}, said.stdout[-2000:] + said.stderr[-4000:]
    return said


def killed(when: Callable[[], bool], *words: object, cwd: Path = ROOT, timeout: float = 200,
           **environment: str) -> bool:
    """Start the same and kill it, and nothing that it started, as soon as something holds; False if it ended before."""
    words = str(cwd), *map(str, words)
    with tempfile.TemporaryDirectory() as folder:
        said = Path(folder, "said")
        process = _started(_program, str(said), str(said), ON_A_CPU | environment, command, words)
        until = time.monotonic() + timeout
        try:
            while not when():
                if process.exitcode == 0:
                    return False
                assert process.exitcode is None and time.monotonic() < until, (
                    f"{words}: {process.exitcode}\n{said.read_text()[-4000:]}")
                time.sleep(0.02)
            return True
        finally:
            process.kill()
            process.join()


def command(cwd: str, *words: str) -> None:
    """Run a command of sbkit in a folder and leave this process.

    A run on one rank counts operations with COUNT_FLOPS=1 alone, as that is a tenth of what a small one takes.
    """
    from sbkit.cli import main
    from sbkit.recipe import flops

    if words[0] == "train" and os.environ.get("WORLD_SIZE", "1") == "1" and "COUNT_FLOPS" not in os.environ:
        flops.operations_per_second = lambda *_: 1e6
    os.chdir(cwd)
    sys.path.insert(0, cwd)
    sys.argv[:] = ["sbkit", *words]
    sys.exit(main(words))


class Beside:
    """``fn(pipe, *args)`` in a process beside this one while the block lasts; ``pipe`` is our end of its pipe."""

    def __init__(self, fn, *args, **environment: str):
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = _started(_beside, fn, theirs, environment, args)
        theirs.close()

    def kill(self) -> None:
        """It alone: what it started lives on."""
        self.process.kill()
        self.process.join()

    def __enter__(self) -> Beside:
        return self

    def __exit__(self, *error: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.join()
        self.pipe.close()


def _beside(fn, pipe, environment, args) -> None:
    os.setsid()
    os.environ.update(environment)
    fn(pipe, *args)
