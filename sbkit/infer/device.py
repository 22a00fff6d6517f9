"""The device that a model runs on. There is no silent fallback to the CPU."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from sbkit.errors import SbkitError, first_line, is_out_of_memory, shown

T = TypeVar("T")


@dataclass(frozen=True)
class DeviceChoice:
    """A request: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``."""

    text: str
    kind: str
    index: int = 0

    @classmethod
    def parse(cls, device: str) -> DeviceChoice:
        match = re.fullmatch(r"(auto|cpu|cuda)(?::(\d+))?", device)
        if match is None or (match[2] and match[1] != "cuda"):
            raise SbkitError("bad-value", f"there is no device {shown(device)}", hint="use auto, cpu, cuda or cuda:N",
                             key="device", value=device)
        return cls(device, match[1], int(match[2] or 0))


@dataclass
class Placement:
    """The requested device, and where and how the model runs."""

    requested: str
    device: str
    provider: str
    model: str
    """``onnx``, ``int8`` or ``torch``."""
    file: str
    threads: int
    versions: dict[str, str] = field(default_factory=dict)
    note: str = ""
    """Why ``auto`` chose this device, and anything unusual about it."""
    operators: dict[str, int] = field(default_factory=dict)
    """How many operators of the graph each provider runs, if the library reports it; on a GPU, the CPU runs those that
    compute shapes."""

    def __str__(self) -> str:
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        requested = "" if self.requested == self.device else f", requested: {self.requested}"
        threads = f"{self.threads} thread{'' if self.threads == 1 else 's'}"
        shared = (f" with {self.operators.get(self.provider, 0)} of {sum(self.operators.values())} operators"
                  if len(self.operators) > 1 else "")
        return (f"{self.file} on {self.device} ({self.provider}{shared}, {threads}, {versions}{requested}"
                f"{f'; {self.note}' if self.note else ''})")


class DeviceUnavailable(SbkitError):
    """Why a device can't be used, as a clause: ``torch sees no CUDA device``."""

    def __init__(self, message: str, *, hint: str | None = None):
        super().__init__("device-unavailable", message, hint=hint)


def open_on(choice: DeviceChoice, attempt: Callable[[int | None], T]) -> tuple[T, str]:
    """Open a model on the requested device or raise; returns it, and the reason for ``auto``'s choice.

    attempt : opens it on a GPU of this number, or on the CPU (None), runs it once and checks where it ran. It raises
        ``DeviceUnavailable`` if the device can't be used, and another error if no other device would help.
    """
    if choice.kind == "cpu":
        return attempt(None), ""
    try:
        return attempt(choice.index), "" if choice.kind == "cuda" else "a test inference on CUDA succeeded"
    except DeviceUnavailable as error:
        if choice.kind == "cuda":
            raise SbkitError(error.code, f"{choice.text} was requested, but {error.message}", hint=error.hint,
                             key="device", value=choice.text) from error
        reason = error.message
    return attempt(None), reason


class OutOfMemory(SbkitError):
    """A run needed more memory than the device has left; smaller runs still work."""


def fault(error: Exception) -> str | None:
    """Return the device's fault if that caused an error, after which only a new process helps; None for other errors,
    such as a lack of memory."""
    if is_out_of_memory(error):
        return None
    return first_line(error) if "CUDA" in str(error) or "cuda" in type(error).__name__.lower() else None
