"""FSDP2 and recomputed activations give what DDP gives, and checkpoints that look the same."""

from __future__ import annotations

import copy

import pytest
import torch
from processes import results
from toys import SIZE, ToyBrain, ToyEvalLoader, ToyTrainLoader, brain, furthest, state

from sbkit.errors import SbkitError
from sbkit.runs import restore
from sbkit.score.metric import Metric
from sbkit.score.weights import ChosenWeights, Mean
from sbkit.tasks.task import Task
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint_average import averaged_state
from sbkit.train.distributed import ranks, sharding
from sbkit.train.recomputing import checkpoint_activations


class Layer(torch.nn.Module):
    def __init__(self, size):
        super().__init__()
        self.lin = torch.nn.Linear(size, size)
        self.drop = torch.nn.Dropout(0.1)

    def forward(self, x, scale=1.0):
        return x + self.drop(torch.tanh(self.lin(x))) * scale


class Deep(torch.nn.Module):
    """Layers that repeat, and a method that is not ``forward``."""

    def __init__(self):
        super().__init__()
        self.inp = torch.nn.Linear(SIZE, 8)
        self.layers = torch.nn.ModuleList([Layer(8) for _ in range(3)])
        self.out = torch.nn.Linear(8, 1)

    def encode(self, x):
        x = self.inp(x)
        for layer in self.layers:
            x = layer(x, scale=0.5)
        return self.out(x).squeeze(-1)


class DeepBrain(ToyBrain):
    def compute_forward(self, batch, stage):
        if stage.name == "TRAIN":  # the same dropout whichever rank computes it
            torch.manual_seed(int(batch.ids[0]))
        return self.hparams.model[0].encode(batch.x)


def modules():
    torch.manual_seed(0)
    return torch.nn.ModuleList([Deep()])


def train(options, folder, epochs=2):
    rank, world = ranks.rank(), ranks.world_size()
    model = modules()
    checkpointer = Checkpointer(folder, {"model": model})
    toy = brain(DeepBrain, modules=model, hparams=options, checkpointer=checkpointer, max_grad_norm=1.0)
    toy.fit(range(1, epochs + 1), ToyTrainLoader(4, 6, rank, world, 2), ToyEvalLoader(9, rank, world))
    toy.checkpointer.save_checkpoint()
    toy.checkpointer.wait()
    names = [name for name, _ in toy.modules.named_parameters()]
    return sharding.full_value(state(toy)), toy.ends, names


@pytest.mark.slow
@pytest.mark.parametrize("options", [
    {"fsdp": True}, {"fsdp": ["Layer"], "activation_checkpointing": ["model.0.layers.*"]},
    {"activation_checkpointing": [Layer]},
], ids=str)
def test_two_ranks_train_as_with_ddp_and_write_the_same_checkpoint(tmp_path, options):
    (expected, ends, names), _ = results(train, {}, tmp_path / "ddp")
    (first, first_ends, first_names), (second, second_ends, _) = results(train, options, tmp_path / "other")
    assert furthest(first, expected) < 1e-5 and all(torch.equal(first[name], second[name]) for name in first)
    assert first_names == names and first_ends == second_ends
    assert [loss for _, loss in first_ends] == pytest.approx([loss for _, loss in ends], rel=1e-5)
    for name in ("model", "optimizer"):
        files = [next((tmp_path / which).glob("CKPT*")) / f"{name}.ckpt" for which in ("ddp", "other")]
        theirs, ours = (torch.load(file, weights_only=True) for file in files)
        assert ours.keys() == theirs.keys()
        flat = [torch.utils._pytree.tree_flatten(each)[0] for each in (theirs, ours)]
        for one, other in zip(*flat, strict=True):
            assert type(one) is type(other)
            if isinstance(one, torch.Tensor):
                torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def go_on(options, folder):
    rank, world = ranks.rank(), ranks.world_size()
    model = modules()
    toy = brain(DeepBrain, modules=model, hparams=options, checkpointer=Checkpointer(folder, {"model": model}))
    toy.fit(range(3, 4), ToyTrainLoader(4, 6, rank, world, 2))
    return sharding.full_value(state(toy)), toy.optimizer_step


@pytest.mark.slow
def test_a_checkpoint_can_be_resumed_sharded_or_not(tmp_path):
    results(train, {"fsdp": True}, tmp_path)
    divided, _ = results(go_on, {"fsdp": True}, tmp_path)
    whole, _ = results(go_on, {}, tmp_path)
    assert divided[1] == whole[1] == 12
    assert furthest(divided[0], whole[0]) < 1e-5


