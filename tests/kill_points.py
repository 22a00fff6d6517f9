"""Saves checkpoints, is killed (-9) at each operation on the disk in turn, prints what is found next.

Run by test_kill_resume.py, in a process of its own, because it forks a process for every kill.
"""

import builtins
import json
import os
import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path

import torch
from speechbrain.utils import checkpoints as stock
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.train.checkpoint import Checkpointer

torch.set_num_threads(1)
OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open")


class Killer:
    """Patches what changes a disk so that operation number ``at`` is the last thing this process does.

    torch writes a small state in some fifty pieces; only ``finely`` does each count, else the first.
    """

    def __init__(self, at, finely=False):
        self.at, self.finely, self.done, self.names = at, finely, 0, []
        for name in OPERATIONS:
            setattr(os, name, self.wrapped(name, getattr(os, name)))
        opening = builtins.open
        builtins.open = lambda file, mode="r", *args, **kwargs: (
            Halting(opening(file, mode, *args, **kwargs), self) if "w" in mode
            else opening(file, mode, *args, **kwargs))

    def wrapped(self, name, function):
        def call(*args, **kwargs):
            self.tick(name)
            return function(*args, **kwargs)
        return call

    def tick(self, name):
        self.done += 1
        self.names.append(name)
        if self.done == self.at:
            os.kill(os.getpid(), signal.SIGKILL)


class Halting:
    """A file whose writes come in two halves, with a kill possible before, between and after."""

    def __init__(self, file, killer):
        self.file, self.killer, self.begun = file, killer, False

    def write(self, data):
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            if self.killer.finely or not self.begun:
                self.killer.tick("write")
            self.file.write(part)
            self.file.flush()
        self.begun = True
        return len(data)

    def __getattr__(self, name):
        return getattr(self.file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.file.close()


class Run:
    """A model whose weights, optimizer and epoch counter all say which checkpoint they are from."""

    def __init__(self, folder, kind=Checkpointer, **options):
        self.model = torch.nn.Linear(8, 8)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.0)
        self.counter = EpochCounter(10**9)
        recoverables = {"model": self.model, "optimizer": self.optimizer, "counter": self.counter}
        self.checkpointer = kind(folder, recoverables, **options)

    def save(self, number, name=None):
        for param in self.model.parameters():
            torch.nn.init.constant_(param, number)
        self.optimizer.param_groups[0]["lr"] = float(number)
        self.counter.current = number
        self.checkpointer.save_and_keep_only(name=name, meta={"number": number}, max_keys=["number"])
        if isinstance(self.checkpointer, Checkpointer):
            self.checkpointer.wait()

    def recover(self):
        ckpt = self.checkpointer.recover_if_possible()
        weights = {float(value) for param in self.model.parameters() for value in param.detach().flatten()}
        found = weights | {self.optimizer.param_groups[0]["lr"], self.counter.current, ckpt.meta["number"]}
        assert len(found) == 1, f"a mixture: {found}"
        return int(found.pop())


def in_a_process(job):
    """Run ``job`` in a fork; True if it was killed. What it returns is written as JSON and read back."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.write(writing, json.dumps(job()).encode())
            code = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        text = pipe.read()
    status = os.waitpid(pid, 0)[1]
    killed = os.WIFSIGNALED(status)
    assert killed or status == 0, f"a start after a kill failed: {os.WEXITSTATUS(status)}"
    return killed, json.loads(text) if text else None


def next_start(folder):
    """What is found after a kill, by us and by SpeechBrain, and whether a new save leaves all tidy.

    In this process: nothing kills it, and a fork takes longer than it does.
    """
    run = Run(folder)
    number = run.recover()
    assert Run(folder, stock.Checkpointer).recover() == number
    run.save(100)
    left = [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]
    assert not left, f"left behind: {left}"
    assert Run(folder).recover() == 100
    return number


def saving(folder, at, asynchronous, name, finely):
    """Save number 2 where 1 is; killed at operation ``at``."""
    def job():
        run = Run(folder, asynchronous=asynchronous)
        killer = Killer(at, finely)
        run.save(2, name)
        return killer.names
    return job


def fresh(folder, name):
    """A folder with checkpoint 1."""
    made = f"{folder}.{name}"
    if not os.path.exists(made):
        in_a_process(lambda: Run(made).save(1, name))
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder)


def every_point(folder, asynchronous, name, finely):
    """Of the pieces that a file is written in, each third, so that now a whole piece is the last and now a half."""
    operations, found = saved_after(folder, 0, asynchronous, name, finely)
    assert found == 2
    points = [at for at, operation in enumerate(operations, 1) if operation != "write" or not finely or at % 3 == 0]
    found = [saved_after(folder, at, asynchronous, name, finely)[1] for at in points]
    return {"operations": operations, "points": points, "found": found}


def saved_after(folder, at, asynchronous, name, finely):
    """The operations of a save that was killed at one of them (0: of none), and what the next start finds."""
    fresh(folder, name)
    killed, operations = in_a_process(saving(folder, at, asynchronous, name, finely))
    assert killed == bool(at)
    return operations, next_start(folder)


def killed_again_while_tidying(folder, first):
    """After a kill at operation ``first``, the next start is killed at each of its own operations."""
    at, found = 1, []
    while True:
        fresh(folder, "best")
        in_a_process(saving(folder, first, False, "best", False))

        def start(at=at):
            Killer(at)
            Run(folder)
        killed = in_a_process(start)[0]
        found.append(next_start(folder))
        if not killed:
            return {"first": first, "found": found}
        at += 1


def at_random(folder, times, seed):
    """Saves number after number until killed at any moment, also inside the kernel or torch."""
    random.seed(seed)
    found = []
    for _ in range(times):
        fresh(folder, None)
        progress = Path(f"{folder}.progress")
        progress.write_text("1")
        pid = os.fork()
        if pid == 0:
            run = Run(folder, asynchronous=True)
            for number in range(2, 10**6):
                run.save(number)
                progress.write_text(str(number))
        time.sleep(random.uniform(0.02, 0.3))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        number = next_start(folder)
        saved = int(progress.read_text() or number)  # killed while noting it: any will do
        assert saved <= number <= saved + 1, f"{saved} was saved, {number} is found"
        found.append(number)
    return {"found": found}


def main(folder):
    """One JSON object with what was found after each kill."""
    Run(f"{folder}/warm").save(1)  # what torch imports at its first use, it then does not in every fork
    report = {}
    for where, how in {
        "finely": (False, None, True), "async": (True, None, False),
        "replaced": (False, "best", False), "replaced, async": (True, "best", False),
    }.items():
        report[where] = every_point(f"{folder}/checkpoints", *how)
    firsts = range(1, len(report["replaced"]["operations"]) + 1, 5)
    report["again"] = [killed_again_while_tidying(f"{folder}/again", first) for first in firsts]
    report["random"] = at_random(f"{folder}/random", 30, seed=1)
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1])
