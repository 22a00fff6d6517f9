"""Muon against torch's own, against AdamW, and against singular values."""

from __future__ import annotations

import copy
import math
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import results
from refusals import refused
from torch import nn
from toys import ToyTrainLoader, brain, layers

from sbkit.recipe import load
from sbkit.rehearsal import fake_gpu
from sbkit.train import muon, orthogonal
from sbkit.train.distributed import ranks, sharding
from sbkit.train.muon import Muon
from sbkit.train.orthogonal import newton_schulz, orthogonalise

ROOT = Path(__file__).parents[2]


def drawn(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def parameters(*shapes):
    return [nn.Parameter(drawn(*shape, seed=i) / 10) for i, shape in enumerate(shapes)]


def holder(*weights):
    """A module whose matrices are these."""
    layers = nn.ModuleList()
    for weight in weights:
        layer = nn.Linear(1, 1, bias=False)
        layer.weight = weight
        layers.append(layer)
    return layers


def descend(optimizer, weights, steps, start=0):
    """Take steps on gradients that are the same for the same numbers of steps."""
    for step in range(start, start + steps):
        for place, weight in enumerate(weights):
            weight.grad = drawn(*weight.shape, seed=100 * step + place)
        optimizer.step()


def polar(matrix):
    """What orthogonalising means: the singular vectors, with ones for singular values."""
    left, _, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    return (left @ right).float()


@given(st.integers(1, 40), st.integers(0, 80), st.integers(0, 99), st.sampled_from([1e-28, 1e-12, 1.0, 1e12, 1e30]))
@settings(max_examples=50, deadline=None)
def test_singular_values_come_near_one_at_any_scale(height, more, seed, scale):
    matrices = drawn(2, height, height + more, seed=seed)
    found = newton_schulz(scale * matrices)
    spread = torch.linalg.svdvals(matrices / torch.linalg.matrix_norm(matrices, keepdim=True))
    values = torch.linalg.svdvals(found)
    assert values.max() < 1.3
    assert values[spread > 0.01].min() > 0.6


def test_the_direction_is_that_of_the_singular_vectors():
    matrices = drawn(3, 24, 64)
    for found, exact in zip(newton_schulz(matrices), polar(matrices), strict=True):
        assert torch.cosine_similarity(found.flatten(), exact.flatten(), dim=0) > 0.97


@pytest.mark.parametrize("scale", [0.0, 1e-36, 1e-38, 1e-45])
def test_tiny_gradients_give_tiny_updates(scale):
    assert newton_schulz(scale * drawn(2, 30, 50)).abs().max() < 0.2


def test_a_gradient_that_ends_leaves_finite_weights():
    """Its momentum shrinks until its squares are no numbers any more."""
    (weight,) = parameters((8, 12))
    optimizer = Muon([weight], modules=[holder(weight)], lr=1e-3, momentum=0.8)
    descend(optimizer, [weight], 1)
    weight.grad.zero_()
    for _ in range(600):
        optimizer.step()
    before = weight.detach().clone()
    optimizer.step()
    assert weight.isfinite().all() and torch.allclose(weight, before, rtol=1e-3)


def test_matrices_are_updated_as_with_torchs_muon():
    shapes = [(16, 16), (16, 40), (40, 16)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    one = Muon(ours, lr=0.02, modules=[holder(*ours)], update_rms=0.2, weight_decay=0.1)
    other = torch.optim.Muon(theirs, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    before = copy.deepcopy(ours)
    descend(one, ours, 6)
    descend(other, theirs, 6)
    for mine, its, was in zip(ours, theirs, before, strict=True):
        moved = (its - was).norm()
        assert (mine - its).norm() < 0.03 * moved, mine.shape  # bfloat16, and another order of additions


def step_alone(weight, grad, momentum):
    """A step of one matrix, written plainly."""
    momentum.lerp_(grad, 0.05)
    ahead = grad.lerp(momentum, 0.95).flatten(1)
    tall = ahead.shape[0] > ahead.shape[1]
    found = newton_schulz((ahead.T if tall else ahead)[None])[0] * math.sqrt(max(ahead.shape))
    direction = (found.T if tall else found).reshape(weight.shape)
    return weight * (1 - 0.02 * 0.1) - 0.02 * 0.4 * direction


@pytest.mark.parametrize("shapes", [[(20, 8)], [(20, 8), (6, 6), (8, 20), (8, 5, 2, 2), (20, 4, 2), (20, 8)]])
@pytest.mark.parametrize("skips", [False, True])
def test_a_step_is_that_of_each_matrix_by_itself(shapes, skips):
    weights = parameters(*shapes)
    optimizer = Muon(weights, modules=[holder(*weights)], lr=0.02, weight_decay=0.1)
    momenta, expected = [torch.zeros(shape) for shape in shapes], [weight.detach().clone() for weight in weights]
    for step in range(5):
        skipped = skips and step in (0, 3)
        for place, weight in enumerate(weights):
            weight.grad = drawn(*weight.shape, seed=10 * step + place) * (math.nan if skipped else 1)
        given = [weight.grad.clone() for weight in weights]
        if skips:
            optimizer.found_inf = torch.tensor(float(skipped))
        optimizer.step()
        if not skipped:
            expected = [step_alone(*each) for each in zip(expected, given, momenta, strict=True)]
        for weight, exact, grad in zip(weights, expected, given, strict=True):
            torch.testing.assert_close(weight.detach(), exact, rtol=1e-4, atol=1e-6)
            torch.testing.assert_close(weight.grad, grad, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("every", [1, 3])
def test_a_cpu_computes_to_the_bit_what_is_computed_without_reading_on_the_host(every, monkeypatch):
    monkeypatch.setattr(muon, "_have_kernels", lambda *tensors: False)  # both go by torch, which reads or doesn't
    shapes = [(20, 8), (6, 6), (8, 20), (8, 5, 2, 2), (16,)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    matrices = len(shapes) - 1
    optimizers = [Muon(weights, modules=[holder(*weights[:matrices])], lr=0.02, weight_decay=0.1,
                       orthogonalize_every=every) for weights in (ours, theirs)]
    for step in range(7):
        for on_host, weights, optimizer in zip((True, False), (ours, theirs), optimizers, strict=True):
            for place, weight in enumerate(weights):
                weight.grad = drawn(*weight.shape, seed=10 * step + place)
            monkeypatch.setattr(muon, "in_host_memory", lambda tensor, on_host=on_host: on_host)
            optimizer.grad_scale = torch.tensor(1.7)
            optimizer.found_inf = torch.tensor(float(step in (0, 4)))
            optimizer.step()
        for mine, its in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, its, rtol=0, atol=0)


@pytest.mark.parametrize("dtype, within", [(torch.float64, 0.0), (torch.float32, 1e-6)])
def test_a_rate_in_a_tensor_does_what_the_number_does(dtype, within):
    rate = 0.01286  # whose weight decay is another one if it is rounded once less
    ours, theirs = parameters((20, 8), (16,)), parameters((20, 8), (16,))
    one, other = (Muon(each, modules=[holder(each[0])], lr=rate, weight_decay=0.1) for each in (ours, theirs))
    other.param_groups[0]["lr"] = torch.tensor(rate, dtype=dtype)
    descend(one, ours, 5)
    descend(other, theirs, 5)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(its, mine, rtol=within, atol=within)


def test_other_parameters_are_updated_as_with_adamw():
    shapes = [(16,), (28, 16), (3, 16, 16)]
    ours, theirs = parameters(*shapes), parameters(*shapes)
    descend(Muon(ours, modules=[nn.Linear(1, 1)], lr=0.02, weight_decay=0.1), ours, 5)
    descend(torch.optim.AdamW(theirs, lr=0.02, betas=(0.9, 0.98), weight_decay=0.1), theirs, 5)
    for mine, its in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-7)


def test_of_the_flagship_only_matrices_are_updated_by_muon(tmp_path):
    hparams = load.load(ROOT / "hparams" / "ctc.yaml", {"output_folder": str(tmp_path), "num_encoder_layers": 1})
    model = hparams["model"]
    optimizer = hparams["opt_class"](model.parameters())
    named = [name for name, p in model.named_parameters() if id(p) in optimizer.matrices and ".decoder." not in name]
    layer = "1.encoder.layers.0."
    assert sorted(named) == sorted([
        "1.custom_src_module.layers.0.w.weight", f"{layer}mha_layer.in_proj_weight",
        f"{layer}mha_layer.out_proj.weight", f"{layer}convolution_module.bottleneck.0.weight",
        f"{layer}convolution_module.after_conv.2.weight",
        *(f"{layer}ffn_module{i}.1.ffn.{j}.weight" for i in (1, 2) for j in (0, 3))])


@pytest.mark.parametrize("every", [2, 3, 5])
def test_matrices_are_orthogonalised_in_turn(every):
    weights = parameters(*[(6, 6)] * 7)
    optimizer = Muon(weights, modules=[holder(*weights)], orthogonalize_every=every)
    descend(optimizer, weights, 1)
    counts = [0] * len(weights)
    for step in range(every):
        before = [optimizer.state[weight]["direction"].clone() for weight in weights]
        descend(optimizer, weights, 1, start=1 + step)
        new = [not torch.equal(was, optimizer.state[weight]["direction"])
               for was, weight in zip(before, weights, strict=True)]
        assert sum(new) in (len(weights) // every, math.ceil(len(weights) / every))
        counts = [count + its for count, its in zip(counts, new, strict=True)]
    assert counts == [1] * len(weights)


def test_a_direction_is_kept_only_between_turns_and_a_resumed_run_may_change_them():
    def states(optimizer, weights):
        return [(sorted(optimizer.state[weight]), optimizer.state[weight]["momentum"].clone()) for weight in weights]

    weights = parameters((6, 6), (6, 9))
    one, other = (Muon(weights, modules=[holder(*weights)], orthogonalize_every=every) for every in (1, 2))
    descend(one, weights, 3)
    (names, momentum), _ = states(one, weights)
    assert names == ["momentum", "turn"]
    other.load_state_dict({**one.state_dict(), "param_groups": other.state_dict()["param_groups"]})
    before = [weight.detach().clone() for weight in weights]
    descend(other, weights, 1, start=3)
    names, found = states(other, weights)[0]
    assert names == ["direction", "momentum", "turn"]
    torch.testing.assert_close(found, momentum.lerp(drawn(6, 6, seed=300), 1 - 0.95))
    assert not any(map(torch.equal, before, weights)), "all had their turn, since none had a direction"
    one.load_state_dict({**other.state_dict(), "param_groups": one.state_dict()["param_groups"]})
    descend(one, weights, 1, start=4)
    assert all(names == ["momentum", "turn"] for names, _ in states(one, weights))


def test_a_replayed_step_counts_and_the_key_says_whose_turn_it_is():
    def made():
        weights = parameters((4, 4), (4, 4), (4, 4))
        for weight in weights:
            weight.grad = torch.ones_like(weight)
        return Muon(weights, modules=[holder(*weights)], orthogonalize_every=3)

    stepped, replayed = made(), made()
    keys = [stepped.graph_key()]
    for number in range(7):
        stepped.step()
        if number:
            replayed.count_step()
        else:
            replayed.step()
        keys.append(stepped.graph_key())
        assert replayed.graph_key() == keys[-1]
    assert keys[0] == (True, True, True) and keys[1:4] == keys[4:7] and len(set(keys[1:4])) == 3
    assert all(sum(key) == 1 for key in keys[1:])


def test_a_weight_with_gradients_in_some_steps_only_gets_its_turn():
    weights = parameters((6, 6), (6, 6), (6, 6))
    optimizer = Muon(weights, modules=[holder(*weights)], orthogonalize_every=2)
    counts = [0, 0, 0]
    for step in range(24):
        for place, weight in enumerate(weights):
            weight.grad = drawn(6, 6, seed=10 * step + place) if place != 1 or step % 2 else None
        before = [optimizer.state[weight].get("direction", torch.zeros(())).clone() for weight in weights]
        optimizer.step()
        counts = [count + (weight.grad is not None and not torch.equal(was, optimizer.state[weight]["direction"]))
                  for count, was, weight in zip(counts, before, weights, strict=True)]
    assert counts[0] in (12, 13) and counts[1] in (6, 7) and counts[2] in (12, 13)


@pytest.mark.parametrize("shapes", [[(8, 8)], [(8,)]])
def test_gradients_are_divided_by_the_loss_scale(shapes):
    ours, theirs = parameters(*shapes), parameters(*shapes)
    layers = [holder(*(each if len(shapes[0]) == 2 else parameters((2, 2)))) for each in (ours, theirs)]
    one, other = (Muon(each, modules=[layer], lr=0.01) for each, layer in zip((ours, theirs), layers, strict=True))
    for step, scale in enumerate((4.0, 0.5, 32.0, 1.0)):
        grad = drawn(*shapes[0], seed=step)
        ours[0].grad, theirs[0].grad = grad * scale, grad.clone()
        one.grad_scale = torch.tensor(scale)
        one.step()
        other.step()
    torch.testing.assert_close(ours[0], theirs[0])


def test_filters_in_any_layout_move():
    layer = nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)
    before = layer.weight.detach().clone()
    layer(drawn(1, 8, 9, 9)).sum().backward()
    Muon(layer.parameters(), modules=[layer]).step()
    assert (layer.weight - before).abs().min() > 0


def test_a_weight_that_is_also_an_embedding_is_updated_as_with_adamw():
    lookup, head = nn.Embedding(9, 6), nn.Linear(6, 9, bias=False)
    head.weight = lookup.weight
    both = nn.ModuleList([lookup, head, nn.Linear(6, 6)])
    assert Muon(both.parameters(), modules=[both]).matrices == {id(both[2].weight)}


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("stop", [1, 4, 5])
def test_a_resumed_run_reaches_the_same_bits(every, stop):
    def made():
        weights = parameters((8, 8), (8, 20), (8,), (24, 8))
        return weights, Muon(weights, lr=0.01, modules=[holder(weights[0], weights[1], weights[3])],
                             orthogonalize_every=every)

    whole, optimizer = made()
    descend(optimizer, whole, 9)
    first, optimizer = made()
    descend(optimizer, first, stop)
    saved = copy.deepcopy(optimizer.state_dict())
    second, optimizer = made()
    for weight, value in zip(second, first, strict=True):
        weight.data.copy_(value)
    optimizer.load_state_dict(saved)
    descend(optimizer, second, 9 - stop, start=stop)
    assert all(torch.equal(*pair) for pair in zip(whole, second, strict=True))


def test_a_checkpoint_of_an_earlier_version_whose_groups_had_other_names_is_loaded():
    weights = parameters((8, 8), (8, 8))
    before = Muon(weights, modules=[holder(*weights)], update_rms=0.2, orthogonalize_every=2)
    descend(before, weights, 3)
    saved = copy.deepcopy(before.state_dict())
    [group] = saved["param_groups"]
    group["strength"], group["every"] = group.pop("update_rms"), group.pop("orthogonalize_every")

    other = parameters((8, 8), (8, 8))
    with torch.no_grad():
        for same, weight in zip(other, weights, strict=True):
            same.copy_(weight)
    resumed = Muon(other, modules=[holder(*other)], update_rms=0.2, orthogonalize_every=2)
    resumed.load_state_dict(saved)
    assert resumed.param_groups[0].keys() == before.param_groups[0].keys()
    descend(before, weights, 3)
    descend(resumed, other, 3)
    assert all(torch.equal(*pair) for pair in zip(weights, other, strict=True))


def test_a_run_with_adamw_can_be_resumed_with_muon(caplog):
    weights = parameters((8, 8), (8,), (8, 8), (8, 8))
    before = torch.optim.AdamW(weights, lr=0.5)
    descend(before, weights, 2)
    matrices = [weights[0], *weights[2:]]
    optimizer = Muon(weights, modules=[holder(*matrices)], update_rms=0.3, orthogonalize_every=4)
    optimizer.load_state_dict(before.state_dict())
    assert "Muon's momentum starts at 0" in caplog.text
    squares = optimizer.state[weights[1]]["exp_avg_sq"].clone()
    descend(optimizer, weights, 1)
    assert optimizer.param_groups[0]["update_rms"] == 0.3 and optimizer.param_groups[0]["lr"] == 0.5
    assert all(optimizer.state[weight]["direction"].abs().min() > 0 for weight in matrices)
    kept = optimizer.state[weights[1]]
    assert kept["step"] == 3 and not torch.equal(squares, kept["exp_avg_sq"])


def direct_as_one_of(shapes, unlike):
    """Directions of matrices on a rank whose processor computes a little else, and how many matrices it computed."""
    computed = []

    def here(matrices):
        computed.append(len(matrices))
        return newton_schulz(matrices) * (1 + unlike * ranks.rank())

    orthogonal.newton_schulz = here
    if ranks.launched():
        ranks.init(torch.device("cpu"))
    return orthogonalise([drawn(*shape, seed=i) for i, shape in enumerate(shapes)]), sum(computed)


@pytest.mark.slow
@pytest.mark.parametrize("world", [2, 3])
def test_ranks_share_the_work_and_have_the_same_bits_whatever_their_processors(world, monkeypatch):
    shapes = [(8, 8)] * 4 + [(8, 20)] + [(8, 24), (24, 8)]
    monkeypatch.setattr(orthogonal, "newton_schulz", newton_schulz)  # to have it back
    alone, _ = direct_as_one_of(shapes, 0)
    exact = results(direct_as_one_of, shapes, 0, world=world)
    unlike = results(direct_as_one_of, shapes, 1e-3, world=world)
    assert [count for _, count in exact] == {2: [4, 3], 3: [3, 2, 2]}[world]
    for found, _ in exact:
        torch.testing.assert_close(found, alone, rtol=1e-5, atol=1e-5)
    for found, _ in unlike[1:]:
        assert all(map(torch.equal, found, unlike[0][0]))
    assert not torch.equal(unlike[0][0][1], exact[0][0][1])


@pytest.mark.gpu
def test_an_update_of_more_matrices_launches_few_more_kernels():
    if not fake_gpu.active():
        pytest.skip("launches are counted on a fake GPU")

    def launches(count):
        weights = [nn.Parameter(torch.zeros(shape, device="cuda")) for shape in ((8, 8), (8, 16), (16, 8)) * count]
        optimizer = Muon(weights, modules=[holder(*weights)])
        optimizer.grad_scale, optimizer.found_inf = torch.ones((), device="cuda"), torch.zeros((), device="cuda")
        for _ in range(2):  # the first makes the state
            for weight in weights:
                weight.grad = torch.ones_like(weight)
            before = fake_gpu.counters()
            optimizer.step()
        return (fake_gpu.counters() - before).launches

    assert 0 < launches(40) <= launches(2) + 20


def test_a_closure_is_called():
    (weight,) = parameters((4, 4))

    def closure():
        loss = weight.square().sum()
        loss.backward()
        return loss

    before = weight.square().sum().item()
    assert Muon([weight], modules=[holder(weight)]).step(closure).item() == before
    assert weight.square().sum().item() < before


def test_a_brain_learns_with_it():
    made = layers()
    toy = brain(opt_class=partial(Muon, lr=0.01, modules=[made[0]], orthogonalize_every=2), modules=made)
    toy.fit(range(1, 12), ToyTrainLoader(6))
    losses = [loss for name, loss in toy.ends if name == "TRAIN"]
    assert len(losses) == 11 and losses[-1] < losses[0] / 2
    assert {id(weight) for weight, state in toy.optimizer.state.items() if "direction" in state} == {id(made[0].weight)}


def test_sharded_parameters_are_refused(monkeypatch):
    made = layers()
    toy = brain(opt_class=partial(Muon, modules=[made]), modules=made, hparams={"fsdp": True})
    monkeypatch.setattr(sharding.ranks, "world_size", lambda: 2)
    with refused("conflicting-options", key="fsdp"):
        toy.fit(range(1, 2), ToyTrainLoader(2))


@pytest.mark.parametrize("wrong", [
    {"orthogonalize_every": 0}, {"orthogonalize_every": 1.5}, {"orthogonalize_every": True}, {"momentum": 1.0},
    {"lr": -1}, {"betas": (0.9, 1.5)}, {"update_rms": -1}, {"eps": float("nan")}, {"modules": ["CNN"]},
    {"modules": nn.Linear(2, 2)}], ids=str)
def test_invalid_arguments_are_errors(wrong):
    (name,) = wrong
    with refused("bad-value", key="betas[1]" if name == "betas" else name):
        Muon(parameters((2, 2)), **{"modules": [nn.Linear(2, 2)], **wrong})


@pytest.mark.parametrize("modules", [[], [nn.GRU(2, 2)], [nn.LayerNorm(2)]], ids=str)
def test_modules_without_a_weight_that_it_updates_are_errors(modules):
    with refused("nothing-for-muon"):
        Muon(parameters((2, 2)), modules=modules)
