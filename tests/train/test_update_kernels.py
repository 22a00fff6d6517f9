"""Updates by compiled kernels against the same updates by torch: weights, states, norms, whatever the shapes."""

from __future__ import annotations

import copy
import math
import platform
import shutil

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from processes import results
from torch import nn

from sbkit.nn.native import library
from sbkit.train import muon, update_kernels
from sbkit.train.distributed import ranks
from sbkit.train.muon import Muon
from sbkit.train.orthogonal import iterate_squares, newton_schulz
from sbkit.train.update import update, write_rates

CPU = torch.device("cpu")
#: Wide, tall, square, long enough for runs of iterations, filters, several of one shape, more than a block.
SHAPES = [(20, 8), (6, 6), (8, 20), (8, 5, 2, 2), (4, 33), (33, 4), (20, 8), (1, 7), (96, 70)]
OTHERS = [(16,), (), (1,), (3, 16, 16), (5000,)]


@pytest.fixture(autouse=True)
def kernels():
    if platform.system() != "Linux" or shutil.which("gcc") is None:
        pytest.skip("the kernels need Linux and gcc")
    assert library.load() is None


@pytest.fixture
def in_float32(monkeypatch):
    """Products of matrices that are rounded as little as all else, so that both ways can be told from mistakes."""
    for module in ("sbkit.train.muon", "sbkit.train.orthogonal"):
        monkeypatch.setattr(f"{module}.dtype_of_products", lambda device: torch.float32)


def drawn(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


class Trained:
    """Weights with an optimizer, that steps by kernels or by torch."""

    def __init__(self, by_kernels, shapes=SHAPES, others=OTHERS, **options):
        self.by_kernels = by_kernels
        self.weights = [nn.Parameter(drawn(*shape, seed=i) / 10) for i, shape in enumerate([*shapes, *others])]
        layers = nn.ModuleList(nn.Linear(1, 1, bias=False) for _ in shapes)
        for layer, weight in zip(layers, self.weights, strict=False):
            layer.weight = weight
        self.optimizer = Muon(self.weights, modules=[layers], **{"lr": 0.02, "weight_decay": 0.1, **options})

    def load(self):
        if self.by_kernels:
            library.load()
        else:
            library.unload()

    def set_gradients(self, step, missing=(), scale=1.0):
        for place, weight in enumerate(self.weights):
            grad = scale * drawn(*weight.shape, seed=100 * step + place).to(weight.dtype)
            weight.grad = None if place in missing else grad

    def step(self, step, missing=(), bad=None, factor=0.5, max_norm=1.0):
        """Take a step as a run does; return the norm, and whether it was skipped."""
        self.load()
        self.set_gradients(step, missing)
        if bad is not None:
            self.weights[len(self.weights) // 2].grad.view(-1)[-1] = bad
        rates = write_rates([self.optimizer], CPU)
        return update([self.optimizer], torch.tensor(factor), max_norm, rates=rates)

    def values(self):
        states = [value for weight in self.weights for name, value in sorted(self.optimizer.state[weight].items())
                  if isinstance(value, torch.Tensor)]
        return [*(weight.detach() for weight in self.weights), *states]


def both(**options):
    return Trained(True, **options), Trained(False, **options)


def assert_close(ours, theirs, **tolerances):
    # Directions have a mean square of 1. An iteration more than triples what is small in a matrix, rounding errors too.
    tolerances = tolerances or {"rtol": 1e-4, "atol": 5e-5}
    for mine, its in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(mine, its, **tolerances)


def counted(monkeypatch):
    """The names of the kernels that are called from now on."""
    calls, plain_call = [], library.call

    def recorded(kernel, dtype, /, **arguments):
        calls.append(kernel)
        plain_call(kernel, dtype, **arguments)

    monkeypatch.setattr(library, "call", recorded)
    return calls


@pytest.mark.parametrize("every", [1, 3, 4])
@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.5, 0.95])
def test_steps_are_those_of_torch(every, momentum, in_float32, monkeypatch):
    """Also with gradients that are missing in some steps, and steps that are skipped."""
    ours, theirs = both(orthogonalize_every=every, momentum=momentum)
    calls = counted(monkeypatch)
    for step in range(9):
        missing = {1, 3, len(SHAPES) + 1} if step in (0, 4, 5) else set()
        bad = {2: math.nan, 6: math.inf}.get(step)
        (norm, skipped), (exact, expected) = (side.step(step, missing, bad) for side in (ours, theirs))
        torch.testing.assert_close(norm, exact, equal_nan=True)
        assert skipped == expected == (bad is not None)
    assert_close(ours, theirs)
    assert set(calls) == {"sum_squares", "momentum", "move", "adamw"}
    assert calls.count("sum_squares") == 9 and calls.count("move") == calls.count("adamw") == 7
    for mine, its in zip(ours.weights, theirs.weights, strict=True):
        turns = [side.optimizer.state[weight].get("turn") for side, weight in ((ours, mine), (theirs, its))]
        assert turns[0] == turns[1]


