"""The Brain on one process: what it takes, what a step does, what it writes down."""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import pickle
import signal
import sys
import time
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from host_syncs import HostSyncs
from processes import program
from refusals import refused
from safetensors.torch import load_file
from speechbrain.core import Stage
from speechbrain.nnet import losses
from speechbrain.processing.features import InputNormalization
from speechbrain.utils.run_opts import RunOptions
from torch.utils.data import DataLoader
from toys import SIZE, ToyBrain, ToyEvalLoader, ToyTrainLoader, batch_of, brain, furthest, layers, state

import sbkit
from sbkit.errors import SbkitError
from sbkit.system import memory
from sbkit.train import options
from sbkit.train.averaging import EMA
from sbkit.train.bad_batch import replay
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.loss import Loss
from sbkit.train.signals import Stopped
from sbkit.train.trainer import NotFinite

ADAMW = partial(torch.optim.AdamW, lr=0.05, weight_decay=0.1)
BAD = [math.nan, math.inf, -math.inf]


# ------------------------------------------------------------------ what it takes


def test_modules_may_be_null():
    assert list(options.check_modules({"lin": torch.nn.Linear(1, 1), "normalize": None})) == ["lin"]


@pytest.mark.parametrize("modules", [
    pytest.param({"lin": torch.nn.Linear(1, 1), "dims": 80}, id="a number"),
    pytest.param({"stack": [torch.nn.Linear(1, 1)]}, id="a list"),
    pytest.param({"lin": torch.nn.Linear}, id="a class"),
    pytest.param({"lin": partial(torch.nn.Linear, 1, 1)}, id="a partial"),
    pytest.param({"keys": torch.nn.Linear(1, 1)}, id="the name of a method"),
    pytest.param({"a.b": torch.nn.Linear(1, 1)}, id="a name with a dot"),
    pytest.param(torch.nn.ModuleList([torch.nn.Linear(1, 1)]), id="no mapping")])
def test_an_entry_of_modules_that_is_not_a_module_is_named(modules):
    with refused("bad-modules"):
        sbkit.Brain(modules, run_opts={"device": "cpu"})


def test_a_test_of_what_has_no_checkpoint_is_told(tmp_path, caplog):
    untrained = brain(checkpointer=Checkpointer(tmp_path), test_only=True)
    untrained.fit(range(1), None)
    assert f"There is no checkpoint in {tmp_path}" in caplog.text


def test_limits_given_as_flags_are_numbers():
    _, run_opts, _ = RunOptions.from_command_line_args(
        ["r.yaml", "--device", "cpu", "--optimizer_step_limit", "3", "--max_grad_norm", "-1", "--noprogressbar"])
    toy = ToyBrain({"model": (model := layers())}, ADAMW, {"model": model}, run_opts)
    assert toy.optimizer_step_limit == 3 and toy.max_grad_norm == -1.0
    toy.fit(range(1, 10), ToyTrainLoader())
    assert toy.optimizer_step == 3


