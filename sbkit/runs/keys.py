"""A protocol: the keys of a task that commands on a run read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from speechbrain.utils.parameter_transfer import Pretrainer

    from sbkit.data.corpus import Corpus
    from sbkit.data.plan import Batching
    from sbkit.train.brain import Brain
    from sbkit.train.checkpoint import Checkpointer


class RunKeys(Protocol):
    """Says what is trained on what, and what that starts from; see ``sbkit.tasks.keys.TaskKeys``."""

    brain: type[Brain]
    corpus: Corpus
    batching: Batching
    checkpointer: Checkpointer
    experiment: str | None
    language: str | None
    pretrainer: Pretrainer | None
    init_from: str | None
    init_checkpoint: str
    init_average: int
    init_leave: Sequence[str] | None

    @property
    def folder(self) -> Path: ...
