"""Steps: exact means, one clip, skipped updates, optimizers that skip themselves."""

from __future__ import annotations

import contextlib
import copy
import math
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
import toys
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from speechbrain.dataio.batch import PaddedBatch
from toys import ToyBrain, ToyTrainLoader, brain

import sbkit
from sbkit.data.batch import Batch
from sbkit.train.batches import is_last
from sbkit.train.loss import Loss, as_loss
from sbkit.train.muon import Muon
from sbkit.train.optim import fused
from sbkit.train.precision import Scaled, Scaler
from sbkit.train.update import skips_itself, update, write_rates


def model():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))


def losses(net, rows):
    return (net(rows).squeeze(-1) - rows.sum(-1)) ** 2


def muon(parameters):
    """Muon, for the first layer's matrix."""
    parameters = list(parameters)
    layer = torch.nn.Linear(1, 1)
    layer.weight = parameters[0]
    return Muon(parameters, lr=0.1, modules=[layer])


@pytest.fixture(autouse=True, scope="module")
def _working_directory(tmp_path_factory):
    """A step that isn't finite is saved there, since these Brains have no output folder."""
    with contextlib.chdir(tmp_path_factory.mktemp("here")) if sys.version_info >= (3, 11) else contextlib.nullcontext():
        yield


class Net(sbkit.Brain):
    """Sums losses over rows."""

    def compute_forward(self, batch, stage):
        return losses(self.modules.net, batch)

    def compute_objectives(self, predictions, batch, stage):
        return Loss(predictions.sum(), len(batch))


def take(net, optimizer, parts, max_norm=None, scaler=None, spoil=None, kind=Net):
    """One optimizer step over micro-batches, and what the host learns of it."""
    toy = kind({"net": net}, None, {}, {"device": "cpu", "max_grad_norm": -1.0 if max_norm is None else max_norm})
    toy.optimizers_dict, toy.scaler, facts = {"all": optimizer}, toy.scaler if scaler is None else scaler, []
    toy.on_step_known, toy.nonfinite_patience = facts.append, 9
    toy.trainer.precision = Scaled(toy.scaler) if toy.scaler.is_enabled() else toy.trainer.precision
    toy.trainer.share_by(toy.trainer.parallel)
    handle = next(net.parameters()).register_hook(lambda grad: grad if spoil is None else torch.full_like(grad, spoil))
    assert toy.trainer.train_step((part, place == len(parts)) for place, part in enumerate(parts, start=1))
    handle.remove()
    assert toy.trainer.receive_results(wait=True) == set()
    return facts[-1]


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(1, 5), min_size=1, max_size=5), st.sampled_from([None, 0.0, -1.0, 0.3, 100.0]))
def test_micro_batches_of_any_size_give_the_gradient_of_the_mean(sizes, max_norm):
    rows = torch.randn(sum(sizes), 4, generator=torch.Generator().manual_seed(1))
    net, reference = model(), model()
    fact = take(net, torch.optim.SGD(net.parameters(), 0.1), rows.split(sizes), max_norm)
    loss = losses(reference, rows).mean()
    loss.backward()
    if max_norm is not None and max_norm > 0:
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), max_norm)
        assert fact.norm == pytest.approx(norm.item(), rel=1e-4)
    torch.optim.SGD(reference.parameters(), 0.1).step()
    for one, other in zip(net.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)
    assert fact.loss == pytest.approx(loss.item(), rel=1e-5) and not fact.skipped


def test_all_parameter_groups_of_an_optimizer_are_clipped_together():
    """SpeechBrain clips the first one only."""
    net = model()
    groups = [{"params": [net[0].weight]}, {"params": [net[0].bias, *net[2].parameters()]}]
    optimizer = torch.optim.SGD(groups, 1.0)
    before = [p.detach().clone() for p in net.parameters()]
    take(net, optimizer, [torch.full((3, 4), 10.0)], max_norm=1e-2)
    moved = torch.cat([(a - b).flatten() for a, b in zip(before, net.parameters(), strict=True)])
    assert moved.norm().item() == pytest.approx(1e-2, rel=1e-3)