@pytest.mark.parametrize("run_opts, hparams, code", [
    pytest.param({"optimizer_step_limit": "many"}, {}, "bad-value", id="step limit"),
    pytest.param({}, {"max_grad_norm": "big"}, "bad-value", id="norm"),
    pytest.param({}, {"grad_accumulation_factor": [2]}, "bad-value", id="accumulation"),
    pytest.param({"precision": "fp8"}, {}, "bad-value", id="precision"),
    pytest.param({"nonsense": 1}, {}, "unknown-key", id="nonsense"),
    pytest.param({"data_parallel_backend": True}, {}, "device-unavailable", id="data parallel",
                 marks=pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is here")),
    pytest.param({"device": "gpu"}, {}, "bad-value", id="device")])
def test_options_that_make_no_sense_are_one_clear_error(run_opts, hparams, code):
    with refused(code):
        ToyBrain({"model": layers()}, ADAMW, hparams, {"device": "cpu", **run_opts})


SGD = torch.optim.SGD


@pytest.mark.parametrize(("opt_class", "hparams", "code"), [
    pytest.param("torch.optim.SGD", {}, "bad-optimizer", id="a text"),
    pytest.param(SGD([torch.ones(1)]), {}, "bad-optimizer", id="an optimizer"),
    pytest.param(partial(SGD, betas=0.9), {}, "bad-optimizer", id="an unknown argument"),
    pytest.param(partial(SGD, lr="0.1"), {}, "bad-optimizer", id="a number in quotes"),
    pytest.param({}, ADAMW, "bad-value", id="hparams before it"),
    pytest.param({}, {}, "bad-optimizer", id="a mapping")])
def test_what_makes_no_optimizer_is_one_clear_error(opt_class, hparams, code):
    with refused(code):
        ToyBrain({"model": layers()}, opt_class, hparams, {"device": "cpu"})


def test_a_label_that_speechbrains_ctc_loss_gets_and_the_model_has_no_output_for_is_told():
    cost = partial(losses.ctc_loss, blank_index=0)
    given = [torch.randn(2, 7, 5).log_softmax(-1), torch.tensor([[1, 4, 2], [3, 9, 9]]), torch.ones(2)]
    checked = brain(hparams={"ctc_cost": cost, "limit": 3}).hparams
    checked.ctc_cost = pickle.loads(pickle.dumps(checked.ctc_cost))
    assert (checked.limit, checked.ctc_cost.keywords) == (3, {"blank_index": 0})
    padded = torch.tensor([1.0, 1 / 3])
    assert torch.equal(checked.ctc_cost(*given, padded), cost(*given, padded))
    with pytest.raises(SbkitError, match=r"CTC labels: row 1, position 1: index 9 is outside the table of 5"):
        checked.ctc_cost(*given, torch.ones(2))


def test_precedence_is_default_then_hparams_then_run_opts():
    make = partial(ToyBrain, {"model": layers()}, ADAMW)
    assert make({}, {"device": "cpu"}).max_grad_norm == 5.0
    assert make({"max_grad_norm": "2"}, {"device": "cpu"}).max_grad_norm == 2.0
    assert make({"max_grad_norm": 2}, {"device": "cpu", "max_grad_norm": 3.0}).max_grad_norm == 3.0
    assert make({"device": torch.device("cpu")}, {}).device == "cpu"
    assert make({"precision": "bf16"}, {"device": "cpu", "eval_precision": "fp16"}).eval_precision == "fp16"


# ------------------------------------------------------------------ a step


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_losses_are_fp32_in_every_precision_and_layers_are_not(precision):
    seen = {}

    class Seeing(ToyBrain):
        def compute_forward(self, batch, stage):
            hidden = self.modules.model[0](batch.x)
            seen[stage, "forward"] = hidden.dtype
            return {"hidden": hidden, "all": [hidden, (hidden,)]}

        def compute_objectives(self, predictions, batch, stage):
            parts = [predictions["hidden"], predictions["all"][0], predictions["all"][1][0]]
            late = self.modules.model[2](torch.tanh(predictions["hidden"]))
            seen[stage, "given"], seen[stage, "late"] = {p.dtype for p in parts}, late.dtype
            return late.square().mean()

    half = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[precision]
    toy = brain(Seeing, precision=precision, eval_precision=precision)
    toy.fit(range(1, 2), ToyTrainLoader(2), ToyEvalLoader(4))
    for stage in (Stage.TRAIN, Stage.VALID):
        assert seen[stage, "forward"] == seen[stage, "late"] == half
        assert seen[stage, "given"] == {torch.float32}
    assert toy.loss_of(next(ToyTrainLoader().at(1))).total.dtype == torch.float32


def test_the_scaler_is_saved_and_continues(tmp_path):
    toy = brain(precision="fp16", checkpointer=Checkpointer(tmp_path))
    toy.fit(range(1, 2), ToyTrainLoader())
    toy.checkpointer.save_checkpoint()
    toy.checkpointer.wait()
    toy.scaler.update(2.0**9)
    toy.checkpointer.save_checkpoint()
    toy.checkpointer.wait()
    again = brain(precision="fp16", checkpointer=Checkpointer(tmp_path))
    again.on_fit_start()
    again.scaler.scale(torch.ones(()))
    assert again.scaler.get_scale() == 2.0**9 and again.scaler.sum_scale == toy.scaler.sum_scale < 1


class Long(ToyBrain):
    """A mean over some ten thousand frames, whose sum is as much larger than it."""

    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return Loss(loss.total * 25, loss.count * 500)

    def on_step_known(self, fact):
        super().on_step_known(fact)
        self.facts = [*getattr(self, "facts", []), fact]


class Weights(ToyBrain):
    """Remembers its weights after each step."""

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        self.after = [*getattr(self, "after", []), self.modules.model[0].weight.detach().clone()]


def bad_third_step(folder, lag=None, **options):
    """A run whose third step is not finite, what it told, and what it saved."""
    toy = brain(Weights, hparams={"output_folder": str(folder)}, nonfinite_patience=3, **options)
    toy.trainer.arriving.lag = toy.trainer.arriving.lag if lag is None else lag
    toy.fit([1], ToyTrainLoader(6, touch=lambda batch: batch.x.fill_(math.nan if batch.step == 2 else 1.0)))
    (bad_batch,) = folder.glob("bad_batches/*")
    kept = load_file(bad_batch / "model.safetensors")["model.0.weight"]
    return toy, json.loads((bad_batch / "bad_batch.json").read_text()), kept, replay(toy, bad_batch)


def test_a_report_says_which_weights_it_was_made_with(tmp_path, caplog):
    toy, told, kept, again = bad_third_step(tmp_path / "at-once")
    assert told["late"] == 0 and torch.equal(kept, toy.after[2]) and "Weights: those of that step." in again
    assert "It was run again with" not in caplog.text
    toy, told, kept, again = bad_third_step(tmp_path / "late", lag=1)
    assert told["late"] == 1 and torch.equal(kept, toy.after[3]) and not torch.equal(kept, toy.after[2])
    assert "Step 3 of epoch 1: the loss is not finite; the step was skipped. It was run again with the weights " \
           "after step 4." in caplog.text
    assert "Weights: those after step 4." in again


@pytest.mark.gpu(values=True)
def test_on_a_gpu_a_report_uses_the_weights_of_the_next_step(tmp_path):
    toy, told, kept, again = bad_third_step(tmp_path, device="cuda")
    assert told["late"] == 1 and torch.equal(kept, toy.after[3].cpu()) and "Weights: those after step 4" in again


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu(values=True))])
def test_in_fp16_a_sum_of_many_overflows_no_more_than_its_mean(device):
    sgd = partial(torch.optim.SGD, lr=0.5)
    exact, half = brain(Long, sgd, device=device), brain(Long, sgd, device=device, precision="fp16")
    for toy in (exact, half):
        toy.fit(range(1, 3), ToyTrainLoader(micros=2))
    assert not any(fact.skipped for fact in half.facts) and half.scaler.get_scale() == 65536.0
    for one, other in zip(exact.facts, half.facts, strict=True):
        assert other.norm == pytest.approx(one.norm, rel=0.01) and other.loss == pytest.approx(one.loss, rel=0.01)