class Averaged(DeepBrain, Task):
    """Tests the mean of its two best checkpoints, as a recogniser does."""

    metric = Metric("WER")

    def on_stage_start(self, stage, epoch=None):
        if stage.name == "TEST":
            self.tested = sharding.full_value(state(self))

    def close_stage(self, stage, loss, epoch=None):
        if stage.name == "VALID":
            self.checkpointer.save_checkpoint(meta={"WER": 10.0 - epoch})


def score_the_mean(options, folder, card=False):
    place = ranks.rank(), ranks.world_size()
    on = {"device": f"cuda:{place[0]}"} if card else {}
    model = modules()
    toy = brain(Averaged, modules=model, hparams={"average_checkpoints": 2, **options},
                checkpointer=Checkpointer(folder, {"model": model}), **on)
    toy.fit(range(1, 4), ToyTrainLoader(2, 6, *place, 2), ToyEvalLoader(9, *place))
    toy.checkpointer.wait()
    loss = toy.evaluate(ToyEvalLoader(9, *place), min_key="WER")
    expected, used = averaged_state(toy.checkpointer, "model", Mean(2), min_key="WER")
    afterwards = brain(Averaged, modules=(model := modules()), checkpointer=Checkpointer(folder, {"model": model}))
    assert restore.take_weights(afterwards, ChosenWeights(average=Mean(2))) == used  # as `sbkit evaluate --average 2`
    return loss, toy.tested, expected, state(afterwards)


@pytest.mark.slow
def test_the_mean_of_checkpoints_is_tested_sharded_or_not(tmp_path):
    (expected, _, _, _), _ = results(score_the_mean, {}, tmp_path / "ddp")
    for loss, *found in results(score_the_mean, {"fsdp": True}, tmp_path / "fsdp"):
        assert loss == pytest.approx(expected, rel=1e-5)
        assert_the_mean_was_tested(*found)


@pytest.mark.slow
@pytest.mark.gpu(cards=2, values=True)
def test_the_mean_of_checkpoints_is_tested_on_gpus(tmp_path):
    for _, *found in results(score_the_mean, {"fsdp": True}, tmp_path, True):
        assert_the_mean_was_tested(*found)


def assert_the_mean_was_tested(tested, mean, evaluated):
    for name, value in mean.items():
        assert torch.equal(tested[f"model.{name}"], value) and torch.equal(evaluated[f"model.{name}"], value)


@pytest.mark.parametrize("wanted", [["Layer"], [Layer], ["layers.*"], "Layer"])
def test_recomputed_activations_change_no_gradient(wanted):
    plain, again = modules()[0], modules()[0]
    checkpoint_activations(again, wanted)
    calls = []
    again.layers[0].lin.register_forward_hook(lambda *a: calls.append(1))
    x = torch.randn(3, SIZE)
    for model in (plain, again):
        torch.manual_seed(1)
        model.encode(x).sum().backward()
    for one, other in zip(plain.parameters(), again.parameters(), strict=True):
        assert torch.equal(one.grad, other.grad)
    assert len(calls) == 2  # once more in backward
    again.eval()
    again.encode(x)
    assert len(calls) == 3
    assert isinstance(again.layers[0], Layer) and again.state_dict().keys() == plain.state_dict().keys()
    twin = copy.deepcopy(again)
    assert twin.layers[0].lin.weight is not again.layers[0].lin.weight
    checkpoint_activations(again, wanted)  # a second fit
    assert type(again.layers[0]).__mro__.count(Layer) == 1


def test_a_name_that_fits_nothing_is_an_error_that_lists_the_layers_that_repeat():
    with pytest.raises(SbkitError, match=r"activation_checkpointing.*'EncoderLayer'.*repeated layers: Layer"):
        checkpoint_activations(modules(), ["EncoderLayer"])
    for wrong, meant in (("Layers", "Layer"), ("0.layer.0", "0.layers.0")):
        with pytest.raises(SbkitError, match=f"did you mean {meant}[?]"):
            checkpoint_activations(modules(), [wrong])


@pytest.mark.parametrize("options", [{"fsdp": True}, {"activation_checkpointing": ["Layer"]}], ids=str)
def test_one_process_trains_the_same(options):
    plain, again = (brain(DeepBrain, modules=modules(), hparams=hparams) for hparams in ({}, options))
    for toy in (plain, again):
        toy.fit(range(1, 2), ToyTrainLoader(3))
    assert all(torch.equal(value, state(again)[name]) for name, value in state(plain).items())
