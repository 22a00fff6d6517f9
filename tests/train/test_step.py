"""Steps: exact means, one clip, skipped updates, optimizers that skip themselves."""

from __future__ import annotations

import copy
import math
from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sbkit.errors import SbkitError
from sbkit.train.muon import Muon
from sbkit.train.optim import fused, skips_itself, total_norm
from sbkit.train.precision import Scaler
from sbkit.train.step import Loss, StepAccumulator, as_loss

CPU = torch.device("cpu")


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


def take(net, optimizer, parts, max_norm=None, scaler=None, spoil=None):
    """One optimizer step over micro-batches."""
    step = StepAccumulator(CPU, scaler=scaler)
    for part in parts:
        loss = as_loss(Loss(losses(net, part).sum(), len(part)))
        step.add(loss)
        step.scaled(loss).backward()
    if spoil is not None:
        next(net.parameters()).grad[0, 0] = spoil
    step.update([optimizer], max_norm)
    (fact,) = step.results()
    return fact


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


def test_all_parameter_groups_are_clipped_together():
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


def test_extras_are_summed_and_must_not_change_within_a_step():
    step = StepAccumulator(CPU)
    for n in (1.0, 2.0):
        step.add(as_loss(Loss(torch.tensor(4.0 * n), n, {"ctc": (torch.tensor(n), n), "att": (3.0, n)})))
    step.update([], None)
    (fact,) = step.results()
    assert (fact.total, fact.count) == (12.0, 3.0) and fact.extras == {"att": (6.0, 3.0), "ctc": (3.0, 3.0)}
    step.add(as_loss(Loss(torch.tensor(1.0), 1.0, {"ctc": (1.0, 1.0)})))
    with pytest.raises(SbkitError, match="extras"):
        step.add(as_loss(torch.tensor(1.0)))


def test_a_placeholder_does_not_count_even_if_its_loss_is_nan():
    loss = as_loss(Loss(torch.tensor(math.nan), 7.0, {"ctc": (torch.tensor(math.nan), 7.0)}), weight=0.0)
    assert loss.total == 0 and loss.count == 0 and loss.weightless
    assert loss.extras == {"ctc": (0.0, 0.0)}


def test_a_step_of_placeholders_only_changes_nothing():
    net = model()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    step, before = StepAccumulator(CPU), net[0].weight.detach().clone()
    loss = as_loss(losses(net, torch.ones(2, 4)).sum(), weight=0.0)
    step.add(loss)
    loss.total.backward()
    step.update([optimizer], 1.0)
    assert torch.equal(before, net[0].weight) and not step.results()[0].skipped


@pytest.mark.parametrize("value, says", [(torch.ones(3), r"\(3,\)"), (0.5, "float"), (None, "NoneType")])
def test_a_loss_that_is_not_one_number_is_refused(value, says):
    with pytest.raises(SbkitError, match=says):
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


def test_results_arrive_a_step_later_on_an_asynchronous_device():
    step = StepAccumulator(CPU)
    step.device = torch.device("cuda")  # only decides how many are held back
    sums = []
    for n in range(3):
        step._sums = torch.tensor([float(n), 1.0])
        step.announced = True
        _keep(step)
        sums.append([fact.total for fact in step.results()])
    assert sums == [[], [0.0], [1.0]]
    assert [fact.total for fact in step.peek()] == [2.0] == [fact.total for fact in step.results(wait=True)]


def _keep(step):
    device, step.device = step.device, CPU
    step._keep_result(torch.ones(()), torch.zeros(()), None)
    step.device = device


def test_the_norm_is_that_of_all_gradients_as_one_vector():
    grads = [torch.randn(3, 2), torch.randn(4).double(), torch.randn(2, dtype=torch.bfloat16)]
    expected = torch.cat([g.double().flatten() for g in grads]).norm().item()
    assert total_norm(grads, CPU).item() == pytest.approx(expected, rel=1e-2)
    assert total_norm([], CPU).item() == 0
