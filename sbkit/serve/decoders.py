"""Processes that decode uploads, apart from the server: one that dies, hangs or eats memory is replaced.

A decoder gets an open file and writes samples into another one. It gets no path, no key and only the environment
variables it needs; the kernel limits its memory, its processor time and what it writes.
"""

from __future__ import annotations

import contextlib
import json
import queue
import select
import socket
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from typing import IO, Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.serve.backlog import Work
from sbkit.serve.clients import Turns
from sbkit.serve.decoder_process import NO, READY, YES
from sbkit.serve.disk import Disk, DiskReservation, described, with_room
from sbkit.serve.errors import ApiError, invalid, no_room, not_ready
from sbkit.serve.job import Job
from sbkit.serve.limits import Limits
from sbkit.system import helper_process

_COMMAND = tuple(helper_process.command("sbkit.serve.decoder_process"))
_PASSED_ON = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")
_OWN_MEMORY = 1 << 30  # Python, numpy, libsndfile and blocks of samples; address space, not memory in use
_HIGHEST_RATE = 192_000
_START_SECONDS = 60.0
_POLL_SECONDS = 0.1  # interval of checks for a cancelled job
_BLOCK = 1 << 18  # samples


class Wave:
    """Decoded samples at the model's rate, in a file without a name."""

    def __init__(self, file: IO[bytes], samples: int, held: DiskReservation, warning: str | None = None):
        self._file, self.samples, self._held = file, samples, held
        self.warning = warning
        """What of the recording is missing in them."""

    def blocks(self) -> Iterator[np.ndarray]:
        self._file.seek(0)
        left = self.samples
        while left:
            data = self._file.read(4 * min(left, _BLOCK))
            if not data:
                raise RuntimeError(f"the last {left} of {self.samples} decoded samples are missing")
            block = np.frombuffer(data, dtype=np.float32)
            left -= len(block)
            yield block

    def close(self) -> None:
        self._file.close()
        self._held.close()


class Died(Exception):
    """A decoder died while processing an order."""


class TookTooLong(Died):
    """A decoder was ended because it took too long."""


class NotStarted(Died):
    """A decoder could not be started."""


class _Decoder:
    """One decoding process."""

    def __init__(self, command: Sequence[str], memory: int, file_bytes: int):
        self._socket, theirs = socket.socketpair()
        environment = helper_process.environment(_PASSED_ON) | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(memory), str(file_bytes)], pass_fds=[theirs.fileno()],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True)  # Ctrl-C is for the server, which finishes requests in flight
        self._ready = self._used = False

    @property
    def fresh(self) -> bool:
        """Whether it is alive and unused: if it dies then, the order is to blame."""
        return not self._used and self.process.poll() is None

    def start(self, job: Job) -> None:
        if not self._ready:
            try:
                if self._line(job, time.monotonic() + _START_SECONDS) != READY:
                    raise NotStarted("could not be started")
            except Died as error:
                raise NotStarted(str(error)) from None
            self._ready = True

    def decode(self, order: dict[str, Any], files: Sequence[int], room: Callable[[int], bool], job: Job,
               seconds: float) -> dict[str, Any]:
        """Process an order and return the answer; ``room`` says whether it may write this many bytes."""
        self.start(job)
        until = time.monotonic() + seconds
        try:
            socket.send_fds(self._socket, [json.dumps(order).encode() + b"\n"], list(files))
            while "room" in (answer := json.loads(self._line(job, until))):
                self._socket.sendall(YES if room(answer["room"]) else NO)
        except OSError:
            raise Died("ended") from None
        self._used = True
        return answer

    def _line(self, job: Job, until: float) -> bytes:
        found = b""
        while not found.endswith(b"\n"):
            job.check()
            if time.monotonic() > until:
                raise TookTooLong("took too long")
            if select.select([self._socket], [], [], _POLL_SECONDS)[0]:
                try:
                    part = self._socket.recv(1 << 16)
                except OSError:
                    part = b""
                if not part:
                    raise Died("ended")
                found += part
        return found

    def close(self) -> None:
        self.process.kill()
        self.process.wait()
        self._socket.close()


