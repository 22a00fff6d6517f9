"""Sources of live samples: 16-bit PCM from standard input, and the microphone."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from io import BufferedIOBase
from types import ModuleType
from typing import Any

import numpy as np

from sbkit.data.tar import kind_of
from sbkit.errors import SbkitError, first_line
from sbkit.infer.samples import from_pcm

_READ_BYTES = 1 << 16  # at most; fewer if fewer are available
_BLOCK_SECONDS = 0.04  # of the microphone
_MAX_DELAY_SECONDS = 30.0  # of the model behind the microphone


class Pcm:
    """Reads 16-bit little-endian samples [N] of one channel from standard input, as soon as they are available.

    file : standard input, read to its end
    rate : samples per second
    """

    name = "standard input"

    def __init__(self, file: BufferedIOBase, rate: int):
        self._file = file
        self.rate = rate
        self.warning: str | None = None
        """To be printed after the last samples."""

    def __iter__(self) -> Iterator[np.ndarray]:
        sniffer = FileSniffer()
        empty = True
        rest = b""  # half of a sample
        while data := self._file.read1(_READ_BYTES):
            kind = sniffer.kind(data)
            if kind is not None:
                raise SbkitError("not-pcm", f"{self.name} is a file ({kind}), but must be raw 16-bit PCM",
                                 hint="sbkit transcribe reads files; or: ffmpeg -i FILE -f s16le -ac 1 -ar "
                                      f"{self.rate} -")
            empty = False
            data = rest + data
            whole = len(data) // 2 * 2
            rest = data[whole:]
            yield from_pcm(data[:whole])
        if empty:
            self.warning = f"{self.name} was empty"
        if rest:
            self.warning = f"{self.name} ended in the middle of a sample: is it 16-bit PCM of one channel?"


class Microphone:
    """Records one channel from a microphone, with the package sounddevice.

    rate : samples per second; None: the model's if the microphone supports it, or its default
    model_rate : the model's
    device : a number or a part of a name, as ``python -m sounddevice`` lists them; None: the system's default
    """

    def __init__(self, rate: int | None, model_rate: int, device: str | None = None):
        try:
            import sounddevice
        except ImportError:
            raise SbkitError("missing-package", "a microphone needs the package sounddevice",
                             hint="pip install 'sbkit[listen]'; or pipe 16-bit PCM into: sbkit listen BUNDLE "
                                  "-") from None
        except OSError as error:
            raise SbkitError("broken-package", f"sounddevice can't be used: {first_line(error)}",
                             hint="install PortAudio, such as: apt install libportaudio2; or pipe 16-bit PCM into: "
                                  "sbkit listen BUNDLE -") from error
        self._library: ModuleType = sounddevice
        self.warning: str | None = None
        self._device = int(device) if device is not None and device.isdecimal() else device
        try:
            facts: dict[str, Any] = sounddevice.query_devices(self._device, "input")
            self.name = str(facts["name"])
            self.rate = rate or model_rate
            try:
                sounddevice.check_input_settings(device=self._device, channels=1, dtype="int16", samplerate=self.rate)
            except sounddevice.PortAudioError:
                if rate is not None:
                    raise
                self.rate = round(facts["default_samplerate"])
        except (sounddevice.PortAudioError, ValueError) as error:
            raise self._unusable(error) from error

    def __iter__(self) -> Iterator[np.ndarray]:
        blocks: queue.SimpleQueue[np.ndarray | None] = queue.SimpleQueue()
        try:
            recording = self._library.RawInputStream(
                samplerate=self.rate, channels=1, dtype="int16", device=self._device,
                blocksize=round(_BLOCK_SECONDS * self.rate), finished_callback=lambda: blocks.put(None),
                callback=lambda data, *_: blocks.put(np.frombuffer(bytes(data), np.int16)))
            with recording:
                while (block := blocks.get()) is not None:
                    if blocks.qsize() * _BLOCK_SECONDS > _MAX_DELAY_SECONDS:
                        raise SbkitError("too-slow", f"transcription is {_MAX_DELAY_SECONDS:g} s behind the "
                                         "microphone, because this machine is too slow for the model",
                                         hint="choose a larger --chunk or --model int8, or leave out --lm")
                    yield block
        except self._library.PortAudioError as error:
            raise self._unusable(error) from error
        raise SbkitError("no-microphone", f"the microphone {self.name} stopped", hint="is it still connected?")

    def _unusable(self, error: Exception) -> SbkitError:
        return SbkitError("no-microphone", f"the microphone can't be used: {first_line(error)}",
                          hint="python -m sounddevice lists microphones, for --microphone; or pipe 16-bit PCM into: "
                               "sbkit listen BUNDLE -")


_SNIFFED_BYTES = 1_443  # the longest frame of an MP3, and the start of the next


class FileSniffer:
    """Detects whether a stream's first bytes are those of a file."""

    def __init__(self) -> None:
        self._seen = b""

    def kind(self, data: bytes) -> str | None:
        """Take the next bytes, and return the file type, or None."""
        if len(self._seen) >= _SNIFFED_BYTES:
            return None
        self._seen += data[: _SNIFFED_BYTES - len(self._seen)]
        kind = kind_of(self._seen)
        return None if kind is None else kind.name
