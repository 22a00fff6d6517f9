"""Engine that runs a bundle's model in one worker thread, for any number of calling threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.layout import Config
from sbkit.export.padding import pad
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer.bundle_engine import BatchEngine
from sbkit.infer.formats import AUTO
from sbkit.infer.onnx_session import Interface

#: Lengths and numbers of signals that a model is compiled for by default; batches are padded to the next shape.
_SECONDS, _BATCHES = (2.0, 5.0, 10.0, 20.0, 30.0), (1, 4, 16)


class Engine(BatchEngine):
    """Computes log-probabilities of waveforms.

    >>> engine = Engine("bundle", device="cuda")       # doctest: +SKIP
    >>> [scores] = engine.run([signal])                # [T, V]; from any thread

    folder, model, device, threads, compile : as for ``BundleEngine``
    buckets : shapes (utterances, seconds) that the model is compiled for
    """

    config: Config

    def __init__(self, folder: str | Path, model: str = AUTO, device: str = AUTO, threads: int | None = None,
                 compile: str | None = None, buckets: Sequence[tuple[int, float]] | None = None):
        self._requested_buckets = buckets
        self._buckets: list[tuple[int, int]] = []  # utterances and samples
        super().__init__(folder, model, device, threads, compile)

    def _read(self) -> None:
        self.config = Config.read(self.folder)
        self.vocabulary = Vocabulary.read(self.folder, self.config)

    # ------------------------------------------------------------------ calls

    def run(self, signals: Sequence[np.ndarray]) -> list[Any]:  # of a subclass, other outputs
        """Map waveforms [S] to log-probabilities [T, V], each with its own T."""
        return self.submit(signals).result()

    def submit(self, signals: Sequence[np.ndarray]) -> Future[Any]:
        """Start :meth:`run` and return a future."""
        for signal in signals:
            if signal.ndim != 1 or signal.dtype != np.float32 or not len(signal):
                raise ValueError(f"a signal must be float32 [S], not {signal.dtype} {list(signal.shape)}")
        return super().submit(signals)

    # ------------------------------------------------------------------ within the worker

    def _warm_up(self, path: Path) -> None:
        if self.compile:
            buckets = self._default_buckets() if self._requested_buckets is None else self._requested_buckets
            self._buckets = sorted((rows, max(round(seconds * self.config.sample_rate), self.config.min_samples))
                                   for rows, seconds in buckets)
        for utterances, samples in self._buckets or [(1, self.config.sample_rate // 2)]:
            self._run([np.zeros(samples, dtype=np.float32)] * utterances)

    def _default_buckets(self) -> list[tuple[int, float]]:
        longest = max(self._usual_seconds(), _SECONDS[0])
        lengths = [*(seconds for seconds in _SECONDS if seconds < longest), longest]
        sizes = _BATCHES if self.config.batching else (1,)
        return [(rows, seconds) for rows in sizes for seconds in lengths]

    def _usual_seconds(self) -> float:
        """The length of the longest usual signal."""
        return self.config.chunk_seconds

    def _interface(self) -> Interface:
        samples = max(self.config.min_samples, self.config.sample_rate // 2)
        example = np.zeros((1, samples), dtype=np.float32), np.array([samples], dtype=np.int64)
        return Interface(dict(zip(layout.INPUTS, example, strict=True)), self.config.outputs)

    def run_batch(self, signals: list[np.ndarray]) -> list[np.ndarray]:
        rows = len(signals)
        samples = max(self.config.min_samples, *map(len, signals))
        if self._buckets:  # the smallest one that the batch fits in
            fitting = [bucket for bucket in self._buckets if bucket[0] >= rows and bucket[1] >= samples]
            if not fitting:
                raise SbkitError("audio-too-long", f"a batch of {rows} utterances of "
                                 f"{samples / self.config.sample_rate:.1f} s fits none of the shapes that the model "
                                 "was compiled for", hint="pass larger buckets")
            rows, samples = min(fitting, key=lambda shape: shape[0] * shape[1])
        fillers = [np.zeros(1, dtype=np.float32)] * (rows - len(signals))  # of a bucket with more rows
        return self._split(self.compute(*pad([*signals, *fillers], samples)), len(signals))

    def _split(self, outputs: Sequence[np.ndarray], count: int) -> list[np.ndarray]:
        """Split the graph's outputs for a batch into those of its first ``count`` signals."""
        log_probs, frames = outputs
        if log_probs.ndim != 3 or frames.ndim != 1 or min(len(log_probs), len(frames)) < count:
            raise SbkitError("mismatched-bundle", f"the model outputs {list(log_probs.shape)} and {list(frames.shape)} "
                             f"for {count} signals", hint="export it again", file=self.folder)
        if log_probs.shape[2] != self.config.width:
            raise SbkitError("mismatched-bundle", f"{self.folder}: the model outputs {log_probs.shape[2]} values per "
                             f"frame, but {layout.CONFIG} says {self.config.width}",
                             hint="do all files come from the same export?", file=self.folder)
        return [log_probs[i, : frames[i]] for i in range(count)]
