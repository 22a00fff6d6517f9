"""Waveform augmentation in the data workers, reproducible after a resume: speed, noise, reverberation, codecs, gain.

Every utterance has its own random generator, seeded by (seed, pass number, utterance), so that its augmentation depends
neither on the number of workers nor on where a run was stopped.

    augment: !new:sbkit.data.augment.Augment
        stages:
            - !new:sbkit.data.augment.SpeedPerturb
                speeds: [0.9, 1.0, 1.1]
            - !new:sbkit.data.augment.AddNoise
                folder: /data/musan/noise
                prob: 0.5
"""

from __future__ import annotations

import copy
import functools
import hashlib
import io
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.data.audio import SUFFIXES, AudioError, audio_info, read_audio, resample
from sbkit.data.batch import SAMPLE_RATE
from sbkit.errors import SbkitError
from sbkit.system.schema import POSITIVE, Number, require

logger = logging.getLogger(__name__)

#: Damaged noise files or impulse responses that may be drawn in a row for one utterance before the run ends.
_TRIES = 5
#: Decoded impulse responses that a worker keeps; about 8 MB if each has a second.
_KEPT_RESPONSES = 128
#: libsndfile's format and subtype of each codec, its sample rate, and its options.
_CODECS: dict[str, tuple[str, str, int, dict[str, Any]]] = {
    "ulaw": ("WAV", "ULAW", 8000, {}), "alaw": ("WAV", "ALAW", 8000, {}), "gsm": ("WAV", "GSM610", 8000, {}),
    "adpcm": ("WAV", "IMA_ADPCM", 8000, {}),
    "mp3": ("MP3", "MPEG_LAYER_III", 16000, {"bitrate_mode": "AVERAGE", "compression_level": 0.95}),
    "opus": ("OGG", "OPUS", 16000, {"compression_level": 1.0}),
    "opus_narrow": ("OGG", "OPUS", 8000, {"compression_level": 1.0}),
    "vorbis": ("OGG", "VORBIS", 16000, {"compression_level": 1.0}),
}


