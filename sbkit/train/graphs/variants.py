"""The stages of a capture: of the whole run, and of each variant of a micro-step or of an update."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Generic, TypeVar

GraphT = TypeVar("GraphT")


class Phase(enum.Enum):
    """What a run does about graphs. It begins with the first one, also after ``Captured.reset``."""

    BEFORE_FIRST_UPDATE = enum.auto()
    """Python computes all: optimizers make their states, and ranks agree on the gradients that they exchange."""
    CAPTURING = enum.auto()
    """Variants that are new are captured, and those that are captured are replayed."""
    STOPPED = enum.auto()
    """This rank replays nothing any more, because a capture failed. Others may: it takes part in their comparisons."""
    REFUSED = enum.auto()
    """No rank has ever captured anything: all of them decided so after the first update."""


class Stage(enum.Enum):
    """How far a variant is. Each stage follows from the first one, and ``REFUSED`` from any."""

    FIRST_SEEN = enum.auto()
    """It is about to be captured."""
    CAPTURED = enum.auto()
    """It is replayed, though there was no memory to compare a first replay."""
    VERIFIED = enum.auto()
    """It is replayed, and a first replay has computed what Python does."""
    REFUSED = enum.auto()
    """Python computes it."""


class Outcome(enum.Enum):
    """How the capture of a variant has ended."""

    VERIFIED = enum.auto()
    """A first replay has computed what Python does."""
    NOT_COMPARED = enum.auto()
    """It is captured, but a rank has no memory to compare a first replay, or captures nothing."""
    NO_MEMORY = enum.auto()
    """There is no memory for it, nor for any other."""
    NOT_REPEATABLE = enum.auto()
    """It can't be captured, or a first replay has computed something else."""


@dataclass
class Variant(Generic[GraphT]):
    """All micro-steps, or all updates, that launch the same kernels with the same numbers."""

    stage: Stage = Stage.FIRST_SEEN
    graph: GraphT | None = None
    """What is replayed; None before it is captured, and if it is refused."""
    reason: str = ""
    """Why it is refused."""

    def take(self, graph: GraphT, is_verified: bool) -> None:
        """Replay a graph from now on; ``is_verified``: whether a first replay was compared, and right."""
        assert self.stage is Stage.FIRST_SEEN, "a variant is captured once"
        self.stage = Stage.VERIFIED if is_verified else Stage.CAPTURED
        self.graph = graph

    def refuse(self, reason: str) -> None:
        """Let Python compute it from now on, and free its graph."""
        self.stage = Stage.REFUSED
        self.graph = None
        self.reason = reason
