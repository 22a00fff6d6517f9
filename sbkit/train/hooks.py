"""Protocols: the parts of SpeechBrain's Brain that each part of training uses."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any, Protocol

import torch
from speechbrain.core import Stage

from sbkit.train.keys import TrainKeys


class Computes(Protocol):
    """Computes the loss of a training batch."""

    training_ctx: contextlib.AbstractContextManager[Any]

    def compute_forward(self, batch: Any, stage: Stage) -> Any: ...
    def compute_objectives(self, predictions: Any, batch: Any, stage: Stage) -> Any: ...


class Steps(Computes, Protocol):
    """Has parameters, and the optimizers that update them."""

    modules: torch.nn.ModuleDict
    hparams: Any
    device: str
    scaler: Any
    max_grad_norm: float
    opt_class: Any
    optimizer: torch.optim.Optimizer
    optimizers_dict: Mapping[str, torch.optim.Optimizer] | None

    def no_sync(self, use: bool = True) -> contextlib.AbstractContextManager[None]: ...
    def freeze_optimizers(
        self, optimizers: Mapping[str, torch.optim.Optimizer]) -> Mapping[str, torch.optim.Optimizer]: ...
    def zero_grad(self, set_to_none: bool = False) -> None: ...
    def optimizers_step(self) -> None: ...


class Evaluates(Protocol):
    """Evaluates batches, and handles the result of a whole set."""

    modules: torch.nn.ModuleDict
    hparams: Any
    keys: TrainKeys
    device: str
    checkpointer: Any
    debug: bool
    debug_batches: int
    tqdm_barcolor: Mapping[str, str]

    @property
    def shares_validation(self) -> bool: ...
    def open_stage(self, stage: Stage, epoch: Any = None) -> None: ...
    def close_batch(self, batch: Any, stage: Stage) -> None: ...
    def close_stage(self, stage: Stage, loss: float, epoch: Any = None) -> None: ...
    def evaluate_batch(self, batch: Any, stage: Stage) -> Any: ...
    def update_average(self, loss: Any, avg_loss: float) -> float: ...


class Trains(Steps, Evaluates, Protocol):
    """Trains on micro-batches, with hooks around an epoch."""

    compiled: bool
    grad_accumulation_factor: int
    metrics_log: Any
    optimizer_step_limit: int | None
    profiler: Any
    tot_prof_steps: int
    train_sampler: Any
    utilisation: Any
    avg_train_loss: float

    def fit_batch(self, batch: Any) -> Any: ...
    def open_step(self, number: int) -> None: ...


class Decides(Steps, Protocol):
    """Sets when to save and how many skipped steps to accept, and is told of each step."""

    keys: TrainKeys
    checkpointer: Any
    ckpt_interval_minutes: float
    ckpt_interval_steps: int
    nonfinite_patience: int

    def close_step(self, facts: Any) -> None: ...


class Loads(Protocol):
    """Makes data loaders from datasets."""

    keys: TrainKeys
    device: str
    checkpointer: Any

    @property
    def shares_validation(self) -> bool: ...
    def make_dataloader(self, dataset: Any, stage: Stage, **kwargs: Any) -> Any: ...