@pytest.mark.parametrize("opt_class", [
    partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.Adam, lr=0.1),
    partial(torch.optim.SGD, lr=0.1, momentum=0.9), lambda p: torch.optim.AdamW(p, lr=0.1),
    partial(torch.optim.Adagrad, lr=0.1), partial(torch.optim.RMSprop, lr=0.1), muon,
])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_step_that_is_not_finite_changes_neither_parameters_nor_states(opt_class, bad):
    net = model()
    optimizer = fused(opt_class)(net.parameters())
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    take(net, optimizer, [rows])
    optimizer.zero_grad()
    before, states = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict()["state"])
    fact = take(net, optimizer, [rows], spoil=bad)
    assert fact.skipped and fact.failed and math.isfinite(fact.total)
    assert all(torch.equal(before[k], v) for k, v in net.state_dict().items())
    for i, state in optimizer.state_dict()["state"].items():
        assert all(torch.equal(torch.as_tensor(v), torch.as_tensor(states[i][k])) for k, v in state.items()
                   if k != "turn")  # counted without asking the device
    optimizer.zero_grad()
    fact = take(net, optimizer, [torch.full((1, 4), bad)])
    assert fact.skipped and not math.isfinite(fact.total)
    optimizer.zero_grad()
    assert not take(net, optimizer, [rows]).skipped
    assert not torch.equal(before["0.weight"], net[0].weight)


@pytest.mark.parametrize("opt_class", [
    partial(torch.optim.AdamW, lr=0.1), partial(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.1),
    lambda p: torch.optim.AdamW(p, lr=0.1), partial(torch.optim.RMSprop, lr=0.1, weight_decay=0.1), muon])
def test_a_step_that_counts_nothing_changes_nothing_and_is_no_failure(opt_class):
    class CountsNone(Net):
        def compute_objectives(self, predictions, batch, stage):
            return Loss(0.0 * predictions.sum(), 0.0)

    net = model()
    optimizer, scaler = fused(opt_class)(net.parameters()), Scaler("cpu", init_scale=8.0)
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    take(net, optimizer, [rows], scaler=scaler)
    before, scale = copy.deepcopy(net.state_dict()), scaler.get_scale()
    fact = take(net, optimizer, [rows], kind=CountsNone, scaler=scaler)
    assert not fact.failed and not fact.skipped and fact.count == 0 and scaler.get_scale() == scale
    assert all(torch.equal(before[name], tensor) for name, tensor in net.state_dict().items())
    take(net, optimizer, [rows], scaler=scaler)
    assert not torch.equal(before["0.weight"], net[0].weight)


def test_extras_are_summed_and_must_not_change_within_a_step():
    class Extras(Net):
        def compute_objectives(self, predictions, batch, stage):
            n, more = float(len(batch)), {"att": (3.0, float(len(batch)))} if len(batch) < 3 else {}
            return Loss(predictions.sum(), n, {"ctc": (torch.tensor(n), n), **more})

    net = model()
    optimizer, rows = torch.optim.SGD(net.parameters(), 0.1), torch.ones(4, 4)
    fact = take(net, optimizer, [rows[:1], rows[:2]], kind=Extras)
    assert fact.count == 3.0 and fact.extras == {"att": (6.0, 3.0), "ctc": (3.0, 3.0)}
    with refused("bad-loss"):
        take(net, optimizer, [rows[:1], rows[:3]], kind=Extras)


def test_a_loss_is_weighed_and_added_to_as_a_mean_is():
    loss, other = Loss(torch.tensor(6.0), 3, {"ctc": (6.0, 3)}), Loss(torch.tensor(4.0), 8)
    for made, mean in ((loss * 2, 4.0), (0.5 * loss, 1.0), (loss / 2, 1.0), (loss + torch.tensor(0.25), 2.25),
                       (1 + loss, 3.0), (loss + other, 2.5), (sum([loss, other]), 2.5)):
        assert float(made.mean) == mean and made.count == 3 and made.extras == loss.extras


def test_a_sum_of_losses_has_the_extras_of_both():
    ctc = Loss(torch.tensor(6.0), 3, {"ctc": (6.0, 3), "entropy": (1.0, 2)})
    attention = Loss(torch.tensor(4.0), 8, {"attention": (4.0, 8), "entropy": (5.0, 1)})
    both = {"ctc": (6.0, 3), "attention": (4.0, 8), "entropy": (6.0, 3)}
    assert (ctc + attention).extras == sum([ctc, attention]).extras == both
    assert (Loss(torch.tensor(6.0), 3) + ctc).extras == ctc.extras
    assert ctc.extras == {"ctc": (6.0, 3), "entropy": (1.0, 2)}, "it is unchanged"


