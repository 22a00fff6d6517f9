"""A rank that is stopped, and so neither works nor fails, is named while the others wait for it."""

from __future__ import annotations

import os
import re
import signal
import threading
import time

import pytest
import torch
from processes import results

from sbkit.train.distributed import heartbeats, ranks


def stopped_for_a_while(stopped, seconds):
    """What the log of each rank says while one is stopped by the other, and then continued."""
    heartbeats.SILENT_SECONDS = 2.0
    said = []
    heartbeats.logger.warning = lambda text, *values: said.append(text % values)
    ranks.init(torch.device("cpu"))
    pids = ranks.gather_objects(os.getpid())
    time.sleep(1.5)  # for the first heartbeats
    ranks.meet()
    if ranks.rank() != stopped:
        os.kill(pids[stopped], signal.SIGSTOP)
        threading.Timer(seconds, os.kill, (pids[stopped], signal.SIGCONT)).start()
    ranks.meet()
    time.sleep(1.5)
    ranks.meet()
    return pids, said


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [0, 1])  # without torchrun rank 0 holds the store
def test_a_stopped_rank_is_named_once_and_when_it_answers_again(stopped):
    (pids, first), (_, second) = results(stopped_for_a_while, stopped, 5.0)
    said, own = (first, second) if stopped else (second, first)
    assert own == [] and len(said) == 2, (first, second)
    assert re.match(rf"Rank {stopped} \(host \S+, process {pids[stopped]}\) has not answered for [23] s, and all "
                    rf"others wait for it \(rank {1 - stopped} in ", said[0]), said
    assert said[1] == f"Rank {stopped} answers again."


@pytest.mark.slow
def test_a_rank_that_has_left_is_not_waited_for():
    assert results(leaves_early)[0] == []


def leaves_early():
    heartbeats.SILENT_SECONDS = 1.0
    said = []
    heartbeats.logger.warning = lambda text, *values: said.append(text % values)
    ranks.init(torch.device("cpu"))
    time.sleep(1.0)
    ranks.meet()
    if ranks.rank():
        ranks.shutdown()
        time.sleep(4)
    else:
        time.sleep(3)
    return said
