"""Reads audio: a file, bytes or a member of a shard as float32 mono at the wanted sample rate.

libsndfile decodes (WAV, FLAC, MP3, Ogg Vorbis and Opus; ``sbkit.data.container`` the rest), soxr resamples. Decoding
takes four fifths of reading a 48 kHz MP3. With quality "MQ", soxr keeps 0 to 7.3 kHz within 0.1 dB (7.5 kHz: -0.5),
attenuates everything above 8 kHz by 100 dB, and distorts a tone below 7 kHz 110 dB below its level, which is less than
16 bits can represent. "HQ" would change nothing audible for 2 to 3 % more time, "LQ" would lose everything above 6 kHz
and save no time. The filter is computed in 20 microseconds, so it isn't cached. (Not faster: matrix products, FFTs,
decoding and resampling block by block in the cache, reusing a buffer.)
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
import re
from collections.abc import Callable, Iterable, Iterator
from typing import BinaryIO, NamedTuple, TypeVar

import numpy as np
import soundfile
import soxr

from sbkit.data import container, mp3, tar, true_length
from sbkit.data.remote import NO_REMOTE, Remote, UrlNotAllowed
from sbkit.errors import SbkitError
from sbkit.system import untrusted

#: File name suffixes of recordings.
SUFFIXES = (".aac", ".aif", ".aifc", ".aiff", ".au", ".caf", ".flac", ".m4a", ".mp3", ".mp4", ".oga", ".ogg", ".opus",
            ".rf64", ".snd", ".sph", ".w64", ".wav", ".wave", ".webm")
#: The most that one call decodes, so that a damaged header can't fill the memory.
MAX_SECONDS = 4 * 3600.0
#: A sample rate outside this range means that the header is damaged.
MIN_RATE = 1_000
MAX_RATE = 768_000
#: A file has been cut off if it has less audio than its header says by more than both of these (MP3 padding is less).
TRUNCATED_SECONDS = 0.1
TRUNCATED_SHARE = 0.1
#: A recording that is longer than its row says by at most the sum of these (rounding in a list, an encoder's padding)
#: is read to its end. If it is longer still, or if the row has a start, the row is a segment of the recording.
LONGER_SECONDS = 0.2
LONGER_SHARE = 0.02
#: A recording has been cut off if it is shorter than its row says by more than both of these.
MISSING_SECONDS = 0.5
MISSING_SHARE = 0.1
#: libsndfile's names for WAV.
WAV_FORMATS = ("WAV", "WAVEX")
#: A number of frames above this means that it is unknown (libsndfile gives 2^63-1).
NO_LENGTH = 2**40
#: The most frames in a page of Ogg Vorbis: in the last page of a file, libsndfile seeks about 20 ms off.
VORBIS_PAGE = 2**18
#: Full scale is 1, or 32768 in files that store 16-bit numbers as floats; larger values make a model overflow.
LOUDEST = 1e6
#: Frames that are read at once where what can't be decoded shall cost no more.
_PIECE = 4096
#: The number of shards that one process keeps open.
OPEN_SHARDS = 64

Duration = TypeVar("Duration", float, np.ndarray)

#: libsndfile's number of this error, SF_ERR_UNRECOGNISED_FORMAT.
_UNKNOWN_FORMAT = 1
_MEMBER = re.compile(r"^(?P<path>.+)\?offset=(?P<offset>\d+)&size=(?P<size>\d+)$")


class AudioError(SbkitError):
    """Raised for audio that can't be used: ``.code`` and ``.cause`` say why, ``.wav`` names it."""

    def __init__(self, code: str, wav: str, cause: str):
        super().__init__(code, f"{wav}: {cause}", file=None if wav.startswith("<") else wav)
        self.wav = wav
        self.cause = cause


class UnknownFormat(AudioError):
    """Raised for a file whose format nothing here can decode, or which is no recording."""


class LengthMismatch(NamedTuple):
    """How the frames in a recording's file differ from its header."""

    description: str
    damaged: bool
    """Whether the file was cut off or damaged; otherwise it is a WAV, behind whose audio may be the rest of an older
    file."""


