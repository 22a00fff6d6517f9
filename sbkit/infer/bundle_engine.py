"""Base classes of engines, which run one graph of a bundle in one worker thread, and of loaded bundles.

A model that was compiled in one thread can't replay its CUDA graphs in another. So imports, compilation, warm-up and
runs all happen in a single thread, which also avoids problems with other libraries' per-thread state.
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

_SHOWN = 160  # characters of metadata that a message shows
#: What to do about a model whose output is NaN or infinite.
DIVERGED = "its training may have diverged: export an earlier checkpoint"
_Call = tuple["Future[Any]", Callable[..., Any], tuple[Any, ...]]


class Worker:
    """Runs calls one after another in its thread; any thread may submit them.

    ``ThreadPoolExecutor`` accepts no calls after a script's last line, when other threads may still submit some.
    """

    def __init__(self, name: str):
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=_work, args=(self._calls,), name=name, daemon=True)
        self._thread.start()
        self._end = weakref.finalize(self, self._calls.put, None)  # also without a call of close()

    def submit(self, call: Callable[..., Any], *args: Any) -> Future[Any]:  # arguments and result of the call
        """Queue a call; its future can be cancelled until it starts. Raises if the worker was closed."""
        if not self._end.alive:
            raise closed_error()
        future: Future[Any] = Future()
        self._calls.put((future, call, args))
        return future

    def close(self) -> None:
        """End the thread after the submitted calls; may be called in the thread itself."""
        self._end()
        if threading.current_thread() is not self._thread:
            self._thread.join()


def _work(calls: queue.SimpleQueue[_Call | None]) -> None:
    while (item := calls.get()) is not None:
        future, call, args = item
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(call(*args))
            except BaseException as error:
                future.set_exception(error)
        del item, future, call, args  # they would stay in memory until the next call
    while not calls.empty():  # submitted while another thread closed it
        item = calls.get()
        if item is not None:
            future, _, _ = item
            future.cancel()


class ModelFailed(SbkitError):
    """The runtime failed while it ran a graph."""


class _Closing(ABC):
    """Is closed at the end of a ``with`` block."""

    @abstractmethod
    def close(self) -> None:
        """Release what is held."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class BundleEngine(_Closing):
    """Holds one graph of a bundle, opened and warmed up in a worker; if that fails, the worker ends.

    Subclasses run the graph with :meth:`compute`, in ``worker``. A model of two graphs has two engines.

    folder : a bundle
    model : ``onnx``, ``int8`` or ``torch``, which can run code; ``auto`` takes the first of the others in the bundle
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; raises if it is unavailable
    threads : CPU threads of one run; None: all that this process may use
    compile : a mode of ``torch.compile``, for ``model="torch"``
    """

    config: Bundle
    kind: ClassVar[str] = "model"
    """The graph's name in messages."""
    thread: ClassVar[str] = "sbkit-model"
    """The worker's name."""
    spin: ClassVar[bool] = True
    """As for ``open_graph``."""

    def __init__(self, folder: str | Path, model: str = formats.AUTO, device: str = formats.AUTO,
                 threads: int | None = None, compile: str | None = None):
        self.folder = Path(folder)
        self.threads = threads
        self.compile = compile
        self.fault: str | None = None
        """The error that broke the device, if any; then only a new process helps."""
        self.backend: Backend | None = None
        """It runs the graph, and may be replaced. None once closed."""
        self._read()
        models = self._models()
        model = formats.choose(self.folder, models, model, self.kind)
        wanted = DeviceChoice.parse(device)
        if compile and model != layout.TORCH:
            raise SbkitError("conflicting-options", f"compile works only with the model torch, but {model} was chosen",
                             hint="add --model torch", key="compile")
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
            raise closed_error()
        return self.backend

    def close(self) -> None:
        """Release the model after the submitted calls."""
        self.worker.close()
        self.backend = None

    @abstractmethod
    def _read(self) -> None:
        """Read ``config``, the bundle's configuration."""

    def _models(self) -> Mapping[str, str]:
        return self.config.models

    # ------------------------------------------------------------------ within the worker

    def _open(self, path: Path, model: str, device: DeviceChoice) -> None:
        formats.check_file(path, self.config)
        self.backend = open_graph(path, model, device, self.threads, self._interface(), self.compile, self.spin)
        for name, expected in self.config.onnx_metadata().items():
            actual = self.backend.metadata.get(name, expected)
            if actual != expected:
                raise SbkitError("mismatched-bundle", f"{path} was exported with {name} {_shortened(actual)}, but "
                                 f"{layout.CONFIG} says {_shortened(expected)}",
                                 hint="do both come from the same export? export it again", file=path)
        self._warm_up(path)

    @abstractmethod
    def _interface(self) -> Interface:
        """The inputs and outputs that the graph must have."""

    @abstractmethod
    def _warm_up(self, path: Path) -> None:
        """Run the graph once as it will be used, and raise if its output can't be right."""

    def compute(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """Run the graph once; raises without running it after a fault of the device."""
        if self.fault is not None:
            raise SbkitError("device-fault", f"the device failed earlier and stays unusable ({self.fault})",
                             hint="restart the process")
        try:
            return self._ready(*inputs)
        except Exception as error:
            self.fault = devices.fault(error)
            if self.fault is not None:
                raise
            if not is_out_of_memory(error):
                raise ModelFailed("model-failed", f"{self.folder}: the model failed: {first_line(error)}",
                                  hint="is the file complete? export it again", file=self.folder) from error
            message = f"out of memory on {self.running.device}: {first_line(error)}"
            traceback.clear_frames(error.__traceback__)  # frees what was computed so far
        self._ready.free()
        raise OutOfMemory("out-of-memory", message, hint="give it shorter audio or text, or smaller batches")


class BatchEngine(BundleEngine):
    """Runs the graph on submitted batches."""

    def submit(self, batch: Sequence[Any]) -> Future[Any]:  # inputs and outputs of the subclass's graph
        """Queue a batch; the future has a result for each item, and can be cancelled until it runs."""
        return self.worker.submit(self._run, list(batch))

    def _run(self, batch: list[Any]) -> list[Any]:  # as for ``submit``
        """Run a batch, or each item by itself if its outputs would depend on the others."""
        if not self.config.batching:
            return [self.run_batch([item])[0] for item in batch]
        return self.run_batch(batch) if batch else []

    @abstractmethod
    def run_batch(self, batch: list[Any]) -> list[Any]:  # as for ``submit``
        """Run the graph on a batch that was submitted."""


def _shortened(text: str) -> str:
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN // 2]} ... {text[-_SHOWN // 2:]}"


def closed_error() -> SbkitError:
    return SbkitError("model-closed", "the model was closed", hint="load it again")


E = TypeVar("E", bound=BundleEngine)


class LoadedBundle(_Closing, Generic[E]):
    """A loaded bundle of any kind, which any number of threads may call.

    What it can do besides is its subclass's: ``sbkit.infer.kinds.MODELS`` says which one loads which kind.
    """

    def __init__(self, engine: E):
        self.engine = engine

    @classmethod
    @abstractmethod
    def open(cls, bundle: str | Path, model: str = formats.AUTO, device: str = formats.AUTO,
             threads: int | None = None) -> Self:
        """Load a bundle of this kind; the arguments are those of ``sbkit.infer.load``.

        ``load`` passes on ``compile``, ``options`` and ``buckets`` too, if a subclass has arguments of these names.
        """

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