def test_a_placeholder_does_not_count_even_if_its_loss_is_nan():
    loss = as_loss(Loss(torch.tensor(math.nan), 7.0, {"ctc": (torch.tensor(math.nan), 7.0)}), is_dummy=True)
    assert loss.total == 0 and loss.count == 0 and isinstance(loss.count, float)
    assert loss.extras == {"ctc": (0.0, 0.0)}


def test_a_step_of_placeholders_only_changes_nothing():
    toy = brain(opt_class=partial(torch.optim.SGD, lr=0.1))
    before = toys.state(toy)
    toy.fit([1], ToyTrainLoader(1, touch=lambda batch: setattr(batch, "weight", 0.0)))
    after = toys.state(toy)
    assert toy.optimizer_step == 1 and all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("value", [torch.ones(3), 0.5, None], ids=["vector", "float", "None"])
def test_a_loss_that_is_not_one_number_is_refused(value):
    with refused("bad-loss"):
        as_loss(value)


def test_the_loss_scale_falls_after_an_overflow_and_does_not_enter_the_update():
    net, reference = model(), model()
    rows = torch.randn(6, 4, generator=torch.Generator().manual_seed(1))
    scaler = Scaler("cpu", init_scale=2.0**10, growth_interval=1)
    fact = take(net, torch.optim.SGD(net.parameters(), 0.1), [rows[:2], rows[2:]], scaler=scaler)
    take(reference, torch.optim.SGD(reference.parameters(), 0.1), [rows])
    torch.testing.assert_close(net[0].weight, reference[0].weight)
    assert fact.scale == 2.0**10 and scaler.get_scale() == 2.0**11
    net.zero_grad()
    fact = take(net, torch.optim.SGD(net.parameters(), 0.1), [rows], scaler=scaler, spoil=math.inf)
    assert fact.skipped and not fact.failed  # the scale was tried too high, nothing more
    assert scaler.get_scale() == 2.0**10


@pytest.mark.parametrize("count", [1, 2, 3, 480, 5000.5, 1e9])
def test_sums_are_scaled_by_the_power_of_two_next_below_one_by_their_count(count):
    scaler = Scaler("cpu")
    scaler.follow_count(torch.tensor(float(count)))
    found = scaler.sum_scale.item()
    assert math.frexp(found)[0] == 0.5 and 0.5 < found * count <= 1
    for nothing in (0.0, math.nan, math.inf):
        scaler.follow_count(torch.tensor(nothing))
        assert scaler.sum_scale == found


def test_what_scales_sums_follows_their_counts_and_enters_no_bit_of_an_update():
    rows = torch.randn(12, 4, generator=torch.Generator().manual_seed(1))
    net, reference, scaler = model(), model(), Scaler("cpu")
    for size, scale in ((1, 1.0), (3, 1 / 2), (4, 1 / 8), (4, 1 / 8)):  # of the step before
        parts = [rows[:size], rows[size : 2 * size]]
        found = take(net, torch.optim.SGD(net.parameters(), 0.1), parts, max_norm=0.5, scaler=scaler)
        expected = take(reference, torch.optim.SGD(reference.parameters(), 0.1), parts, max_norm=0.5)
        assert (found.sum_scale, expected.sum_scale) == (scale, 1.0) and found.norm == expected.norm
        net.zero_grad(), reference.zero_grad()
    assert all(torch.equal(value, reference.state_dict()[name]) for name, value in net.state_dict().items())


class Refuses(torch.optim.AdamW):
    """Its fused form is for another device, as Adagrad's is for the CPU only."""

    def __init__(self, params, fused=None):
        if fused:
            raise RuntimeError("`fused=True` requires all the params to be on the CPU")
        super().__init__(params)


@pytest.mark.parametrize("opt_class, becomes_fused", [
    (torch.optim.AdamW, True), (partial(torch.optim.AdamW, lr=0.1), True),
    (partial(partial(torch.optim.SGD, lr=0.1), momentum=0.9), True),
    (partial(torch.optim.AdamW, fused=False), False), (partial(torch.optim.Adam, foreach=True), False),
    (partial(torch.optim.AdamW, capturable=True), False), (torch.optim.RMSprop, False),
    (lambda p: torch.optim.AdamW(p), False), (muon, True), (Refuses, False),
])
def test_optimizers_are_fused_unless_the_recipe_says_otherwise(opt_class, becomes_fused):
    assert skips_itself(fused(opt_class)(model().parameters())) is becomes_fused


