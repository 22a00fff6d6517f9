"""Gradients that hooks sum over ranks while backward computes are those of torch's DDP, to the bit."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from processes import results
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from sbkit.errors import SbkitError
from sbkit.train.distributed import exchange, ranks
from sbkit.train.distributed.exchange import GradientExchange

STEPS = 5


class Net(nn.Module):
    """Four layers, one without a use, a shared weight and, if wanted, a type of its own; forward is the loss."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(4))
        self.conv = nn.Conv2d(4, 4, 3, padding=1).to(memory_format=torch.channels_last)
        self.unused, self.late = nn.Linear(24, 24), nn.Linear(24, 1)
        self.out = nn.Linear(24, 24)
        self.out.weight = self.layers[0].weight
        self.layers[2].to(dtype)

    def forward(self, x, skip=False, late=False, recompute=False):
        for i, layer in enumerate(self.layers):
            if i == 1 and skip:
                continue
            x = x.to(layer.weight.dtype)
            x = checkpoint(layer, x, use_reentrant=False) if recompute else layer(x)
            x = torch.tanh(x).float()
        x = x + self.conv(x.view(-1, 4, 2, 3)).flatten(1)
        reached = self.late(x.detach()).square().mean() if late else 0.0
        return self.out(x).square().mean() + reached


#: What a step does differently: options of the net by step and rank, and of the training.
CASES = {
    "plain": {},
    "accumulation": {"micros": 3},
    "gradients zeroed in place": {"micros": 2, "set_to_none": False},
    "one rank leaves a layer out": {"net": lambda step, rank: {"skip": (step + rank) % 3 == 0}},
    "two types": {"dtype": torch.bfloat16, "micros": 2},
    "recomputed activations": {"net": lambda step, rank: {"recompute": True}},
    "agreed in each backward": {"each": True, "net": lambda step, rank: {"skip": step > 1, "late": step + rank > 3}},
    "their mean": {"mean": True, "micros": 2},
}


def batch(step, micro):
    return torch.randn(5, 24, generator=torch.Generator().manual_seed(100 * step + 10 * micro + ranks.rank()))


def train(step_of, net, set_to_none=True):
    """Weights and gradients of each step."""
    optimizer, kept = torch.optim.AdamW(net.parameters(), 1e-2, weight_decay=0.1, fused=True), []
    for step in range(STEPS):
        step_of(step)
        optimizer.step()
        kept += [None if p.grad is None else p.grad.clone() for p in net.parameters()]
        optimizer.zero_grad(set_to_none=set_to_none)
    return [*kept, *(p.detach() for p in net.parameters())]


def by_ddp(micros=1, set_to_none=True, net=lambda step, rank: {}, dtype=torch.float32, **_):
    model = Net(dtype)
    ddp = DistributedDataParallel(model, find_unused_parameters=True)

    def step_of(step):
        for micro in range(micros):
            ddp.require_backward_grad_sync = micro + 1 == micros
            ddp(batch(step, micro), **net(step, ranks.rank())).backward()

    return train(step_of, model, set_to_none)


def by_exchange(micros=1, set_to_none=True, net=lambda step, rank: {}, dtype=torch.float32, each=False, mean=False):
    model = Net(dtype)
    gradients = GradientExchange(model.named_parameters(), agree_each_time=each, mean=mean)

    def step_of(step):
        for micro in range(micros):
            gradients.armed = micro + 1 == micros
            model(batch(step, micro), **net(step, ranks.rank())).backward()
        for p in () if mean else model.parameters():
            if p.grad is not None:
                p.grad /= gradients.world
        assert not gradients.changed

    return train(step_of, model, set_to_none)


def equal(one, other):
    return [a is b if a is None or b is None else torch.equal(a, b) for a, b in zip(one, other, strict=True)]


def compared():
    ranks.init(torch.device("cpu"))
    exchange.FIRST_BUCKET_BYTES, exchange.BUCKET_BYTES = 2000, 6000  # several buckets for a small net
    found = {name: (by_exchange(**case), by_ddp(**case)) for name, case in CASES.items()}
    return {name: (equal(*both), both[0]) for name, both in found.items()}


@pytest.mark.slow
def test_weights_and_gradients_are_those_of_ddp_to_the_bit():
    first, second = results(compared)
    for name in CASES:
        assert all(first[name][0]) and all(second[name][0]), name
        assert all(equal(first[name][1], second[name][1])), name