class Augment:
    """A list of augmentations, applied in this order. ``SpeedPerturb`` must be the first: it happens while reading.

    An augmentation whose attribute ``aligned`` is true also changes the signals that a task declares as aligned with
    the recording, with the same random numbers; others change only the recording.

    Slower speech is longer, and a crop shorter, so batches are planned with the durations that ``planned`` returns, and
    never exceed ``max_batch_seconds``.
    """

    def __init__(self, stages: Sequence[Callable[..., np.ndarray]]):
        all_stages: Sequence[Any] = stages  # callables, some with further attributes
        for stage in all_stages:
            if type(stage).__module__.partition(".")[0] in ("speechbrain", "torchaudio"):
                raise SbkitError("bad-value", f"augment: {type(stage).__name__} can't be used here: it computes on "
                                 "batches of tensors, but a stage gets one array and a random generator",
                                 hint="use one of sbkit.data.augment, such as SpeedPerturb", key="augment")
        speeds = [stage for stage in all_stages if isinstance(stage, SpeedPerturb)]
        if len(speeds) > 1 or (speeds and all_stages[0] is not speeds[0]):
            raise SbkitError("bad-value", "augment: SpeedPerturb may appear only once, as the first stage",
                             key="augment")
        self._speed = speeds[0] if speeds else None
        self.stages = [stage for stage in all_stages if not isinstance(stage, SpeedPerturb)]
        self._longest = min((stage.seconds for stage in self.stages if isinstance(stage, Crop)), default=None)

    def set_sample_rate(self, sample_rate: int) -> None:
        """Set the sample rate of stages that need it; refuse a stage that was given another one."""
        for stage in self.stages:
            rate = getattr(stage, "sample_rate", sample_rate)
            if rate is None:
                stage.sample_rate = sample_rate
            elif rate != sample_rate:
                raise SbkitError("conflicting-options", f"augment: {type(stage).__name__} has sample_rate {rate}, but "
                                 f"the recordings are read at {sample_rate} Hz", hint="leave out its sample_rate",
                                 key="augment")

    @property
    def stretch(self) -> float:
        """The largest factor by which an utterance can become longer."""
        return self._speed.stretch if self._speed else 1.0

    def planned(self, durations: np.ndarray | float) -> np.ndarray:
        """Return the longest duration that each utterance can get, in seconds."""
        stretched = np.multiply(durations, self.stretch)
        return stretched if self._longest is None else np.minimum(stretched, self._longest)

    def check(self) -> None:
        """List the folders of all stages, so that a missing one is an error before the first batch."""
        for stage in self.stages:
            if hasattr(stage, "files"):
                stage.files.check()

    @staticmethod
    def rng(seed: int, pass_number: int, name: str) -> np.random.Generator:
        """Return the random generator of an utterance in the ``pass_number``-th pass over it."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        return np.random.Generator(np.random.PCG64([seed % 2**64, pass_number, int.from_bytes(digest, "little")]))

    def speed(self, rng: np.random.Generator) -> float:
        """Draw the speed to read an utterance at."""
        return self._speed.draw(rng) if self._speed else 1.0

    def __call__(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Waveform ``[S]`` float32 to waveform ``[S]`` float32."""
        return self.together([signal], rng)[0]

    def together(self, signals: Sequence[np.ndarray], rng: np.random.Generator) -> list[np.ndarray]:
        """Augment the first of several aligned waveforms ``[S]``, and the others by the stages that are ``aligned``.
        """
        first, *others = signals
        for stage in self.stages:
            if getattr(stage, "aligned", False):  # each draws the same numbers
                others = [stage(other, copy.deepcopy(rng)) for other in others]
            first = stage(first, rng)
            if any(len(other) != len(first) for other in others):
                raise SbkitError("unaligned-stage", f"augment: {type(stage).__name__} changes the length of a "
                                 "recording but not that of its aligned signals",
                                 hint="give it the attribute aligned = True")
        return [first, *others]


def planned_seconds(augment: object, durations: np.ndarray | float) -> np.ndarray:
    """Return the longest duration of training utterances in seconds, [N] or a number, after a recipe's ``augment``."""
    planned = getattr(augment, "planned", None)
    return np.asarray(durations, np.float64) if planned is None else planned(durations)


class SpeedPerturb:
    """Change speed and pitch together (sox's ``speed``), as part of the resampling while reading, so at no extra cost.

    speeds: factors to choose from; 0.9 is slower and makes the utterance 1/0.9 times as long.
    prob: probability that a factor is drawn; otherwise the speed is 1.
    """

    def __init__(self, speeds: Sequence[float] = (0.9, 1.0, 1.1), prob: float = 1.0):
        if not isinstance(speeds, Sequence) or not speeds or not all(
                isinstance(speed, Real) and 0.5 <= speed <= 2 for speed in speeds):
            raise SbkitError("bad-value", f"SpeedPerturb: speeds are {speeds!r}",
                             hint="expected a list of factors from 0.5 to 2, such as 0.9", key="SpeedPerturb.speeds",
                             value=speeds)
        self.speeds = [float(speed) for speed in speeds]
        self.prob = check_probability(prob, "SpeedPerturb")

    @property
    def stretch(self) -> float:
        return max(1.0, 1 / min(self.speeds))

    def draw(self, rng: np.random.Generator) -> float:
        """One speed."""
        if rng.random() >= self.prob:
            return 1.0
        return self.speeds[rng.integers(len(self.speeds))]


