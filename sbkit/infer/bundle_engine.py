"""Bases of engines, which run one graph of a bundle in one worker thread, and of loaded bundles, which have one."""

from __future__ import annotations

import traceback
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Generic, TypeVar

import numpy as np

from sbkit.errors import SbkitError, first_line, is_out_of_memory
from sbkit.export import layout
from sbkit.export.layout import Bundle
from sbkit.infer import device as devices
from sbkit.infer import formats
from sbkit.infer.backends import Backend, open_graph
from sbkit.infer.device import DeviceChoice, OutOfMemory, Placement
from sbkit.infer.onnx_session import Interface
from sbkit.infer.worker import Worker

if TYPE_CHECKING:
    from typing_extensions import Self

_SHOWN = 160  # characters of a difference, of which the beginning and the end are told


class ModelFailed(SbkitError):
    """An error of the runtime while a graph ran."""


class BundleEngine(ABC):
    """Holds one graph of a bundle.

    A derived class reads ``config``, chooses a file of it, and calls :meth:`_start`. What it submits to ``worker``
    runs the graph with :meth:`compute`. Give it one graph: what takes two has two engines.

    Arguments
    ---------
    folder : a bundle
    """

    config: Bundle

    def __init__(self, folder: str | Path):
        self.folder = Path(folder)
        self.fault: str | None = None
        """The error that broke the device, if any; only a new process helps then."""
        self.backend: Backend | None = None
        """What runs the graph; another may take its place. None once closed."""

    def _start(self, path: Path, model: str, device: DeviceChoice, threads: int | None, compile: str | None = None,
               spin: bool = True, thread: str = "sbkit-model") -> None:
        """Start the worker, and open a graph there and warm it up; if that fails, the worker ends.

        Arguments
        ---------
        path, model : the graph's file, and the format it is in
        device, threads, compile, spin : as for ``open_graph``
        thread : the worker's name
        """
        self.worker = Worker(thread)
        try:
            self.worker.submit(self._open, path, model, device, threads, compile, spin).result()
        except BaseException:
            self.worker.close()
            raise

    @property
    def running(self) -> Placement:
        """What was requested, and what actually runs."""
        return self._ready.running

    @property
    def _ready(self) -> Backend:
        if self.backend is None:
            raise closed()
        return self.backend

    def close(self) -> None:
        """Release the model."""
        self.worker.close()
        self.backend = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ within the worker

    def _open(self, path: Path, model: str, device: DeviceChoice, threads: int | None, compile: str | None,
              spin: bool) -> None:
        formats.check_file(path, self.config)
        self.backend = open_graph(path, model, device, threads, self._interface(), self.worker, compile, spin)
        self._compare(path, self.backend.metadata)
        self._warm_up(path)

    def _compare(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Refuse a file that says of itself something else than config.json says."""
        for name, mine in self.config.onnx_metadata().items():
            if (theirs := metadata.get(name, mine)) != mine:
                raise SbkitError(f"{path} was made with {name} {_short(theirs)}, but {layout.CONFIG} says "
                                 f"{_short(mine)}", hint="do both come from the same export? export it again")

    @abstractmethod
    def _interface(self) -> Interface:
        """What the graph must take and give."""

    @abstractmethod
    def _warm_up(self, path: Path) -> None:
        """Run what will be asked for once, and raise if the graph of this file can't be right."""

    def compute(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """Run the graph once; after a fault of the device, never again."""
        devices.refuse_broken(self.fault)
        try:
            return self._ready(*inputs)
        except Exception as error:
            self.fault = devices.fault(error)
            if self.fault is not None:
                raise
            if not is_out_of_memory(error):
                raise ModelFailed(f"{self.folder}: the model failed: {first_line(error)}",
                                  hint="is it whole? export it again") from error
            why = f"out of memory on {self.running.device}: {first_line(error)}"
            traceback.clear_frames(error.__traceback__)  # which hold what has been computed so far
        self._ready.free()
        raise OutOfMemory(why, hint="give it shorter audio or text, or less at once")


def closed() -> SbkitError:
    """The error for whoever asks a model that was closed."""
    return SbkitError("the model was closed", hint="load it again")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN // 2]} ... {text[-_SHOWN // 2:]}"


E = TypeVar("E", bound=BundleEngine)


class Loaded(Generic[E]):
    """A loaded bundle, which any number of threads may call.

    Arguments
    ---------
    engine : runs it
    """

    def __init__(self, engine: E):
        self.engine = engine

    @property
    def running(self) -> Placement:
        """The requested device, and the one the model runs on."""
        return self.engine.running

    def close(self) -> None:
        """Release the model."""
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
