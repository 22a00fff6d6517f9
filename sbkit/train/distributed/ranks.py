"""The processes of a run: all that the rest of sbkit calls, by one name (``ranks.rank()``, ``ranks.run_on_main(...)``).

Behind it are these files of its folder:

====================  ==============================================================================================
``place.py``          which process this is: its rank, and how many there are
``run_group.py``      the process group as one object, which is joined, met in, and left
``joining.py``        how the processes find each other before that
``collectives.py``    what ranks do together
``sums.py``           how tensors are summed: by gloo or NCCL
``shared_sums.py``    the same in memory that ranks share, if all train on the CPU of one machine
``shared_memory.py``  how ranks get memory that they share, and prove that they do
``failures.py``       how the failure of one rank ends all: who writes which key, who reads it, and in what time
``ending.py``         how a process ends at once, after pending writes
``launcher.py``       how a process ends whose torchrun is gone
====================  ==============================================================================================

The others:

====================  ==============================================================================================
``parallel.py``       how ranks share a step: alone, with the whole model on each, or with a part of it on each
``exchange.py``       how gradients are summed over ranks while backward computes
``sharding.py``       large models: recomputed activations, and parameters that are sharded over ranks (FSDP2)
``equality.py``       what keeps ranks equal besides that: rank 0's buffers, and a comparison of all bits
``unreached.py``      the warning of parameters that the loss doesn't reach
``local_ranks.py``    ranks on this machine's cores that a run starts by itself, without torchrun
====================  ==============================================================================================
"""

from __future__ import annotations

from sbkit.train.distributed.collectives import (
    any_of,
    barrier,
    gather_objects,
    run_on_main,
    start_sum,
    sum_across,
    sum_in_place,
    take_from_main,
)
from sbkit.train.distributed.failures import PeerFailed
from sbkit.train.distributed.place import connected, is_alone, is_main, launched, rank, world_size
from sbkit.train.distributed.run_group import group

__all__ = [
    "PeerFailed", "any_of", "barrier", "connected", "cpu_group", "end_together", "failing_together", "gather_objects",
    "init", "is_alone", "is_main", "launched", "raise_on_main", "rank", "run_on_main", "shutdown", "start_sum",
    "sum_across", "sum_in_place", "take_from_main", "world_size",
]

init = group.join
shutdown = group.shutdown
cpu_group = group.cpu_group
end_together = group.end_together
failing_together = group.failures.failing_together
raise_on_main = group.failures.raise_on_main