def test_steps_with_products_in_bfloat16_are_as_far_from_exact_ones_as_those_of_torch(monkeypatch):
    ours, theirs = both(shapes=[(48, 160), (160, 48), (64, 64), (64, 80)])
    exact = Trained(False, shapes=[(48, 160), (160, 48), (64, 64), (64, 80)])
    for step in range(4):
        with monkeypatch.context() as patch:
            for module in ("sbkit.train.muon", "sbkit.train.orthogonal"):
                patch.setattr(f"{module}.dtype_of_products", lambda device: torch.bfloat16)
            ours.step(step)
            theirs.step(step)
        with monkeypatch.context() as patch:
            patch.setattr("sbkit.train.orthogonal.dtype_of_products", lambda device: torch.float32)
            exact.step(step)
    before = Trained(False, shapes=[(48, 160), (160, 48), (64, 64), (64, 80)])
    for mine, its, true, was in zip(*(side.weights[:4] for side in (ours, theirs, exact, before)), strict=True):
        moved = (true - was).norm()
        assert (mine - true).norm() < 0.03 * moved
        assert (its - true).norm() < 0.03 * moved


@given(st.lists(st.one_of(
    st.tuples(st.integers(1, 40), st.integers(1, 40)), st.tuples(*[st.integers(1, 8)] * 3)), min_size=1, max_size=6),
    st.lists(st.tuples(st.integers(0, 9000)), max_size=5), st.integers(1, 4), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_steps_of_any_shapes_are_those_of_torch(shapes, others, every, seed):
    with pytest.MonkeyPatch.context() as patch:
        for module in ("sbkit.train.muon", "sbkit.train.orthogonal"):
            patch.setattr(f"{module}.dtype_of_products", lambda device: torch.float32)
        ours, theirs = both(shapes=shapes, others=others, orthogonalize_every=every)
        for step in range(3):
            (norm, _), (exact, _) = (side.step(seed + step, missing={seed % 7}) for side in (ours, theirs))
            torch.testing.assert_close(norm, exact)
    assert_close(ours, theirs, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("place", [0, 4095, 4096, 8191, 12345])
def test_what_is_not_finite_is_found_anywhere(bad, place):
    grads = [drawn(7), torch.zeros(12346), drawn(2, 3)]
    assert math.isfinite(update_kernels.norm(grads))
    grads[1][place] = bad
    assert not math.isfinite(update_kernels.norm(grads))


def test_a_skipped_step_changes_nothing():
    side = Trained(True, orthogonalize_every=3)
    for step in range(3):
        side.step(step)
    before = [value.clone() for value in side.values()]
    for bad in (math.nan, math.inf):
        assert side.step(5, bad=bad)[1] == 1
    assert all(map(torch.equal, before, side.values()))


@pytest.mark.parametrize("scale", [1e-25, 1e-12, 1.0, 1e12])
def test_gradients_of_any_scale(scale, in_float32):
    """Their squares may be no numbers of float32."""
    ours, theirs = both()
    for step in range(3):
        for side in (ours, theirs):
            side.load()
            side.set_gradients(step, scale=scale)
            side.optimizer.step()
    for mine, its in zip(ours.weights, theirs.weights, strict=True):
        torch.testing.assert_close(mine, its, rtol=1e-4, atol=1e-5)


def test_momenta_that_end_leave_finite_weights():
    side = Trained(True, momentum=0.5)
    side.load()
    side.set_gradients(0)
    side.optimizer.step()
    side.set_gradients(0, scale=0.0)
    for _ in range(200):
        side.optimizer.step()
    before = [weight.detach().clone() for weight in side.weights]
    side.optimizer.step()
    for weight, was in zip(side.weights, before, strict=True):
        assert weight.isfinite().all()
        torch.testing.assert_close(weight.detach(), was, rtol=3e-3, atol=1e-6)


@pytest.mark.parametrize("every", [1, 3])
def test_any_number_of_threads_gives_the_same_bits(every, in_float32, monkeypatch):
    # The products are torch's, whose bits may follow from threads.
    monkeypatch.setattr("sbkit.train.orthogonal.iterate_squares", lambda stack: stack)
    outcomes = []
    threads_before = torch.get_num_threads()
    for threads in (1, 2, 3, 7):
        torch.set_num_threads(threads)
        side = Trained(True, orthogonalize_every=every)
        norms = [side.step(step)[0] for step in range(4)]
        outcomes.append([*side.values(), *norms])
    torch.set_num_threads(threads_before)
    for other in outcomes[1:]:
        assert all(map(torch.equal, outcomes[0], other))


def test_a_run_may_go_on_with_kernels_or_without(in_float32):
    whole, begun = both(orthogonalize_every=3)
    for step in range(6):
        whole.step(step)
    for step in range(3):
        begun.step(step)
    resumed = Trained(True, orthogonalize_every=3)
    for weight, value in zip(resumed.weights, begun.weights, strict=True):
        weight.data.copy_(value)
    resumed.optimizer.load_state_dict(copy.deepcopy(begun.optimizer.state_dict()))
    for step in range(3, 6):
        resumed.step(step)
    assert_close(resumed, whole)
    assert resumed.optimizer.state_dict()["state"].keys() == whole.optimizer.state_dict()["state"].keys()


def unlike(kind, side):
    """Make one tensor of an optimizer one that kernels don't take."""
    weight = side.weights[0]
    if kind == "double":
        weight.data = weight.data.double()
    elif kind == "strided":
        weight.data = torch.empty(weight.shape[::-1]).t().copy_(weight.data)
    elif kind == "subclass":
        weight.__class__ = type("Weight", (nn.Parameter,), {})


@pytest.mark.parametrize("kind", ["double", "strided", "subclass"])
def test_other_weights_are_updated_by_torch(kind, in_float32, monkeypatch):
    ours, theirs = both()
    for side in (ours, theirs):
        unlike(kind, side)
    calls = counted(monkeypatch)
    for step in range(3):
        for side in (ours, theirs):
            side.load()
            side.set_gradients(step)
            side.optimizer.step()
    assert set(calls) == {"adamw"}
    assert_close(ours, theirs)


def test_gradients_with_gaps_are_read_by_torch(in_float32):
    ours, theirs = both()
    for side in (ours, theirs):
        side.load()
        side.set_gradients(0)
        weight = side.weights[0]
        weight.grad = weight.grad.t().contiguous().t()
        assert update_kernels.fit([weight]) and not update_kernels.fit([weight], [weight.grad])
        side.optimizer.step()
    assert_close(ours, theirs)


def test_a_backward_through_weights_that_have_moved_since_is_an_error():
    side = Trained(True, shapes=[(4, 4)], others=[])
    side.set_gradients(0)
    inputs = torch.ones(4, 4, requires_grad=True)
    out = (inputs @ side.weights[0]).sum()
    side.optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


@pytest.mark.parametrize("shape", [(2, 24, 96), (2, 96, 24), (3, 30, 40), (2, 16, 16), (1, 1, 9), (1, 9, 1)])
def test_runs_of_iterations_give_what_single_ones_do(shape):
    matrices = drawn(*shape)
    matrices = matrices / torch.linalg.matrix_norm(matrices, keepdim=True)
    is_tall = shape[1] > shape[2]
    expected = newton_schulz(matrices.mT if is_tall else matrices)
    expected = expected.mT if is_tall else expected
    torch.testing.assert_close(iterate_squares(matrices), expected, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("power", [0.0, 0.5, 1.0, 2.0, 4.0])
def test_runs_in_bfloat16_stay_stable_however_small_singular_values_are(power):
    left, _ = torch.linalg.qr(drawn(64, 64))
    right, _ = torch.linalg.qr(drawn(256, 64, seed=1))
    values = torch.arange(1, 65.0) ** -power
    matrices = (left * (values / values.norm()) @ right.T)[None]

    def error(found):
        return (found - exact).norm() / exact.norm()

    exact = iterate_squares(matrices.double())
    found = iterate_squares(matrices.bfloat16())
    assert torch.linalg.matrix_norm(found.float(), 2) < 1.3
    # What is too small for bfloat16 has errors with single iterations too.
    assert error(found) < 0.06 + error(one_by_one(matrices.bfloat16()))


def one_by_one(matrices):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sbkit.train.orthogonal._RUNS", (1,) * 5)
        return iterate_squares(matrices)


def steps_on_a_rank(every, lacks_kernels):
    """Values after steps on the same gradients, and which kernels were called."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("sbkit.train.muon", "sbkit.train.orthogonal"):
            patch.setattr(f"{module}.dtype_of_products", lambda device: torch.float32)
        calls = counted(patch)
        if ranks.launched():
            ranks.init(CPU)
        library.load()
        side = Trained(True, orthogonalize_every=every)
        side.load = library.load
        if lacks_kernels and ranks.rank() == 1:
            patch.setenv("SBKIT_KERNELS", "0")
            side.load = library.unload
        for step in range(5):
            side.step(step, bad=math.nan if step == 2 else None)
    return side.values(), sorted(set(calls))


@pytest.mark.slow
@pytest.mark.parametrize("every", [1, 4, 20])  # with 20 there are steps in which no matrix is due
def test_ranks_share_the_matrices_and_have_the_same_bits(every):
    alone, _ = steps_on_a_rank(every, False)
    for values, calls in (shared := results(steps_on_a_rank, every, False, world=2)):
        assert calls == ["adamw", "momentum", "move", "sum_squares"]
        for mine, expected, others in zip(values, alone, shared[0][0], strict=True):
            torch.testing.assert_close(mine, expected, rtol=1e-4, atol=1e-5)
            assert torch.equal(mine, others)


@pytest.mark.slow
def test_if_one_rank_lacks_kernels_none_uses_them():
    (first, calls), (second, _) = results(steps_on_a_rank, 1, True, world=2)
    assert calls == [] and all(map(torch.equal, first, second))


def test_a_step_is_a_pass_for_the_norm_and_two_with_products_between_them(monkeypatch):
    """One kernel for all matrices before they are orthogonalised, one after, and one for all else."""
    side = Trained(True)
    calls = counted(monkeypatch)
    monkeypatch.setattr(muon, "orthogonalise", lambda tensors: pytest.fail("torch's path"))
    side.step(0)
    assert calls == ["sum_squares", "momentum", "move", "adamw"]
