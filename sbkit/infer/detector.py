"""Detects speech with Silero's detector, for models that hallucinate words on non-speech."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export.layout import Config, TransducerConfig
from sbkit.infer.onnx_session import Interface, open_session

#: Samples of a frame of the detector, 32 ms, by sample rate. Its input begins an eighth of a frame earlier.
_FRAMES = {8_000: 256, 16_000: 512}
#: Speech begins at the first probability, and ends below the second.
_BEGIN_PROBABILITY, _END_PROBABILITY = 0.5, 0.35
_MIN_FRAMES = 4  # of speech
_MARGIN_FRAMES = 8  # before and after speech, because words begin and end softly


class SpeechDetector:
    """Detects the frames of a recording in which somebody speaks; any number of threads may call it.

    The weights come with the package silero-vad, whose own code isn't run.

    config : the configuration of the recogniser that transcribes the recordings
    """

    def __init__(self, config: Config):
        package = find_spec("silero_vad")
        if package is None or not package.submodule_search_locations:
            raise SbkitError("missing-package", "--vad needs the package silero-vad", hint="pip install 'sbkit[vad]'")
        if isinstance(config, TransducerConfig) or config.sample_rate not in _FRAMES:
            raise SbkitError("unsupported-vad", "--vad works only for CTC models of 8000 or 16000 samples per second",
                             hint="leave out --vad, or process such bundles with another command")
        self._frame = _FRAMES[config.sample_rate]
        self._overlap = self._frame // 8
        self._rate = np.array(config.sample_rate)
        self._first_state = np.zeros((2, 1, 128), np.float32)
        example = {"input": np.zeros((1, self._overlap + self._frame), np.float32), "state": self._first_state,
                   "sr": self._rate}
        path = Path(package.submodule_search_locations[0]) / "data" / "silero_vad.onnx"
        self._session, _ = open_session(path, None, 1, Interface(example, ["output", "stateN"]), spin=False)

    def __call__(self, signal: np.ndarray, frame_samples: int) -> np.ndarray:
        """Map a waveform [S] to whether somebody speaks in each of the model's frames, [T] bool."""
        spoken = np.zeros(-(-len(signal) // self._frame), bool)
        begin: int | None = None  # the frame where the current speech began
        for number, probability in enumerate(self._probabilities(signal)):
            threshold = _BEGIN_PROBABILITY if begin is None else _END_PROBABILITY
            if probability >= threshold:
                begin = number if begin is None else begin
                end = number + 1
                if end - begin >= _MIN_FRAMES:
                    spoken[max(0, begin - _MARGIN_FRAMES) : end + _MARGIN_FRAMES] = True
            else:
                begin = None

        frames = -(-len(signal) // frame_samples)
        return spoken[np.arange(frames) * frame_samples // self._frame]

    def _probabilities(self, signal: np.ndarray) -> Iterator[float]:
        """Yield the probability of speech in each of the detector's frames of a waveform [S]."""
        count = -(-len(signal) // self._frame)
        padded = np.pad(signal, (self._overlap, count * self._frame - len(signal)))[None]
        state = self._first_state
        for number in range(count):
            start = number * self._frame
            window = padded[:, start : start + self._overlap + self._frame]
            probability, state = self._session.run(None, {"input": window, "state": state, "sr": self._rate})
            yield probability[0, 0]
