"""What a device can compute: operations a second, by its data sheet or by a large matrix product."""

from __future__ import annotations

import time

import torch

#: Dense operations a second with bf16 or fp16 inputs, by a part of the name; the first that fits counts.
PEAKS = {
    "B200": 2250e12, "GB200": 2250e12, "GH200": 989e12, "H200": 989e12, "H100 PCIe": 756e12, "H100 NVL": 835e12,
    "H100": 989e12, "H800": 989e12, "A100": 312e12, "A800": 312e12, "A40": 150e12, "A30": 165e12, "A10": 125e12,
    "L40S": 362e12, "L40": 181e12, "L4": 121e12, "V100": 125e12, "T4": 65e12, "RTX 5090": 210e12,
    "RTX 4090": 165e12, "RTX 3090": 71e12, "RTX A6000": 155e12, "RTX 6000 Ada": 364e12,
}


def peak_of(device: torch.device, precision: str) -> tuple[float, str] | None:
    """Operations a second, and where the figure is from; None where nobody knows."""
    if device.type == "cuda" and precision in ("bf16", "fp16") and torch.cuda.is_available():
        name = torch.cuda.get_device_name(device)
        for part, peak in PEAKS.items():
            if part in name:
                return peak, f"the {part}'s data sheet"
    speed = speed_of(device, precision)
    return None if speed is None else (speed, "a large matrix product")


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
