"""One rank fails while the others sit in a collective that it will never join."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from processes import ROOT, programs

from sbkit.system.processes import born, free_port

# Leaving the group waits for ever, as with NCCL while a peer sits in a collective. A collective that waits for ever
# stands for NCCL's, too: gloo's ends with an error when a peer is gone.
JOB = """
import pathlib, sys, threading, time, torch, torch.distributed as dist
{settings}
if stuck is not None:
    dist.destroy_process_group = lambda *group: time.sleep(3600)
from torch.utils.data import DataLoader
from sbkit import cli
from sbkit.commands import train as command
from sbkit.errors import SbkitError
from sbkit.train.distributed import place, ranks
from sbkit.train.checkpoint.pending import BackgroundWriter

def write():
    time.sleep(1.0)
    (folder / f"checkpoint{{ranks.rank()}}").touch()

def train(words):
    ranks.init(device)
    try:
        with ranks.failing_together():
            dist.all_reduce(torch.ones(1, device=device))
            batches = iter(DataLoader(range(99), num_workers=1))
            next(batches)
            (folder / f"worker{{ranks.rank()}}").write_text(str(batches._workers[0].pid))
            BackgroundWriter().start(write)
            ranks.barrier()
            if ranks.rank() == fails:
                (folder / "failed").write_text(str(time.time()))
                raise error
            if stuck == "store":  # as in the first collective, where NCCL's ranks wait there for what rank 0 sets
                place.store().get("what nobody sets")
            if stuck:
                time.sleep(3600)
            dist.all_reduce(torch.ones(1, device=device))
            torch.ones(1, device=device).item()
            print("got here")
    finally:
        ranks.shutdown()

command.run = train
sys.exit(cli.main(["train", recipe]))
"""


def run(code: str) -> None:
    exec(code, {})


def ends(folder: Path, fails: int, error: str, stuck: str | None, device: str = '"cpu"'):
    """Exit codes, what was said on stderr, and the seconds it took from the failure to the last process's end."""
    settings = (f"folder, fails, stuck = pathlib.Path({str(folder)!r}), {fails}, {stuck!r}\n"
                f"recipe = {str(ROOT / 'hparams' / 'ctc.yaml')!r}\n"
                f"device = torch.device({device})\nfrom sbkit.errors import SbkitError\nerror = {error}")
    done = programs(2, run, JOB.format(settings=settings), MASTER_PORT=str(free_port()),
                    TORCHELASTIC_USE_AGENT_STORE="False")  # its store is in the first rank, and ends with it
    seconds = time.time() - float((folder / "failed").read_text())
    return [rank.returncode for rank in done], [rank.stderr for rank in done], seconds


@pytest.mark.slow
@pytest.mark.parametrize("fails, error, code, stuck", [
    (1, 'ValueError("a damaged clip")', 1, ""),
    (1, 'ValueError("a damaged clip")', 1, "store"),
    (0, 'SbkitError("damaged-file", "a damaged clip", exit_code=3)', 3, "collective"),
])
def test_all_ranks_end_at_once_with_one_message(tmp_path, fails, error, code, stuck):
    codes, said, seconds = ends(tmp_path, fails, error, stuck)
    assert codes == [code, code], said
    assert "".join(said).count("a damaged clip") == 1 and "a damaged clip" in said[fails], said
    assert said[1 - fails].count("Traceback") == 0, said
    assert seconds < 20  # on a machine that is busy: 2 where gloo's peer is gone, 5 where nothing tells of it
    assert all((tmp_path / f"checkpoint{rank}").exists() for rank in range(2))
    workers = [int((tmp_path / f"worker{rank}").read_text()) for rank in range(2)]
    until = time.monotonic() + 10
    while any(map(born, workers)) and time.monotonic() < until:
        time.sleep(0.1)
    assert not any(map(born, workers))


@pytest.mark.gpu(cards=2)
@pytest.mark.parametrize("fails", [0, 1])
def test_the_same_on_two_gpus(tmp_path, fails):
    codes, said, seconds = ends(tmp_path, fails, 'ValueError("a damaged clip")', None,
                                '"cuda", int(__import__("os").environ["LOCAL_RANK"])')
    assert codes == [1, 1] and seconds < 10, said
    assert "".join(said).count("ValueError: a damaged clip") == 1, said