def test_in_fp16_a_step_that_overflows_is_skipped_and_one_that_is_nan_is_examined(tmp_path, caplog):
    toy = brain(Long, precision="fp16", hparams={"output_folder": str(tmp_path)}, nonfinite_patience=3)

    def spoil(batch):
        if batch.step in (2, 4):
            batch.x[0, 0] = 7e4 if batch.step == 2 else math.nan

    toy.fit([1], ToyTrainLoader(6, touch=spoil))
    assert [fact.number for fact in toy.facts if fact.skipped] == [3, 5]
    assert "Step 5 was skipped" in caplog.text and "Step 3 was skipped" not in caplog.text
    (told,) = (json.loads(path.read_text()) for path in tmp_path.glob("bad_batches/*/bad_batch.json"))
    assert told["scale"] == 2.0**15 and told["sum_scale"] == toy.facts[4].sum_scale < 2.0**-12


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("micros", [1, 3])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_a_training_step_never_waits_for_the_device(device, micros, precision):
    toy = brain(precision=precision, device=device)
    loader = ToyTrainLoader(4, 6, micros=micros)
    toy.fit(range(1, 2), loader)  # the first step names unreached parameters and so on
    batches = iter([(batch, batch.last) for batch in (each.to(toy.device) for each in loader.at(2))])
    with HostSyncs() as syncs:
        while toy.trainer.train_step(batches):
            pass
    assert syncs.found == []


def test_what_counts_host_syncs_finds_them():
    class Item(ToyBrain):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            loss.total.item()
            outputs[outputs > 0].sum()
            float(outputs.sum())

    toy = brain(Item, opt_class=partial(torch.optim.RMSprop, lr=0.1))
    with HostSyncs() as syncs:
        toy.on_fit_start()
        toy.trainer.train_step(iter([(next(ToyTrainLoader().at(1)), True)]))
    text = "\n".join(syncs.found)
    assert "Tensor.item" in text and "aten.index" in text and "__float__" in text
    assert "train/update.py" in text  # an optimizer that can't skip by itself is the one wait there is


def test_an_epoch_s_last_accumulation_is_a_step_weighted_by_its_size():
    class Mean(ToyBrain):
        def compute_forward(self, batch, stage):
            return self.modules.model[0](batch).sum(-1)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.mean()

    class Endless(torch.utils.data.IterableDataset):  # nobody knows where it ends
        def __iter__(self):
            return iter(rows)

    rows, before = [torch.full((6,), float(i)) for i in range(5)], layers()[0].bias.detach()
    for data in (rows, Endless()):
        toy = brain(Mean, partial(torch.optim.SGD, lr=0.1), grad_accumulation_factor=2, max_grad_norm=-1)
        toy.fit(range(1, 2), data, train_loader_kwargs={"batch_size": 1})
        assert toy.optimizer_step == 3
        torch.testing.assert_close(toy.modules.model[0].bias, before - 3 * 0.1)  # each step's mean gradient is 1


