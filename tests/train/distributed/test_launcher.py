"""Ranks that never join are named; a killed torchrun takes its processes with it, and no others."""

import datetime
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch
from refusals import refused

from sbkit.system.processes import born, free_port
from sbkit.train.distributed import joining, ranks

ROOT = Path(__file__).parents[3]
#: Trains two steps, waits where it can't be reached (in a collective that rank 1 never joins), and saves meanwhile.
WORKER = """
    import os, sys, time
    from pathlib import Path
    import torch
    import torch.distributed as dist
    from sbkit.train.distributed import ranks
    from sbkit.train.checkpoint import Checkpointer
    folder = Path(sys.argv[1])
    ranks.init(torch.device("cpu"))
    model = torch.nn.Linear(2, 2)
    shelf = Checkpointer(folder / "save", {"model": model}, asynchronous=True)
    resumed = shelf.recover_if_possible()
    shelf.save_checkpoint({"resumed": resumed is not None})
    shelf.wait()
    (folder / f"rank{ranks.rank()}").write_text(str(os.getpid()))
    if resumed is not None:
        ranks.shutdown()
    elif ranks.rank():
        time.sleep(600)
    else:
        with ranks.failing_together():  # as a run is: either end may be heard of first
            dist.all_reduce(torch.ones(1))
"""


def started(folder, *launcher):
    script = folder / "worker.py"
    script.write_text(textwrap.dedent(WORKER))
    with open(folder / "log", "a") as log:
        return subprocess.Popen(
            [sys.executable, *launcher, str(script), str(folder)], stdout=log, stderr=log,
            env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"})


def until(what, seconds):
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end
        time.sleep(0.1)


@pytest.mark.long
@pytest.mark.slow
def test_processes_of_a_killed_torchrun_end_in_seconds_say_so_and_the_next_start_resumes(tmp_path):
    agent = started(tmp_path, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2")
    pids = [tmp_path / f"rank{rank}" for rank in range(2)]
    until(lambda: all(path.exists() and path.read_text() for path in pids), 120)
    agent.kill()
    agent.wait()
    workers = [int(path.read_text()) for path in pids]
    until(lambda: not any(map(born, workers)), 30)
    told = (tmp_path / "log").read_text()
    assert told.count(f"torchrun (process {agent.pid}), which started this process, is gone") == 2
    assert started(tmp_path).wait(120) == 0
    resumed = [path.read_text() for path in (tmp_path / "save").glob("CKPT*/CKPT.yaml")]
    assert len(resumed) == 2 and "resumed: true" in "".join(resumed)


STARTED = """
    import os, sys, time
    from pathlib import Path
    from sbkit.train.distributed import launcher
    launcher.POLL_SECONDS = 0.1
    child = os.fork()
    if child == 0:
        launcher.watch_launcher()
        Path(sys.argv[1]).write_text(str(os.getpid()))
        time.sleep(600)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.05)
    os._exit(0)
"""


@pytest.mark.parametrize("environment, ends", [
    ({"RANK": "0", "LOCAL_RANK": "0"}, False), ({"TORCHELASTIC_RUN_ID": "none"}, True)])
def test_only_what_torchrun_started_ends_with_its_parent(tmp_path, environment, ends):
    """A shell that has gone, as with nohup, is no reason."""
    clean = {name: value for name, value in os.environ.items() if name not in ("RANK", "TORCHELASTIC_RUN_ID")}
    pid = tmp_path / "pid"
    subprocess.run([sys.executable, "-c", textwrap.dedent(STARTED), str(pid)], check=True, timeout=60,
                   stderr=subprocess.DEVNULL, env={**clean, **environment, "PYTHONPATH": str(ROOT)})
    child = int(pid.read_text())
    try:
        if ends:
            until(lambda: not born(child), 60)
        else:
            time.sleep(2)
            assert born(child)
    finally:
        if born(child):
            os.kill(child, signal.SIGKILL)


@pytest.mark.parametrize("rank, who", [(0, "ranks 1, 2"), (1, "rank 0")])
def test_ranks_that_never_join_are_named_and_not_waited_for_without_end(monkeypatch, caplog, rank, who):
    agent = torch.distributed.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    monkeypatch.setattr(joining, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(joining, "COLLECTIVE_TIMEOUT", datetime.timedelta(seconds=1))
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": agent.port, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    with refused("missing-rank"):
        ranks.init(torch.device("cpu"))
    assert [f"Waiting for {who}, which" in record.getMessage() for record in caplog.records] == [True]