def test_parameters_that_a_fused_kernel_does_not_take_get_the_plain_optimizer():
    parameter = torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))
    assert not skips_itself(fused(partial(torch.optim.AdamW, lr=0.1))([parameter]))


def test_values_of_a_step_arrive_one_step_later_where_a_device_runs_behind():
    known = []

    class Noting(ToyBrain):
        def on_step_known(self, result):
            known.append((result.number, self.optimizer_step, result.late))

    toy = brain(Noting)
    toy.trainer.arriving.lag = 1
    toy.fit([1], ToyTrainLoader(3))
    assert known == [(1, 2, 1), (2, 3, 1), (3, 3, 0)]


def test_the_norm_is_that_of_all_gradients_as_one_vector():
    parameters = [torch.nn.Parameter(torch.zeros_like(grad)) for grad in (torch.randn(3, 2), torch.randn(4).double())]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    expected = torch.cat([parameter.grad.double().flatten() for parameter in parameters]).norm().item()
    norm, skipped = update([torch.optim.SGD(parameters, 0.1)], torch.tensor(0.5), None)
    assert norm.item() == pytest.approx(0.5 * expected, rel=1e-5) and skipped == 0
    norm, skipped = update([torch.optim.SGD(model().parameters(), 0.1)], torch.tensor(1.0), None)
    assert norm == 0 and skipped == 0


def test_optimizers_are_clipped_each_alone_and_a_parameter_of_two_is_scaled_once():
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for parameter, value in zip(parameters, (3.0, 30.0, 0.004), strict=True):
        parameter.grad = torch.full_like(parameter, value)
    optimizers = [torch.optim.SGD(share, 1.0) for share in (parameters[:2], parameters[1:])]
    expected = torch.stack([parameter.grad for parameter in parameters]).norm().item()
    norm, _ = update(optimizers, torch.tensor(0.5), 0.1)
    assert norm.item() == pytest.approx(0.5 * expected, rel=1e-5)
    first = torch.stack([parameter.detach() for parameter in parameters[:2]])
    assert first[0].norm() / first[1].norm() == pytest.approx(0.05, rel=1e-5), "the second was moved by both"
    assert parameters[2].tolist() == pytest.approx([-0.002] * 2), "short enough"


def test_rates_are_numbers_for_hooks_and_the_same_tensors_for_kernels():
    weights = [torch.nn.Parameter(torch.zeros(())) for _ in range(3)]
    optimizer, seen = torch.optim.SGD([{"params": [weights[0]], "lr": 0.5}], 0.25, fused=True), []
    optimizer.register_step_pre_hook(lambda optimizer, *_: seen.append([each["lr"] for each in optimizer.param_groups]))

    def step():
        for weight in weights:
            weight.grad = -torch.ones(())
        update([optimizer], torch.ones(()), None, rates=write_rates([optimizer], torch.device("cpu")))

    step()
    optimizer.param_groups[0]["lr"] *= 2  # as a hook does
    step()
    assert weights[0] == 1.5 and seen[0][0] is seen[1][0] and type(optimizer.param_groups[0]["lr"]) is float
    optimizer.add_param_group({"params": [weights[1]]})
    own = torch.tensor(4.0)
    step()
    assert [weight.item() for weight in weights] == [2.5, 0.25, 0.0]
    optimizer.add_param_group({"params": [weights[2]], "lr": own})
    step()
    assert [weight.item() for weight in weights] == [3.5, 0.5, 4.0] and seen[-1][2] is own


def of_a_plan(micro):
    empty = torch.zeros(1, 2, dtype=torch.long)
    return Batch(["a"], empty.float(), torch.tensor([2]), empty, torch.tensor([2]), ["w"], micro=micro, micros=2)


@pytest.mark.parametrize("batch, last", [
    (of_a_plan(0), False), (of_a_plan(1), True), (torch.ones(2), None),
    (PaddedBatch([{"id": "a", "last": torch.ones(1)}]), None),
    (SimpleNamespace(last=3), None),
])
def test_only_a_plan_s_batch_says_whether_its_step_ends(batch, last):
    assert is_last(batch) is last