def read_audio(
    wav: str | os.PathLike[str] | bytes | BinaryIO, *, start: float = 0.0, duration: float | None = None,
    sample_rate: int | None = 16_000, speed: float = 1.0, slack: float = 0.0, remote: Remote = NO_REMOTE,
    as_stored: bool = False, goes_on: Callable[[float], None] | None = None,
) -> np.ndarray:
    """Read a recording, or a segment of it: decode, mix to mono and resample in one pass.

    wav: a path, a member of an uncompressed tar (``shard.tar?offset=1536&size=20480``), a URL of either that
        ``remote`` allows, the bytes of a file, or a binary file.
    start, duration: the segment to read, in seconds; without ``duration`` it ends with the recording.
        Only this segment is decoded, unless libsndfile can't seek exactly: MP3s of variable bit rate are decoded
        from their beginning, and the last seconds of Ogg Vorbis from an earlier page.
    sample_rate: sample rate of the result; ``None`` keeps the recording's.
    slack: if the recording ends at most this many seconds after the segment, it is read to its end.
    speed: 1.1 makes the recording faster and higher, 0.9 slower and lower, in the same resampling.
    as_stored: leave samples of 16 bits as they are, if nothing changes them.
    goes_on: called with the recording's seconds if it ends later than ``slack`` after the segment.

    Returns
    -------
    float32 array, shape ``[S]``, mono (the mean of the channels); int16 if it is ``as_stored``.

    Raises ``AudioError`` if the audio is missing, damaged, cut off, empty, too long, or has values that can't be sound.
    """
    name = describe(wav)
    with open_recording(wav, name, remote) as opened:
        rate = opened.file.samplerate
        to_rate = sample_rate or rate
        recorded = opened.file.frames / rate
        if goes_on is not None and duration is not None and recorded > start + duration + slack:
            goes_on(recorded)
        as_stored = as_stored and rate * speed == to_rate and (
            opened.file.subtype, opened.file.channels) == ("PCM_16", 1)
        [signal] = opened.blocks(start, duration, slack, dtype="int16" if as_stored else "float32")
    if as_stored:
        return signal
    check_values(name, signal)
    return signal if rate * speed == to_rate else resample(signal, rate * speed, to_rate)


def read_utterance(wav: str, start: float, duration: float, *, sample_rate: int = 16_000,
                   speed: float = 1.0, remote: Remote = NO_REMOTE, as_stored: bool = False,
                   goes_on: Callable[[float], None] | None = None) -> np.ndarray:
    """Read the recording of a manifest's row as ``read_audio`` does; ``AudioError`` if it was cut off."""
    slack = 0.0 if start else length_tolerance(duration)
    signal = read_audio(wav, start=start, duration=duration, sample_rate=sample_rate, speed=speed, slack=slack,
                        remote=remote, as_stored=as_stored, goes_on=goes_on)
    check_whole(wav, duration, len(signal) * speed / sample_rate)
    return signal


def check_values(name: str, signal: np.ndarray) -> None:
    """Raise ``AudioError`` if a signal [S] of ``name``, before it is resampled, has values that can't be sound: the one
    limit of training, export, transcription and serving."""
    loudest = max(signal.max(), -signal.min()) if len(signal) else 0.0  # NaN stays NaN
    if not np.isfinite(loudest):
        raise AudioError("bad-samples", name, "holds values that are not finite (NaN or infinite)")
    if loudest > LOUDEST:
        raise AudioError("bad-samples", name, f"has samples as large as {loudest:g}; full scale is 1")


def check_whole(wav: str, duration: float, seconds: float) -> None:
    """Raise ``AudioError`` if a row of ``duration`` has only ``seconds`` of audio because it was cut off."""
    missing = duration - seconds
    if missing > MISSING_SECONDS and missing > MISSING_SHARE * duration:
        raise AudioError("damaged-audio", wav, f"{missing:.2f} of its {duration:.2f} s are missing")


def length_tolerance(duration: Duration) -> Duration:
    """Return by how many seconds a recording may exceed its row's ``duration``, and still be read to its end."""
    return LONGER_SECONDS + LONGER_SHARE * duration


def resample(signal: np.ndarray, rate: float, to_rate: float) -> np.ndarray:
    """Resample float32 ``[S]`` to ``[round(S * to_rate / rate)]``."""
    return soxr.resample(signal, rate, to_rate, "MQ")


