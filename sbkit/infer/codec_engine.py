"""Engines that run a codec's two graphs, each in one worker thread, for any number of calling threads."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from sbkit.codes import Books
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.padding import pad
from sbkit.infer.bundle_engine import DIVERGED, BatchEngine
from sbkit.infer.onnx_session import Interface

_HINT = "do its files come from the same export? export it again"
_EXAMPLE_FRAMES = 25  # of the test input


class CodecEngine(BatchEngine):
    """Runs one of a codec's two graphs on batches of parts of recordings: samples [S], or codes [T, Q]."""

    config: layout.CodecConfig
    kind = "codec"

    def _read(self) -> None:
        self.config = layout.CodecConfig.read(self.folder)
        self.books = books_of(self.config)

    # ------------------------------------------------------------------ within the worker

    @abstractmethod
    def _example(self) -> np.ndarray:
        """Make a part to test the graph with."""

    def _warm_up(self, path: Path) -> None:
        self._run([self._example()])  # checks its output


class CodeEngine(CodecEngine):
    """Computes codes [T, Q] of samples [S] float32. They are not checked: for samples unlike the training data they
    may be in no codebook."""

    def _interface(self) -> Interface:
        example = pad([self._example()], self.config.min_samples)
        return Interface(dict(zip(layout.INPUTS, example, strict=True)), layout.CODES)

    def _example(self) -> np.ndarray:
        return np.zeros(_EXAMPLE_FRAMES * self.config.stride, np.float32)

    def _warm_up(self, path: Path) -> None:
        [codes] = self._run([self._example()])
        self.books.check(codes, f"the output of {path.name}")

    def run_batch(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        codes, frames = self.compute(*pad(parts, self.config.min_samples))
        expected = [-(-len(part) // self.config.stride) for part in parts]
        if frames.tolist() != expected or codes.ndim != 3 or len(codes) != len(parts) or codes.shape[1] < max(expected):
            raise SbkitError("mismatched-bundle", f"the codec output {frames.tolist()} frames instead of {expected}",
                             hint=_HINT)
        return [row[:count].copy() for row, count in zip(codes, expected, strict=True)]  # not a view of the batch


class SoundEngine(CodecEngine):
    """Computes samples [T * stride] float32 from -1 to 1 of codes [T, Q] int64, which must be valid."""

    def _models(self) -> Mapping[str, str]:
        return self.config.decoders

    def _interface(self) -> Interface:
        example = pad([self._example()], self.config.min_frames)
        return Interface(dict(zip(layout.CODES, example, strict=True)), layout.INPUTS)

    def _example(self) -> np.ndarray:
        return np.tile(np.array(self.config.books, np.int64) - 1, (_EXAMPLE_FRAMES, 1))  # the last entry of each book

    def run_batch(self, parts: list[np.ndarray]) -> list[np.ndarray]:
        signals, lengths = self.compute(*pad(parts, self.config.min_frames))
        expected = [len(part) * self.config.stride for part in parts]
        if lengths.tolist() != expected or signals.ndim != 2 or len(signals) != len(parts) \
                or signals.shape[1] < max(expected):
            raise SbkitError("mismatched-bundle", f"the codec output {lengths.tolist()} samples instead of {expected}",
                             hint=_HINT)
        sounds = [row[:count].clip(-1.0, 1.0) for row, count in zip(signals, expected, strict=True)]
        if not all(np.isfinite(sound).all() for sound in sounds):
            raise SbkitError("nan-output", "the codec's output has samples that are NaN or infinite", hint=DIVERGED)
        return sounds


def books_of(config: layout.CodecConfig) -> Books:
    return Books(tuple(config.books), config.sample_rate / config.stride, config.sample_rate, config.codec)
