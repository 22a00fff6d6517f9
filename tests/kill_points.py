"""Saves checkpoints, and finds what a kill (-9) at each operation on the disk, and at any other moment, leaves."""

import builtins
import contextlib
import os
import random
import shutil
import signal
import subprocess
import time
from pathlib import Path

import pytest
import torch
from speechbrain.utils import checkpoints as stock
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.train.checkpoint import Checkpointer

OPERATIONS = ("fsync", "rename", "replace", "unlink", "rmdir", "mkdir", "open", "chmod")


class Disturber:
    """Patches what changes a disk so that ``tick`` is called before each operation.

    torch writes a small state in some fifty pieces; only ``finely`` does each count, else the first.
    """

    def __init__(self, finely=False):
        self.finely, self.done, self.names = finely, 0, []
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


class Copying(Disturber):
    """Before each operation the folder is copied, as a kill would leave it: ``folder.1``, ``folder.2`` and so on.

    Of the pieces that a file is written in, each third, so that now a whole piece is the last and now a half.
    """

    def __init__(self, folder, finely=False):
        self.folder, self.copies = folder, []
        super().__init__(finely)

    def tick(self, name):
        super().tick(name)
        if name != "write" or not self.finely or self.done % 3 == 0:
            copy(self.folder, f"{self.folder}.{self.done}")
            self.copies.append(f"{self.folder}.{self.done}")


def copy(folder, to):
    """By a program, as what Python does may be disturbed."""
    subprocess.run(["cp", "-a", folder, to], check=True)


class WithoutMemory(Disturber):
    """At the n-th operation there is no memory left: of those on the disk, and of copies of tensors."""

    MORE = ((torch.Tensor, "clone"), (torch, "save"))

    def __init__(self, number, error):
        self.number, self.error = number, error
        super().__init__()
        for module, name in self.MORE:
            setattr(module, name, self.wrapped(name, getattr(module, name)))

    def tick(self, name):
        super().tick(name)
        if self.done == self.number:
            raise self.error("there is none left")


@contextlib.contextmanager
def disturbed(*more):
    """What a Disturber patches is given back at the end, and ``more`` pairs of a module and a name."""
    with pytest.MonkeyPatch.context() as patch:
        for module, name in (*((os, name) for name in OPERATIONS), (builtins, "open"), *more):
            patch.setattr(module, name, getattr(module, name))
        yield


class Halting:
    """A file whose writes come in two halves, with a tick before, between and after."""

    def __init__(self, file, disturber):
        self.file, self.disturber, self.begun = file, disturber, False

    def write(self, data):
        half = len(data) // 2
        for part in (data[:half], data[half:]):
            if self.disturber.finely or not self.begun:
                self.disturber.tick("write")
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


def next_start(folder):
    """What is found after a kill, by us and by SpeechBrain, and whether a new save leaves all tidy."""
    run = Run(folder)
    number = run.recover()
    assert Run(folder, stock.Checkpointer).recover() == number
    run.save(100)
    left = [path.name for path in Path(folder).iterdir() if path.name.startswith(".")]
    assert not left, f"left behind: {left}"
    assert Run(folder).recover() == 100
    return number


def killed_while_saving(folder, asynchronous, name, finely=False):
    """Save number 2 where 1 is: the operations, and the folders that kills at them leave."""
    Run(folder).save(1, name)
    run = Run(folder, asynchronous=asynchronous)
    with disturbed():
        copying = Copying(folder, finely)
        run.save(2, name)
    return copying


def killed_again_while_tidying(folder):
    """What is found after a start in what a kill left is killed at each of its own operations, and after it is not."""
    with disturbed():
        copying = Copying(folder)
        Run(folder)
    return [next_start(each) for each in (*copying.copies, folder)]


def saved_without_memory(folder, asynchronous, name, number, error):
    """Save number 2 where 1 is, with no memory at an operation: whether that was an error, and what is found then.

    None if there are fewer operations.
    """
    Run(folder).save(1, name)
    run, failed = Run(folder, asynchronous=asynchronous), False
    with disturbed(*WithoutMemory.MORE):
        without = WithoutMemory(number, error)
        try:
            run.save(2, name)
        except error:
            failed = True
    return None if without.done < number else (failed, next_start(folder))


def killed_at_random(folder, times):
    """Processes save number after number until killed at any moment, also inside the kernel or torch."""
    random.seed(1)
    torch.set_num_threads(1)
    for _ in range(int(times)):
        shutil.rmtree(folder, ignore_errors=True)
        Run(folder).save(1)
        progress = Path(f"{folder}.progress")
        progress.write_text("1")
        pid = os.fork()
        if pid == 0:
            run = Run(folder, asynchronous=True)
            for number in range(2, 10**6):
                run.save(number)
                progress.write_text(str(number))
        time.sleep(random.uniform(0.02, 0.1))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        number = next_start(folder)
        saved = int(progress.read_text() or number)  # killed while noting it: any will do
        assert saved <= number <= saved + 1, f"{saved} was saved, {number} is found"
