"""The whole training loop of the flagship never waits for the device between two lines of its log; kernels are few, and
none gets a number that changes from step to step from the host."""

from __future__ import annotations

import functools
from pathlib import Path
from types import BuiltinFunctionType, FunctionType, ModuleType

import pytest
import torch
from host_syncs import HostSyncs
from run_folders import TINY
from speechbrain.core import Stage
from torch.utils._python_dispatch import TorchDispatchMode

from sbkit.data.batch import Batch
from sbkit.nn import ctc
from sbkit.recipe import load
from sbkit.tasks import feature_statistics
from sbkit.tasks.ctc import CTC
from sbkit.train import muon, runner
from sbkit.train.averaging import EMA
from sbkit.train.precision import Scaler
from sbkit.train.trainer import Trainer

RECIPE = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
STEPS, MICROS = 6, 2
FROM, TO = 2, 5  # steps that are looked at: the first one checks ranks, the last one ends the epoch


def batch_of(step, micro):
    drawn = torch.Generator().manual_seed(10 * step + micro)
    lengths = torch.tensor([16000, 12000 + 100 * step])
    tokens = torch.randint(3, 28, (2, 4), generator=drawn)
    return Batch(
        ids=[f"{step}.{micro}.{i}" for i in range(2)], signals=0.1 * torch.randn(2, 16000, generator=drawn),
        signal_lengths=lengths, tokens=tokens, token_lengths=torch.tensor([4, 3]), texts=["a b", "c"],
        step=step, micro=micro, micros=MICROS, samples=int(lengths.sum()))


class Plan:
    """Batches of an epoch; from one step to another what happens is noted in ``noted``."""

    def __init__(self, noted):
        self.noted = noted

    def steps(self, epoch):
        return STEPS

    def at(self, epoch, step=0):
        batches = [[batch_of(step, micro) for micro in range(MICROS)] for step in range(STEPS)]
        for step, micros in enumerate(batches):
            if step == FROM:
                self.noted.__enter__()
            if step == TO:
                self.noted.__exit__(None, None, None)
            yield from micros


def lengths_on_the_host(log_probs, targets, input_lengths, target_lengths, blank):
    """What the CPU's kernel needs, and a GPU's does not: numpy's view of them is no wait."""
    losses, _ = torch._ctc_loss(log_probs.transpose(0, 1), targets, input_lengths.numpy().tolist(),
                                target_lengths.numpy().tolist(), blank, zero_infinity=True)
    return losses


def trained(noted, brain_class, folder, monkeypatch, **overrides):
    """The brain after ``fit``, with the recipe as it is but for sizes and epochs."""
    monkeypatch.setattr(ctc, "by_torch", lengths_on_the_host)
    monkeypatch.setattr(muon, "in_host_memory", lambda tensor: False)  # as on a GPU
    hparams = load.load(RECIPE, {**TINY, "output_folder": str(folder), "number_of_epochs": 1, **overrides})
    hparams["log_interval"] = 1e9
    hparams["schedule"].total_steps = STEPS
    feature_statistics.allow_missing(hparams["normalize"])  # a run has them before its first step
    brain = brain_class(hparams["modules"], hparams["opt_class"], hparams, {"device": "cpu", "noprogressbar": True},
                        hparams["checkpointer"])
    brain.fit(hparams["epoch_counter"], Plan(noted))
    assert brain.optimizer_step == STEPS and brain.train_stats["loss"] > 0
    return brain


def found_by(noted, *args, **overrides):
    """What is noted of steps within ``fit``."""
    trained(noted, *args, **overrides)
    return noted.found


@pytest.mark.parametrize("overrides", [{}, {"ctc_weight": 0.3, "precision": "bf16", "ema_decay": 0.99}], ids=str)
def test_a_step_of_the_flagship_never_waits_for_the_device(tmp_path, monkeypatch, overrides):
    assert found_by(HostSyncs(), CTC, tmp_path, monkeypatch, **overrides) == []


class InObjectives(CTC):
    def compute_objectives(self, scores, batch, stage):
        loss = super().compute_objectives(scores, batch, stage)
        if stage == Stage.TRAIN:
            self.shown = loss.total.item()
        return loss


class InTheLoop(CTC):
    def on_step_known(self, fact):
        super().on_step_known(fact)
        self.largest = max(float(p.detach().abs().max()) for p in self.modules.parameters())


@pytest.mark.parametrize("brain_class, says", [(InObjectives, "Tensor.item"), (InTheLoop, "__float__")])
def test_it_shows_where_one_is_added(tmp_path, monkeypatch, brain_class, says):
    found = found_by(HostSyncs(), brain_class, tmp_path, monkeypatch)
    assert any(says in line and "test_no_host_sync.py" in line for line in found)


# ------------------------------------------------------------ kernels, which each cost the host time on a GPU

