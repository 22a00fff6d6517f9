"""The speed of a device: operations per second by data sheet or by a large matrix product, the share of it that
training reaches (MFU: model FLOPs utilisation), and its best precision."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

#: 10^12 dense operations per second by the makers' data sheets: of tensor cores with bf16 or fp16 inputs and fp32 sums,
#: of tensor cores with TF32, and with fp32. Larger figures in the sheets are for sparse matrices (twice the dense ones)
#: and, for GeForce, for fp16 sums; a training step has neither.
#: The first entry that is part of the card's name counts, so longer names come first.
PEAKS = {
    "GB200": (2500, 1250, 80), "B200": (2250, 1100, 75), "GH200": (990, 495, 67),
    "H200 NVL": (836, 418, 60), "H200": (989, 495, 67), "H100 NVL": (836, 418, 60), "H100 PCIe": (756, 378, 51),
    "H100": (989, 495, 67), "H800 PCIe": (756, 378, 51), "H800": (989, 495, 67),
    "A100": (312, 156, 19.5), "A800": (312, 156, 19.5),
    "A40": (149.7, 74.8, 37.4), "A30": (165, 82, 10.3), "A10": (125, 62.5, 31.2),
    "L40S": (362, 183, 91.6), "L40": (181, 90.5, 90.5), "L4": (121, 60, 30.3),
    "RTX 5090": (209.5, 104.8, 104.8), "RTX 4090": (165.2, 82.6, 82.6), "RTX 3090": (71, 35.6, 35.6),
    "RTX 6000 Ada": (364.2, 182.1, 91.1), "RTX A6000": (154.8, 77.4, 38.7),
    "V100": (125, 15.7, 15.7), "T4": (65, 8.1, 8.1),
    "MI325X": (1307, 654, 163.4), "MI300X": (1307, 654, 163.4),
}


#: Seconds during which products are timed. The fastest counts, in case other programs compute in the meantime.
MEASURE_SECONDS = 0.3


def peak_of(device: torch.device, precision: str) -> tuple[float | None, str]:
    """The highest operations per second that training could reach, and the source; None for a card not in the table.

    For a CPU, whose data sheet lacks the clock under load, it is the speed of a matrix product.
    """
    if device.type != "cuda":
        return speed_of(device, precision), "a large matrix product here"
    return peak_of_card(torch.cuda.get_device_name(device), precision)


def peak_of_card(name: str, precision: str) -> tuple[float | None, str]:
    """The same for a card by its name, which this machine may lack; fp32 means TF32 if that is allowed."""
    column = 0 if precision in ("bf16", "fp16") else 2 if torch.get_float32_matmul_precision() == "highest" else 1
    for words, peaks in PEAKS.items():
        if re.search(rf"\b{words}\b(?! (?:Ti|D|Laptop)\b)", name) and "MIG" not in name:  # MIG: a slice of a card
            return peaks[column] * 1e12, f"the {words}'s data sheet"
    return None, name


def speed_of(device: torch.device, precision: str) -> float | None:
    """Measure operations per second of a large matrix product; None for a device that isn't available."""
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not torch.cuda.is_available()):
        return None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = 4096 if device.type == "cuda" else 1024
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    wait: Callable[[], None] = torch.cuda.synchronize if device.type == "cuda" else (lambda: None)
    fastest, until = float("inf"), time.perf_counter() + MEASURE_SECONDS
    while time.perf_counter() < until or math.isinf(fastest):
        wait()
        started = time.perf_counter()
        product = left @ right
        wait()
        fastest = min(fastest, time.perf_counter() - started)
    if device.type == "cuda":
        del left, right, product
        torch.cuda.empty_cache()
    return 2 * size**3 / fastest


def usable_speed(device: torch.device, precision: str) -> float | None:
    """The same of what most layers can use: on a CPU that of fp32, since units for bf16 serve large products alone."""
    return speed_of(device, "fp32" if device.type == "cpu" else precision)


@functools.cache
def native_precision(device: torch.device) -> str:
    """The precision that ``auto`` means: bf16 if the device supports it without emulation, else fp32."""
    if device.type == "cuda":
        native = torch.cuda.is_bf16_supported(including_emulation=False)
    elif device.type == "cpu":
        native = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    else:
        native = False
    return "bf16" if native else "fp32"


_UNITS = ((1e15, "PFLOP"), (1e12, "TFLOP"), (1e9, "GFLOP"), (1e6, "MFLOP"))


@dataclass(frozen=True)
class Utilisation:
    """The FLOPs of training on a second of audio, and the peak of the device.

    FLOPs for padding and recomputation don't count, so they lower the utilisation.
    """

    operations: float
    """FLOPs of a second of audio, forward and backward."""
    peak: float | None = None
    """FLOPs a second of one device; None: unknown."""
    source: str = ""
    """Where the peak comes from."""

    def rate(self, audio_s_per_s: float) -> float:
        """Return FLOPs a second at a speed in seconds of audio a second."""
        return self.operations * audio_s_per_s

    def share(self, audio_s_per_s: float) -> float | None:
        """Return the share of a device's peak at a speed on one device; None if the peak is unknown."""
        return self.rate(audio_s_per_s) / self.peak if self.peak else None

    def words(self, audio_s_per_s: float) -> str:
        """Describe the utilisation at a speed on one device.

        >>> Utilisation(0.6e9, 2e11).words(100), Utilisation(0.6e9, 9.9e14).words(195), Utilisation(0.6e9).words(100)
        ('MFU 30 %', 'MFU 0.01 %', '60 GFLOP/s')
        """
        share = self.share(audio_s_per_s)
        if share is None:
            return f"{flops(self.rate(audio_s_per_s))}/s"
        return f"MFU {100 * share:.0f} %" if share >= 0.01 else f"MFU {100 * share:.1g} %"

    def __str__(self) -> str:
        needs = f"a second of audio takes {flops(self.operations)} in training"
        if self.peak is None:
            return f"{needs}; the peak of {self.source or 'this device'} is unknown, so there is no MFU"
        return f"{needs}; MFU is of {flops(self.peak)}/s, by {self.source}"


def flops(value: float) -> str:
    """Format a number of operations with its unit.

    >>> flops(9.89e14), flops(6e8)
    ('989 TFLOP', '600 MFLOP')
    """
    size, unit = next(((size, unit) for size, unit in _UNITS if value >= size), (1.0, "FLOP"))
    return f"{value / size:.3g} {unit}"
