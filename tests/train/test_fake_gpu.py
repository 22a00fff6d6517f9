"""A step of the flagship on fake GPU tensors, on a machine that may have no GPU.

A tensor left on the CPU fails it, as it would on a GPU; so does looking at a value. Backward can't run on fake tensors:
its gradients are made up. That nothing waits for the device is in ``test_no_host_sync``, and what the kernels give
in ``tests/nn``.
"""

from __future__ import annotations

import shutil
import warnings
from pathlib import Path

import pytest
import torch
from run_folders import TINY
from speechbrain.core import Stage
from test_no_host_sync import RECIPE, batch_of
from torch._subclasses.fake_tensor import DataDependentOutputException

from sbkit.nn import ctc
from sbkit.recipe import load
from sbkit.recipe.trace import fake_tensors
from sbkit.tasks.ctc import CTC
from sbkit.train import precision, results, rng
from sbkit.train.trainer import Trainer

CUDA = torch.device("cuda:0")


def losses_on_the_device(log_probs, targets, input_lengths, target_lengths, blank):
    """Where the kernels would be, which need a card."""
    return log_probs.sum((1, 2)) + 0 * (input_lengths + target_lengths + targets.sum(1))


@pytest.fixture
def peeked(monkeypatch):
    """Tensors that are copied aside for the host."""
    found = []
    monkeypatch.setattr(results, "Peek", found.append)
    monkeypatch.setattr(ctc, "kernels_work", lambda device, block: True)
    monkeypatch.setattr(ctc, "by_kernels", losses_on_the_device)
    return found


def made(folder: Path, brain_class=CTC, parts=(), **overrides):
    """Recipe and Brain without their numbers; ``parts``: (line, its other version) of the recipe and its bases."""
    shutil.copytree(RECIPE.parent, folder / "hparams")
    for line, other in parts:
        [path] = [each for each in (folder / "hparams" / "ctc.yaml", *(folder / "hparams").glob("base/*.yaml"))
                  if line in each.read_text()]
        assert path.read_text().count(line) == 1
        path.write_text(path.read_text().replace(line, other))
    hparams = load.load(folder / "hparams" / "ctc.yaml", {**TINY, "output_folder": str(folder / "run"), **overrides})
    brain = brain_class(hparams["modules"], hparams["opt_class"], hparams, {"device": "cpu", "noprogressbar": True},
                        hparams["checkpointer"])
    brain.modules.to("meta")
    return hparams, brain


def onto_the_device(hparams, brain):
    """On fake tensors."""
    own = set(brain.modules.modules())
    beside = [module for module in (hparams["compute_features"], hparams["spec_augment"]) if module not in own]
    for module in (brain.modules, *beside):
        module.to_empty(device=CUDA)
    brain.device, brain.device_type = CUDA, CUDA.type


def step_on_fake_tensors(*args, **overrides):
    """Two micro-batches and the update, all on fake tensors."""
    hparams, brain = made(*args, **overrides)
    brain.open_stage(Stage.TRAIN, 1)
    batches = [batch_of(0, micro) for micro in range(2)]
    with fake_tensors(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # autocast finds no card
        onto_the_device(hparams, brain)
        brain.scaler = precision.Scaler(CUDA.type, enabled=brain.precision == "fp16")
        brain.init_optimizers()
        brain.modules.train()
        parameters = list(brain.modules.parameters())

        def backward(total):
            assert total.device == CUDA
            for parameter in parameters:
                parameter.grad = torch.ones_like(parameter)

        def updated(parameters, *states, lr, grad_scale, found_inf, **options):
            assert {lr.device, grad_scale.device, found_inf.device, parameters[0].device} == {CUDA}

        with pytest.MonkeyPatch.context() as patched:
            patched.setattr(torch.Tensor, "backward", backward)
            patched.setattr(rng, "capture", lambda device: {})
            patched.setattr(torch, "_fused_adamw_", updated)  # which torch lacks for fake tensors
            brain.max_grad_norm = 5.0
            scaling = precision.Scaled(brain.scaler) if brain.scaler.is_enabled() else precision.Unscaled(CUDA)
            own = brain.trainer
            loop = Trainer(own.hooks, CUDA, brain.train_state, own.freezing, rng.RngState(), scaling,
                           own.moving_average)
            assert loop.train_step((batch.to(CUDA), batch.last) for batch in batches)


@pytest.mark.slow
@pytest.mark.parametrize("overrides", [
    {}, {"precision": "bf16"}, {"precision": "fp16"}, {"ctc_weight": 0.3}, {"ctc_weight": 0.3, "precision": "fp16"},
    {"consistency": 0.2}, {"intermediate_ctc": 0.3, "num_encoder_layers": 2}, {"ema_decay": 0.99},
], ids=lambda overrides: " ".join(f"{key}={value}" for key, value in overrides.items()) or "as it is")
def test_a_step_stays_on_the_device_and_reads_no_value(overrides, tmp_path, peeked):
    step_on_fake_tensors(tmp_path, **overrides)
    assert [tensor.device for tensor in peeked] == [CUDA]


@pytest.mark.slow
@pytest.mark.parametrize("encoder, attention, norm", [
    ("conformer", "RelPosMHAXL", "sentence"), ("conformer", "regularMHA", "global"),
    ("transformer", "RelPosMHAXL", "global"), ("transformer", "regularMHA", "sentence"),
    ("branchformer", "RelPosMHAXL", "sentence"), ("branchformer", "regularMHA", "global")])
def test_other_layers_never_wait_for_the_device(encoder, attention, norm, tmp_path, peeked):
    step_on_fake_tensors(tmp_path, parts=[
        ("encoder_module: conformer", f"encoder_module: {encoder}"),
        ("attention_type: RoPEMHA", f"attention_type: {attention}"), ("norm_type: global", f"norm_type: {norm}")])
    assert [tensor.device for tensor in peeked] == [CUDA]


@pytest.mark.parametrize("overrides", [{}, {"ctc_weight": 0.3}], ids=str)
def test_statistics_that_a_checkpoint_left_on_the_cpu_are_moved_in_evaluation(overrides, tmp_path, peeked):
    hparams, brain = made(tmp_path, **overrides)
    brain.modules.eval()
    batch, norm = batch_of(0, 0), hparams["normalize"]
    statistics = torch.zeros(80), torch.ones(80)
    with fake_tensors(), torch.no_grad():
        onto_the_device(hparams, brain)
        norm.glob_mean, norm.glob_std = statistics
        scores = brain.compute_forward(batch.to(CUDA), Stage.VALID)
        assert scores.ctc.device == norm.glob_mean.device == norm.glob_std.device == CUDA


class LeavesBehind(CTC):
    def compute_forward(self, batch, stage):
        scores = super().compute_forward(batch, stage)
        return scores._replace(ctc=scores.ctc + torch.zeros(scores.ctc.shape[-1]))


class Looks(CTC):
    def compute_objectives(self, scores, batch, stage):
        loss = super().compute_objectives(scores, batch, stage)
        self.shown = loss.total.item()
        return loss


def test_a_tensor_that_was_left_behind_is_found(tmp_path, peeked):
    with pytest.raises(Exception, match=r"[Ff]ound two different devices|on different devices"):
        step_on_fake_tensors(tmp_path, LeavesBehind)


def test_a_value_that_is_read_is_found(tmp_path, peeked):
    with pytest.raises(DataDependentOutputException):
        step_on_fake_tensors(tmp_path, Looks)
