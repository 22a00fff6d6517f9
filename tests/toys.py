"""A model and data of a few numbers, with what real ones have: plans, shares, counts, stand-ins."""

from __future__ import annotations

import dataclasses
from functools import partial

import torch
from speechbrain.utils.checkpoints import DEFAULT_LOAD_HOOKS, DEFAULT_SAVE_HOOKS, get_default_hook

import sbkit
from sbkit.data.batch import PlannedBatch
from sbkit.train.loss import Loss

SIZE = 6


def save(obj, path):
    """Save a recoverable as a checkpointer does."""
    get_default_hook(obj, DEFAULT_SAVE_HOOKS)(obj, path)


def load(obj, path, end_of_epoch=True):
    """Load a recoverable as a checkpointer does."""
    get_default_hook(obj, DEFAULT_LOAD_HOOKS)(obj, path, end_of_epoch)


@dataclasses.dataclass
class ToyBatch(PlannedBatch):
    """Rows ``x`` [B, SIZE], each with ``tokens`` [B] targets' worth of weight."""

    ids: list[int]
    x: torch.Tensor
    tokens: torch.Tensor
    step: int = 0
    micro: int = 0
    micros: int = 1
    weight: float = 1.0
    seconds: float = 1.0
    padded_seconds: float = 1.25
    beyond_shape: bool = False

    def to(self, device, non_blocking=True):
        moved = {name: getattr(self, name).to(device, non_blocking=non_blocking) for name in ("x", "tokens")}
        return dataclasses.replace(self, **moved)


def rows(ids) -> tuple[torch.Tensor, torch.Tensor]:
    """The data of some ids: they are the same wherever they are asked for."""
    drawn = [torch.randn(SIZE, generator=torch.Generator().manual_seed(i)) for i in ids]
    return torch.stack(drawn), torch.tensor([1.0 + i % 5 for i in ids])


def batch_of(ids, weight: float = 1.0, **place) -> ToyBatch:
    x, tokens = rows(ids)
    return ToyBatch(list(ids), x, tokens, weight=weight, seconds=float(len(ids)), **place)


class ToyTrainLoader:
    """``steps`` optimizer steps of ``size`` rows an epoch; ``touch(batch)`` may spoil batches."""

    def __init__(self, steps=6, size=7, rank=0, world=1, micros=1, touch=None):
        self.count, self.size, self.rank, self.world, self.micros = steps, size, rank, world, micros
        self.touch = touch or (lambda batch: None)

    def steps(self, epoch):
        return self.count

    def step_ids(self, epoch, step):
        order = torch.randperm(self.count * self.size, generator=torch.Generator().manual_seed(int(epoch)))
        return order[step * self.size : (step + 1) * self.size].tolist()

    def at(self, epoch, step=0):
        for i in range(step, self.count):
            ids = self.step_ids(epoch, i)
            parts = [ids[k :: self.world * self.micros] for k in range(self.world * self.micros)]
            for micro, part in enumerate(parts[self.rank :: self.world]):
                place = {"step": i, "micro": micro, "micros": self.micros}
                batch = batch_of(part, **place) if part else batch_of([0], weight=0.0, **place)
                self.touch(batch)
                yield batch


class ToyEvalLoader:
    """The rows of this rank, two at a time."""

    def __init__(self, count=11, rank=0, world=1):
        self.parts = [list(range(i, min(i + 2, count))) for i in range(0, count, 2)][rank::world]

    def __len__(self):
        return len(self.parts)

    def __iter__(self):
        return (batch_of(part) for part in self.parts)


class Block(torch.nn.Module):
    """Reached by a method that is not ``forward``."""

    def __init__(self, inputs, outputs):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(outputs, inputs).uniform_(-0.4, 0.4))

    def project(self, x):
        return x @ self.weight.T


def layers(seed=0) -> torch.nn.ModuleList:
    """Three layers that are used, one that the loss never reaches."""
    torch.manual_seed(seed)
    return torch.nn.ModuleList(
        [torch.nn.Linear(SIZE, 8), Block(8, 8), torch.nn.Linear(8, 1), torch.nn.Linear(8, 3)]
    )


class ToyBrain(sbkit.Brain):
    """Layers inside one ModuleList, called through hparams and by methods other than ``forward``."""

    def compute_forward(self, batch, stage):
        model = self.hparams.model
        return model[2](torch.tanh(model[1].project(torch.tanh(model[0](batch.x))))).squeeze(-1)

    def compute_objectives(self, predictions, batch, stage):
        losses = (predictions - batch.x.sum(-1)) ** 2  # [B]
        return Loss((losses * batch.tokens).sum(), batch.tokens.sum())

    def on_stage_end(self, stage, stage_loss, epoch):
        self.ends = [*getattr(self, "ends", []), (stage.name, stage_loss)]


def brain(cls=ToyBrain, opt_class=None, modules=None, checkpointer=None, hparams=None, **run_opts):
    """A toy brain on the CPU; ``run_opts`` are SpeechBrain's."""
    model = modules or layers()
    opt_class = opt_class or partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
    return cls(
        {"model": model}, opt_class, {"model": model, **(hparams or {})},
        {"device": "cpu", "noprogressbar": True, **run_opts}, checkpointer,
    )


def state(brain) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in brain.modules.state_dict().items()}


def furthest(one, other) -> float:
    """The largest difference between two states."""
    return max((one[name] - other[name]).abs().max().item() for name in one)