def told():
    """A layer that one rank reaches later, one that all leave out, an epoch that ends within an accumulation."""
    ranks.init(torch.device("cpu"))
    model = Net()
    gradients = GradientExchange(model.named_parameters())
    seen = []
    for step in range(4):
        model.zero_grad()
        model(batch(step, 0), late=step > 1 and ranks.rank() == 1, skip=step == 1).backward()
        seen.append((sorted(gradients.changed), gradients.missed, model.late.weight.grad is None,
                     model.unused.weight.grad is None, float(model.layers[1].weight.grad.abs().sum()) > 0))
        if step == 2:
            gradients.reset(agree_each_time=True)
    gradients.reset(agree_each_time=False)
    for _ in range(2):
        model.zero_grad()
        gradients.armed = False
        model(batch(9, 0)).backward()
        alone = model.out.bias.grad.clone()
        gradients.finish()
        gradients.armed = True
    dist.all_reduce(alone)
    return seen, torch.equal(alone, model.out.bias.grad)


def test_a_rank_tells_what_differs_from_the_agreement():
    (first, summed), (second, also_summed) = results(told)
    names = ["late.bias", "late.weight"]
    #                changed, missed, late is None, unused is None, the layer has a gradient
    assert first == [([], False, True, True, True), ([], True, True, True, False),
                     ([], False, True, True, True), ([], True, False, True, True)]
    assert second == [([], False, True, True, True), ([], True, True, True, False),
                      (names, False, True, True, True), ([], False, False, True, True)]
    assert summed and also_summed


def adversarial(mean_of):
    """A generator and a discriminator, whose backwards follow each other in a step."""
    torch.manual_seed(0)
    one, other = nn.Linear(8, 8), nn.Linear(8, 1)
    optimizers = [torch.optim.AdamW(each.parameters(), 1e-2) for each in (one, other)]
    mean = mean_of([("one." + name, p) for name, p in one.named_parameters()]
                   + [("other." + name, p) for name, p in other.named_parameters()])
    for step in range(STEPS):
        x = batch(step, 0)[:, :8]
        for loss, optimizer in ((lambda x: other(one(x).detach()).mean() - other(x).mean(), optimizers[1]),
                                (lambda x: one(x).square().mean() - other(one(x)).mean(), optimizers[0])):
            for each in optimizers:
                each.zero_grad()
            loss(x).backward()
            mean()
            optimizer.step()
    return [p.detach() for each in (one, other) for p in each.parameters()]


def by_hooks(named):
    GradientExchange(named, agree_each_time=True, mean=True)
    return lambda: None


def by_hand(named):
    def mean():
        for _, p in named:
            if p.grad is not None:
                dist.all_reduce(p.grad)
                p.grad /= ranks.world_size()
    return mean


def both_ways():
    ranks.init(torch.device("cpu"))
    return adversarial(by_hooks), adversarial(by_hand)


def test_two_backwards_with_two_optimizers_are_exchanged_one_after_the_other():
    for hooks, hand in results(both_ways):
        assert all(map(torch.equal, hooks, hand))


class Refuses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, refuses):
        ctx.refuses = refuses
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.refuses:
            raise ArithmeticError("no more memory")
        return grad, None


def interrupted(failing):
    ranks.init(torch.device("cpu"))
    exchange.FIRST_BUCKET_BYTES = 1000
    gradients = GradientExchange((model := Net()).named_parameters())
    for step in range(4):
        model.zero_grad()
        fails = step in (1, 2) and ranks.rank() in failing
        handle = model.layers[1].register_forward_hook(lambda _, __, out, fails=fails: Refuses.apply(out, fails))
        try:
            model(batch(step, 0)).backward()
            assert not fails
        except ArithmeticError:
            pass
        handle.remove()
        if step in (1, 2):
            gradients.reset()
    kept = [None if p.grad is None else p.grad / 2 for p in model.parameters()]
    gradients.close()
    ddp = DistributedDataParallel(model, find_unused_parameters=True)
    model.zero_grad()
    ddp(batch(3, 0)).backward()
    return equal(kept, [p.grad for p in model.parameters()])


@pytest.mark.parametrize("failing", [[0], [0, 1]])
def test_a_backward_that_raises_leaves_ranks_in_step(failing):
    assert all(all(each) for each in results(interrupted, failing))


class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x):
        return checkpoint(self.layer, checkpoint(self.layer, x, use_reentrant=True), use_reentrant=True).sum()


def reentrant(mean):
    ranks.init(torch.device("cpu"))
    GradientExchange((model := Nested()).named_parameters(), agree_each_time=mean, mean=mean)
    try:
        model(torch.ones(2, 4, requires_grad=True)).backward()
    except SbkitError as error:
        return error.hint
    return None


def test_a_backward_within_another_is_refused_where_its_sum_would_be_wrong():
    assert results(reentrant, False) == ["pass use_reentrant=False to torch.utils.checkpoint"] * 2
    assert results(reentrant, True) == [None, None]


def test_one_process_exchanges_nothing():
    gradients = GradientExchange((model := Net()).named_parameters())
    model(batch(0, 0)).backward()
    expected = [p.grad for p in model.parameters()]
    gradients.finish()
    assert gradients.world == 1 and all(p.grad is grad for p, grad in zip(model.parameters(), expected, strict=True))
