"""Keys that the enhancement task reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbkit.recipe.choices import Range
from sbkit.recipe.keys import key
from sbkit.tasks.keys import TaskKeys

if TYPE_CHECKING:
    from sbkit.nn.enhance import Enhancer


@dataclass(kw_only=True)
class EnhancementKeys(TaskKeys):
    """Keys of the model and of its loss."""

    enhancer: Enhancer = key("noisy waveforms [B, S] and sample counts [B] to clean ones, a sbkit.nn.enhance.Enhancer")
    most_decibels: float = key("an utterance that is this clean already teaches nothing more", 30.0, Range(0))
