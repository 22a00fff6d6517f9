"""Protocols: the parts of SpeechBrain's Brain that each part of training uses."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, Protocol

import torch
from speechbrain.core import Stage
from torch.utils.data import Sampler

from sbkit.data.batch import Batch
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.given import DataSource, MicroBatch, Objectives, Outputs
from sbkit.train.keys import TrainKeys
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.monitor.utilisation import Utilisation
from sbkit.train.precision import Scaler
from sbkit.train.step import Facts, Loss


class Computes(Protocol):
    """Computes the loss of a training batch."""

    training_ctx: contextlib.AbstractContextManager[Any]

    def compute_forward(self, batch: MicroBatch, stage: Stage) -> Outputs: ...
    def compute_objectives(self, predictions: Outputs, batch: MicroBatch, stage: Stage) -> Objectives: ...


class Examined(Computes, Protocol):
    """Has the modules that compute, on a device, and counts optimizer steps."""

    modules: torch.nn.ModuleDict
    device: str
    optimizer_step: int


class StandsIn(Protocol):
    """Computes the loss of stand-in batches without a trace; a Brain that is no task has no ``stand_in``."""

    modules: torch.nn.ModuleDict
    device: str

    def stand_in(self, utterances: int, seconds: float) -> Batch: ...
    def stacked_layers(self) -> Sequence[torch.nn.Module] | None: ...
    def untouched(self) -> contextlib.AbstractContextManager[None]: ...
    def loss_of(self, batch: MicroBatch) -> Loss: ...


class Steps(Examined, Protocol):
    """Has parameters, and the optimizers that update them."""

    hparams: SimpleNamespace
    scaler: Scaler
    max_grad_norm: float
    opt_class: Callable[..., torch.optim.Optimizer] | None
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
    hparams: SimpleNamespace
    keys: TrainKeys
    device: str
    checkpointer: Checkpointer | None
    debug: bool
    debug_batches: int
    tqdm_barcolor: Mapping[str, str]

    @property
    def shares_validation(self) -> bool: ...
    def open_stage(self, stage: Stage, epoch: int | None = None) -> None: ...
    def close_batch(self, batch: MicroBatch, stage: Stage) -> None: ...
    def close_stage(self, stage: Stage, loss: float, epoch: int | None = None) -> None: ...
    def evaluate_batch(self, batch: MicroBatch, stage: Stage) -> Objectives: ...
    def update_average(self, loss: torch.Tensor, avg_loss: float) -> float: ...


class Trains(Steps, Evaluates, Protocol):
    """Trains on micro-batches, with hooks around an epoch."""

    compiled: bool
    grad_accumulation_factor: int
    metrics_log: MetricsLog | None
    optimizer_step_limit: int | None
    profiler: torch.profiler.profile | None
    tot_prof_steps: int
    train_sampler: Sampler[Any] | None
    utilisation: Utilisation | None
    avg_train_loss: float

    def fit_batch(self, batch: MicroBatch) -> Objectives: ...
    def open_step(self, number: int) -> None: ...


class Decides(Steps, Protocol):
    """Sets when to save and how many skipped steps to accept, and is told of each step."""

    keys: TrainKeys
    checkpointer: Checkpointer | None
    ckpt_interval_minutes: float
    ckpt_interval_steps: int
    nonfinite_patience: int

    def close_step(self, facts: Facts) -> None: ...


class Loads(Protocol):
    """Makes data loaders from datasets."""

    keys: TrainKeys
    device: str
    checkpointer: Checkpointer | None

    @property
    def shares_validation(self) -> bool: ...
    def make_dataloader(self, dataset: DataSource, stage: Stage, **kwargs: Any) -> Iterable[Any]: ...