def audio_info(wav: str | os.PathLike[str] | bytes | BinaryIO, remote: Remote = NO_REMOTE, *,
               whole: bool = False) -> tuple[float, int, int]:
    """Seconds, sample rate and channels of a recording, from its header; no audio is decoded.

    whole: raise ``AudioError`` if the file holds less audio than its header says, or if a FLAC holds more
    """
    name = describe(wav)
    with open_recording(wav, name, remote) as opened:
        file = opened.file
        if whole:
            opened.check_length()
        return file.frames / file.samplerate, file.samplerate, file.channels


def length_mismatch(declared: int, actual: int, file: soundfile.SoundFile) -> LengthMismatch | None:
    """Compare the frames in a recording's file with its header; None if they differ only by rounding."""
    rate = file.samplerate
    if abs(declared - actual) <= length_tolerance(declared / rate) * rate:
        return None
    if actual < declared:
        return LengthMismatch(f"cut off: {actual / rate:.2f} of {declared / rate:.2f} s can be read", damaged=True)
    longer = f"its header says {declared / rate:.2f} s, but it goes on to {actual / rate:.2f} s: the rest isn't read"
    if file.format in WAV_FORMATS:
        return LengthMismatch(longer, damaged=False)
    return LengthMismatch(f"damaged: {longer}", damaged=True)


def describe(wav: str | os.PathLike[str] | bytes | BinaryIO) -> str:
    """Return the name of a recording for messages: its path, or its number of bytes."""
    if isinstance(wav, (str, os.PathLike)):
        return os.fspath(wav)
    if isinstance(wav, (bytes, bytearray, memoryview)):
        return f"<{len(wav)} bytes of audio>"
    return f"<{getattr(wav, 'name', 'audio file')}>"


def read_bytes(wav: str | os.PathLike[str], remote: Remote = NO_REMOTE) -> bytes:
    """The encoded bytes of a file, a member of a shard, or a URL that ``remote`` allows."""
    path, offset, size = split_member(os.fspath(wav))
    try:
        if "://" in path:
            data = remote.read(path, offset, size)
        elif size is None:
            with untrusted.open_regular(path) as file:
                return file.read()
        else:
            data = _shard(path).read(offset, size)
    except OSError as error:
        raise _unreadable(os.fspath(wav), error) from None
    if size is not None and len(data) != size:
        raise AudioError("damaged-audio", os.fspath(wav), f"the shard ends {size - len(data)} bytes too early")
    return data


def split_member(wav: str) -> tuple[str, int, int | None]:
    """Split ``path?offset=O&size=N`` into (path, O, N); a plain path gives (path, 0, None)."""
    match = _MEMBER.match(wav)
    if match is None:
        return wav, 0, None
    return match["path"], int(match["offset"]), int(match["size"])