def test_a_recipe_s_own_optimizers_step_gets_mean_gradients():
    norms = []

    class Own(ToyBrain):
        def optimizers_step(self):
            norms.append(self.modules.model[0].weight.grad.norm().item())
            super().optimizers_step()

    expected = brain(max_grad_norm=0)
    expected.fit(range(1, 2), ToyTrainLoader(3))
    own = brain(Own, max_grad_norm=0)
    own.fit(range(1, 2), ToyTrainLoader(3))
    assert furthest(state(expected), state(own)) < 1e-6
    x, tokens = zip(*[(b.x, b.tokens) for b in ToyTrainLoader(3).at(1)], strict=True)
    reference = brain()
    batch = batch_of([0])
    batch.x, batch.tokens = x[0], tokens[0]
    loss = reference.compute_objectives(reference.compute_forward(batch, None), batch, None)
    (loss.total / loss.count).backward()
    assert norms[0] == pytest.approx(reference.modules.model[0].weight.grad.norm().item(), rel=1e-5)


def test_a_run_that_reaches_its_limit_of_steps_names_the_option(caplog):
    caplog.set_level("INFO")
    brain(optimizer_step_limit=2).fit(range(1, 2), ToyTrainLoader())
    assert "Training ends, because the run has taken the 2 steps of optimizer_step_limit" in caplog.messages


def test_frozen_optimizers_stay_frozen():
    class Two(ToyBrain):
        def init_optimizers(self):
            model = self.modules.model
            self.optimizers_dict = {"a": ADAMW(model[0].parameters()), "b": ADAMW(model[2].parameters())}

        def freeze_optimizers(self, optimizers):
            return {"b": optimizers["b"]} if self.optimizer_step < 2 else optimizers

    toy = brain(Two, optimizer_step_limit=2)
    toy.fit(range(1, 2), ToyTrainLoader())
    assert torch.equal(toy.modules.model[0].weight, layers()[0].weight)
    assert not torch.equal(toy.modules.model[2].weight, layers()[2].weight)


@pytest.mark.parametrize("method", ["", "optimizers_step"])
def test_gradients_that_frozen_optimizers_keep_follow_a_growing_loss_scale(method):
    class Two(ToyBrain):
        def init_optimizers(self):
            model, sgd = self.modules.model, partial(torch.optim.SGD, lr=0.01)
            self.optimizers_dict = {"a": sgd(model[0].parameters()), "b": sgd(model[2].parameters())}

        def freeze_optimizers(self, optimizers):
            return {"b": optimizers["b"]} if self.optimizer_step < 3 else optimizers

        if method:
            def optimizers_step(self):
                super().optimizers_step()

    def trained(steps_to_growth):
        toy = brain(Two, precision="fp16", max_grad_norm=-1)
        toy.scaler.load_state_dict({**toy.scaler.state_dict(), "scale": 8.0, "growth_interval": steps_to_growth})
        toy.fit([1], ToyTrainLoader(4))
        return state(toy)

    growing = trained(1)
    assert furthest(growing, trained(1000)) < 1e-3
    assert furthest(growing, state(brain())) > 1e-2


def test_optimizers_are_asked_for_when_a_step_ends():
    asked = []

    class Asked(ToyBrain):
        def freeze_optimizers(self, optimizers):
            asked.append(self.step)
            return optimizers

    brain(Asked).fit([1], ToyTrainLoader(2, micros=2))
    assert asked == [0, 2, 4, 4]  # the first and the last are zero_grad's


def test_trying_the_largest_batch_leaves_nothing_behind(monkeypatch):
    class Counting(ToyBrain):
        computed, known = 0, []

        def compute_objectives(self, predictions, batch, stage):
            self.known.append(batch.step)
            self.computed += 1
            return super().compute_objectives(predictions, batch, stage)

    class Planned(ToyTrainLoader):
        def largest(self, epoch):
            return list(self.at(epoch, 2))

    monkeypatch.setattr(memory, "bounded", lambda: True)
    plain, tried = brain(Counting), brain(Counting)
    plain.fit([1], ToyTrainLoader(3))
    tried.fit([1], Planned(3))
    assert tried.known == [0, 1, 2, 2, 0, 1, 2] and tried.computed == 3
    assert all(torch.equal(value, state(tried)[name]) for name, value in state(plain).items())


