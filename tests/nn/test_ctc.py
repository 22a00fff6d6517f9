"""CTC against torch's own loss in float64, and what happens to utterances that are too short for it."""

from __future__ import annotations

import itertools
import math
import os
import subprocess
import sys
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused

from sbkit.nn import ctc
from sbkit.nn.ctc import consistency, ctc_frames_needed, ctc_loss


def reference(logits, targets, frames, labels, blank=0):
    """Per utterance, infinite where there is no path."""
    log_probs = logits.double().log_softmax(-1).transpose(0, 1)
    return torch.nn.functional.ctc_loss(log_probs, targets, frames, labels, blank=blank, reduction="none")


def random_case(seed: int, batch: int = 6, frames: int = 14, vocabulary: int = 5, labels: int = 7):
    """Lengths from 0 on, few symbols (so that neighbours repeat): some utterances are infeasible."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(batch, frames, vocabulary, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, vocabulary, (batch, labels), generator=generator)
    return (logits, targets, torch.randint(1, frames + 1, (batch,), generator=generator),
            torch.randint(0, labels + 1, (batch,), generator=generator))


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 10**6), vocabulary=st.integers(2, 6))
def test_loss_and_gradient_equal_torchs_in_double_precision(seed, vocabulary):
    logits, targets, frames, labels = random_case(seed, vocabulary=vocabulary)
    mine, theirs = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    found = ctc_loss(mine, targets, frames, labels)
    expected = reference(theirs, targets, frames, labels)
    possible = expected.isfinite()
    assert torch.equal(found.feasible, possible)
    torch.testing.assert_close(found.losses[possible], expected[possible], rtol=1e-10, atol=1e-10)
    assert not found.losses[~possible].any(), "too short ones are left out"
    found.total.backward()
    torch.nn.functional.ctc_loss(
        theirs.log_softmax(-1).transpose(0, 1), targets, frames, labels, reduction="sum", zero_infinity=True
    ).backward()
    torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-8, atol=1e-10)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.lists(st.integers(1, 3), max_size=6), min_size=1, max_size=4))
def test_frames_needed_is_the_shortest_length_with_a_path(rows):
    width = max(1, max(map(len, rows)))
    # The padding looks like repeats.
    targets = torch.tensor([row + [1] * (width - len(row)) for row in rows])
    labels = torch.tensor([len(row) for row in rows])
    needed = ctc_frames_needed(targets, labels)
    for row, frames in zip(rows, needed.tolist(), strict=True):
        assert frames == len(row) + sum(a == b for a, b in itertools.pairwise(row))
    for extra, possible in ((0, True), (-1, False)):
        lengths = (needed + extra).clamp(min=0)
        logits = torch.zeros(len(rows), max(1, int(lengths.max())), 4)
        found = ctc_loss(logits, targets, lengths, labels)
        assert found.feasible.tolist() == [possible or n == 0 for n in needed.tolist()]


def test_an_infinite_loss_of_a_feasible_utterance_stays_visible():
    logits = torch.zeros(1, 4, 3)
    logits[..., 2] = -math.inf  # the model rules out a label that the text has
    found = ctc_loss(logits, torch.tensor([[2]]), torch.tensor([4]), torch.tensor([1]))
    assert found.feasible.item() and found.losses.item() == math.inf


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_the_loss_is_fp32_whatever_the_model_computes_in(dtype):
    logits, targets, frames, labels = random_case(3)
    logits = logits.to(dtype)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found = ctc_loss(logits, targets, frames, labels)
    assert found.losses.dtype == torch.float32
    expected = reference(logits, targets, frames, labels)[found.feasible].float()
    torch.testing.assert_close(found.losses[found.feasible], expected, rtol=1e-5, atol=1e-5)


def test_log_probabilities_and_another_blank():
    logits, targets, frames, labels = random_case(5)
    blank = 4
    targets = targets - 1
    found = ctc_loss(logits.log_softmax(-1), targets, frames, labels, blank=blank, from_logits=False)
    expected = reference(logits, targets, frames, labels, blank=blank)
    torch.testing.assert_close(found.losses[found.feasible], expected[found.feasible])


def test_padding_is_never_looked_at():
    logits, targets, frames, labels = random_case(7)
    padded = targets.masked_fill(torch.arange(targets.shape[1]) >= labels[:, None], -100)
    assert torch.equal(ctc_loss(logits, padded, frames, labels).losses,
                       ctc_loss(logits, targets, frames, labels).losses)


def test_a_batch_without_any_label():
    logits = torch.randn(2, 3, 4)
    found = ctc_loss(logits, torch.zeros(2, 0, dtype=torch.long), torch.tensor([3, 2]), torch.tensor([0, 0]))
    expected = -torch.stack([logits.log_softmax(-1)[0, :3, 0].sum(), logits.log_softmax(-1)[1, :2, 0].sum()])
    torch.testing.assert_close(found.losses, expected)


@pytest.mark.parametrize("label", [0, -1, 5])
def test_a_label_that_cannot_be_names_its_utterance(label):
    targets = torch.tensor([[1, 2], [3, label]])
    with refused("index-out-of-range"):
        ctc_loss(torch.zeros(2, 4, 5), targets, torch.tensor([4, 4]), torch.tensor([2, 2]),
                 ids=["clip-0", "clip-1"])


@pytest.mark.parametrize(
    ("frames", "labels", "named"),
    [([5], [1], "input_lengths"), ([4], [3], "target_lengths"), ([-1], [1], "input_lengths"),
     ([0.5], [1], "integers")],
)
def test_lengths_that_cannot_be_are_refused(frames, labels, named):
    with pytest.raises(ValueError, match=named):
        ctc_loss(torch.zeros(1, 4, 3), torch.tensor([[1, 2]]), torch.tensor(frames), torch.tensor(labels))


@pytest.mark.slow
def test_the_gpu_kernels_compute_the_same():
    """Triton's interpreter must be chosen before Triton is first imported, hence another process."""
    pytest.importorskip("triton", minversion="3.6", reason="older interpreters of Triton fail with today's numpy")
    found = subprocess.run(
        [sys.executable, __file__], capture_output=True, text=True, timeout=500,
        env={**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
    )
    assert found.returncode == 0, found.stdout + found.stderr


@pytest.mark.parametrize("labels, block", [(17, 64), (31, 64), (32, 128), (60, 128), (300, 1024), (1023, 2048)])
def test_kernels_are_rehearsed_for_the_block_that_is_about_to_be_used(labels, block, monkeypatch):
    asked = []
    monkeypatch.setattr(ctc, "kernels_work", lambda device, block: asked.append((device.type, block)))
    log_probs = mock.Mock(device=torch.device("cuda", 0), dtype=torch.float32)
    assert not ctc.use_kernels(log_probs, torch.ones(2, labels))
    assert asked == [("cuda", block)]
    example = []
    ctc.run_example(lambda log_probs, targets, *_: example.append(targets.shape) or log_probs.sum(), torch.float32,
                  "cpu", block)
    assert example == [(4, block // 2 - 1)], "the most labels that the block takes"


@pytest.mark.parametrize("generation, blocks", [  # the least, a usual one, the most
    (75, (32, 128, 2048)), (80, (2048,)), (90, (2048,)), (100, (32, 128, 2048))])
@pytest.mark.slow
def test_the_gpu_kernels_compile_for_cards_that_are_not_here(generation, blocks):
    triton = pytest.importorskip("triton", minversion="3.6", reason="older ones compile for the card that is there")
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from sbkit.nn import ctc_kernels

    floats, integers = dict.fromkeys(("emit", "alpha", "losses", "outer", "grad"), "*fp32"), dict.fromkeys(
        ("targets", "frames", "tokens"), "*i64")
    known = {**floats, **integers, "frames_max": "i32", "tokens_max": "i32", "BLOCK": "constexpr"}
    for kernel in (ctc_kernels._forward, ctc_kernels._backward):
        for block in blocks:
            source = ASTSource(kernel, {name: known[name] for name in kernel.arg_names}, constexprs={"BLOCK": block})
            made = triton.compile(source, target=GPUTarget("cuda", generation, 32),
                                  options={"num_warps": ctc_kernels.warps(block), "num_stages": 1})
            assert made.asm["cubin"] and made.metadata.shared <= 48 << 10


def long_case(labels: int):
    """Two utterances that have a path, one of them as long as the tensors."""
    frames = 3 * labels // 2 + 3
    generator = torch.Generator().manual_seed(labels)
    logits = torch.randn(2, frames, 7, generator=generator, dtype=torch.float64)
    targets = torch.randint(1, 7, (2, labels), generator=generator)
    return logits, targets, torch.tensor([frames, frames // 4]), torch.tensor([labels, labels // 8])


def compare(logits, *rest, device="cpu", loss=1e-5, gradient=1e-5) -> None:
    """The kernels with torch in double precision, both of losses of any weight."""
    mine, theirs = logits.float().to(device).requires_grad_(), logits.clone().requires_grad_()
    with mock.patch.object(ctc, "use_kernels", lambda *_: True):
        found = ctc_loss(mine, *(each.to(device) for each in rest))
    expected = reference(theirs, *rest)
    assert torch.equal(found.feasible.cpu(), expected.isfinite())
    expected = expected.masked_fill(~expected.isfinite(), 0).float()
    torch.testing.assert_close(found.losses.cpu(), expected, rtol=loss, atol=1e-5)
    weights = torch.rand(len(logits))
    (found.losses * weights.to(device)).sum().backward()
    losses = torch.nn.functional.ctc_loss(theirs.log_softmax(-1).transpose(0, 1), *rest, reduction="none",
                                          zero_infinity=True)
    (losses * weights).sum().backward()
    torch.testing.assert_close(mine.grad.cpu(), theirs.grad.float(), rtol=1e-4, atol=gradient)


def interpret() -> None:
    """What that process does: the kernels on the CPU against torch, and the rehearsal a GPU begins with."""
    import numpy
    from triton.runtime import interpreter

    numpy.seterr(divide="ignore", invalid="ignore")  # log(0), which a GPU computes quietly
    patch = interpreter._patch_lang_tensor

    def patched(tensor, scope):
        patch(tensor, scope)  # its own __index__ fails with numpy 2.4, to which one element is no number
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patched
    quiet = {"set_sync_debug_mode": lambda mode: None, "get_sync_debug_mode": lambda: 0}
    with mock.patch.multiple(torch.cuda, **quiet):
        interpreted(ctc.kernels_work.__wrapped__, torch.device("cpu"))


def interpreted(work, cpu) -> None:
    from sbkit.nn.ctc_kernels import CTCNegLogLikelihood

    for seed, labels, frames in ((0, 7, 14), (1, 1, 9), (2, 0, 5), (4, 3, 1), (5, 5, 2)):
        compare(*random_case(seed, labels=labels, frames=frames))
    compare(*long_case(40), gradient=1e-4)

    wrong = ctc.by_kernels(torch.zeros(2, 3, 4).log_softmax(-1), torch.tensor([[1, 2], [1, 2]]),
                            torch.tensor([4, 3]), torch.tensor([2, 2]), 0)
    assert wrong.isnan().tolist() == [True, False], "a length beyond the tensor must not go unnoticed"

    sound = CTCNegLogLikelihood.apply
    with mock.patch.object(CTCNegLogLikelihood, "apply", lambda emit, *rest: sound(emit, *rest) + (rest[-1] > 64)):
        assert work(cpu, 64), "of 17 labels"
        assert not work(cpu, 128), "wrong kernels for 60 labels must not be used, though those for 17 are right"


@pytest.mark.gpu(values=True)
@pytest.mark.parametrize("labels", [5, 17, 40, 60, 130, 300, 1023])
def test_on_a_gpu_the_kernels_are_used_and_compute_the_same(labels):
    assert ctc.kernels_work.__wrapped__(torch.device("cuda", 0), ctc.block_size(labels))
    compare(*long_case(labels), device="cuda", loss=1e-4, gradient=5e-3)


@pytest.mark.gpu
def test_no_host_sync_on_a_gpu():
    logits, targets, frames, labels = random_case(1, batch=16, frames=200, vocabulary=50, labels=40)
    logits = logits.float().cuda().requires_grad_()
    on_device = [t.cuda() for t in (targets, frames, labels)]
    ctc_loss(logits, *on_device).total.backward()  # compiles, and compares itself with torch's
    torch.cuda.set_sync_debug_mode("error")
    try:
        ctc_loss(logits, *on_device).total.backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.gpu(values=True)
def test_losses_of_a_batch_on_a_gpu():
    logits, targets, frames, labels = random_case(1, batch=16, frames=200, vocabulary=50, labels=40)
    found = ctc_loss(logits.float().cuda(), *(each.cuda() for each in (targets, frames, labels)))
    expected = reference(logits, targets, frames, labels)[found.feasible.cpu()].float()
    torch.testing.assert_close(found.losses[found.feasible].cpu(), expected, rtol=1e-4, atol=1e-4)


if __name__ == "__main__":
    interpret()


# ---------------------------------------------------------------- two views


def views(seed=0):
    return torch.randn(4, 6, 5, generator=torch.Generator().manual_seed(seed)).log_softmax(-1)


def test_it_is_the_divergence_of_each_from_the_other():
    log_probs, frames = views(), torch.tensor([6, 4, 6, 4])
    (first, second), lengths = log_probs.chunk(2), frames[:2]
    expected = sum(
        torch.nn.functional.kl_div(a[i, :n], b[i, :n], log_target=True, reduction="sum")
        for a, b in ((first, second), (second, first)) for i, n in enumerate(lengths)
    )
    torch.testing.assert_close(consistency(log_probs, frames), expected)


def test_views_that_agree_cost_nothing():
    one = views()[:2]
    assert consistency(torch.cat([one, one]), torch.tensor([6, 4, 6, 4])) == 0


def test_padding_has_no_gradient_and_targets_have_none():
    scores = torch.randn(4, 6, 5, requires_grad=True)
    consistency(scores.log_softmax(-1), torch.tensor([6, 4, 6, 4])).backward()
    assert scores.grad[1, 4:].abs().max() == 0 and scores.grad[1, :4].abs().min() > 0
    # A target without a gradient: each row's gradient is its probabilities minus the other view's.
    one, other = scores.detach().softmax(-1).chunk(2)
    torch.testing.assert_close(scores.grad[0], (one - other)[0])
