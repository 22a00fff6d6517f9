"""Removes noise from recordings and streams with an exported enhancer, piece by piece."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.bundle_engine import DIVERGED, BatchEngine, LoadedBundle
from sbkit.infer.formats import AUTO
from sbkit.infer.onnx_session import Interface
from sbkit.infer.recordings import Recording, Source

if TYPE_CHECKING:
    from typing_extensions import Self

#: Seconds of a recording in one run.
PIECE_SECONDS = 4.0
State = list[np.ndarray]
#: Frames [T, hop] float32 of a stream, and the state before them.
Piece = tuple[np.ndarray, State]


class EnhanceEngine(BatchEngine):
    """Enhances pieces of streams: each becomes samples [S] and the next state."""

    config: layout.EnhancerConfig
    kind = "enhancer"

    def _read(self) -> None:
        self.config = layout.EnhancerConfig.read(self.folder)

    def _models(self) -> Mapping[str, str]:
        return self.config.streams

    def state(self) -> State:
        """Make the state at the start of a stream."""
        return [np.zeros(part["shape"], part["type"]) for part in self.config.state.values()]

    # ------------------------------------------------------------------ within the worker

    def _example(self) -> Piece:
        return np.zeros((2, self.config.hop), np.float32), self.state()

    def _interface(self) -> Interface:
        frames, state = self._example()
        inputs = {"pieces": frames[None]}
        for name, part in zip(self.config.state, state, strict=True):
            inputs[name] = part[None]
        return Interface(inputs, ("enhanced", *(f"next_{name}" for name in self.config.state)))

    def _warm_up(self, path: Path) -> None:
        self._run([self._example()])  # checks its output

    def _run(self, pieces: list[Piece]) -> list[tuple[np.ndarray, State]]:
        """Run pieces of the same length together, because the state is the one after all frames of the batch."""
        results: dict[int, tuple[np.ndarray, State]] = {}
        for count in {len(frames) for frames, _ in pieces}:
            same_length = [i for i, (frames, _) in enumerate(pieces) if len(frames) == count]
            batches = [same_length] if self.config.batching else [[i] for i in same_length]
            for batch in batches:
                results.update(zip(batch, self.run_batch([pieces[i] for i in batch]), strict=True))
        return [results[i] for i in range(len(pieces))]

    def run_batch(self, pieces: list[Piece]) -> list[tuple[np.ndarray, State]]:
        frames = np.stack([frames for frames, _ in pieces])
        state = [np.stack(parts) for parts in zip(*(state for _, state in pieces), strict=True)]
        sound, *next_state = self.compute(frames, *state)
        if sound.shape != frames.shape or [part.shape for part in next_state] != [part.shape for part in state]:
            raise SbkitError("mismatched-bundle", f"the enhancer output {list(sound.shape)} for {list(frames.shape)}",
                             hint="export it again")
        if not np.isfinite(sound).all():
            raise SbkitError("nan-output", "the enhancer's output has samples that are NaN or infinite", hint=DIVERGED)
        return [(sound[i].reshape(-1), [part[i].copy() for part in next_state]) for i in range(len(pieces))]


class LiveEnhancer:
    """Enhances a stream as its samples come; the output is as long as the input. ``feed`` samples, then ``finish``.

    seconds : the length of a piece that is enhanced at once, at least a frame
    """

    def __init__(self, engine: EnhanceEngine, seconds: float):
        config = engine.config
        self._engine = engine
        self._state = engine.state()
        self._hop = config.hop
        self._size = max(1, round(seconds * config.sample_rate / config.hop)) * config.hop  # samples of a piece
        self._buffer = np.zeros(0, np.float32)
        self._delay = config.delay
        self._skip = config.delay  # samples of the model's delay that it will still return
        self._pending = 0  # samples that came and were not returned yet

    def feed(self, samples: np.ndarray) -> np.ndarray:
        """Take any number of samples [N] at the model's rate; returns the enhanced samples [M] that are ready."""
        self._buffer = np.concatenate([self._buffer, np.asarray(samples, np.float32)])
        self._pending += len(samples)
        ready = [np.zeros(0, np.float32)]
        while len(self._buffer) >= self._size:
            piece = self._buffer[: self._size]
            self._buffer = self._buffer[self._size :]
            ready.append(self._enhance(piece))
        return np.concatenate(ready)

    def finish(self) -> np.ndarray:
        """End the stream; returns the rest of it."""
        rest = self._buffer
        self._buffer = np.zeros(0, np.float32)
        if not self._pending:
            return rest
        # Silence pushes the last samples through the model's delay, and fills the last frame.
        fill = -(len(rest) + self._delay) % self._hop
        return self._enhance(np.pad(rest, (0, self._delay + fill)))

    def _enhance(self, samples: np.ndarray) -> np.ndarray:
        """Enhance a piece, keep the next state, and return the samples [N] without the model's delay."""
        [(sound, self._state)] = self._engine.submit([(samples.reshape(-1, self._hop), self._state)]).result()
        skipped = min(self._skip, len(sound))
        self._skip -= skipped
        sound = sound[skipped : skipped + self._pending]
        self._pending -= len(sound)
        return sound.clip(-1.0, 1.0)


class EnhancerModel(LoadedBundle[EnhanceEngine]):
    """A loaded enhancer, which any number of threads may call.

    >>> model = sbkit.infer.load("bundle")                # doctest: +SKIP
    >>> samples = model.enhance("noisy.mp3")              # doctest: +SKIP
    """

    @classmethod
    def open(cls, bundle: str | Path, model: str = AUTO, device: str = AUTO, threads: int | None = None) -> Self:
        return cls(EnhanceEngine(bundle, model, device, threads))

    def enhance(self, audio: Source) -> np.ndarray:
        """Return a recording's samples [S] float32 at :attr:`sample_rate` without noise.

        audio : a path, the bytes of a file, a binary file, or float samples [S] at :attr:`sample_rate`
        """
        recording = Recording.of(audio)
        samples = np.concatenate(list(self.blocks(recording.blocks(self.sample_rate))))
        recording.log_warning()
        return samples

    def blocks(self, blocks: Iterable[np.ndarray]) -> Iterator[np.ndarray]:
        """Enhance a recording that comes in blocks [S], some seconds at a time."""
        stream = self.stream(PIECE_SECONDS)
        for block in blocks:
            yield stream.feed(block)
        yield stream.finish()

    def stream(self, seconds: float = 0.0) -> LiveEnhancer:
        """Begin a stream.

        seconds : the length of a piece that is enhanced at once; by default one frame
        """
        return LiveEnhancer(self.engine, seconds)