def test_a_stand_in_changes_nothing_in_a_recipe_s_own_steps():
    class Own(ToyBrain):
        def optimizers_step(self):
            super().optimizers_step()

    def touch(batch):
        batch.weight = 1.0 - batch.micro

    toy = brain(Own, partial(torch.optim.SGD, lr=0.1), nonfinite_patience=0)
    toy.fit([1], ToyTrainLoader(3, 6, micros=2, touch=touch))
    assert furthest(state(brain()), state(toy)) > 0 and math.isfinite(toy.ends[0][1])


@pytest.mark.parametrize("rows", [4, 5])
def test_without_an_optimizer_hooks_are_called_once_a_batch(rows):
    ended = []

    class Counting(ToyBrain):
        def compute_forward(self, batch, stage):
            return self.modules.model[0](batch).sum(-1)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.mean()

        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            ended.append(should_step)

    class Endless(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter(torch.ones(rows, 6))

    toy = Counting({"model": layers()}, None, {}, {"device": "cpu", "noprogressbar": True,
                                                   "grad_accumulation_factor": 2})
    toy.fit([1], Endless(), train_loader_kwargs={"batch_size": 1})
    assert ended == [False, True, False, True, False][:rows]
    [(_, loss)] = toy.ends
    with torch.no_grad():
        assert loss == pytest.approx(float(toy.modules.model[0](torch.ones(6)).sum()))


def test_the_last_line_of_an_epoch_has_its_loss_however_short_it_is(capsys):
    toy = brain()
    toy.fit([1], ToyTrainLoader(2), progressbar=True)
    assert f"took 0:00, loss {toy.ends[0][1]:.3f}" in capsys.readouterr().err


def test_without_an_optimizer_gradients_can_be_read():
    model = layers()
    toy = ToyBrain({"model": model}, None, {"model": model}, {"device": "cpu", "noprogressbar": True})
    toy.on_fit_start()
    assert toy.try_batch(batch_of([1, 2])) and toy.optimizer_step == 0
    assert model[0].weight.grad is not None


def test_parameters_the_loss_never_reaches_are_named_once(caplog):
    caplog.set_level("WARNING", "sbkit.train.distributed.unreached")  # `sbkit tune` silences it in its process
    toy = brain()
    toy.fit(range(1, 3), ToyTrainLoader(2))
    said = [record.message for record in caplog.records if "Not trained, because the loss" in record.message]
    assert len(said) == 1 and said[0].endswith(": model.3")
    assert torch.equal(toy.modules.model[3].weight, layers()[3].weight)


def spoiled(bad_steps):
    def touch(batch):
        if batch.step in bad_steps:
            batch.x[0, 0] = math.nan

    return ToyTrainLoader(6, 6, touch=touch)


def test_the_gradient_of_a_placeholder_reaches_no_weight():
    def fit(value):
        def touch(batch):
            if batch.micro == 1:
                batch.weight, batch.x[:] = 0.0, value

        toy = brain(nonfinite_patience=0)
        toy.fit(range(1, 2), ToyTrainLoader(3, 6, micros=2, touch=touch))
        return state(toy), toy.ends

    (spoilt, ends), (expected, expected_ends) = fit(math.nan), fit(1.0)
    assert furthest(expected, state(brain())) > 0.01
    assert all(torch.equal(spoilt[name], value) for name, value in expected.items()) and ends == expected_ends


def test_patience_counts_the_bad_steps_of_an_epoch_whose_losses_are_in_no_mean(tmp_path):
    hparams = {"output_folder": str(tmp_path)}
    toy = brain(hparams=hparams, nonfinite_patience=2)
    toy.fit(range(1, 3), spoiled({1, 3}))  # two in each epoch
    assert all(math.isfinite(loss) for _, loss in toy.ends)
    with refused("not-finite", kind=NotFinite):
        brain(hparams=hparams, nonfinite_patience=2).fit(range(1, 3), spoiled({1, 3, 4}))
    assert NotFinite("not-finite", "x").exit_code == 1 and issubclass(NotFinite, ValueError)


# ------------------------------------------------------------------ means


def test_the_training_loss_is_the_exact_mean_and_can_be_read_at_any_time():
    reads = []

    class Reading(ToyBrain):
        def on_fit_batch_end(self, batch, outputs, loss, should_step):
            reads.append(self.avg_train_loss)

    toy = brain(Reading, opt_class=partial(torch.optim.SGD, lr=0.0))
    toy.fit(range(1, 2), ToyTrainLoader(3, 5))
    batch = batch_of([i for b in ToyTrainLoader(3, 5).at(1) for i in b.ids])
    exact = toy.compute_objectives(toy.compute_forward(batch, None), batch, None).mean.item()
    assert toy.ends == [("TRAIN", pytest.approx(exact, rel=1e-5))] and isinstance(toy.ends[0][1], float)
    assert reads[-1] == pytest.approx(exact, rel=1e-5)
    assert toy.avg_train_loss == 0.0


def test_an_average_of_a_recipe_s_own_is_used():
    class Own(ToyBrain):
        def update_average(self, loss, avg_loss):
            return max(avg_loss, float(loss))

    toy = brain(Own, opt_class=partial(torch.optim.SGD, lr=0.0))
    toy.fit(range(1, 2), ToyTrainLoader(3, 1), ToyEvalLoader(6))
    batches = [batch_of([i]) for b in ToyTrainLoader(3, 1).at(1) for i in b.ids]
    losses = [toy.compute_objectives(toy.compute_forward(b, None), b, None).mean.item() for b in batches]
    assert toy.ends[0][1] == pytest.approx(max(losses))


def test_a_fit_batch_that_calls_ours_averages_what_it_returns():
    class Around(ToyBrain):
        def fit_batch(self, batch):
            self.returned = [*getattr(self, "returned", []), float(super().fit_batch(batch))]
            return torch.tensor(self.returned[-1])

    around, plain = brain(Around), brain()
    for toy in (around, plain):
        toy.fit(range(1, 2), ToyTrainLoader(4))
    assert around.ends == [("TRAIN", pytest.approx(sum(around.returned) / 4))]
    assert furthest(state(plain), state(around)) < 1e-5


@pytest.mark.parametrize("losses, mean", [
    ([Loss(torch.tensor(6.0), torch.tensor(4)), Loss(torch.tensor([3.0]), 2.0)], 1.5),
    ([torch.tensor(1.0), 2.0, Loss(torch.tensor(9.0), 1)], 4.0),
    *(([Loss(torch.tensor(bad), 7.0), Loss(torch.tensor(6.0), 4.0), torch.tensor(bad)], 1.5) for bad in BAD),
    (BAD, math.nan), ([Loss(torch.tensor(math.nan), torch.tensor(3))], math.nan), ([], math.nan),
    ([Loss(torch.tensor(0.0), 0.0)], math.nan), ([Loss(torch.tensor(0.0), 0.0), math.nan], math.nan)])
def test_the_mean_of_an_evaluation_is_by_count_of_what_is_finite(losses, mean):
    """Of nothing, or of dummy batches alone, it is unknown."""
    subject = brain()
    subject.evaluate_batch = lambda batch, stage: batch  # each batch is its loss
    with torch.no_grad():
        assert subject.pass_over(losses, Stage.VALID, "valid", False) == pytest.approx(mean, nan_ok=True)


def test_evaluation_weighs_by_count_and_leaves_out_what_is_not_finite():
    class Nan(ToyBrain):
        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, batch, stage)
            return Loss(loss.total * math.nan, loss.count) if 0 in batch.ids else loss

    toy = brain(Nan)
    batch = batch_of(range(2, 11))
    exact = ToyBrain.compute_objectives(toy, toy.compute_forward(batch, None), batch, None).mean.item()
    assert toy.evaluate(ToyEvalLoader(11)) == pytest.approx(exact, rel=1e-5)


