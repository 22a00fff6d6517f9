"""Parts that don't train, always or for some steps: as if they weren't there, and exact on resuming."""

from __future__ import annotations

import json
from functools import partial

import pytest
import torch
from processes import outcomes, results
from refusals import refused
from speechbrain.core import Stage
from speechbrain.utils.epoch_loop import EpochCounter
from toys import ToyBrain, ToyEvalLoader, ToyTrainLoader, brain, layers, state

from sbkit.errors import SbkitError
from sbkit.recipe.parts import ParameterGroups
from sbkit.recipe.speed import Utilisation
from sbkit.train.averaging import EMA
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.adapted import Adapted
from sbkit.train.distributed import ranks
from sbkit.train.freezing import Freezing


class Stop(Exception):
    pass


class Named(ToyBrain):
    """A recipe that has a key for the first layer, with statistics and dropout behind it."""

    def compute_forward(self, batch, stage):
        model = self.hparams.model
        x = torch.nn.functional.dropout(model[4](model[0](batch.x)), 0.2, training=model[4].training)
        return model[2](torch.tanh(model[1].project(torch.tanh(x)))).squeeze(-1)

    def on_fit_batch_start(self, batch, should_step):
        if self.optimizer_step == getattr(self.hparams, "die_at", None) and batch.micro == 1:
            raise Stop


def model():
    made = layers()
    made.append(torch.nn.BatchNorm1d(8))
    return made


def toy(freeze, modules=None, hparams=None, **options):
    modules = modules or model()
    return brain(Named, modules=modules, hparams={"first": modules[0], "freeze": freeze, **(hparams or {})}, **options)


def test_frozen_parameters_do_not_change_and_have_no_state():
    made = toy({"first": True, "model.4": True})
    before = state(made)
    made.fit([1, 2], ToyTrainLoader(4))
    after = state(made)
    assert {name.split(".")[1] for name in after if not torch.equal(before[name], after[name])} == {"1", "2"}
    held = {id(p) for p in made.optimizer.state}
    assert not held & {id(p) for i in (0, 4) for p in made.modules["model"][i].parameters()}
    assert all(parameter.grad is None for parameter in made.modules["model"][0].parameters())


def test_frozen_modules_run_in_evaluation_mode():
    modes = []

    class Looking(Named):
        def compute_forward(self, batch, stage):
            if stage == Stage.TRAIN:
                modes.append([layer.training for layer in self.hparams.model])
            return super().compute_forward(batch, stage)

    modules = model()
    made = brain(Looking, modules=modules,
                 hparams={"first": modules[0], "freeze": {"first.bias": True, "model.4": 2}})
    made.fit([1, 2], ToyTrainLoader(2), ToyEvalLoader(2))
    assert modes[:2] == [[True, True, True, True, False]] * 2  # a part of a module is not all of it
    assert modes[-2:] == [[True] * 5] * 2


def test_the_last_pattern_that_fits_counts():
    made = toy({"*": True, "model.2": False, "first.weight": 3})
    frozen = [name for name, p in made.modules.named_parameters() if not p.requires_grad]
    assert "model.2.weight" not in frozen and "model.0.bias" in frozen
    assert "model.0.weight" not in frozen  # the cost is for the time after
    made.fit([1], ToyTrainLoader(2))
    assert not made.modules["model"][0].weight.requires_grad
    made.fit([2, 3], ToyTrainLoader(2))
    assert made.modules["model"][0].weight.requires_grad and not made.modules["model"][0].bias.requires_grad


def test_a_weight_that_layers_share_is_frozen_by_either_name():
    tied = torch.nn.ModuleDict({"a": torch.nn.Linear(3, 3), "b": torch.nn.Linear(3, 3)})
    tied["b"].weight = tied["a"].weight
    Freezing(tied, ParameterGroups(tied, {}), {"b": True})
    assert [p.requires_grad for p in tied["a"].parameters()] == [False, True]


@pytest.mark.parametrize("pattern", ["first", "model.0", "model.0.*", "fir*", "model.[0]"])
def test_a_part_is_named_by_its_key_by_its_path_or_by_a_pattern(pattern):
    made = toy({pattern: True})
    assert [n for n, p in made.modules.named_parameters() if not p.requires_grad] == ["model.0.weight", "model.0.bias"]


@pytest.mark.parametrize("key", ["freeze", "learning_rates"])
def test_a_pattern_that_fits_nothing_is_refused(key):
    with pytest.raises(SbkitError, match=f"{key}: no trainable part is called 'frist'") as error:
        brain(Named, modules=(modules := model()), hparams={"first": modules[0], key: {"frist": 1}})
    assert error.value.hint == "did you mean first?"


@pytest.mark.parametrize("value", [{"first": "yes"}, {"first": -1}, ["first"], True])
def test_a_value_that_says_nothing_is_refused(value):
    with pytest.raises(SbkitError, match=r"freeze is .* and must be a mapping of parts to true"):
        toy(value)


