"""Checks that end in different ways."""

import os
import signal
import time


def well(bench):
    bench.found("one", "fine", True, figure=1.5)
    bench.note("a note")
    bench.measured("two", "slow", False)


def crashes(bench):
    bench.found("one", "fine", True)
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(bench):
    print("on its way")
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")


def hangs(bench):
    bench.found("one", "fine", True)
    if os.fork() == 0:
        time.sleep(600)
    (bench.folder / "child").touch()
    time.sleep(600)