class Normalised(ToyBrain):
    def compute_forward(self, batch, stage):
        self.hparams.normalize(batch.x[:, None])
        return super().compute_forward(batch, stage)


def test_a_normaliser_beside_the_modules_learns_nothing_from_dev_data():
    toy = brain(Normalised, hparams={"normalize": InputNormalization()})
    toy.fit(range(1, 2), ToyTrainLoader(2, 5), ToyEvalLoader(4))
    assert toy.hparams.normalize.count == 10
    toy.fit(range(2, 3), ToyTrainLoader(1, 5), ToyEvalLoader(4))
    assert toy.hparams.normalize.count == 15


class NanOnce(Normalised):
    def compute_objectives(self, predictions, batch, stage):
        loss = super().compute_objectives(predictions, batch, stage)
        return loss._replace(total=loss.total * (math.nan if batch.step == 1 else 1.0))


def test_the_search_for_a_bad_batch_counts_its_features_only_once(tmp_path, caplog):
    toy = brain(NanOnce, hparams={"normalize": InputNormalization(), "output_folder": str(tmp_path)})
    toy.fit([1], ToyTrainLoader(3, 5))
    assert "Step 2 was skipped" in caplog.text and toy.hparams.normalize.count == 15


def test_moving_averages_are_used_in_evaluation_only():
    model = layers()
    toy = brain(modules=model, hparams={"ema": EMA(model, decay=0.5)})
    seen = []
    compute = toy.compute_forward
    toy.compute_forward = lambda batch, stage: (seen.append(model[0].weight.detach().clone()), compute(batch, stage))[1]
    toy.fit(range(1, 2), ToyTrainLoader(3), ToyEvalLoader(2))
    trained, evaluated = model[0].weight.detach(), seen[-1]
    assert toy.trainer.moving_average.updates == 3 and not torch.equal(trained, evaluated)
    torch.testing.assert_close(evaluated, toy.trainer.moving_average.state_dict()["weights"]["0.weight"])


