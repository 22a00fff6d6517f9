"""Finds where somebody speaks, by Silero's detector, for models that write words where nobody does."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export.layout import Config, TransducerConfig
from sbkit.infer.onnx_session import Interface, open_session

#: Samples of a frame of the detector's, 32 ms, by samples per second; before it, it hears the last eighth of a frame.
_FRAMES = {8_000: 256, 16_000: 512}
#: Speech begins at this probability, ends below that one, ...
_BEGINS, _ENDS = 0.5, 0.35
#: ... lasts at least so many frames, and so many before and after it are kept as well: words begin and end softly.
_SHORTEST, _AROUND = 4, 8


class SpeechDetector:
    """Tells in which frames of a recording somebody speaks; any number of threads may call it.

    The weights come with the package silero-vad, whose own code isn't run.

    config : of the recogniser whose recordings and frames they are
    """

    def __init__(self, config: Config):
        package = find_spec("silero_vad")
        if package is None or not package.submodule_search_locations:
            raise SbkitError("finding speech needs silero-vad", hint="pip install 'sbkit[vad]'")
        if isinstance(config, TransducerConfig) or config.sample_rate not in _FRAMES:
            raise SbkitError("silero-vad finds speech for CTC models of 8000 or 16000 samples a second only",
                             hint="leave out --vad, or give such bundles another command")
        self._frame, self._rate = _FRAMES[config.sample_rate], np.array(config.sample_rate)
        self._state = np.zeros((2, 1, 128), np.float32)
        example = {"input": np.zeros((1, self._frame + self._frame // 8), np.float32), "state": self._state,
                   "sr": self._rate}
        path = Path(package.submodule_search_locations[0]) / "data" / "silero_vad.onnx"
        self._session, _ = open_session(path, None, 1, Interface(example, ["output", "stateN"]), spin=False)

    def __call__(self, signal: np.ndarray, frame_samples: int) -> np.ndarray:
        """Map a waveform [S] to whether somebody speaks in each of the model's frames, [T] bool."""
        before, count = self._frame // 8, -(-len(signal) // self._frame)
        padded = np.pad(signal, (before, count * self._frame - len(signal)))[None]
        spoken, state, since = np.zeros(count, bool), self._state, -1
        for number in range(count):
            at = number * self._frame
            found, state = self._session.run(None, {
                "input": padded[:, at:at + before + self._frame], "state": state, "sr": self._rate})
            if found[0, 0] >= (_BEGINS if since < 0 else _ENDS):
                since = number if since < 0 else since
                if number + 1 - since >= _SHORTEST:
                    spoken[max(0, since - _AROUND):number + 1 + _AROUND] = True
            else:
                since = -1
        places = np.arange(-(-len(signal) // frame_samples)) * frame_samples // self._frame
        return spoken[places]
