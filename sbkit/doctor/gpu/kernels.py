"""sbkit's CTC kernels against torch's, and its layers against SpeechBrain's, on the device that trains."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch

    from sbkit.doctor.gpu.bench import Bench

LABELS = (5, 40, 130, 300, 1023)
LOSSES, GRADIENTS = 1e-4, 5e-3
LAYERS = {"fp32": 1e-3, "bf16": 0.1}


def check(bench: Bench) -> None:
    """Check losses, gradients, layers and dropout."""
    bench.stand_in("torch's CTC in fp32 in place of the kernels, which need a card; tests/nn/test_ctc.py runs them "
                   "in Triton's interpreter")
    losses, gradients = {}, {}
    sizes = bench.size(LABELS, LABELS[:3])
    used = bench.call(_used, bench.device, sizes)
    unused = "not tried: they need a card" if bench.rehearse else "they don't, torch's are used: the log says why"
    bench.measured("used", "they do" if used else unused, used)
    for labels in sizes:
        losses[str(labels)], gradients[str(labels)] = bench.call(ctc, bench.device, labels)
    bench.found("losses", _worst(losses), max(losses.values()) <= LOSSES, **losses)
    bench.found("gradients", _worst(gradients),
                all(gradients[str(labels)] <= _most(labels) for labels in sizes), **gradients)
    for precision, most in LAYERS.items():
        apart = bench.call(layers, bench.device, bench.recipe("flagship"), precision, bench.rehearse, bench.folder)
        bench.found(precision, _worst(apart), max(apart.values()) <= most, **apart)
    share, factor = bench.call(dropped, bench.device)
    bench.found("dropout", f"drops {100 * share:.2f} %, scales by {factor:.4f}",
                0.095 <= share <= 0.105 and abs(factor - 1 / 0.9) < 1e-3, share=share, factor=factor)


def _worst(apart: dict[str, float]) -> str:
    name = max(apart, key=apart.__getitem__)
    return f"at most {apart[name]:.1e} apart ({name})"


def _most(labels: int) -> float:
    """The tolerance for gradients: in fp32 torch's own are 1 % off with 1023 labels."""
    return max(GRADIENTS, 1e-5 * (2 * labels + 1))


def _used(device: str, sizes: Sequence[int]) -> bool:
    import torch

    from sbkit.nn import ctc

    return device != "cpu" and all(ctc._kernels_work(torch.device(device), ctc._block(labels)) for labels in sizes)


def ctc(device: str, labels: int) -> tuple[float, float]:
    """Compute the relative distance of losses and gradients from torch's in fp64 on the CPU."""
    import torch

    from sbkit.nn import ctc as ours

    drawn = torch.Generator().manual_seed(labels)
    batch, frames, vocabulary = 4, 2 * labels + 30, 60
    logits = torch.randn(batch, frames, vocabulary, generator=drawn)
    targets = torch.randint(1, vocabulary, (batch, labels), generator=drawn)
    widths = torch.tensor([frames, frames - 7, frames - 20, frames])
    lengths = torch.tensor([labels, labels - 1, labels // 2, 0])
    by = ours._by_torch if device == "cpu" else ours._by_kernels
    expected = _losses(ours._by_torch, logits.double(), targets, widths, lengths)
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


def layers(device: str, recipe: Path, precision: str, small: bool, folder: Path) -> dict[str, float]:
    """Compute how far the flagship's CTC loss and gradients with sbkit's layers are from those with SpeechBrain's."""
    import torch

    from sbkit.nn.accelerate import accelerate, restore

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    modules, run = _flagship(device, recipe, small, folder)
    gather = functools.partial(_gather, modules, run, torch.device(device).type, precision)
    accelerate(modules)
    loss, grads = gather()
    restore(modules)
    expected, theirs = gather()
    apart = {"loss": abs(loss - expected) / abs(expected)}
    worst = max(theirs, key=lambda name: _apart(grads[name], theirs[name]))
    return apart | {f"gradient of {worst}": _apart(grads[worst], theirs[worst])}


def _apart(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Relative distance, with a floor for tensors that are almost zero, such as a bias before a norm."""
    return ((found - expected).norm() / (expected.norm() + 1e-3 * expected.numel() ** 0.5)).item()


def _gather(modules: torch.nn.Module, run: Callable[[], torch.Tensor], kind: str, precision: str
            ) -> tuple[float, dict[str, torch.Tensor]]:
    import torch

    modules.zero_grad(set_to_none=True)
    with torch.autocast(kind, torch.bfloat16, enabled=precision == "bf16"):
        loss = run()
    loss.backward()
    return loss.item(), {name: p.grad.float() for name, p in modules.named_parameters() if p.grad is not None}


def _flagship(device: str, recipe: Path, small: bool, folder: Path
              ) -> tuple[torch.nn.Module, Callable[[], torch.Tensor]]:
    """Build the recipe's modules without dropout, and a function for their loss on a batch of noise."""
    import torch

    from sbkit.doctor.gpu.bench import SMALL
    from sbkit.nn.ctc import ctc_loss
    from sbkit.recipe import load

    torch.manual_seed(0)
    hparams = load.load(recipe, {"dropout": 0.0, "output_folder": str(folder / "layers"), **(SMALL if small else {})})
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
        feats = hparams["normalize"](modules["features"](signals), share)
        scores = last(encoder.encode(front(feats), share))
        frames = (share * scores.shape[1]).round().long()
        return ctc_loss(scores, labels, frames, torch.full_like(frames, 20)).total / rows

    return modules, run


def dropped(device: str) -> tuple[float, float]:
    """Apply dropout of 10 % to a million ones: the share dropped, and the value of the others."""
    import torch

    from sbkit.nn.accelerate import accelerate

    module = torch.nn.Sequential(torch.nn.Dropout(0.1)).train()
    accelerate(module)
    kept = module(torch.ones(1000, 1000, device=device))
    return (kept == 0).float().mean().item(), kept.max().item()