# ------------------------------------------------------------------ what it leaves out


def test_debug_mode_runs_a_few_batches_of_a_few_epochs():
    toy = brain(debug=True, debug_batches=3, debug_epochs=2)
    toy.fit(range(1, 10), ToyTrainLoader(6, micros=2), ToyEvalLoader(9))
    assert [stage for stage, _ in toy.ends] == ["TRAIN", "VALID"] * 2
    assert toy.optimizer_step == 4  # 2 + 1 micro-batches are two steps, twice


def test_only_testing_trains_nothing():
    toy = brain(test_only=True)
    toy.fit(range(1, 3), ToyTrainLoader())
    assert toy.optimizer_step == 0 and not hasattr(toy, "ends")


# ------------------------------------------------------------------ what it writes down


def test_metrics_are_written_for_programs(tmp_path):
    class Parts(ToyBrain):
        def compute_objectives(self, predictions, batch, stage):
            loss = super().compute_objectives(predictions, batch, stage)
            return loss._replace(extras={"ctc": (loss.total * 2, loss.count)})

    toy = brain(Parts, hparams={"output_folder": str(tmp_path), "log_interval": 0.0})
    toy.fit(range(1, 3), ToyTrainLoader(4))
    toy.metrics_log.flush()
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == list(range(1, 9))
    assert steps[0]["ctc"] == pytest.approx(2 * steps[0]["loss"])
    assert {"lr", "grad_norm", "audio_s_per_s", "data_wait_share", "padding_share", "skipped_steps"} <= set(steps[0])
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert [line["train_loss"] for line in epochs] == pytest.approx([loss for _, loss in toy.ends])
    assert sum(epochs[0]["time_shares"].values()) == pytest.approx(1, abs=0.02)


def test_a_recipe_that_updates_all_by_itself_counts_its_steps():
    """SpeechBrain's recipes may replace ``optimizers_step`` and never call the original."""

    class Own(sbkit.Brain):
        def compute_forward(self, batch, stage):
            return self.modules.model(batch)

        def compute_objectives(self, predictions, batch, stage):
            return predictions.square().mean()

        def optimizers_step(self):
            for optimizer in self.optimizers_dict.values():
                optimizer.step()
                optimizer.zero_grad(set_to_none=True)
            self.optimizer_step += 1

    own = Own({"model": torch.nn.Linear(2, 1)}, partial(torch.optim.SGD, lr=0.1), run_opts={"device": "cpu"})
    before = own.modules.model.weight.detach().clone()
    batches = torch.utils.data.DataLoader(torch.ones(8, 2), batch_size=2)
    own.fit(range(1, 3), batches)
    assert own.optimizer_step == 8 and not torch.equal(own.modules.model.weight, before)


@pytest.mark.parametrize("counts", [False, True])
def test_a_step_of_a_script_that_counts_no_update_is_a_warning(counts, caplog):
    class Own(ToyBrain):
        def optimizers_step(self):
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.optimizer_step += counts

    brain(Own).fit(range(1, 3), ToyTrainLoader(2))
    assert caplog.text.count("it also do self.optimizer_step += 1") == (not counts)


class StopsInItsLastBatch(ToyBrain):
    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if self.optimizer_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)


def test_a_signal_in_the_last_step_of_a_run_without_validation_saves_it(tmp_path):
    with pytest.raises(Stopped, match="after step 2, checkpoint saved at"):
        brain(StopsInItsLastBatch, checkpointer=Checkpointer(tmp_path)).fit([1], ToyTrainLoader(2))
    again = brain(checkpointer=Checkpointer(tmp_path))
    again.fit([1], ToyTrainLoader(2))
    assert again.optimizer_step == 2 and [name for name, _ in again.ends] == ["TRAIN"]


class LosesItsWorker(ToyBrain):
    """The worker dies while the main process is busy elsewhere, and torch raises its error there."""

    def compute_forward(self, batch, stage):
        (worker,) = multiprocessing.active_children()
        worker.kill()
        time.sleep(60)


