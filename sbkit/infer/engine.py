"""Engine that runs a bundle's model in one worker thread, for any number of calling threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from importlib import util
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.errors import SbkitError, first_line
from sbkit.export import layout
from sbkit.export.layout import Config
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.backends import Backend, Onnx, Torch
from sbkit.infer.device import DeviceChoice, Placement
from sbkit.infer.worker import Worker

AUTO = "auto"
_PREFERRED = (layout.ONNX, layout.INT8, layout.TORCH)
_NEEDS = {layout.ONNX: "onnxruntime", layout.INT8: "onnxruntime", layout.TORCH: "torch"}
#: Shapes for which a compiled model has a graph; batches are padded to the next one.
_SECONDS, _BATCHES = (2.0, 5.0, 10.0, 20.0, 30.0), (1, 4, 16)


class Engine:
    """Computes log-probabilities of waveforms.

    >>> engine = Engine("bundle", device="cuda")       # doctest: +SKIP
    >>> [scores] = engine.run([signal])                # [T, V]; from any thread

    Arguments
    ---------
    folder : a bundle
    model : ``onnx``, ``int8`` or ``torch``; ``auto`` takes the first that the bundle has
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; raises if it is unavailable
    threads : CPU threads of one run; None for all that this process may use
    compile : a mode of ``torch.compile``, for ``model="torch"``
    buckets : shapes (utterances, seconds) that the model is compiled for
    """

    def __init__(self, folder: str | Path, model: str = AUTO, device: str = AUTO, threads: int | None = None,
                 compile: str | None = None, buckets: Sequence[tuple[int, float]] | None = None):
        self.folder = Path(folder)
        self._read()
        model = self._choose(model)
        wanted = DeviceChoice.parse(device)
        if compile and model != layout.TORCH:
            raise SbkitError(f"compile only works with the model torch, but {model} was chosen",
                             hint="add --model torch")
        self._buckets = self._shapes(buckets) if compile else []
        self.fault: str | None = None
        """The error that broke the device, if any; only a new process helps then."""
        self._worker = Worker()
        self._backend: Backend | None = None
        try:
            self._worker.submit(self._open, self.folder / self.config.models[model], model, wanted, threads,
                                compile).result()
        except BaseException:
            self._worker.close()
            raise

    def _read(self) -> None:
        """Read the bundle's configuration."""
        self.config = Config.read(self.folder)
        self.vocabulary = Vocabulary.read(self.folder, self.config)

    # ------------------------------------------------------------------ asking

    @property
    def _ready(self) -> Backend:
        assert self._backend is not None, "the engine was closed"
        return self._backend

    @property
    def running(self) -> Placement:
        """What was requested, and what actually runs."""
        return self._ready.running

    def run(self, signals: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Map waveforms [S] to log-probabilities [T, V], each with its own T; waits for its turn."""
        return self.submit(signals).result()

    def submit(self, signals: Sequence[np.ndarray]) -> Future[Any]:
        """Start :meth:`run` and return a future."""
        for signal in signals:
            if signal.ndim != 1 or signal.dtype != np.float32 or not len(signal):
                raise ValueError(f"a signal must be float32 [S], not {signal.dtype} {list(signal.shape)}")
        return self._worker.submit(self._run, list(signals))

    def close(self) -> None:
        """Release the model."""
        self._worker.close()
        self._backend = None

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ------------------------------------------------------------------ within the worker

    def _open(self, path: Path, model: str, wanted: DeviceChoice, threads: int | None, compile: str | None) -> None:
        self._check_file(path)
        if model == layout.TORCH:
            self._backend = Torch(path, model, wanted, threads, self._worker, compile)
        else:
            self._backend = Onnx(path, model, wanted, threads, self._outputs())
        self._check_width(path)
        for utterances, samples in self._buckets or [(1, self.config.sample_rate // 2)]:  # warms up
            self._run([np.zeros(samples, dtype=np.float32)] * utterances)

    def _at_once(self) -> float:
        """The length in seconds of the longest usual signal."""
        return self.config.chunk_seconds

    def _outputs(self) -> Sequence[str]:
        """The names of the model's outputs."""
        return layout.OUTPUTS

    def _check_width(self, path: Path) -> None:
        width = self._ready.width
        if width is not None and width != len(self.vocabulary):
            raise SbkitError(f"{path} gives {width} scores per frame, but {layout.TOKENS} has {len(self.vocabulary)} "
                             "tokens", hint="do both come from the same export?")

    def _run(self, signals: list[np.ndarray]) -> list[np.ndarray]:
        if self.fault is not None:
            raise SbkitError(f"the device failed earlier ({self.fault})",
                             hint="restart the process: the device stays broken")
        if not self.config.batching:
            return [self._batch([signal])[0] for signal in signals]
        return self._batch(signals) if signals else []

    def _batch(self, signals: list[np.ndarray]) -> list[np.ndarray]:
        longest = max(self.config.min_samples, *map(len, signals))
        rows, samples = self._bucket(len(signals), longest)
        batch = np.zeros((rows, samples), dtype=np.float32)
        lengths = np.ones(rows, dtype=np.int64)  # rows that only pad a bucket have length 1
        for i, signal in enumerate(signals):
            batch[i, : len(signal)] = signal
            lengths[i] = len(signal)
        try:
            found = self._ready(batch, lengths)
        except Exception as error:
            if "CUDA" in str(error) or "cuda" in type(error).__name__.lower():
                self.fault = first_line(error)
            raise
        return self._apart(found, len(signals))

    def _apart(self, found: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        """Split the model's output into the first ``count`` rows."""
        log_probs, frames = found
        if log_probs.shape[2] != len(self.vocabulary):
            raise SbkitError(f"the model gives {log_probs.shape[2]} scores per frame, but there are "
                             f"{len(self.vocabulary)} tokens")
        return [log_probs[i, : frames[i]] for i in range(count)]

    # ------------------------------------------------------------------ choosing

    def _choose(self, model: str) -> str:
        there = [name for name in _PREFERRED if name in self.config.models]
        usable = [name for name in there if util.find_spec(_NEEDS[name])]
        if model == AUTO:
            if not usable:
                raise SbkitError(f"no installed package runs the models of {self.folder} "
                                 f"({', '.join(there) or 'it has none'})", hint="pip install onnxruntime")
            return usable[0]
        if model not in _PREFERRED:
            raise SbkitError(f"there is no model {model!r}", hint=f"use {', '.join((AUTO, *_PREFERRED))}")
        if model not in there:
            raise SbkitError(f"{self.folder} has no model {model}", hint=f"it has {', '.join(there) or 'none'}")
        if model not in usable:
            raise SbkitError(f"the model {model} needs {_NEEDS[model]}", hint=f"pip install {_NEEDS[model]}")
        return model

    def _check_file(self, path: Path) -> None:
        """Report a missing or truncated file, before a library complains about protobufs."""
        expected = self.config.files.get(path.name, {}).get("bytes")
        try:
            actual = path.stat().st_size
        except OSError:
            raise SbkitError(f"{path} is missing", hint="copy the bundle again") from None
        if expected is not None and actual != expected:
            raise SbkitError(f"{path} has {actual} bytes, but the export wrote {expected}",
                             hint="copy the bundle again")

    def _shapes(self, buckets: Sequence[tuple[int, float]] | None) -> list[tuple[int, int]]:
        if buckets is None:
            longest = max(self._at_once(), _SECONDS[0])
            seconds = [*(each for each in _SECONDS if each < longest), longest]
            buckets = [(rows, each) for rows in (_BATCHES if self.config.batching else (1,)) for each in seconds]
        rate = self.config.sample_rate
        return sorted((rows, max(round(seconds * rate), self.config.min_samples)) for rows, seconds in buckets)

    def _bucket(self, rows: int, samples: int) -> tuple[int, int]:
        """The shape that a batch is padded to: its own, or the smallest bucket that it fits in."""
        if not self._buckets:
            return rows, samples
        fitting = [(r, s) for r, s in self._buckets if r >= rows and s >= samples]
        if not fitting:
            raise SbkitError(f"a batch of {rows} utterances of {samples / self.config.sample_rate:.1f} s fits no shape "
                             "that the model was compiled for", hint="give the engine larger buckets")
        return min(fitting, key=lambda shape: shape[0] * shape[1])