class OpenRecording(NamedTuple):
    """An open recording with a plausible header."""

    file: soundfile.SoundFile
    name: str
    exact: int
    """The last frame to which seeking is exact."""
    frames: Callable[[], tuple[int, int]]
    """Returns the number of frames by its header, and by the content of the file."""

    def check_length(self) -> str | None:
        """Raise ``AudioError`` if its file was cut off or damaged; return a notice if a WAV's is longer than its header
        says."""
        mismatch = length_mismatch(*self.frames(), self.file)
        if mismatch is None:
            return None
        if mismatch.damaged:
            raise AudioError("damaged-audio", self.name, mismatch.description)
        return mismatch.description

    def blocks(self, start: float, duration: float | None, slack: float = 0.0, whole: bool = True,
               block_seconds: float | None = None, dtype: str = "float32") -> Iterator[np.ndarray]:
        """Decode a segment, as in ``read_audio``: mono blocks [S], none of them empty.

        whole: raise ``AudioError`` if its end is missing or damaged; otherwise decode as far as possible.
        block_seconds: length of each block except the last; None: one block.
        """
        file = self.file
        name = self.name
        rate = self.file.samplerate
        first = round(start * rate)
        if first >= file.frames:
            raise AudioError("segment-outside-audio", name, f"is {file.frames / rate:.2f} s long, so it has no audio "
                             f"from {start:.2f} s on")
        wanted = file.frames - first
        if duration is not None and wanted > (duration + slack) * rate:
            wanted = round(duration * rate)
        at = min(first, self.exact)
        if block_seconds is None and first - at + wanted > MAX_SECONDS * rate:
            raise AudioError("clip-too-long", name, f"has {(first - at + wanted) / rate / 3600:.1f} hours, but at most "
                             f"{MAX_SECONDS / 3600:.0f} can be read at once (read parts of it with start and duration)")
        if at:
            file.seek(at)
        file.seekable = lambda: False  # otherwise soundfile seeks after each read, which is slow, and inexact for MP3
        size = wanted if block_seconds is None else round(block_seconds * rate)
        at += sum(map(len, self._read(first - at, size)))  # where seeking isn't exact, decode what comes before, too
        if at < first:
            raise AudioError("damaged-audio", name, f"cut off: it ends after {at / rate:.2f} of "
                             f"{file.frames / rate:.2f} s, before the part from {start:.2f} s on")
        read = 0
        for block in self._read(wanted, size, dtype) if whole else self._readable(wanted, size):
            read += len(block)
            mono = block[:, 0]
            if block.shape[1] > 1:  # the mean of the channels; far faster than ``mean(axis=1)``
                mono = mono.copy()
                for channel in range(1, block.shape[1]):
                    mono += block[:, channel]
                mono /= block.shape[1]
            yield mono
        lost = (wanted - read) / rate
        if read < min(wanted, 1) or (whole and lost > max(TRUNCATED_SECONDS, TRUNCATED_SHARE * wanted / rate)):
            raise AudioError("damaged-audio", name, f"cut off: {read / rate:.2f} of {wanted / rate:.2f} s can be read")
        if not read:
            raise AudioError("empty-audio", name, "holds no audio")

    def _readable(self, frames: int, size: int) -> Iterator[np.ndarray]:
        """Read as ``_read`` does, up to what can't be decoded: in small pieces, as the one that fails is lost."""
        pieces: list[np.ndarray] = []
        with contextlib.suppress(AudioError):
            for piece in self._read(frames, min(size, _PIECE)):
                pieces.append(piece)
                if sum(map(len, pieces)) >= size:
                    yield np.concatenate(pieces)
                    pieces = []
        if pieces:
            yield np.concatenate(pieces)

    def _read(self, frames: int, size: int, dtype: str = "float32") -> Iterator[np.ndarray]:
        """Read the next ``frames`` in blocks [S, C] of ``size``; fewer if the recording ends early."""
        read = 0
        rate = self.file.samplerate
        while read < frames:
            try:
                block = self.file.read(min(size, frames - read), dtype=dtype, always_2d=True)
            except soundfile.LibsndfileError as error:
                if not read:
                    raise
                raise AudioError("damaged-audio", self.name, f"damaged or cut off after {read / rate:.2f} of "
                                 f"{frames / rate:.2f} s: {error.error_string}") from None
            if not len(block):
                return
            yield block
            read += len(block)