def test_a_data_worker_that_dies_during_a_step_is_one_clear_error():
    with pytest.raises(SbkitError, match=r"a data worker died: .*killed by signal: Killed"):
        brain(LosesItsWorker).fit([1], DataLoader(range(9), num_workers=1))


def without_a_reader(work):
    ours, theirs = os.pipe()
    os.close(ours)
    os.dup2(theirs, 2)
    toy = brain(noprogressbar=False)
    toy.fit(range(1, 4), ToyTrainLoader()) if work == "fit" else toy.evaluate(ToyEvalLoader())
    print("an end", file=sys.stderr)
    print("went on")


@pytest.mark.slow
@pytest.mark.parametrize("work", ["fit", "evaluate"])
def test_a_script_continues_when_the_reader_of_its_output_exits(work):
    done = program(without_a_reader, work)
    assert (done.stdout, done.returncode) == ("went on\n", 0)


def test_a_loss_that_is_not_finite_is_told_of_a_fit_batch_that_does_not_look(caplog):
    class Own(ToyBrain):
        def fit_batch(self, batch):
            return torch.tensor(math.nan if self.step == 2 else 1.0)

    toy = brain(Own, partial(torch.optim.SGD, lr=0.1), nonfinite_patience=1)
    toy.fit([1], ToyTrainLoader(3, 6))
    assert "batch 2 has the loss nan, number 1 of epoch 1 (nonfinite_patience allows 1)" in caplog.text
    with refused("not-finite", kind=NotFinite):
        brain(Own, partial(torch.optim.SGD, lr=0.1), nonfinite_patience=0).fit([1], ToyTrainLoader(3, 6))


def test_a_check_of_ones_own_is_called_for_each_loss():
    class Own(ToyBrain):
        def check_loss_isfinite(self, loss):
            self.hparams.looked.append(float(loss))

    toy = brain(Own, partial(torch.optim.SGD, lr=0.1), hparams={"looked": []})
    toy.fit([1], ToyTrainLoader(3, 6))
    assert len(toy.hparams.looked) == 3


@pytest.mark.parametrize(("method", "loss"), [
    ("compute_objectives", None), ("compute_objectives", torch.ones(2)), ("evaluate_batch", None)],
    ids=["no loss", "two losses", "no loss of evaluate_batch"])
def test_a_loss_that_is_no_number_is_told_in_validation_too(method, loss):
    class Own(ToyBrain):
        pass

    def returned(self, *given, **named):
        real = getattr(ToyBrain, method)(self, *given, **named)
        return loss if Stage.VALID in (*given, *named.values()) else real

    setattr(Own, method, returned)
    with refused("bad-loss"):
        brain(Own).fit([1], ToyTrainLoader(3, 6), ToyEvalLoader(5))


def test_losses_that_count_nothing_and_factors_that_mean_nothing_are_told(caplog):
    class Own(ToyBrain):
        def compute_objectives(self, predictions, batch, stage):
            return Loss(predictions.sum() * 0, self.hparams.count)

    brain(Own, hparams={"count": 0}).fit([1], ToyTrainLoader(3, 6))
    assert "Nothing was trained in epoch 1: every loss had a count of 0" in caplog.text
    with refused("bad-loss"):
        brain(Own, hparams={"count": -2}).fit([1], ToyTrainLoader(3, 6))
    with refused("bad-value", key="grad_accumulation_factor", value=0):
        brain(grad_accumulation_factor=0)
    with refused("bad-value", key="ema"):
        brain(hparams={"ema": 5})


def test_loggers_without_a_folder_are_told(caplog):
    brain(hparams={"loggers": ["tensorboard"]})
    assert "nothing is sent to them, as the recipe has no output_folder" in caplog.text


class ChangesOptions(ToyBrain):
    """Sets options in a hook, which SpeechBrain reads at each step."""

    def on_stage_start(self, stage, epoch=None):
        super().on_stage_start(stage, epoch)
        if epoch == 2:
            self.max_grad_norm, self.grad_accumulation_factor = 1e-12, 3


def test_options_that_a_script_sets_in_a_hook_count_from_then_on():
    toy, ends = brain(ChangesOptions, opt_class=partial(torch.optim.SGD, lr=0.1)), []
    drawn = torch.Generator().manual_seed(0)
    data = DataLoader([SimpleNamespace(x=torch.randn(2, SIZE, generator=drawn), tokens=torch.ones(2))
                       for _ in range(6)], batch_size=None)
    toy.on_stage_end = lambda *given: ends.append((toy.optimizer_step, state(toy)))
    toy.fit(range(1, 3), data)
    (steps, before), (all_steps, after) = ends
    assert steps == 6 and all_steps == 6 + 2
    assert furthest(before, after) < 1e-9, "gradients are clipped to nothing"