def test_a_loss_without_trainable_parameters_is_an_error():
    with refused("nothing-to-train"):
        toy({"*": True, "model.3": False}).fit([1], ToyTrainLoader(1))


def test_frozen_for_no_steps_is_not_frozen_to_the_bit():
    plain, made = toy(None), toy({"first": 0})
    for each in (plain, made):
        torch.manual_seed(4)
        each.fit([1], ToyTrainLoader(4))
    assert all(torch.equal(value, state(made)[name]) for name, value in state(plain).items())


# ------------------------------------------------------------------ unfreezing, on one rank and on two

UNTIL = {"first": 7, "model.4": 3}


def run(folder, die_at=None, average=True):
    rank, world = ranks.rank(), ranks.world_size()
    torch.manual_seed(5)
    modules, counter = model(), EpochCounter(3)
    ema = EMA(modules, 0.9) if average else None
    shelf = Checkpointer(folder, {"counter": counter, "model": modules})
    made = toy(UNTIL, modules, {"die_at": die_at, "ema": ema, "output_folder": None, "seed": 3}, checkpointer=shelf,
               opt_class=partial(torch.optim.AdamW, lr=0.02, weight_decay=0.3), max_grad_norm=0.5,
               ckpt_interval_steps=2)
    try:
        made.fit(counter, ToyTrainLoader(4, 8, rank, world, micros=2), ToyEvalLoader(5, rank, world))
    finally:
        if die_at is None or ranks.world_size() == 1:
            shelf.wait()
    held = made.optimizer.state_dict()["state"]
    return state(made), {i: {k: v.clone() for k, v in one.items()} for i, one in held.items()}, \
        (ema.state_dict()["weights"] if ema else {}), getattr(made.trainer.parallel.exchange, "agree_each_time", False)


def same(one, other):
    return all(torch.equal(value, other[name]) for name, value in one.items()) and set(one) == set(other)


def compare(whole, again):
    assert same(whole[0], again[0]) and same(whole[2], again[2])
    assert set(whole[1]) == set(again[1]) and all(same(each, again[1][i]) for i, each in whole[1].items())


def test_parameters_frozen_for_some_steps_train_from_then_on(tmp_path):
    start = {name: value.clone() for name, value in model().state_dict().items()}
    with pytest.raises(Stop):
        run(tmp_path, 7)
    saved = torch.load(max(tmp_path.glob("CKPT*/model.ckpt"), key=lambda path: path.stat().st_mtime))
    assert torch.equal(saved["0.weight"], start["0.weight"]) and not torch.equal(saved["4.weight"], start["4.weight"])
    weights, held, averages, _ = run(tmp_path)
    assert not torch.equal(weights["model.0.weight"], start["0.weight"])
    steps = sorted({int(one["step"]) for one in held.values()})
    assert steps == [5, 9, 12]  # of 12: each state is as old as its part trains
    assert not torch.equal(averages["0.weight"], weights["model.0.weight"])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.slow
@pytest.mark.parametrize("die_at", [2, 3, 4, 7, 8])
def test_a_run_that_died_before_at_or_after_unfreezing_resumes_exactly(tmp_path, whole, die_at):
    with pytest.raises(Stop):
        run(tmp_path, die_at)
    compare(whole, run(tmp_path))


@pytest.mark.slow
def test_unfreezing_works_on_two_ranks(tmp_path):
    first, second = results(run, tmp_path / "whole")
    assert same(first[0], second[0]) and not first[3]  # and no backward searches for what it doesn't reach
    for die_at in (6, 7):
        assert all(end.error is not None for end in outcomes(run, tmp_path / str(die_at), die_at))
        again, other = results(run, tmp_path / str(die_at))
        compare(first, again)
        assert same(again[0], other[0]) and not again[3]


def as_a_rank(cls, freeze):
    made = brain(cls, modules=layers(), hparams={"freeze": freeze})
    made.fit([1, 2], ToyTrainLoader(4, 8, ranks.rank(), ranks.world_size()))
    return state(made), made.trainer.parallel.exchange.agree_each_time


@pytest.mark.slow
def test_unfrozen_parameters_that_the_loss_does_not_reach_are_not_averaged():
    (first, searches), (second, _) = results(as_a_rank, ToyBrain, {"model.3": 2, "model.0": 2})
    assert same(first, second) and not searches
    assert torch.equal(first["model.3.weight"], layers()[3].weight)
    assert not torch.equal(first["model.0.weight"], layers()[0].weight)


class OwnStep(ToyBrain):
    """A ``fit_batch`` of its own, as in a GAN."""

    def fit_batch(self, batch):
        loss = ((self.compute_forward(batch, None) - batch.x.sum(-1)) ** 2).mean()
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.optimizer_step += 1
        return loss.detach()


@pytest.mark.slow
def test_unfreezing_works_with_a_recipes_own_fit_batch_on_two_ranks():
    (first, _), (second, _) = results(as_a_rank, OwnStep, {"model.0": 2})
    assert same(first, second) and not torch.equal(first["model.0.weight"], layers()[0].weight)


