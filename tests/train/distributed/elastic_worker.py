"""A stand-in for training: sums over all ranks, saves every step, resumes from what it saved last.

    torchrun ... elastic_worker.py FOLDER STEPS

It leaves in FOLDER: ``saved.json`` (the state after the last step) and ``starts.jsonl`` (one line for each
start of each process: agent, rank, processes, pid, first step). A file ``enough`` there ends it early.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from sbkit.train.distributed import ranks

STEP_SECONDS = 0.05


def main(folder: Path, steps: int) -> None:
    ranks.init(torch.device("cpu"))
    rank, world = dist.get_rank(), dist.get_world_size()
    saved = folder / "saved.json"
    state = json.loads(saved.read_text()) if saved.exists() else {"step": 0, "total": 0.0}
    with open(folder / "starts.jsonl", "a") as log:
        log.write(json.dumps({"agent": os.environ.get("AGENT"), "rank": rank, "world": world,
                              "pid": os.getpid(), "first": state["step"]}) + "\n")
    dist.barrier()  # nobody saves while another still reads
    while state["step"] < steps:
        enough = rank == 0 and (folder / "enough").exists()
        value = torch.tensor([float(state["step"] + 1), float(enough)])
        ranks.sum_in_place(value)
        state = {"step": state["step"] + 1, "total": state["total"] + value[0].item() / world}
        if rank == 0:
            aside = folder / f"saved.{os.getpid()}"
            aside.write_text(json.dumps(state))
            os.replace(aside, saved)
        if value[1]:
            break
        time.sleep(STEP_SECONDS)
    dist.barrier()
    ranks.shutdown()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
