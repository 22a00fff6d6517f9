"""Bases of engines, which run one graph of a bundle in one worker thread, and of loaded bundles, which have one.

torch 2.11 keeps the state of CUDA graphs in the thread that first imports ``torch._inductor.cudagraph_trees``; a
model compiled in one thread and run in another finds none. A single thread for everything avoids this, and the same
problem with any other library's per-thread state: imports, compilation, warm-up and runs all happen there.
"""

from __future__ import annotations

import queue
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

import numpy as np

from sbkit.errors import SbkitError, first_line, is_out_of_memory
from sbkit.export import layout
from sbkit.export.layout import Bundle
from sbkit.infer import device as devices
from sbkit.infer import formats
from sbkit.infer.backends import Backend, open_graph
from sbkit.infer.device import DeviceChoice, OutOfMemory, Placement
from sbkit.infer.onnx_session import Interface

if TYPE_CHECKING:
    from typing_extensions import Self

_SHOWN = 160  # characters of a difference, of which the beginning and the end are told
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Worker:
    """Runs calls one after another in a thread of its own; any thread may submit them.

    ``ThreadPoolExecutor`` takes none after a script's last line, where its threads and pools may still go on.
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)  # also if nobody called close()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:  # what the call takes and gives
        """Queue a call; its future can be cancelled before its turn. Raises if the worker was closed."""
        if not self._end.alive:
            raise closed()
        future: Future[Any] = Future()
        self._calls.put((future, call, args))
        return future

    def close(self) -> None:
        """End the thread after the calls that were submitted; a call may do this too."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (taken := calls.get()) is not None:
        future, call, args = taken
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
        del taken, future, call, args  # which would stay in memory until the next call
    while not calls.empty():  # submitted while another thread closed it
        if (late := calls.get()) is not None:
            late[0].cancel()


class ModelFailed(SbkitError):
    """An error of the runtime while a graph ran."""


