"""A rank that is stopped, and so neither works nor fails, is named while the others wait for it."""

from __future__ import annotations

import datetime
import os
import re
import signal
import threading
import time

import pytest
import torch
from processes import results

from sbkit.errors import SbkitError
from sbkit.system.processes import free_port
from sbkit.train.distributed import ending, ranks


def joined():
    """The warnings of a rank of which another would soon say that it is silent."""
    ending.SILENT_SECONDS, said = 4.0, []
    ending.logger.warning = lambda text, *values: said.append(text % values)
    ranks.init(torch.device("cpu"))
    return said


def stopped_for_a_while(stopped, seconds):
    """What the log of each rank says while one is stopped by the other, and then continued."""
    said = joined()
    pids = ranks.gather_objects(os.getpid())
    time.sleep(1.5)  # for the first heartbeats
    ranks.barrier()
    if ranks.rank() != stopped:
        os.kill(pids[stopped], signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (pids[stopped], signal.SIGCONT)).start()
    ranks.barrier()
    time.sleep(1.5)
    ranks.barrier()
    return pids, said


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])  # without torchrun rank 0 holds the store
def test_a_stopped_rank_is_named_once_and_when_it_responds_again(stopped):
    (pids, first), (_, second) = results(stopped_for_a_while, stopped, 10.0)
    said, own = (first, second) if stopped else (second, first)
    assert own == [] and len(said) == 2, (first, second)
    assert re.match(rf"Rank {stopped} \(host \S+, process {pids[stopped]}\) has not responded for ([4-9]|1\d) s, and "
                    rf"all others wait for it \(rank {1 - stopped} in ", said[0]), said
    assert said[1] == f"Rank {stopped} responds again."


@pytest.mark.slow
def test_a_rank_that_has_left_is_not_waited_for():
    assert results(leaves_early)[0] == []


def leaves_early():
    said = joined()
    time.sleep(1.0)
    ranks.barrier()
    if ranks.rank():
        ranks.shutdown()
        time.sleep(8)
    else:
        time.sleep(7)
    return said


@pytest.mark.parametrize("rank, who", [(0, "ranks 1, 2"), (1, "rank 0")])
def test_ranks_that_never_join_are_named_and_not_waited_for_without_end(monkeypatch, caplog, rank, who):
    agent = torch.distributed.TCPStore("127.0.0.1", free_port(), is_master=True, wait_for_workers=False)
    monkeypatch.setattr(ranks, "SILENT_SECONDS", 0.2)
    monkeypatch.setattr(ranks, "COLLECTIVE_TIMEOUT", datetime.timedelta(seconds=1))
    for name, value in {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": 3, "MASTER_ADDR": "127.0.0.1",
                        "MASTER_PORT": agent.port, "TORCHELASTIC_USE_AGENT_STORE": True}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(SbkitError, match=f"^{who} didn't join the others in 1 s"):
        ranks.init(torch.device("cpu"))
    assert [f"Waiting for {who}, which" in record.getMessage() for record in caplog.records] == [True]
