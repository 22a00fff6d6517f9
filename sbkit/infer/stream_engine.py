"""Engine that runs a bundle's streaming graph: the chunks of many streams in one batch, in one worker thread."""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from pathlib import Path

import numpy as np

from sbkit.decode.streaming import StreamSearch
from sbkit.errors import SbkitError, shown
from sbkit.export.layout import Config, Streaming
from sbkit.export.vocabulary import Vocabulary
from sbkit.export.windows import Window
from sbkit.infer import formats
from sbkit.infer.bundle_engine import BundleEngine, Worker, closed_error
from sbkit.infer.device import OutOfMemory
from sbkit.infer.onnx_session import Interface
from sbkit.infer.samples import as_int
from sbkit.infer.session import Session, State


def has_streaming_graph(config: Config, model: str) -> bool:
    """Whether live speech is recognised chunk by chunk. If not, ``Tail`` does it with the model for whole recordings.

    model : the format in use
    """
    return config.streaming is not None and model in config.streaming.models


class StreamEngine(BundleEngine):
    """Transcribes many streams at once.

    A step batches the streams whose next chunk is complete, up to ``max_streams``; chunks that become complete
    meanwhile are in the next step. So a stream never waits for samples of another.

    >>> engine = StreamEngine("bundle")                                   # doctest: +SKIP
    >>> session = engine.open(GreedyStream(engine.vocabulary.spelling))   # doctest: +SKIP
    >>> session.feed(samples); session.finish()                           # doctest: +SKIP
    >>> while session.busy: print(session.take())                         # doctest: +SKIP

    folder : a bundle that has a streaming graph
    model, device, threads : as for ``BundleEngine``
    max_streams : streams in one step; more would not be faster on a CPU, and all would wait longer
    on_step : is called with the number of streams after each step, in the worker thread
    """

    config: Config
    streaming: Streaming
    kind = "streaming graph"
    thread = "sbkit-streams"
    spin = False

    def __init__(self, folder: str | Path, model: str = formats.AUTO, device: str = formats.AUTO,
                 threads: int | None = None, max_streams: int = 16, on_step: Callable[[int], None] | None = None):
        self.max_streams = max_streams
        self._on_step = on_step
        self._step_began: float | None = None
        self._lock = threading.Lock()
        self._queue: deque[Session] = deque()  # streams that wait for a step
        self._sessions: weakref.WeakSet[Session] = weakref.WeakSet()
        self._closed = False
        super().__init__(folder, model, device, threads)

    def _read(self) -> None:
        self.config = Config.read(self.folder)
        self.vocabulary = Vocabulary.read(self.folder, self.config)
        if self.config.streaming is None:
            raise SbkitError("no-streaming-graph", f"{self.folder} has no streaming graph, so its model needs whole "
                             "recordings",
                             hint="train with hparams/streaming.yaml (sbkit new FOLDER --task streaming writes it) and "
                                  "export that run; if a model was trained in chunks, exporting it again adds the "
                                  "graph", file=self.folder)
        self.streaming = self.config.streaming
        # Reused by all steps: the system would zero new memory of this size each time.
        self._states = [np.zeros((self.max_streams, *part["shape"]), part["type"])
                        for part in self.streaming.state.values()]

    def _models(self) -> Mapping[str, str]:
        return self.streaming.models

    # ------------------------------------------------------------------ calls

    @property
    def chunks(self) -> dict[int, int]:
        """The chunk sizes that the model was trained for: milliseconds, and output frames of each."""
        return {round(1000 * self.config.frame_seconds * size): size for size in self.streaming.chunks}

    def open(self, search: StreamSearch, chunk: int | None = None,
             on_result: Callable[[], None] | None = None) -> Session:
        """Begin a stream.

        search : decodes this stream only; ``Decoder.stream()`` makes one
        chunk : milliseconds of a chunk, one of :attr:`chunks`; None: the middle one
        on_result : as for ``Session``
        """
        session = Session(self.config, self.frames_of(chunk), self.state(), search, self.enqueue, on_result)
        with self._lock:
            if self._closed:
                raise closed_error()
            self._sessions.add(session)
        return session

    def state(self) -> State:
        """Make the state at the start of a stream."""
        return [np.zeros(part.shape[1:], part.dtype) for part in self._states]

    def frames_of(self, chunk: object) -> int:
        """Return a chunk's output frames; raises if the model wasn't trained for it."""
        chunks = self.chunks
        if chunk is None:
            return sorted(chunks.values())[len(chunks) // 2]
        sizes = ", ".join(map(str, chunks))
        size = as_int(chunk)
        if size is None:
            raise SbkitError("bad-value", f"a chunk must be a whole number of milliseconds, not {shown(chunk)}",
                             hint=f"the model was trained for {sizes}", key="chunk", value=chunk)
        if size not in chunks:
            raise SbkitError("bad-value", f"the model was not trained for chunks of {shown(size)} ms",
                             hint=f"it was trained for {sizes}", key="chunk", value=chunk)
        return chunks[size]

    @property
    def busy_seconds(self) -> float:
        """How long the current step has been running; 0 if there is none."""
        began = self._step_began
        return 0.0 if began is None else time.monotonic() - began

    def close(self) -> None:
        """Release the model; open streams end with an error."""
        with self._lock:
            self._closed = True
            sessions = list(self._sessions)
        for session in sessions:
            session.fail(closed_error())
        super().close()
        if "_searcher" in self.__dict__:
            self._searcher.close()

    def enqueue(self, session: Session) -> None:
        with self._lock:
            self._queue.append(session)
            step_is_submitted = len(self._queue) > 1
        if step_is_submitted:
            return
        try:
            self.worker.submit(self._next_step)
        except SbkitError as error:  # it was closed meanwhile
            session.fail(error)

    @cached_property
    def _searcher(self) -> Worker:
        """The thread of slow searches, so that other streams' chunks don't wait for them."""
        return Worker("sbkit-search")

    # ------------------------------------------------------------------ within the worker

    def _interface(self) -> Interface:
        samples = self.config.window(min(self.streaming.chunks))
        inputs: dict[str, np.ndarray] = {"samples": np.zeros((1, samples), np.float32), "frames": np.zeros(1, np.int64)}
        for name, part in zip(self.streaming.state, self.state(), strict=True):
            inputs[name] = part[None]
        return Interface(inputs, [self.config.outputs[0], "counts", *(f"next_{name}" for name in self.streaming.state)])

    def _warm_up(self, path: Path) -> None:
        samples = self.config.window(min(self.streaming.chunks))
        self.step([Window(np.zeros(samples, np.float32), 0)], [self.state()])

    def _next_step(self) -> None:
        """Run one step for the queued streams whose chunks are as large as the first one's."""
        with self._lock:
            taken: list[Session] = []
            left: deque[Session] = deque()
            for session in self._queue:
                if session.chunk == self._queue[0].chunk and len(taken) < self.max_streams:
                    taken.append(session)
                else:
                    left.append(session)
            self._queue = left
            has_more = bool(left)  # now: others may be queued meanwhile, which submit a step themselves
        if has_more:
            self.worker.submit(self._next_step)

        sessions = []
        windows = []
        for session in taken:
            window = session.next()
            if window is None:
                self._search(session, None)
            else:
                sessions.append(session)
                windows.append(window)
        if sessions:
            self.take_step(sessions, windows)

    def take_step(self, sessions: list[Session], windows: list[Window]) -> None:
        """Run a step and search its outputs; without memory for all streams, one after another. An error ends its
        streams."""
        try:
            self._step_began = time.monotonic()
            outputs = self.step(windows, [session.state for session in sessions])
        except Exception as error:
            fatal = len(sessions) == 1 or not isinstance(error, OutOfMemory)
            for session, window in zip(sessions, windows, strict=True):
                if fatal:
                    session.fail(error)
                else:
                    self.take_step([session], [window])
            return
        finally:
            self._step_began = None
        if self._on_step is not None:
            self._on_step(len(sessions))
        for session, log_probs in zip(sessions, outputs, strict=True):
            self._search(session, log_probs)

    def step(self, windows: Sequence[Window], states: Sequence[State]) -> list[np.ndarray]:
        """Compute log-probabilities [T, V] of each stream, and update its state.

        windows : of chunks of the same size
        """
        streams = len(windows)
        for batch, parts in zip(self._states, zip(*states, strict=True), strict=True):
            np.stack(parts, out=batch[:streams])
        samples = np.stack([window.samples for window in windows])
        frames = np.array([window.frames for window in windows], np.int64)
        outputs = self.compute(samples, frames, *(batch[:streams] for batch in self._states))
        log_probs, counts, *next_states = outputs
        if log_probs.ndim != 3 or {len(log_probs), *counts.shape} != {streams} \
                or [batch.shape for batch in next_states] != [(streams, *part.shape) for part in states[0]]:
            raise SbkitError("mismatched-bundle", f"the streaming graph outputs {[array.shape for array in outputs]} "
                             f"for {streams} streams", hint="export it again", file=self.folder)
        if log_probs.shape[2] != self.config.width:
            raise SbkitError("mismatched-bundle", f"the streaming graph outputs {log_probs.shape[2]} values per frame, "
                             f"but config.json says {self.config.width}",
                             hint="do all files come from the same export?", file=self.folder)
        for row, state in enumerate(states):
            for part, batch in zip(state, next_states, strict=True):
                part[...] = batch[row]
        # Copies: a view would keep the whole batch in memory until the slowest search is done.
        return [row[:count].copy() for row, count in zip(log_probs, counts.tolist(), strict=True)]

    def _search(self, session: Session, log_probs: np.ndarray | None) -> None:
        if session.search.quick:
            session.decode(log_probs)
        else:
            self._searcher.submit(session.decode, log_probs)
