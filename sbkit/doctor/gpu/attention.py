"""Attention on the card: finite gradients (cuDNN has had bugs), the cost of a new shape, and which lengths pay off."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sbkit.doctor.gpu.bench import Bench

LENGTHS = 24
ROUNDINGS = (0.0, 0.32, 1.28)
#: Factor by which the chosen rounding may be slower than the best.
NEAR = 1.15
#: The kernel's name if torch runs none of its own.
NONE = "sbkit's own for a CPU"


def check(bench: Bench) -> None:
    """Check gradients, shapes, heads and rounding."""
    bench.stand_in("torch's attention on a CPU, where cuDNN's settings have no effect")
    lengths = [64 + 128 * i for i in range(bench.size(LENGTHS, 3))]
    off, on = (bench.call(not_finite, bench.device, lengths, cudnn) for cudnn in (False, True))
    bench.found("finite", f"{len(off)} of {len(lengths)} lengths with values that aren't"
                + (f": {', '.join(map(str, off))} frames" if off else "") + f"; with cuDNN {len(on)}", not off)
    times = {f"cuDNN {'on' if on else 'off'}, {what}": value for on in (False, True)
             for what, value in bench.call(_shapes, bench.device, on, bench.rehearse).items()}
    without, with_it = times["cuDNN off, new shape, ms"], times["cuDNN on, new shape, ms"]
    bench.measured("shapes", f"{without:.1f} ms off, {with_it:.1f} ms on", without <= 1.1 * with_it, **times)
    heads = {name: bench.call(_head, bench, name) for name in ("flagship", "large")}
    kernels = {f"{size} ({name})": bench.call(kernel_of, bench.device, size) for name, size in heads.items()}
    bench.measured("heads", ", ".join(f"{head}: {kernel}" for head, kernel in kernels.items()),
                   not any("math" in kernel or kernel == NONE for kernel in kernels.values()))
    _rounding(bench)


def not_finite(device: str, lengths: list[int], cudnn: bool) -> list[int]:
    """Find lengths with non-finite gradients: padded rows, and queries with all keys masked."""
    import torch

    from sbkit.nn.fast.attend import attend

    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    torch.manual_seed(0)
    bad = []
    for frames in lengths:
        q, k, v = (torch.randn(2, 4, frames, 64, device=device, dtype=torch.bfloat16) for _ in range(3))
        q[:, :, ::7] = 12.0
        k[:] = -k.abs() - 1.0  # such a row's logsumexp is far below zero
        mask = torch.arange(frames, device=device) < torch.tensor([[frames], [max(1, frames - 37)]], device=device)
        for each in (q, k, v):
            each.requires_grad_()
        attend(q, k, v, mask[:, None, None], 0.0, 64**-0.5).float().square().mean().backward()
        if not all(each.grad is not None and each.grad.isfinite().all() for each in (q, k, v)):
            bad.append(frames)
    return bad


def _shapes(device: str, cudnn: bool, small: bool) -> dict[str, float]:
    """Measure milliseconds of forward and backward, for new and for known shapes."""
    import torch

    torch.backends.cuda.enable_cudnn_sdp(cudnn)
    lengths = [40 + 13 * i for i in range(3 if small else 16)]
    _pass(device, 31)  # loads the kernels
    new = [_pass(device, frames) for frames in lengths]
    known = [_pass(device, frames) for frames in lengths]
    return {"new shape, ms": 1e3 * sum(new) / len(new), "known shape, ms": 1e3 * sum(known) / len(known)}


def _pass(device: str, frames: int) -> float:
    import torch
    from torch.nn import functional

    q, k, v = (torch.randn(8, 8, frames, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
               for _ in range(3))
    mask = (torch.arange(frames, device=device) < frames - 3).expand(8, 1, 1, frames)
    _wait(device)
    started = time.perf_counter()
    functional.scaled_dot_product_attention(q, k, v, attn_mask=mask).sum().backward()
    _wait(device)
    return time.perf_counter() - started


def _wait(device: str | torch.device) -> None:
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


def _head(bench: Bench, name: str) -> int:
    """The head size of the unmodified recipe."""
    from sbkit.recipe import load

    asked = load.load(bench.recipe(name), {"data_folder": "none", "language": "en",
                                           "output_folder": str(bench.folder / name)})
    return asked["d_model"] // asked["nhead"]


def kernel_of(device: str, head: int) -> str:
    """Find the kernel that torch runs for sbkit's attention with mask and dropout, by torch's profiler."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    from sbkit.nn.fast.attend import attend

    torch.backends.cuda.enable_cudnn_sdp(False)
    q, k, v = (torch.randn(2, 4, 50, head, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = (torch.arange(50, device=device) < 40).expand(2, 1, 1, 50)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        attend(q, k, v, mask, 0.1, head**-0.5)
    start = "aten::_scaled_dot_product_"
    names = sorted(each.key for each in seen.key_averages() if each.key.startswith(start))
    return ", ".join(name.removeprefix(start).removesuffix("_attention") for name in names) or NONE


def _rounding(bench: Bench) -> None:
    found = {seconds: bench.call(_steps, bench, seconds) for seconds in ROUNDINGS}
    chosen = bench.call(_chosen, bench)
    speed = found.get(chosen) or bench.call(_steps, bench, chosen)
    best = max(found.values())
    bench.measured("rounding", f"training takes {chosen:g} s: {speed:.0f} audio s/s, the best {best:.0f}",
                   speed * NEAR >= best, **{f"rounded to {seconds:g} s, audio s/s": value
                                            for seconds, value in found.items()})


def _chosen(bench: Bench) -> float:
    import torch

    from sbkit.recipe import load

    hparams = load.load(bench.recipe("flagship"), {"output_folder": str(bench.folder / "rounding")})
    return hparams["batching"].rounding(torch.device(bench.device).type)


def _steps(bench: Bench, rounding: float) -> float:
    """Measure the flagship's speed in seconds of audio per second on new lengths with this rounding."""
    import numpy as np
    import torch

    from sbkit.recipe import arguments
    from sbkit.train.memory import trials

    device = torch.device(bench.device)
    lengths = np.random.default_rng(1).uniform(1.0, bench.size(12.0, 2.0), bench.size(48, 3))
    held = bench.size(60.0, 4.0)
    with trials.trial(arguments.parse(bench.words("flagship")), device) as trial:
        def step(seconds: float) -> float:
            rounded = -(-seconds // rounding) * rounding if rounding else seconds
            utterances = max(1, int(held / rounded))
            trial.brain.try_batch(trial.batch(utterances, rounded))
            return utterances * seconds

        step(held / 4)
        _wait(device)
        started = time.perf_counter()
        audio = sum(map(step, lengths.tolist()))
        _wait(device)
        return audio / (time.perf_counter() - started)
