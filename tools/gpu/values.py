"""Results of kernels on the card: CTC compared with torch's, layers with SpeechBrain's, attention by shape."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.nn import ctc

from .bench import RECIPES, SMALL

if TYPE_CHECKING:
    import torch

    from .bench import Bench

LABELS = (5, 40, 130, 300, 1023)
LOSSES, GRADIENTS = 1e-4, 5e-3
#: How far sbkit's layers may be from SpeechBrain's in fp32; the same of the loss in half precision, and of a gradient
#: there, against how far that of SpeechBrain's own layers is.
LAYERS, HALF_LOSS, NEAR_THEIRS = 1e-3, 0.02, 1.25
#: Lengths of attention; roundings of lengths, and the factor by which the chosen one may be slower than the best.
LENGTHS, ROUNDINGS, NEAR = 24, (0.0, 0.32, 1.28), 1.15
NOT_FUSED = "none that is fused"


# ------------------------------------------------------------------ CTC and layers


def kernels(bench: Bench) -> None:
    """Check losses, gradients, layers and dropout; a dry run has torch's CTC instead of the kernels."""
    losses, gradients = {}, {}
    sizes = bench.size(LABELS, LABELS[:3])
    used = bench.call(_used, bench.device, sizes)
    unused = "not tried: they need a card" if bench.dry_run else "they don't, torch's are used: the log says why"
    bench.measured("used", "they do" if used else unused, used)
    for labels in sizes:
        losses[str(labels)], gradients[str(labels)] = bench.call(ctc_apart, bench.device, labels)
    bench.found("losses", _worst(losses), max(losses.values()) <= LOSSES, **losses)
    bench.found("gradients", _worst(gradients),
                all(gradients[str(labels)] <= max_apart(labels) for labels in sizes), **gradients)
    for precision, (apart, good) in bench.call(layers, bench.device, bench.dry_run, bench.folder).items():
        bench.found(precision, _worst(apart), good, **apart)
    share, factor = bench.call(dropped, bench.device)
    bench.found("dropout", f"drops {100 * share:.2f} %, scales by {factor:.4f}",
                0.095 <= share <= 0.105 and abs(factor - 1 / 0.9) < 1e-3, share=share, factor=factor)


def _worst(apart: dict[str, float]) -> str:
    name = max(apart, key=apart.__getitem__)
    return f"at most {apart[name]:.1e} apart ({name})"


def max_apart(labels: int) -> float:
    """The tolerance for gradients: in fp32 torch's own are 1 % off with 1023 labels."""
    return max(GRADIENTS, 1e-5 * (2 * labels + 1))


def _used(device: str, sizes: Sequence[int]) -> bool:
    import torch

    return device != "cpu" and all(ctc.kernels_work(torch.device(device), ctc.block_size(labels)) for labels in sizes)