def divided(folder):
    made = brain(ToyBrain, modules=layers(), hparams={"freeze": {"model.0": 2}, "fsdp": True})
    with refused("conflicting-options", key="fsdp", wording=False):
        made.fit([1], ToyTrainLoader(2, 8, ranks.rank(), ranks.world_size()))
    model = layers()
    shelf = Checkpointer(folder, {"model": Adapted(model, model[0].requires_grad_(False), folder)})
    made = brain(ToyBrain, modules=model, hparams={"fsdp": True}, checkpointer=shelf)
    with refused("conflicting-options", key="fsdp", wording=False):
        made.fit([1], ToyTrainLoader(2, 8, ranks.rank(), ranks.world_size()))


@pytest.mark.slow
def test_sharded_parameters_are_neither_unfrozen_nor_saved_as_adapters(tmp_path):
    results(divided, tmp_path)


def test_parameters_that_a_model_itself_keeps_frozen_are_never_unfrozen():
    """Convolutions of a pretrained encoder and the base of adapters get no gradient, whatever the recipe thaws."""
    modules = torch.nn.ModuleDict({"model": torch.nn.ModuleList([torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)])})
    modules["model"][0].weight.requires_grad_(False)
    for _ in range(2):  # a run's modules may be given to another Brain, as the check's are
        freezing = Freezing(modules, ParameterGroups(modules, {}), {"*": 5})
        freezing.apply(0)
        assert not any(parameter.requires_grad for parameter in modules.parameters())
    freezing.apply(5)
    assert [name for name, each in modules.named_parameters() if not each.requires_grad] == ["model.0.weight"]


def test_a_module_is_in_evaluation_mode_whoever_froze_its_parts():
    """Spans are masked and values dropped by the module above: a frozen encoder is to do neither."""
    encoder = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2))
    encoder[0].requires_grad_(False)
    modules = torch.nn.ModuleDict({"model": torch.nn.ModuleList([encoder, torch.nn.Linear(2, 2)])})
    freezing = Freezing(modules, ParameterGroups(modules, {"encoder": encoder}), {"encoder": 5})
    freezing.apply(0)
    freezing.train()
    assert not encoder.training and not encoder[0].training and modules["model"][1].training
    freezing.apply(5)
    freezing.train()
    assert encoder.training


def test_a_part_that_the_model_itself_keeps_frozen_cannot_train_from_a_step_on():
    modules = torch.nn.ModuleDict({"model": torch.nn.Linear(2, 2)})
    modules["model"].weight.requires_grad_(False)
    with refused("frozen-by-model", key="freeze", value="model.weight"):
        Freezing(modules, ParameterGroups(modules, {}), {"model.weight": 5})
    Freezing(modules, ParameterGroups(modules, {}), {"model.weight": True, "model.bias": 5})


# ------------------------------------------------------------------ what a run says of it


def said(caplog, freeze, **hparams):
    """The messages of a run of three steps."""
    caplog.set_level("INFO", "sbkit")
    toy(freeze, hparams=hparams).fit([1], ToyTrainLoader(3))
    return [record.getMessage() for record in caplog.records]


def test_the_start_says_what_learns_and_since_when(caplog):
    (table,) = [each for each in said(caplog, {"first": 2, "model.4": True}, learning_rates={"model.2": 10})
                if each.startswith("Trained parts")]
    lines = table.splitlines()
    assert lines[1].split() == "part trained frozen rate factor peak rate".split()
    assert "until step 2" in lines[3] and lines[3].startswith("  first") and "0.05 to 0.5" in lines[4]
    assert "parameters are trained from the first step" in lines[-1] and "until step 2 and 16 for good" in lines[-1]


def test_no_table_is_logged_if_all_parts_learn_at_one_rate(caplog):
    assert not any("Trained parts" in each for each in said(caplog, None))


@pytest.mark.parametrize(("freeze", "told"), [({"first": 2}, [": model.3"]),
                                              ({"model.3.bias": 2}, [": model.3", ": model.3"])])
def test_after_unfreezing_only_unfrozen_parameters_are_named_that_the_loss_does_not_reach(caplog, freeze, told):
    found = [each for each in said(caplog, freeze) if "Not trained, because the loss" in each]
    assert [each[each.rindex(":"):] for each in found] == told


@pytest.mark.parametrize("until, known", [(4, [False, True, True]), (5, [False, False, True]), (True, [True] * 3)])
def test_an_epoch_in_which_parts_are_frozen_that_will_train_has_no_utilisation(tmp_path, until, known):
    made = toy({"first": until}, hparams={"output_folder": str(tmp_path)})
    made.utilisation = Utilisation(1e9, 2e11)
    made.fit([1, 2, 3], ToyTrainLoader(4))
    made.metrics_log.flush()
    lines = map(json.loads, (tmp_path / "metrics.jsonl").read_text().splitlines())
    assert ["flops_per_s" in line for line in lines if line["kind"] == "epoch"] == known
