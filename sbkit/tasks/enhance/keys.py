"""Keys that the task of speech enhancement reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbkit.recipe.keys import key
from sbkit.system.schema import NOT_NEGATIVE
from sbkit.tasks.keys import TaskKeys

if TYPE_CHECKING:
    from sbkit.nn.enhance import Enhancer


@dataclass(kw_only=True)
class EnhancementKeys(TaskKeys):
    """Keys of the model and of its loss."""

    enhancer: Enhancer = key("noisy waveforms [B, S] and sample counts [B] to clean ones, a sbkit.nn.enhance.Enhancer")
    max_db: float = key("ratio in decibels at which the loss of an utterance saturates", 30.0, NOT_NEGATIVE)