def ctc_apart(device: str, labels: int) -> tuple[float, float]:
    """Compute the relative distance of losses and gradients from torch's in fp64 on the CPU."""
    import torch

    drawn = torch.Generator().manual_seed(labels)
    batch, frames, vocabulary = 4, 2 * labels + 30, 60
    logits = torch.randn(batch, frames, vocabulary, generator=drawn)
    targets = torch.randint(1, vocabulary, (batch, labels), generator=drawn)
    widths = torch.tensor([frames, frames - 7, frames - 20, frames])
    lengths = torch.tensor([labels, labels - 1, labels // 2, 0])
    by = ctc.by_torch if device == "cpu" else ctc.by_kernels
    expected = _losses(ctc.by_torch, logits.double(), targets, widths, lengths)
    found = _losses(by, logits.to(device), *(each.to(device) for each in (targets, widths, lengths)))
    losses, gradients = (((a.double().cpu() - b).abs().max() / b.abs().max()).item() for a, b in
                         zip(found, expected, strict=True))
    return losses, gradients


def _losses(by: Callable[..., torch.Tensor], logits: torch.Tensor, *rest: torch.Tensor
            ) -> tuple[torch.Tensor, torch.Tensor]:
    logits = logits.clone().requires_grad_()
    losses = by(logits.log_softmax(-1), *rest, 0)
    losses.sum().backward()
    assert logits.grad is not None
    return losses.detach(), logits.grad


def layers(device: str, small: bool, folder: Path) -> dict[str, tuple[dict[str, float], bool]]:
    """Compute how far the flagship's CTC loss and gradients with sbkit's layers, in each precision, are from those with
    SpeechBrain's in fp32, and whether that is near enough."""
    import torch

    from sbkit.nn.accelerate import accelerate, restore
    from sbkit.nn.tf32 import allow_tf32

    allow_tf32(False)
    torch.backends.cuda.enable_cudnn_sdp(False)  # as in a run
    modules, run = flagship(device, small, folder)
    gather = functools.partial(_gather, modules, run, torch.device(device).type)
    expected, theirs = gather("fp32")

    def apart(precision: str) -> tuple[float, float, str]:
        loss, grads = gather(precision)
        return _apart(loss, expected), *max((_apart(grads[name], theirs[name]), name) for name in theirs)

    limits = {"fp32": (LAYERS, LAYERS)}
    limits |= {half: (HALF_LOSS, NEAR_THEIRS * apart(half)[1]) for half in ("bf16", "fp16")}
    accelerate(modules)
    found = {}
    for precision, (near, near_gradient) in limits.items():
        loss, gradient, name = apart(precision)
        found[precision] = {"loss": loss, f"gradient of {name}": gradient}, loss <= near and gradient <= near_gradient
    restore(modules)
    return found


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance, with a floor for tensors that are almost zero, such as a bias before a norm."""
    return ((found - expected).norm() / (expected.norm() + 1e-3 * expected.numel() ** 0.5)).item()


def _gather(modules: torch.nn.Module, run: Callable[[], torch.Tensor], kind: str, precision: str
            ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    import torch

    scale = 64.0 if precision == "fp16" else 1.0  # so that no gradient underflows, and none overflows
    modules.zero_grad(set_to_none=True)
    with torch.autocast(kind, torch.float16 if precision == "fp16" else torch.bfloat16, enabled=precision != "fp32"):
        loss = run()
    (loss * scale).backward()
    return loss.detach().float(), {name: p.grad.float() / scale for name, p in modules.named_parameters()
                                   if p.grad is not None}


def flagship(device: str, small: bool, folder: Path) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Build the flagship's modules without dropout, and a function for their loss on a batch of noise."""
    import torch

    from sbkit.recipe import load

    torch.manual_seed(0)
    changed = {"dropout": 0.0, "output_folder": str(folder / "layers"), **(SMALL if small else {})}
    hparams = load.load(RECIPES["flagship"], changed)
    modules = torch.nn.ModuleDict(hparams["modules"]).to(device)
    modules["features"] = hparams["compute_features"].to(device)
    for layer in modules.modules():
        if isinstance(layer, torch.nn.modules.dropout._DropoutNd):  # the convolutions' has no key in the recipe
            layer.p = 0.0
    encoder, front, last = hparams["Transformer"], hparams["CNN"], hparams["ctc_lin"]
    rows, samples = (2, 32_000) if small else (8, 160_000)
    signals = 0.1 * torch.randn(rows, samples, device=device)
    share = torch.ones(rows, device=device)  # effects of padding differ on purpose
    labels = torch.randint(3, 28, (rows, 20), device=device)

    def run() -> torch.Tensor:
        with torch.autocast(signals.device.type, enabled=False):  # as in a run
            feats = hparams["normalize"](modules["features"](signals), share)
        scores = last(encoder.encode(front(feats), share))
        frames = (share * scores.shape[1]).round().long()
        return ctc.ctc_loss(scores, labels, frames, torch.full_like(frames, 20)).total / rows

    return modules, run


def dropped(device: str) -> tuple[float, float]:
    """Apply dropout of 10 % to a million ones: the share dropped, and the value of the others."""
    import torch

    from sbkit.nn.accelerate import accelerate

    module = torch.nn.Sequential(torch.nn.Dropout(0.1)).train()
    accelerate(module)
    kept = module(torch.ones(1000, 1000, device=device))
    return (kept == 0).float().mean().item(), kept.max().item()


# ------------------------------------------------------------------ attention


def attention(bench: Bench) -> None:
    """Check gradients (cuDNN has had bugs), the cost of new shapes, the kernels that run, and which lengths pay off."""
    lengths = [64 + 128 * i for i in range(bench.size(LENGTHS, 3))]
    off, on = (bench.call(not_finite, bench.device, lengths, cudnn) for cudnn in (False, True))
    bench.found("finite", f"{len(off)} of {len(lengths)} lengths with values that aren't"
                + (f": {', '.join(map(str, off))} frames" if off else "") + f"; with cuDNN {len(on)}", not off)
    heads = {name: bench.call(_head, bench, name) for name in RECIPES}
    ran = {f"{size} ({name})": bench.call(kernel_of, bench.device, size) for name, size in heads.items()}
    bench.measured("heads", ", ".join(f"{head}: {kernel}" for head, kernel in ran.items()),
                   NOT_FUSED not in ran.values())
    chosen = bench.call(_chosen_rounding, bench)
    speeds = {seconds: bench.call(_speed, bench, seconds) for seconds in {*ROUNDINGS, chosen}}
    best = max(speeds.values())
    bench.measured("rounding", f"training takes {chosen:g} s: {speeds[chosen]:.0f} audio s/s, the best {best:.0f}",
                   speeds[chosen] * NEAR >= best, **{f"rounded to {seconds:g} s, audio s/s": value
                                                     for seconds, value in speeds.items()})
    times = {f"cuDNN {'on' if on else 'off'}, {what}": value for on in (False, True)
             for what, value in bench.call(_shapes, bench.device, on, bench.dry_run).items()}
    without, with_it = times["cuDNN off, new shape, ms"], times["cuDNN on, new shape, ms"]
    bench.measured("shapes", f"{without:.1f} ms off, {with_it:.1f} ms on", without <= 1.1 * with_it, **times)


def not_finite(device: str, lengths: list[int], cudnn: bool) -> list[int]:
    """Find lengths with non-finite gradients: padded rows, and queries with all keys masked."""
    import torch

    from sbkit.nn.fast.attention import attend

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
        try:
            attend(q, k, v, mask[:, None, None], 0.0, 64**-0.5).float().square().mean().backward()
        except RuntimeError as error:  # cuDNN has no kernel for it
            print(f"{frames} frames: {error}", flush=True)
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


def _wait(device: str) -> None:
    import torch

    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def _head(bench: Bench, name: str) -> int:
    """The head size of the unmodified recipe."""
    from sbkit.recipe import load

    asked = load.load(RECIPES[name], {"data_folder": "none", "language": "en",
                                      "output_folder": str(bench.folder / name)})
    return asked["d_model"] // asked["nhead"]


def kernel_of(device: str, head: int) -> str:
    """Find the kernel that torch runs for sbkit's attention with mask and dropout."""
    import torch
    from torch.utils._python_dispatch import TorchDispatchMode

    from sbkit.nn.fast.attention import attend

    names: list[str] = []

    class Names(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            names.append(str(function))
            return function(*args, **(kwargs or {}))

    torch.backends.cuda.enable_cudnn_sdp(False)
    q, k, v = (torch.randn(2, 4, 50, head, device=device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    mask = (torch.arange(50, device=device) < 40).expand(2, 1, 1, 50)
    with Names():  # type: ignore[no-untyped-call]
        attend(q, k, v, mask, 0.1, head**-0.5)
    start = "aten._scaled_dot_product_"
    return ", ".join(name.removeprefix(start).partition("_attention")[0] for name in names
                     if name.startswith(start)) or NOT_FUSED


def _chosen_rounding(bench: Bench) -> float:
    from sbkit.recipe import load

    hparams = load.load(RECIPES["flagship"], {"output_folder": str(bench.folder / "rounding")})
    return hparams["batching"].rounding(bench.device.split(":")[0])


def _speed(bench: Bench, rounding: float) -> float:
    """Measure the flagship's speed in seconds of audio per second on new lengths with this rounding."""
    import numpy as np
    import torch

    from sbkit.recipe import arguments
    from sbkit.train.memory import trials

    lengths = np.random.default_rng(1).uniform(1.0, bench.size(12.0, 2.0), bench.size(48, 3))
    held = bench.size(60.0, 4.0)
    with trials.open_trial(arguments.parse(bench.words("flagship")), torch.device(bench.device)) as trial:
        def step(seconds: float) -> float:
            rounded = -(-seconds // rounding) * rounding if rounding else seconds
            utterances = max(1, int(held / rounded))
            trial.brain.try_batch(trial.batch(utterances, rounded))
            return utterances * seconds

        step(held / 4)
        _wait(bench.device)
        started = time.perf_counter()
        audio = sum(map(step, lengths.tolist()))
        _wait(bench.device)
        return audio / (time.perf_counter() - started)