class Crop:
    """Keep a random segment of each utterance, a different one in each pass over the corpus.

    seconds: length of the segment; shorter utterances stay whole.
    sample_rate: of the waveforms; set by the loader.
    """

    aligned = True

    def __init__(self, seconds: float, sample_rate: int | None = None):
        require("Crop: seconds", seconds, POSITIVE)
        self.seconds = seconds
        self.sample_rate = sample_rate

    def __call__(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """``[S]`` to at most ``[seconds * sample_rate]``."""
        size = round(self.seconds * (self.sample_rate or SAMPLE_RATE))
        start = int(rng.integers(max(0, len(signal) - size) + 1))
        return signal[start : start + size]


class RandomStage(ABC):
    """Base of augmentations that change some utterances and leave the others as they are.

    prob: probability that an utterance is changed.
    sample_rate: of the waveforms; set by the loader.
    """

    def __init__(self, prob: float, sample_rate: int | None = None):
        self.prob = check_probability(prob, type(self).__name__)
        self.sample_rate = sample_rate

    @property
    def rate(self) -> int:
        """The sample rate, by default 16 kHz."""
        return self.sample_rate or SAMPLE_RATE

    def __call__(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """``[S]`` to ``[S]``."""
        return self.change(signal, rng) if rng.random() < self.prob else signal

    @abstractmethod
    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        """Change a waveform, ``[S]`` to ``[S]``."""


class Gain(RandomStage):
    """Make an utterance louder or quieter by a random number of decibels.

    low_db, high_db: range of the gain.
    """

    aligned = True

    def __init__(self, low_db: float = -10.0, high_db: float = 6.0, prob: float = 1.0):
        check_range("Gain", low_db=low_db, high_db=high_db)
        super().__init__(prob)
        self.low_db = low_db
        self.high_db = high_db

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        return signal * np.float32(10 ** (rng.uniform(self.low_db, self.high_db) / 20))


class AddNoise(RandomStage):
    """Add noise from a random recording of a folder at a random signal-to-noise ratio.

    folder: contains audio files at any depth. Only the segment needed is read; short recordings are repeated.
    snr_low, snr_high: range of the ratio, in decibels.
    """

    def __init__(self, folder: str, snr_low: float = 0.0, snr_high: float = 20.0, prob: float = 0.5,
                 sample_rate: int | None = None):
        check_range("AddNoise", snr_low=snr_low, snr_high=snr_high)
        super().__init__(prob, sample_rate)
        self.files = AudioFiles(folder, "AddNoise")
        self.snr_low = snr_low
        self.snr_high = snr_high

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        ratio = rng.uniform(self.snr_low, self.snr_high)
        noise = self.files.draw(rng, lambda path: recorded_noise(path, len(signal), self.rate, rng))
        return add_noise(signal, noise, ratio)


class AddReverb(RandomStage):
    """Add reverberation: convolve an utterance with a random impulse response from a folder.

    The position of the direct sound and the loudness are kept.

    folder: contains impulse responses as audio files at any depth.
    """

    def __init__(self, folder: str, prob: float = 0.5, sample_rate: int | None = None):
        super().__init__(prob, sample_rate)
        self.files = AudioFiles(folder, "AddReverb")

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        response = self.files.draw(rng, lambda path: _response(path, self.rate))
        size = 1 << (len(signal) + len(response) - 2).bit_length()
        wet = np.fft.irfft(np.fft.rfft(signal, size) * np.fft.rfft(response, size), size)
        wet = wet[: len(signal)].astype(np.float32)
        power = _power(signal)
        wet_power = _power(wet)
        return wet * np.float32((power / wet_power) ** 0.5) if wet_power else signal


class ApplyCodec(RandomStage):
    """Encode and decode an utterance with a random codec, as a telephone or an internet call does.

    Telephone codecs work at 8 kHz, so nothing above 4 kHz is left; the others are used at their lowest bit rates.

    codecs: names to choose from: ulaw and alaw (telephones), gsm (mobiles, 13 kbit/s), adpcm and opus_narrow, all at
        8 kHz; mp3 (14 kbit/s), opus (9) and vorbis (18) at 16 kHz.
    """

    def __init__(self, codecs: Sequence[str] = tuple(_CODECS), prob: float = 0.5, sample_rate: int | None = None):
        wrong = [name for name in codecs if name not in _CODECS] if isinstance(codecs, (list, tuple)) else [codecs]
        if wrong or not codecs:
            raise SbkitError("bad-value", f"ApplyCodec: codecs are {codecs!r}",
                             hint=f"expected a list of any of {', '.join(_CODECS)}", key="ApplyCodec.codecs",
                             value=codecs)
        super().__init__(prob, sample_rate)
        self.codecs = list(codecs)

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        if len(signal) < self.rate // 100:  # 10 ms
            return signal
        container, subtype, rate, options = _CODECS[self.codecs[rng.integers(len(self.codecs))]]
        file = io.BytesIO()
        loudest = max(1.0, float(np.abs(signal).max(initial=0.0)))  # files hold -1 to 1
        soundfile.write(file, resample(signal / np.float32(loudest), self.rate, rate), rate, format=container,
                        subtype=subtype, **options)
        file.seek(0)
        coded = resample(soundfile.read(file, dtype="float32")[0], rate, self.rate)[: len(signal)]
        return np.pad(coded, (0, len(signal) - len(coded))) * np.float32(loudest)


class BandPass(RandomStage):
    """Keep a random band of frequencies, as telephones, small microphones and loudspeakers do.

    low_hz: range of the lower limit, where half of the power is left; it falls by 48 dB per octave below.
    high_hz: range of the upper limit; 8000 cuts nothing from recordings at 16 kHz.
    """

    def __init__(self, low_hz: Sequence[float] = (0, 400), high_hz: Sequence[float] = (2500, 8000), prob: float = 0.5,
                 sample_rate: int | None = None):
        for name, limits, least in (("low_hz", low_hz, 0), ("high_hz", high_hz, 1)):
            if not (isinstance(limits, (list, tuple)) and len(limits) == 2 and all(
                    isinstance(limit, Real) for limit in limits) and least <= limits[0] <= limits[1]):
                raise SbkitError("bad-value", f"BandPass: {name} is {limits!r}",
                                 hint="expected two frequencies, such as [100, 400]", key=f"BandPass.{name}",
                                 value=limits)
        super().__init__(prob, sample_rate)
        self.low_hz = low_hz
        self.high_hz = high_hz

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        low, high = (rng.uniform(least, most) for least, most in (self.low_hz, self.high_hz))
        size = 1 << max(len(signal) - 1, 1).bit_length()
        pitch = np.fft.rfftfreq(size, 1 / self.rate)
        pitch[0] = pitch[1] / 2
        kept = ((1 + (low / pitch) ** 16) * (1 + (pitch / high) ** 16)) ** -0.5  # a Butterworth filter of order 8
        return np.fft.irfft(np.fft.rfft(signal, size) * kept, size)[: len(signal)].astype(np.float32)


class Overdrive(RandomStage):
    """Clip an utterance's peaks, as an overloaded microphone does, and keep its loudness.

    low_db, high_db: range of what is cut from the highest peak, in decibels.
    """

    def __init__(self, low_db: float = 3.0, high_db: float = 15.0, prob: float = 0.2):
        check_range("Overdrive", low_db=low_db, high_db=high_db)
        super().__init__(prob)
        self.low_db = low_db
        self.high_db = high_db

    def change(self, signal: np.ndarray, rng: np.random.Generator) -> np.ndarray:
        limit = np.abs(signal).max(initial=0.0) * np.float32(10 ** (-rng.uniform(self.low_db, self.high_db) / 20))
        cut = np.clip(signal, -limit, limit)
        power = _power(signal)
        left = _power(cut)
        return cut * np.float32((power / left) ** 0.5) if left else signal


@functools.lru_cache(maxsize=_KEPT_RESPONSES)
def _response(path: str, sample_rate: int) -> np.ndarray:
    """An impulse response, cut so that it begins with its direct sound, the largest peak."""
    response = read_audio(path, sample_rate=sample_rate)
    peak = int(np.argmax(np.abs(response)))
    if not response[peak]:
        raise AudioError("silent-audio", path, "is silent")
    return response[peak:]


class AudioFiles:
    """The audio files below a folder, listed once and sorted, so that the order is the same on every machine."""

    def __init__(self, folder: str, owner: str):
        self.folder = str(folder)
        self.owner = owner
        self._paths: list[str] | None = None
        self._skipped: set[str] = set()  # files that were warned of

    def check(self) -> list[str]:
        """The sorted paths of the files; an error if there are none."""
        if self._paths is None:
            if not os.path.isdir(self.folder):
                raise SbkitError("no-such-path", f"{self.owner}: {self.folder} is not a folder",
                                 hint="copy the recordings there, or name the folder that has them", file=self.folder)
            below = Path(self.folder).rglob("*")
            self._paths = sorted(str(path) for path in below if path.suffix.lower() in SUFFIXES)
            if not self._paths:
                raise SbkitError("no-audio-files", f"{self.owner}: no audio files in {self.folder}",
                                 hint=f"looked for {', '.join(SUFFIXES)}", file=self.folder)
        return self._paths

    def draw(self, rng: np.random.Generator, read: Callable[[str], np.ndarray]) -> np.ndarray:
        """Read a random file; if it is damaged, say so once and try others."""
        paths = self.check()
        for _ in range(_TRIES):
            path = paths[rng.integers(len(paths))]
            try:
                return read(path)
            except AudioError as error:
                if path not in self._skipped:
                    logger.warning("%s: skipped: %s", self.owner, error)
                self._skipped.add(path)
                last = error
        raise SbkitError("too-much-damaged-audio", f"{self.owner}: {_TRIES} files in a row cannot be used, the last: "
                         f"{last}", hint=f"check the files in {self.folder}", file=self.folder)


def recorded_noise(path: str, size: int, rate: int, rng: np.random.Generator) -> np.ndarray:
    """Read ``[size]`` samples from a random place of a recording, which is repeated if it is too short."""
    needed = size / rate
    start = rng.random() * max(audio_info(path)[0] - needed, 0.0)
    noise = read_audio(path, start=start, duration=needed + 0.01, sample_rate=rate)
    if len(noise) < size:
        noise = np.tile(np.roll(noise, rng.integers(len(noise))), -(-size // len(noise)))
    return noise[:size]


def add_noise(signal: np.ndarray, noise: np.ndarray, decibels: float) -> np.ndarray:
    """Add noise ``[S]`` to a signal ``[S]`` at a signal-to-noise ratio; silence is returned unchanged."""
    power = _power(signal)
    noise_power = _power(noise)
    if not power or not noise_power:
        return signal
    return signal + noise * np.float32((power / noise_power / 10 ** (decibels / 10)) ** 0.5)


def _power(signal: np.ndarray) -> float:
    return float(np.dot(signal, signal)) / max(len(signal), 1)


def check_range(owner: str, **limits: float) -> None:
    """Refuse two limits that aren't numbers, or if the first is above the second."""
    for name, value in limits.items():
        require(f"{owner}: {name}", value, Number())
    (low, least), (high, most) = limits.items()
    if least > most:
        raise SbkitError("bad-value", f"{owner}: {low} ({least}) is above {high} ({most})", key=f"{owner}.{low}",
                         value=least)


def check_probability(prob: float, owner: str) -> float:
    """Return a probability; an error if it isn't one."""
    require(f"{owner}: prob", prob, Number())
    if not 0 <= prob <= 1:
        raise SbkitError("bad-value", f"{owner}: prob is {prob}", hint="it must be a probability from 0 to 1",
                         key=f"{owner}.prob", value=prob)
    return float(prob)
