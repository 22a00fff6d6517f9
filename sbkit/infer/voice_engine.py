"""Engine that runs a voice in one worker thread, for any number of calling threads."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.data.pronunciation import pronunciation
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.padding import pad
from sbkit.infer.bundle_engine import DIVERGED, BatchEngine, ModelFailed
from sbkit.infer.onnx_session import Interface

#: One symbol with the first speaker, at speed 1.
_EXAMPLE = np.ones((1, 1), np.int64), np.ones(1, np.int64), np.zeros(1, np.int64), np.ones(1, np.float32)
_INTERFACE = Interface(dict(zip(layout.VOICE_INPUTS, _EXAMPLE, strict=True)), layout.VOICE_OUTPUTS)


@dataclass(frozen=True)
class SpeechInput:
    """One text of a batch: symbol ids, a speaker's number and a speed."""

    ids: Sequence[int]
    speaker: int = 0
    speed: float = 1.0

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True)
class SpeechOutput:
    """A line's samples [S] float32 from -1 to 1, and the frames of each symbol [U]."""

    samples: np.ndarray
    frames: np.ndarray


class VoiceEngine(BatchEngine):
    """Computes samples from symbol ids."""

    config: layout.VoiceConfig
    kind = "voice"

    def _read(self) -> None:
        self.config = layout.VoiceConfig.read(self.folder)
        if self.config.spelling is not None:
            pronunciation(self.config.spelling)  # raises now if something that it needs is missing

    def submit(self, lines: Sequence[SpeechInput]) -> Future[Any]:
        """Queue a batch; the future has a ``SpeechOutput`` for each line."""
        symbols, speakers = len(self.config.symbols), len(self.config.speakers)
        for line in lines:
            if not 0 < len(line) <= self.config.max_symbols:
                raise ValueError(f"a line must have 1 to {self.config.max_symbols} symbols, not {len(line)}")
            if not all(isinstance(id, (int, np.integer)) and 1 <= id < symbols for id in line.ids):
                raise ValueError(f"ids of symbols must be whole numbers from 1 to {symbols - 1}")
            if not isinstance(line.speaker, (int, np.integer)) or not 0 <= line.speaker < speakers:
                raise ValueError(f"a speaker must be a whole number from 0 to {speakers - 1}, not {line.speaker!r}")
            if not 0 < line.speed < np.inf:
                raise ValueError(f"a speed must be a number above 0, not {line.speed!r}")
        return super().submit(lines)

    # ------------------------------------------------------------------ within the worker

    def _interface(self) -> Interface:
        return _INTERFACE

    def _warm_up(self, path: Path) -> None:
        self._run([SpeechInput([1])])  # checks its output
        symbols, speakers = len(self.config.symbols), len(self.config.speakers)
        try:
            self._run([SpeechInput([symbols - 1], speakers - 1)])
        except ModelFailed as error:  # an index was out of range
            raise SbkitError("mismatched-bundle", f"{path} can't speak the last of {symbols} symbols with the last of "
                             f"{speakers} voices: {error.message}",
                             hint=f"do it and {layout.CONFIG} come from the same export? export it again",
                             file=path) from error

    def run_batch(self, lines: list[SpeechInput]) -> list[SpeechOutput]:
        text, lengths = pad([np.array(line.ids, dtype=np.int64) for line in lines])
        speaker = np.array([line.speaker for line in lines], dtype=np.int64)
        speed = np.array([line.speed for line in lines], dtype=np.float32)
        outputs = self.compute(text, lengths, speaker, speed)
        if [output.ndim for output in outputs] != [2, 1, 2] or any(len(output) != len(lines) for output in outputs):
            raise SbkitError("mismatched-bundle", f"the voice output {[list(output.shape) for output in outputs]} for "
                             f"{len(lines)} texts", hint="export it again")
        speech = []
        for audio, samples, durations, symbols in zip(*outputs, lengths.tolist(), strict=True):
            if not 0 <= samples <= len(audio):
                raise SbkitError("mismatched-bundle", f"the voice output {len(audio)} samples, but reported {samples} "
                                 "as their number", hint="export it again")
            audio = audio[:samples]  # without the row's padding
            frames = durations[:symbols]
            if not np.isfinite(audio).all():
                raise SbkitError("nan-output", "the voice's output has samples that are NaN or infinite", hint=DIVERGED)
            if frames.min() < 0:
                raise SbkitError("nan-output", "the voice's output has durations that are not numbers", hint=DIVERGED)
            # Copies: a view would keep the whole batch in memory.
            speech.append(SpeechOutput(audio.clip(-1.0, 1.0), frames.astype(np.int64)))
        return speech
