"""The Python API of a codec: load a bundle, encode recordings and decode their codes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import ArrayLike

from sbkit.codes import Books, InvalidCode
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.batches import plan_batches
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.codec_engine import CodecEngine, CodeEngine, SoundEngine
from sbkit.infer.formats import AUTO
from sbkit.infer.recordings import Recording, Source

if TYPE_CHECKING:
    from typing_extensions import Self

#: Seconds of a recording in one run, without the context at both ends.
PIECE_SECONDS = 30.0
#: Maximum length of a recording for a codec without a bounded context.
MAX_SECONDS = 600.0
#: Seconds in one batch, with padding.
BATCH_SECONDS = 60.0


class CodecChunk(NamedTuple):
    """Frames ``begin`` to ``end`` of a recording; the output of ``first`` to ``last`` is kept."""

    source: int  # number of the recording
    begin: int
    end: int
    first: int
    last: int


def too_long(frames: int, config: layout.CodecConfig) -> SbkitError | None:
    """Return an error if a recording of this many frames is too long for a codec without a bounded context."""
    seconds = frames * config.stride / config.sample_rate
    if config.context is not None or seconds <= MAX_SECONDS:
        return None
    return SbkitError(f"it is {seconds:.0f} s long, but this codec takes whole recordings of up to "
                      f"{MAX_SECONDS:g} s", hint="split it")


def chunks(source: int, frames: int, config: layout.CodecConfig) -> list[CodecChunk]:
    """Cut a recording of this many frames into chunks."""
    size = max(1, round(PIECE_SECONDS * config.sample_rate / config.stride))
    context = config.context
    if frames <= size or context is None:
        return [CodecChunk(source, 0, frames, 0, frames)] if frames else []
    return [CodecChunk(source, max(0, first - context), min(frames, first + size + context), first,
                       min(frames, first + size)) for first in range(0, frames, size)]


def batches(parts: Sequence[CodecChunk], config: layout.CodecConfig) -> list[list[CodecChunk]]:
    """Batch chunks of similar length."""
    max_frames = BATCH_SECONDS * config.sample_rate / config.stride
    plan = plan_batches([chunk.end - chunk.begin for chunk in parts], max_frames)
    return [[parts[index] for index in indices] for indices in plan]


class CodecModel(LoadedBundle[CodeEngine]):
    """A loaded codec, which any number of threads may call.

    >>> codec = sbkit.infer.load("bundle")                # doctest: +SKIP
    >>> [codes] = codec.encode(["clip.mp3"])              # doctest: +SKIP
    >>> [samples] = codec.decode([codes])                 # doctest: +SKIP

    The graphs process some seconds at a time: longer recordings are cut into chunks with the context that frames
    need, so that codes and samples are the same as for the whole recording.

    engine : computes codes
    sounds : computes samples
    """

    def __init__(self, engine: CodeEngine, sounds: SoundEngine):
        super().__init__(engine)
        self.sounds = sounds

    @classmethod
    def open(cls, bundle: str | Path, model: str = AUTO, device: str = AUTO, threads: int | None = None) -> Self:
        engine = CodeEngine(bundle, model, device, threads)
        try:
            return cls(engine, SoundEngine(bundle, engine.running.model, device, threads))
        except BaseException:
            engine.close()
            raise

    @property
    def books(self) -> Books:
        return self.engine.books

    def encode(self, audio: Sequence[Source]) -> list[np.ndarray]:
        """Compute the codes [T, Q] int64 of each recording, independent of the others.

        audio : paths, bytes of files, binary files, which are resampled, or float samples [S] at :attr:`sample_rate`

        Raises ``sbkit.data.audio.AudioError`` for the first recording that can't be read, and ``InvalidCode`` for the
        first for which the graph's output is in no codebook.
        """
        _check_list(audio, "encode", "recordings")
        signals = [Recording.of(each, f"recording {number}").samples(self.sample_rate)
                   for number, each in enumerate(audio)]
        codes = []
        for number, found in enumerate(self.encode_each(signals)):
            if isinstance(found, SbkitError):
                raise _numbered(found, f"recording {number}: {found.message}", number)
            codes.append(found)
        return codes

    def encode_each(self, signals: Sequence[np.ndarray]) -> list[np.ndarray | SbkitError]:
        """Compute the codes [T, Q] int64 of each waveform [S], or an error.

        It is an error if a waveform is too long for a codec without a bounded context, or so unlike speech that the
        graph's output is in no codebook (``InvalidCode``).
        """
        stride = self.engine.config.stride
        frames = [-(-len(signal) // stride) for signal in signals]
        errors = [too_long(count, self.engine.config) for count in frames]
        kept = [number for number, error in enumerate(errors) if error is None]
        codes = iter(self._run(self.engine, [signals[number] for number in kept], [frames[number] for number in kept],
                               stride, 1))
        found: list[np.ndarray | SbkitError] = []
        for error in errors:
            try:
                found.append(error or self.books.check(next(codes), f"the output of {self.running.file}"))
            except InvalidCode as invalid:
                found.append(invalid)
        return found

    def decode(self, codes: Sequence[ArrayLike]) -> list[np.ndarray]:
        """Compute the samples [T * stride] float32 of each recording's codes [T, Q], independent of the others.

        Raises ``InvalidCode`` for the first id that is not in its codebook, before any graph runs.
        """
        _check_list(codes, "decode", "codes")
        checked = []
        for number, given in enumerate(codes):
            try:
                checked.append(found := self.books.check(given, f"recording {number}"))
            except InvalidCode as error:
                raise _numbered(error, error.message, number) from None
            if found.ndim != 2:
                raise SbkitError(f"recording {number}: its codes must be [frames, {found.shape[-1]}], not "
                                 f"{list(found.shape)}")
        for number, each in enumerate(checked):
            if (long := too_long(len(each), self.engine.config)) is not None:
                raise _numbered(long, f"recording {number}: {long.message}", number)
        return self._run(self.sounds, checked, list(map(len, checked)), 1, self.engine.config.stride)

    def close(self) -> None:
        super().close()
        self.sounds.close()

    def _run(self, engine: CodecEngine, given: list[np.ndarray], frames: list[int], per_frame: int, out_per_frame: int,
             ) -> list[np.ndarray]:
        """Run a graph on recordings, chunk by chunk.

        per_frame, out_per_frame : rows of the input and of the output per frame
        """
        config = engine.config
        parts = [chunk for number, count in enumerate(frames) for chunk in chunks(number, count, config)]
        groups = batches(parts, config)
        futures = [engine.submit([given[each.source][each.begin * per_frame : each.end * per_frame] for each in group])
                   for group in groups]
        found: list[list[tuple[CodecChunk, np.ndarray]]] = [[] for _ in given]
        try:
            for group, future in zip(groups, futures, strict=True):
                for chunk, result in zip(group, future.result(), strict=True):
                    first, last = chunk.first - chunk.begin, chunk.last - chunk.begin
                    found[chunk.source].append((chunk, result[first * out_per_frame : last * out_per_frame]))
        finally:
            for future in futures:
                future.cancel()  # those after one that failed
        return [np.concatenate([kept for _, kept in sorted(each, key=lambda part: part[0])]) if each
                else np.zeros(0, np.float32) for each in found]


def _numbered(error: SbkitError, message: str, number: int) -> SbkitError:
    if isinstance(error, InvalidCode):
        return InvalidCode(message, (number, *error.position), error.level, error.id, hint=error.hint)
    return SbkitError(message, hint=error.hint)


def _check_list(given: object, method: str, what: str) -> None:
    if not isinstance(given, Sequence) or isinstance(given, (str, bytes)):
        raise SbkitError(f"{method} takes a list of {what}, not {type(given).__name__}",
                         hint=f"for one, write {method}([...])")