#: Of a step of two micro-batches with one encoder layer, as counted with torch 2.11; one more layer or loss adds some.
MOST = {"fp32": 700, "bf16": 790}
_FREE = {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::detach", "aten::lift_fresh"}


class Kernels(TorchDispatchMode):
    """Names of the operations that are started, views left out."""

    def __init__(self):
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func._schema.name
        if not (func.is_view or name in _FREE):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@pytest.mark.skipif(not torch.__version__.startswith("2.11"), reason="another torch has other kernels")
@pytest.mark.parametrize("precision", MOST)
def test_a_step_starts_no_more_kernels_than_it_did(tmp_path, monkeypatch, precision):
    found = found_by(Kernels(), CTC, tmp_path, monkeypatch, precision=precision)
    count = len(found) / (TO - FROM)
    most = sorted({(found.count(name) // (TO - FROM), name) for name in found}, reverse=True)[:12]
    assert 0.8 * MOST[precision] < count <= MOST[precision], f"{count:.0f} kernels a step, most of them {most}"


# ------------------------------------------------------------ numbers, which a captured step would not see change

_OPAQUE = (str, bytes, torch.Tensor, type, ModuleType, FunctionType, BuiltinFunctionType)
#: What a step consists of: forward, loss, loss scale and update.
PARTS = [(Trainer, "compute"), (runner, "update"), (EMA, "update"),
         *((Scaler, name) for name in ("scale", "factor", "adjust", "follow_count"))]
FLAGSHIP = {"consistency": 0.2, "consistency_warmup": 0.9, "ema_decay": 0.9, "learning_rates": {"ctc_lin": 10},
            "spec_augment": {"time_warp": 9, "ramp": [0, 1]}, "opt_class": {"orthogonalize_every": 1}}


def is_number(value):
    return type(value) in (int, float) or (type(value) is tuple and value and all(map(is_number, value)))


def numbers_below(root):
    """All numbers in attributes, dicts and lists that can be reached from an object, by place: holder, key, number."""
    found, seen, left = {}, set(), [root]
    while left:
        each = left.pop()
        if id(each) in seen or isinstance(each, _OPAQUE):
            continue
        seen.add(id(each))
        left += [each.__self__] if hasattr(each, "__self__") else []
        left += each if isinstance(each, (tuple, set)) else []
        for holder in (each if isinstance(each, (dict, list)) else None, getattr(each, "__dict__", None)):
            for key, value in list(holder.items() if isinstance(holder, dict) else enumerate(holder or [])):
                if is_number(value):
                    found[id(holder), key] = holder, key, value
                else:
                    left.append(value)
    return found


class Frozen:
    """Within it, each number that Python holds in a brain is what it was when it was first met; counters go on."""

    def __init__(self):
        self.brain, self.first, self.changed = None, {}, set()

    def of(self, function):
        @functools.wraps(function)
        def inside(*args, **kwargs):
            if isinstance(args[0], Trainer):
                self.brain = args[0].hooks.brain
            now = numbers_below(self.brain)
            self.first = {**now, **self.first}
            changed = {place for place, (*_, value) in now.items() if self.first[place][2] != value}
            self.changed |= {now[place][1] for place in changed}
            for place in changed:
                holder, key, _ = now[place]
                holder[key] = self.first[place][2]
            try:
                return function(*args, **kwargs)
            finally:
                for place in changed:
                    holder, key, value = now[place]
                    frozen = self.first[place][2]
                    holder[key] = value if holder[key] == frozen else value + holder[key] - frozen

        return inside


class Rising(CTC):
    """Its masks widen with each step."""

    def begin_step(self, number):
        self.keys.spec_augment.set_score(number / STEPS)


class ReadsItsStep(Rising):
    def compute_objectives(self, scores, batch, stage):
        loss = super().compute_objectives(scores, batch, stage)
        return loss._replace(total=loss.total * (1 + self.optimizer_step))


@pytest.mark.slow
@pytest.mark.parametrize("brain_class, precision", [(Rising, "fp32"), (Rising, "fp16"), (ReadsItsStep, "fp32")])
def test_a_step_reads_no_number_that_changes_from_the_host(tmp_path, monkeypatch, brain_class, precision):
    frozen, ends = Frozen(), []
    for run in ("free", "frozen"):
        with monkeypatch.context() as patch:
            for holder, name in PARTS if run == "frozen" else ():
                patch.setattr(holder, name, frozen.of(getattr(holder, name)))
            brain = trained(HostSyncs(), brain_class, tmp_path / run, patch, precision=precision, **FLAGSHIP)
        averages = brain.trainer.moving_average.state_dict()["weights"]
        ends.append({**brain.modules.state_dict(), **{f"ema {name}": value for name, value in averages.items()}})
    assert {"optimizer_step", "numbers", "lr", "updates", "turn"} <= frozen.changed
    unlike = [name for name, value in ends[0].items() if not torch.equal(value, ends[1][name])]
    assert bool(unlike) == (brain_class is ReadsItsStep), unlike