class BundleEngine(ABC):
    """Holds one graph of a bundle, opened and warmed up in a worker; if that fails, the worker ends.

    What a derived class does in ``worker`` runs the graph with :meth:`compute`. Give it one graph: what takes two has
    two engines.

    folder : a bundle
    model : ``onnx``, ``int8`` or ``torch``, which can run code; ``auto`` takes the first other one that the bundle has
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; raises if it is unavailable
    threads : CPU threads of one run; None for all that this process may use
    compile : a mode of ``torch.compile``, for ``model="torch"``
    """

    config: Bundle
    kind: ClassVar[str] = "model"
    """What the graph is called in messages."""
    thread: ClassVar[str] = "sbkit-model"
    """The worker's name."""
    spin: ClassVar[bool] = True
    """As for ``open_graph``."""

    def __init__(self, folder: str | Path, model: str = formats.AUTO, device: str = formats.AUTO,
                 threads: int | None = None, compile: str | None = None):
        self.folder, self.threads, self.compile = Path(folder), threads, compile
        self.fault: str | None = None
        """The error that broke the device, if any; only a new process helps then."""
        self.backend: Backend | None = None
        """What runs the graph; another may take its place. None once closed."""
        self._read()
        models = self._models()
        model = formats.choose(self.folder, models, model, self.kind)
        wanted = DeviceChoice.parse(device)
        if compile and model != layout.TORCH:
            raise SbkitError(f"compile only works with the model torch, but {model} was chosen",
                             hint="add --model torch")
        self.worker = Worker(self.thread)
        try:
            self.worker.submit(self._open, self.folder / models[model], model, wanted).result()
        except BaseException:
            self.worker.close()
            raise

    @property
    def running(self) -> Placement:
        return self._ready.running

    @property
    def _ready(self) -> Backend:
        if self.backend is None:
            raise closed()
        return self.backend

    def close(self) -> None:
        """Release the model, once what was asked for is done."""
        self.worker.close()
        self.backend = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @abstractmethod
    def _read(self) -> None:
        """Read ``config``, the bundle's configuration."""

    def _models(self) -> Mapping[str, str]:
        return self.config.models

    # ------------------------------------------------------------------ within the worker

    def _open(self, path: Path, model: str, device: DeviceChoice) -> None:
        formats.check_file(path, self.config)
        self.backend = open_graph(path, model, device, self.threads, self._interface(), self.compile, self.spin)
        self._compare(path, self.backend.metadata)
        self._warm_up(path)

    def _compare(self, path: Path, metadata: Mapping[str, str]) -> None:
        """Refuse a file that says of itself something else than config.json says."""
        for name, mine in self.config.onnx_metadata().items():
            if (theirs := metadata.get(name, mine)) != mine:
                raise SbkitError(f"{path} was exported with {name} {_short(theirs)}, but {layout.CONFIG} says "
                                 f"{_short(mine)}", hint="do both come from the same export? export it again")

    @abstractmethod
    def _interface(self) -> Interface:
        """What the graph must take and give."""

    @abstractmethod
    def _warm_up(self, path: Path) -> None:
        """Run what will be asked for once, and raise if the graph of this file can't be right."""

    def compute(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """Run the graph once; after a fault of the device, never again."""
        if self.fault is not None:
            raise SbkitError(f"the device failed earlier ({self.fault})",
                             hint="restart the process: the device stays broken")
        try:
            return self._ready(*inputs)
        except Exception as error:
            self.fault = devices.fault(error)
            if self.fault is not None:
                raise
            if not is_out_of_memory(error):
                raise ModelFailed(f"{self.folder}: the model failed: {first_line(error)}",
                                  hint="is the file complete? export it again") from error
            why = f"out of memory on {self.running.device}: {first_line(error)}"
            traceback.clear_frames(error.__traceback__)  # which hold what has been computed so far
        self._ready.free()
        raise OutOfMemory(why, hint="give it shorter audio or text, or smaller batches")


class BatchEngine(BundleEngine):
    """Runs the graph on batches that are given to it."""

    def submit(self, batch: Sequence[Any]) -> Future[Any]:  # what the derived class's graph takes and gives
        """Queue a batch; the future gives a result for each of its items, and can be cancelled before its turn."""
        return self.worker.submit(self._run, list(batch))

    def _run(self, batch: list[Any]) -> list[Any]:  # as for ``submit``
        """Run a batch, or each of its items by itself where its outputs would depend on the others."""
        if not self.config.batching:
            return [self.run_batch([each])[0] for each in batch]
        return self.run_batch(batch) if batch else []

    @abstractmethod
    def run_batch(self, batch: list[Any]) -> list[Any]:  # as for ``submit``
        """Run the graph on a batch that was submitted."""


def padded(parts: Sequence[np.ndarray], least: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Put parts [N, ...] into one array [B, ``least`` or more, ...], padded with zeros, and their lengths into one [B].
    """
    lengths = np.array([len(part) for part in parts], dtype=np.int64)
    batch = np.zeros((len(parts), max(least, int(lengths.max())), *parts[0].shape[1:]), dtype=parts[0].dtype)
    for row, part in zip(batch, parts, strict=True):
        row[: len(part)] = part
    return batch, lengths


def closed() -> SbkitError:
    return SbkitError("the model was closed", hint="load it again")


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN // 2]} ... {text[-_SHOWN // 2:]}"


E = TypeVar("E", bound=BundleEngine)


class Loaded(Generic[E]):
    """A loaded bundle, which any number of threads may call.

    engine : runs it
    """

    def __init__(self, engine: E):
        self.engine = engine

    @property
    def running(self) -> Placement:
        """The requested device, and the one the model runs on."""
        return self.engine.running

    @property
    def sample_rate(self) -> int:
        """Samples per second."""
        return self.engine.config.sample_rate

    def close(self) -> None:
        self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
