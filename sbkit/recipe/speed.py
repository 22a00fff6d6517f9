"""The speed of a device: operations per second by data sheet or by a large matrix product, the share of it that
training reaches (MFU: model FLOPs utilisation), and its best precision."""

from __future__ import annotations

import functools
import math
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

#: 10^12 dense operations per second by the makers' data sheets: of tensor cores with bf16 or fp16 inputs and fp32 sums,
#: of tensor cores with TF32, and with fp32; then the TB/s of memory. Larger figures are for sparse matrices
#: (twice the dense ones) and, for GeForce, for fp16 sums; a training step has neither.
#: The first entry that is part of the card's name counts, so longer names come first.
PEAKS = {
    "GB200": (2500, 1250, 80, 8), "B200": (2250, 1100, 75, 8), "GH200": (990, 495, 67, 4),
    "H200 NVL": (836, 418, 60, 4.8), "H200": (989, 495, 67, 4.8), "H100 NVL": (836, 418, 60, 3.9),
    "H100 PCIe": (756, 378, 51, 2.04), "H100": (989, 495, 67, 3.35),
    "H800 PCIe": (756, 378, 51, 2.04), "H800": (989, 495, 67, 3.35),
    "A100-SXM4-40GB": (312, 156, 19.5, 1.56), "A100": (312, 156, 19.5, 2.04), "A800": (312, 156, 19.5, 2.04),
    "A40": (149.7, 74.8, 37.4, 0.696), "A30": (165, 82, 10.3, 0.933), "A10": (125, 62.5, 31.2, 0.6),
    "L40S": (362, 183, 91.6, 0.864), "L40": (181, 90.5, 90.5, 0.864), "L4": (121, 60, 30.3, 0.3),
    "RTX 5090": (209.5, 104.8, 104.8, 1.79), "RTX 4090": (165.2, 82.6, 82.6, 1.01),
    "RTX 3090": (71, 35.6, 35.6, 0.936), "RTX 6000 Ada": (364.2, 182.1, 91.1, 0.96),
    "RTX A6000": (154.8, 77.4, 38.7, 0.768),
    "V100": (125, 15.7, 15.7, 0.9), "T4": (65, 8.1, 8.1, 0.32),
    "MI325X": (1307, 654, 163.4, 6), "MI300X": (1307, 654, 163.4, 5.3),
}


#: Seconds during which a kernel is timed. The fastest counts, in case other programs compute in the meantime.
MEASURE_SECONDS = 0.3
#: Milliseconds of the host for a launch, with Python and autograd around it: 0.029 to 0.036 on the host of an H200, in
#: steps that waited for nothing else.
LAUNCH_MS = 0.032


def peak_of(device: torch.device, precision: str) -> tuple[float | None, str]:
    """The highest operations per second that training could reach, and the source; None for a card not in the table.

    For a CPU, whose data sheet lacks the clock under load, it is the speed of a matrix product. A CPU without units for
    bf16 or fp16 emulates them, at a fiftieth of the speed of fp32, in which much of a step computes whatever the
    precision: so the faster of both products counts.
    """
    if device.type != "cuda":
        speeds = [speed_of(device, each) for each in dict.fromkeys((precision, "fp32"))]
        return max((each for each in speeds if each is not None), default=None), "a large matrix product here"
    return peak_of_card(torch.cuda.get_device_name(device), precision)


def peak_of_card(name: str, precision: str) -> tuple[float | None, str]:
    """The same for a card by its name, which this machine may lack; fp32 means TF32 if that is allowed."""
    column = 0 if precision in ("bf16", "fp16") else 2 if torch.get_float32_matmul_precision() == "highest" else 1
    words = _entry(name)
    return (PEAKS[words][column] * 1e12, f"the {words}'s data sheet") if words else (None, name)


def _entry(name: str) -> str:
    return next((words for words in PEAKS if "MIG" not in name  # MIG: a slice of a card
                 and re.search(rf"\b{words}\b(?! (?:Ti|D|Laptop)\b)", name)), "")


def least_step_seconds(micro_batches: float, kernels: float, launches: float, update: float = 0.0) -> float:
    """The least time of a step: that of its kernels, or that in which the host launches them.

    micro_batches : below 1 for a step that is shorter than a micro-batch; the host launches as many kernels then
    kernels, launches : seconds of a micro-batch
    """
    return max(micro_batches * kernels + update, max(1, micro_batches) * launches)


class Speed(NamedTuple):
    """What kernels can reach at most, a second."""

    operations: float
    bytes: float


def limits_of(device: torch.device, precision: str, card: str = "") -> Speed | None:
    """The limits of a device by its data sheet, or of one that is in none, as measured here; None: unknown.

    card : the name of a card that this machine may lack
    """
    here = not card and (device.type == "cpu" or (device.type == "cuda" and torch.cuda.is_available()))
    name = card or (torch.cuda.get_device_name(device) if here and device.type == "cuda" else "")
    peak = peak_of_card(name, precision)[0]
    if peak is not None:
        return Speed(peak, PEAKS[_entry(name)][3] * 1e12)
    # On a CPU the units for bf16 serve large products alone.
    operations = speed_of(device, "fp32" if device.type == "cpu" else precision) if here else None
    if operations is None:
        return None
    source = torch.ones(1 << 26, dtype=torch.uint8, device=device)  # more than caches hold
    return Speed(operations, 2 * len(source) / _fastest(source.clone, device))


def speed_of(device: torch.device, precision: str) -> float | None:
    """Measure operations per second of a large matrix product; None for a device that isn't available."""
    if device.type not in ("cuda", "cpu") or (device.type == "cuda" and not torch.cuda.is_available()):
        return None
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(precision, torch.float32)
    size = 4096 if device.type == "cuda" else 1024
    left, right = torch.ones(2, size, size, device=device, dtype=dtype)
    return 2 * size**3 / _fastest(lambda: left @ right, device)


def _fastest(work: Callable[[], torch.Tensor], device: torch.device) -> float:
    """The least seconds that a kernel took in a while."""
    wait = torch.get_device_module(device).synchronize
    fastest, until = float("inf"), time.perf_counter() + MEASURE_SECONDS
    while time.perf_counter() < until or math.isinf(fastest):
        wait()
        started = time.perf_counter()
        found = work()
        wait()
        fastest = min(fastest, time.perf_counter() - started)
        del found
    if device.type == "cuda":
        torch.cuda.empty_cache()
    return fastest


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
        """Return the share of a device's peak at a speed on one device; None if the peak is unknown.

        More than the whole peak is impossible, so it was measured too low, such as while other programs computed.
        """
        if not self.peak:
            return None
        share = self.rate(audio_s_per_s) / self.peak
        return share if share <= 1 else None

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
        needs = f"training takes {flops(self.operations)} per second of audio"
        if self.peak is None:
            return f"{needs}; the peak of {self.source or 'this device'} is unknown, so there is no MFU"
        return f"{needs}; MFU is the share of {flops(self.peak)}/s ({self.source})"


def flops(value: float) -> str:
    """Format a number of operations with its unit.

    >>> flops(9.89e14), flops(6e8)
    ('989 TFLOP', '600 MFLOP')
    """
    size, unit = next(((size, unit) for size, unit in _UNITS if value >= size), (1.0, "FLOP"))
    return f"{value / size:.3g} {unit}"
