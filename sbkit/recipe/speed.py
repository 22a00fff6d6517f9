"""What a device can compute: in which precision, and operations a second of a large matrix product."""

from __future__ import annotations

import time

import torch


def speed_of(device: torch.device, precision: str) -> float | None:
    """Operations a second of a large matrix product on a device that is at hand; None for one that isn't."""
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not torch.cuda.is_available()):
        return None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = 4096 if device.type == "cuda" else 512
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    wait = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    fastest = float("inf")
    for _ in range(5):
        wait()
        started = time.perf_counter()
        _ = left @ right
        wait()
        fastest = min(fastest, time.perf_counter() - started)
    if device.type == "cuda":
        del left, right, _
        torch.cuda.empty_cache()
    return 2 * size**3 / fastest


def native_precision(device: torch.device) -> str:
    """What ``precision: auto`` stands for: bf16 where the device computes in it rather than emulates it."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        native = False
    return "bf16" if native else "fp32"