class Decoders:
    """A pool of ``limits.decoders`` decoding processes.

    limits : limits of decoding
    restarted : called when a process was replaced
    command : command to start instead, for tests
    disk : where the samples are stored
    """

    def __init__(self, limits: Limits, restarted: Callable[[], None] | None = None,
                 command: Sequence[str] = _COMMAND, disk: Disk | None = None):
        self._limits, self._command = limits, command
        self._disk = disk or Disk(limits.disk_bytes)
        self._restarted = restarted or (lambda: None)
        self._turns = Turns(limits.decoders, limits.client_share)
        self._memory = _OWN_MEMORY + 4 * limits.upload_bytes
        self._file_bytes = int(4 * _HIGHEST_RATE * (limits.max_audio_seconds + 60))
        self._free: queue.LifoQueue[_Decoder | None] = queue.LifoQueue()  # None: could not be restarted
        self.running: set[_Decoder] = set()
        """The processes, whether busy or free."""
        for _ in range(limits.decoders):
            self._free.put(self._started())

    def check(self) -> None:
        """Wait until they run; raises ``SbkitError`` if they can't."""
        for each in list(self.running):
            try:
                each.start(Job())
            except Died as error:
                raise SbkitError(f"a process that decodes audio {error}",
                                 hint=f"try it by hand: {' '.join(self._command)} 0 0 0") from None

    def decode(self, upload: IO[bytes], rate: int, job: Job, audio: Work | None = None) -> Wave:
        """Decode an upload into samples; raises ``ApiError`` with the reason if it can't. ``audio`` grows with them."""
        with contextlib.ExitStack() as undo:
            held = undo.enter_context(contextlib.closing(DiskReservation(self._disk, job.client)))

            def grow(size: int) -> None:
                if audio is not None:
                    audio.grow(size / 4 / rate)
                held.grow(size)

            with with_room():
                out = undo.enter_context(tempfile.TemporaryFile(prefix="sbkit-"))
                upload.fileno()  # from here on it is on disk
            with self._turns.place(job):
                answer = self._ask(upload, out, grow, rate, job)
            samples = self._samples(answer, grow)
            held.keep(4 * samples)
            if audio is not None:
                audio.keep(samples / rate)
            undo.pop_all()
            return Wave(out, samples, held, answer["warning"])

    def _samples(self, answer: dict[str, Any], grow: Callable[[int], None]) -> int:
        """The number of samples by a decoder's answer; raises ``ApiError`` for a refusal."""
        if "refused" in answer:
            raise invalid(f"the audio {_as_clause(answer['refused'])}", "file", "invalid_audio")
        if "too_long" in answer:
            raise invalid(f"the audio is {answer['too_long']}; the limit of this server is "
                          f"{self._limits.max_audio_seconds:g} s", "file", "audio_too_long")
        if "no_room" in answer:
            grow(answer["no_room"])  # which says why
            raise no_room("there was no room on the server's disk")
        if "full" in answer:
            full = OSError(answer["full"], "")
            raise described(full) or full
        if "failed" in answer:
            raise RuntimeError(f"a recording could not be decoded: {answer['failed']}")
        return answer["samples"]

    def _ask(self, upload: IO[bytes], out: IO[bytes], grow: Callable[[int], None], rate: int,
             job: Job) -> dict[str, Any]:
        """Ask a decoder; if a used or idle one dies, ask a fresh one again."""
        order = {"rate": rate, "seconds": self._limits.max_audio_seconds, "cpu_seconds": self._limits.decode_seconds}

        def room(size: int) -> bool:
            with contextlib.suppress(ApiError):
                grow(size)
                return True
            return False

        decoder = self._take(job)
        while True:
            fresh = decoder.fresh
            try:
                upload.seek(0)
                out.seek(0)
                out.truncate()
                answer = decoder.decode(order, (upload.fileno(), out.fileno()), room, job,
                                        2 * self._limits.decode_seconds)
            except BaseException as error:
                replaced = self._replaced(decoder)
                if type(error) is not Died or fresh or replaced is None:
                    self._free.put(replaced)
                    raise (_blamed(error) if isinstance(error, Died) else error) from None
                decoder = replaced
            else:
                self._free.put(decoder)
                return answer

    def _take(self, job: Job) -> _Decoder:
        while True:
            job.check()
            with contextlib.suppress(queue.Empty):
                found = self._free.get(timeout=_POLL_SECONDS)
                break
        try:
            with with_room():
                return found or self._started()
        except BaseException:
            self._free.put(None)
            raise

    def _started(self) -> _Decoder:
        decoder = _Decoder(self._command, self._memory, self._file_bytes)
        self.running.add(decoder)
        return decoder

    def _replaced(self, decoder: _Decoder) -> _Decoder | None:
        """Start a replacement; None if the machine has no room for a process now."""
        self.running.discard(decoder)
        decoder.close()
        self._restarted()
        try:
            return self._started()
        except OSError:
            return None

    def close(self) -> None:
        for each in list(self.running):
            each.close()


def _blamed(error: Died) -> ApiError:
    if isinstance(error, NotStarted):
        return not_ready(f"a process that decodes audio {error}")
    return invalid(f"the audio can't be decoded: the decoder {error}; is the file damaged?", "file", "invalid_audio")


def _as_clause(cause: str) -> str:
    """Turn a cause about a file, such as 'its header claims ...', into a clause about the audio."""
    if cause.endswith("Format not recognised"):
        return f"{cause}; send WAV, FLAC, MP3 or Ogg"
    return f"can't be used: {cause}" if cause.startswith("its ") else cause