@contextlib.contextmanager
def open_recording(wav: str | os.PathLike[str] | bytes | BinaryIO, name: str,
                   remote: Remote = NO_REMOTE) -> Iterator[OpenRecording]:
    """Open a recording; errors in it while it is open are raised as ``AudioError``, which begins with ``name``."""
    handle = file = None
    data = b""

    def read(count: int, offset: int) -> bytes:
        return bytes(data[offset : offset + count]) if handle is None else os.pread(handle, count, offset)

    try:
        if isinstance(wav, (str, os.PathLike)):
            path = os.fspath(wav)
            if ("?" in path and _MEMBER.match(path)) or "://" in path:
                data = read_bytes(path, remote)
            else:
                handle = untrusted.open_handle(path)
        else:
            data = wav if isinstance(wav, (bytes, bytearray, memoryview)) else wav.read()
        file = _decoder(data if handle is None else handle)
        exact = True
        size = len(data) if handle is None else os.fstat(handle).st_size
        if file.format == "MP3":
            headers = mp3.inspect(read)
            exact = headers is not None and headers.constant  # whether seeking is
            # Without a tag libsndfile guesses the length; a guess that is a frame off or more gets a tag.
            if headers is not None and not headers.tagged and (
                    abs(headers.samples - file.frames) > headers.samples // headers.frames):
                file.close()
                file = _decoder(mp3.with_tag(mp3.read_all(read), headers))
        elif file.format in WAV_FORMATS and not file.frames and (whole := true_length.completed_wav(read, size)):
            file.close()
            file = _decoder(whole)
        if not MIN_RATE <= file.samplerate <= MAX_RATE:
            raise AudioError("damaged-audio", name, f"its header is damaged: a sample rate of {file.samplerate} Hz")
        if file.frames <= 0:
            raise AudioError("empty-audio", name, "holds no audio")
        if file.frames > NO_LENGTH:
            raise AudioError("damaged-audio", name, "does not say in its header how long it is")
        if isinstance(file, container.ContainerFile):
            declared = file.declared
            actual = file.frames
            yield OpenRecording(file, name, 0, lambda: (declared, actual))
            return
        last = max(file.frames - VORBIS_PAGE, 0) if file.subtype == "VORBIS" else file.frames if exact else 0
        yield OpenRecording(file, name, last, functools.partial(true_length.frames, file, read, size))
    except soundfile.SoundFileError as error:
        if handle is not None and os.path.isdir(f"/proc/self/fd/{handle}"):  # libsndfile only says "System error"
            raise AudioError("not-readable", name, "is a folder, not a recording") from None
        if (os.fstat(handle).st_size if handle is not None else len(data)) == 0:
            raise AudioError("empty-audio", name, "is empty (0 bytes)") from None
        reason = (getattr(error, "error_string", "") or str(error)).strip().rstrip(".")
        if not reason or "does not exist" in reason:  # as libsndfile says of some files that are cut off
            reason = "damaged"
        if getattr(error, "code", None) == _UNKNOWN_FORMAT:
            raise UnknownFormat("unknown-audio-format", name, f"cannot be decoded: {reason}") from None
        raise AudioError("damaged-audio", name, f"cannot be decoded: {reason}") from None
    except OSError as error:
        raise _unreadable(name, error) from None
    except container.ContainerError as error:
        raise AudioError(error.code, name, str(error)) from None
    except MemoryError:
        raise AudioError("out-of-memory", name, "there is not enough memory to read it") from None
    except ValueError as error:  # such as a path with a zero
        raise AudioError("not-readable", name, str(error) or type(error).__name__) from None
    finally:
        if file is not None:
            file.close()
        if handle is not None:
            os.close(handle)


def _decoder(source: int | bytes) -> soundfile.SoundFile | container.ContainerFile:
    """The decoder of an open file or of bytes: libsndfile's, unless it is a container that libsndfile can't read."""
    begin = b""
    with contextlib.suppress(IsADirectoryError):  # libsndfile refuses it below
        begin = os.pread(source, tar.BEGIN, 0) if isinstance(source, int) else bytes(source[: tar.BEGIN])
    if (kind := tar.kind_of(begin)) is not None and kind.name in container.DEMUXERS:
        return container.ContainerFile(source, kind.name)
    return soundfile.SoundFile(source if isinstance(source, int) else io.BytesIO(source), closefd=False)


def _unreadable(name: str, error: OSError) -> AudioError:
    """Return the error for a file or URL that the system or a server doesn't give."""
    if isinstance(error, FileNotFoundError):
        return AudioError("missing-audio", name, "no such file")
    cause = error.strerror or str(error)
    if isinstance(error, UrlNotAllowed):
        return AudioError("url-not-allowed", name, cause)
    return AudioError("failed-download" if "://" in name else "not-readable", name, cause)


def prefetch(wavs: Iterable[str]) -> None:
    """Ask the kernel to prefetch these members of shards, all at once instead of one after another."""
    for wav in wavs:
        path, offset, size = split_member(wav)
        if size is not None and "://" not in path:
            with contextlib.suppress(OSError):  # reading it will raise the error
                os.posix_fadvise(_shard(path).handle, offset, size, os.POSIX_FADV_WILLNEED)


class _Shard:
    """An open shard, closed when it is no longer used."""

    def __init__(self, path: str):
        self.handle = untrusted.open_handle(path)

    def __del__(self) -> None:
        if hasattr(self, "handle"):
            os.close(self.handle)

    def read(self, offset: int, size: int) -> bytes:
        """Read without moving the file's position, so that threads and forked processes can share it."""
        parts = []
        left = size
        while left and (part := os.pread(self.handle, left, offset + size - left)):  # pread returns at most 2 GiB
            parts.append(part)
            left -= len(part)
        return parts[0] if len(parts) == 1 else b"".join(parts)


@functools.lru_cache(OPEN_SHARDS)
def _opened(path: str, device: int, inode: int) -> _Shard:
    return _Shard(path)


def _shard(path: str) -> _Shard:
    """The shard at a path, which stays open for the next recordings; one that was replaced is another file."""
    status = os.stat(path)
    return _opened(path, status.st_dev, status.st_ino)
