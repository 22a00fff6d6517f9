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
    return SbkitError("audio-too-long", f"it is {seconds:.0f} s long, but this codec takes whole recordings of up to "
                      f"{MAX_SECONDS:g} s", hint="split it into shorter recordings")


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
        signals = [Recording.of(source, f"recording {number}").samples(self.sample_rate)
                   for number, source in enumerate(audio)]
        codes = []
        for number, result in enumerate(self.encode_each(signals)):
            if isinstance(result, SbkitError):
                raise _numbered(result, f"recording {number}: {result.message}", number)
            codes.append(result)
        return codes

    def encode_each(self, signals: Sequence[np.ndarray]) -> list[np.ndarray | SbkitError]:
        """Compute the codes [T, Q] int64 of each waveform [S], or an error.

        It is an error if a waveform is too long for a codec without a bounded context, or so unlike speech that the
        graph's output is in no codebook (``InvalidCode``).
        """
        stride = self.engine.config.stride
        frames = [-(-len(signal) // stride) for signal in signals]
        results: list[np.ndarray | SbkitError | None] = [too_long(count, self.engine.config) for count in frames]
        usable = [number for number, error in enumerate(results) if error is None]
        outputs = self._run(self.engine, [signals[number] for number in usable], [frames[number] for number in usable],
                            stride, 1)
        for number, codes in zip(usable, outputs, strict=True):
            try:
                results[number] = self.books.check(codes, f"the output of {self.running.file}")
            except InvalidCode as error:
                results[number] = error
        return [result for result in results if result is not None]

    def decode(self, codes: Sequence[ArrayLike]) -> list[np.ndarray]:
        """Compute the samples [T * stride] float32 of each recording's codes [T, Q], independent of the others.

        Raises ``InvalidCode`` for the first id that is not in its codebook, before any graph runs.
        """
        _check_list(codes, "decode", "codes")
        checked = []
        for number, unchecked in enumerate(codes):
            try:
                codes_TQ = self.books.check(unchecked, f"recording {number}")
            except InvalidCode as error:
                raise _numbered(error, error.message, number) from None
            if codes_TQ.ndim != 2:
                raise SbkitError("bad-value", f"recording {number}: its codes must be [frames, {codes_TQ.shape[-1]}], "
                                 f"not {list(codes_TQ.shape)}")
            checked.append(codes_TQ)
        frames = [len(codes_TQ) for codes_TQ in checked]
        for number, count in enumerate(frames):
            length_error = too_long(count, self.engine.config)
            if length_error is not None:
                raise _numbered(length_error, f"recording {number}: {length_error.message}", number)
        return self._run(self.sounds, checked, frames, 1, self.engine.config.stride)

    def close(self) -> None:
        super().close()
        self.sounds.close()

    def _run(self, engine: CodecEngine, inputs: list[np.ndarray], frames: list[int], in_per_frame: int,
             out_per_frame: int) -> list[np.ndarray]:
        """Run a graph on the inputs of recordings, chunk by chunk.

        in_per_frame, out_per_frame : rows of the input and of the output per frame
        """
        config = engine.config
        all_chunks = [chunk for number, count in enumerate(frames) for chunk in chunks(number, count, config)]
        groups = batches(all_chunks, config)
        futures = []
        for group in groups:
            parts = [inputs[chunk.source][chunk.begin * in_per_frame : chunk.end * in_per_frame] for chunk in group]
            futures.append(engine.submit(parts))
        outputs: dict[CodecChunk, np.ndarray] = {}
        try:
            for group, future in zip(groups, futures, strict=True):
                for chunk, output in zip(group, future.result(), strict=True):
                    first = (chunk.first - chunk.begin) * out_per_frame
                    last = (chunk.last - chunk.begin) * out_per_frame
                    outputs[chunk] = output[first:last]
        finally:
            for future in futures:
                future.cancel()  # those after one that failed

        parts_of: list[list[np.ndarray]] = [[] for _ in inputs]
        for chunk in all_chunks:  # in the order of their frames
            parts_of[chunk.source].append(outputs[chunk])
        return [np.concatenate(parts) if parts else np.zeros(0, np.float32) for parts in parts_of]


def _numbered(error: SbkitError, message: str, number: int) -> SbkitError:
    """Return an error of the recording of this number."""
    if isinstance(error, InvalidCode):
        return InvalidCode(message, (number, *error.position), error.level, error.id, hint=error.hint)
    return SbkitError(error.code, message, hint=error.hint, value=number)


def _check_list(argument: object, method: str, what: str) -> None:
    if not isinstance(argument, Sequence) or isinstance(argument, (str, bytes)):
        raise SbkitError("bad-value", f"{method} takes a list of {what}, not {type(argument).__name__}",
                         hint=f"for one, write {method}([...])")
