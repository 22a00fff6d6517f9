"""The device that a model runs on, or why it can't: no silent fallback to the CPU."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from importlib import metadata
from typing import Any

from sbkit.errors import SbkitError, first_line

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
#: cuDNN picks an algorithm by heuristics rather than trying all of them for each new length; fp32 sums stay fp32,
#: because TF32 would round the quiet bands of the features, which are part of the graph, to 10 bits.
_CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}


@dataclass(frozen=True)
class DeviceChoice:
    """A request: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""

    text: str
    kind: str
    index: int = 0

    @classmethod
    def parse(cls, device: str) -> DeviceChoice:
        """Parse a user's choice."""
        match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", device)
        if match is None or (match[2] and match[1] != "cuda"):
            raise SbkitError(f"there is no device {device!r}", hint="use auto, cpu, cuda or cuda:N")
        return cls(device, match[1], int(match[2] or 0))

    @property
    def explicit_gpu(self) -> bool:
        return self.kind == "cuda"


@dataclass
class Placement:
    """What was requested, and what actually runs."""

    asked: str
    device: str
    provider: str
    model: str
    """``onnx``, ``int8`` or ``torch``."""
    file: str
    threads: int
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""
    """Why ``auto`` chose the CPU, if it did."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        asked = "" if self.asked == self.device else f", requested: {self.asked}"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        return (f"{self.file} on {self.device} ({self.provider}, {threads}, {versions}{asked}"
                f"{f'; {self.note}' if self.note else ''})")


def refuse_double_install() -> None:
    """Raise if both builds of ONNX Runtime are installed: they share files, so the second overwrote the first."""
    if _version("onnxruntime") and _version("onnxruntime-gpu"):
        raise SbkitError(
            "onnxruntime and onnxruntime-gpu are both installed, and each overwrote files of the other",
            hint="pip uninstall -y onnxruntime onnxruntime-gpu, then install the one you want")


def runtime_version() -> str:
    """The version of the installed ONNX Runtime."""
    return _version("onnxruntime-gpu") or _version("onnxruntime") or "of an unknown version"


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def for_eight_bits(wanted: DeviceChoice) -> tuple[DeviceChoice, str]:
    """The device for a model with 8-bit products, and why: ONNX Runtime has no CUDA kernels for them.

    ``DynamicQuantizeLinear`` has none at all, and ``MatMulInteger`` none for the unsigned bytes that it outputs: with
    CUDA each product would copy its input to the CPU, compute there, and copy the result back.
    """
    if wanted.explicit_gpu:
        raise SbkitError(f"{wanted.text} was requested, but ONNX Runtime computes 8-bit products only on the CPU",
                         hint="use --model onnx on a GPU, or --device cpu")
    note = "8-bit products run only on the CPU" if wanted.kind == "auto" else ""
    return DeviceChoice(wanted.text, "cpu"), note


def open_session(path: str, wanted: DeviceChoice, threads: int | None) -> tuple[Any, str, str]:
    """Open an ONNX Runtime session on the requested device; returns it, its actual device, and a note.

    The session's own device is compared with the requested one: a provider whose libraries are missing is still in
    the list of available ones, and a session made with it runs on the CPU without an error.
    """
    refuse_double_install()
    import onnxruntime

    there = CUDA in onnxruntime.get_available_providers()
    note = ""
    if wanted.explicit_gpu and not there:
        raise SbkitError(f"{wanted.text} was requested, but this onnxruntime ({runtime_version()}) has no CUDA",
                         hint="pip uninstall -y onnxruntime; pip install onnxruntime-gpu; or use --device cpu")
    providers: list[Any] = [CPU]
    if there and wanted.kind != "cpu":
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()  # CUDA and cuDNN as installed by pip, which the loader doesn't find
        providers.insert(0, (CUDA, {"device_id": str(wanted.index), **_CUDA_OPTIONS}))
    elif wanted.kind == "auto":
        note = "this onnxruntime has no CUDA"
    settings = onnxruntime.SessionOptions()
    settings.log_severity_level = 3
    if threads:
        settings.intra_op_num_threads = threads
    try:
        session = onnxruntime.InferenceSession(path, settings, providers=providers, enable_fallback=0)
    except Exception as error:
        if len(providers) == 1 or wanted.explicit_gpu:
            raise _unusable(path, wanted, error) from error
        note = f"CUDA could not be used: {first_line(error)}"
        session = onnxruntime.InferenceSession(path, settings, providers=[CPU], enable_fallback=0)
    actual = session.get_providers()[0]
    if wanted.explicit_gpu and actual != CUDA:
        raise SbkitError(f"{wanted.text} was requested, but onnxruntime fell back to {actual}",
                         hint="are the CUDA and cuDNN libraries of this onnxruntime-gpu installed? "
                              "pip install 'onnxruntime-gpu[cuda,cudnn]' installs them")
    if actual == CUDA:
        taken = session.get_provider_options()[CUDA]
        if taken.get("use_tf32") != "0":
            note = f"onnxruntime {runtime_version()} computes with TF32 (10 bits), which can't be turned off"
        return session, f"cuda:{taken['device_id']}", note
    if there and wanted.kind == "auto" and not note:
        note = f"onnxruntime fell back to {actual}"
    return session, "cpu", note


def _unusable(path: str, wanted: DeviceChoice, error: Exception) -> SbkitError:
    if wanted.explicit_gpu:
        return SbkitError(f"{wanted.text} can't be used: {first_line(error)}")
    return SbkitError(f"{path} can't be loaded: {first_line(error)}", hint="is the file complete? export it again")
