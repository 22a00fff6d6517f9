"""How often a step makes the host wait for the GPU, as torch itself tells it, over some steps of each epoch."""

from __future__ import annotations

import contextlib
import re
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, TextIO

import torch

FIRST, LOOKED_AT = 5, 100  # steps of an epoch that are passed over, and the steps then looked at

_WAIT = r"called a synchronizing \w+ operation"
_NOTICE = "Synchronization debug mode is a prototype feature"  # torch's, when the mode is first set
# Else each place is told once. They stay, and touch no other warning.
_FILTERS: tuple[tuple[Literal["always", "ignore"], str], ...] = (("always", _WAIT), ("ignore", _NOTICE))
_WARN = 1  # as ``torch.cuda.get_sync_debug_mode()`` gives it


class HostWaits:
    """Within it, torch's warnings of an operation for which the host waited are counted, and none is shown.

    They cost nothing where nothing waits, and counting waits for nothing. Torch tells of values read and of copies
    that aren't from pinned memory, those in backward too; it does not tell of events and collectives. Who has set
    ``torch.cuda.set_sync_debug_mode`` keeps that mode, and nothing is counted; nor is anything without CUDA.
    """

    def __init__(self, device: torch.device, enabled: bool = True):
        self._counts = enabled and device.type == "cuda"
        self._thread = threading.get_ident()
        self._within = self._looking = self._paused = False
        self.reset()

    def reset(self) -> None:
        """Start a new epoch."""
        self._steps = self._counted = 0
        self._places: Counter[tuple[str, int]] = Counter()

    def step(self) -> None:
        """A step is done."""
        if not self._counts or not self._within:
            return
        self._steps += 1
        self._counted += self._looking
        if self._steps == FIRST and torch.cuda.get_sync_debug_mode() == 0:
            self._start()
        elif self._counted == LOOKED_AT:
            self._stop()

    def __enter__(self) -> HostWaits:
        self._within = True
        return self

    def __exit__(self, *error: object) -> None:
        self._within = False
        self._stop()

    @contextlib.contextmanager
    def pause(self) -> Iterator[None]:
        """What waits inside is no part of any step."""
        before, self._paused = self._paused, True
        try:
            yield
        finally:
            self._paused = before

    def a_step(self) -> float | None:
        """Waits a step in the steps that were looked at; None where there were none."""
        return self._places.total() / self._counted if self._counted else None

    def words(self) -> str | None:
        """For a line about the epoch, with where most of the waits are."""
        waits = self.a_step()
        if not waits:
            return None if waits is None else "host waits 0 a step"
        (file, line), _ = self._places.most_common(1)[0]
        return f"host waits {waits:.3g} a step, most of them at {'/'.join(Path(file).parts[-2:])}:{line}"

    def _start(self) -> None:
        there = {(action, getattr(message, "pattern", None)) for action, message, *_ in warnings.filters}
        for wanted in _FILTERS:
            if wanted not in there:  # each change makes Python forget which warnings it has shown
                warnings.filterwarnings(*wanted)
        self._shown, warnings.showwarning = warnings.showwarning, self._show
        torch.cuda.set_sync_debug_mode(_WARN)
        self._looking = True

    def _stop(self) -> None:
        if not self._looking:
            return
        self._looking = False
        if torch.cuda.get_sync_debug_mode() == _WARN:
            torch.cuda.set_sync_debug_mode(0)
        if warnings.showwarning == self._show:
            warnings.showwarning = self._shown

    def _show(self, message: Warning | str, category: type[Warning], filename: str, lineno: int,
              file: TextIO | None = None, line: str | None = None) -> None:
        if not re.match(_WAIT, str(message)):
            self._shown(message, category, filename, lineno, file, line)
        elif not self._paused and threading.get_ident() == self._thread:
            self._places[filename, lineno] += 1
