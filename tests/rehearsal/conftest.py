"""A process on fake GPUs that forks others, whose imports are done then."""

import subprocess
import sys

import pytest

from sbkit.rehearsal.cards import CARDS
from sbkit.rehearsal.fake_gpu import environment

#: Forks processes whose imports are done, for each line of scripts with their environments and where they print.
SERVER = """
import json, os, sys, traceback
from sbkit.rehearsal import fake_gpu
with fake_gpu.without_driver():
    import torch, sbkit.export.bundle, sbkit.rehearsal.rank, sbkit.runs.training
for line in sys.stdin:
    started = []
    for script, environment, out, err in json.loads(line):
        started.append(os.fork())
        if not started[-1]:
            os.environ.update(environment)
            for stream, path in ((1, out), (2, err)):
                os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
            code = 1
            try:
                exec(compile(script, "script", "exec"), {"__name__": "__main__"})
                code = 0
            except BaseException:
                traceback.print_exc()
            sys.stdout.flush(), sys.stderr.flush()
            os._exit(code)
    codes = [os.waitstatus_to_exitcode(os.waitpid(each, 0)[1]) for each in started]
    print(json.dumps(codes), flush=True)
"""


@pytest.fixture(scope="session")
def server():
    """Processes on fake GPUs, of any card and number: they read which when they first ask for one."""
    made = environment(CARDS["H100"], 1)
    with subprocess.Popen([sys.executable, "-c", SERVER], env=made, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as running:
        yield running
        running.stdin.close()
