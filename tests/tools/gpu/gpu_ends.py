"""Checks that end in different ways."""

import faulthandler
import itertools
import os
import signal
import threading
import time


def well(bench):
    bench.found("one", "fine", True, figure=1.5)
    bench.note("a note")
    bench.measured("two", "slow", False)


def crashes(bench):
    bench.found("one", "fine", True)
    faulthandler.disable()  # which pytest has on in what it forks
    os.kill(os.getpid(), signal.SIGSEGV)


def raises(bench):
    print("on its way")
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")


def hangs(bench):
    bench.found("one", "fine", True)
    for _ in range(4):
        if os.fork() == 0:
            writes(bench.folder)
    (bench.folder / "child").touch()
    time.sleep(600)


def writes(folder):
    """Files without end, from a thread: the process counts as ended before its threads have."""
    def on_and_on():
        for number in itertools.count():
            (folder / f"{os.getpid()}-{number % 100}").write_bytes(bytes(10_000))

    threading.Thread(target=on_and_on).start()
    time.sleep(600)
