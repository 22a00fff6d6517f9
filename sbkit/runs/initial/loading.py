"""A run that has nothing yet takes the weights that its recipe says it starts from; all ranks get the same."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sbkit.errors import SbkitError
from sbkit.runs.initial import table
from sbkit.runs.initial.matching import Match
from sbkit.runs.initial.source import Source, find
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)


def fresh(keys: Any) -> bool:
    """Whether a run has no checkpoint of its own."""
    return keys.checkpointer is None or not keys.checkpointer.list_checkpoints()


def source_of(keys: Any) -> Source | None:
    """What a recipe says that its run starts from."""
    if keys.init_from is None:
        return None
    return find(keys.init_from, keys.init_checkpoint, keys.init_average, keys.brain.metric)


def look(keys: Any) -> None:
    """Tell of a source that isn't there, or is none, before a corpus is prepared."""
    if keys.init_from is not None and fresh(keys):
        if Path(keys.init_from).resolve() == keys.folder.resolve():
            raise SbkitError(f"init_from: {keys.init_from} is the folder of this very run",
                             hint="the same command resumes a run; name another --output_folder to start a new one")
        source_of(keys)


def load(brain: Any) -> None:
    """Fill the modules of a Brain whose run begins; one rank reads, and the others get what it has."""
    if brain.keys.init_from is None:
        return
    ranks.run_on_main(_fill, brain)
    if ranks.world_size() > 1:
        with torch.no_grad():
            for tensor in brain.modules.state_dict(keep_vars=True).values():
                dist.broadcast(tensor.detach(), src=0)


def _fill(brain: Any) -> None:
    keys = brain.keys
    source = source_of(keys)
    if source is None:
        raise SbkitError("init_from is null")
    match = Match(brain.modules, vars(brain.hparams), source, keys.init_leave or (), brain.token_tables())
    logger.info("%s", table.text(source.told, match.fill()))
