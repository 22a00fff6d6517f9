"""Separate processes that decode uploads: one that dies, hangs or uses too much memory is replaced.

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
from sbkit.serve.clients import FairQueue
from sbkit.serve.decoder_process import AUDIO_TOO_LONG, DISK_FULL, INVALID_AUDIO, NO, NO_ROOM, READY, YES
from sbkit.serve.disk import Disk, DiskReservation, disk_errors_as_api_error
from sbkit.serve.errors import ApiError, invalid, no_room, not_ready
from sbkit.serve.job import Job
from sbkit.serve.limits import Limits
from sbkit.system import helper_process

_COMMAND = tuple(helper_process.command("sbkit.serve.decoder_process"))
_ENVIRONMENT = ("PATH", "LANG", "LC_ALL", "TMPDIR", "LD_LIBRARY_PATH", "SYSTEMROOT")
_BASE_MEMORY = 1 << 30  # of Python, numpy, libsndfile and blocks of samples; address space, not memory in use
_HIGHEST_RATE = 192_000
_START_SECONDS = 60.0
_POLL_SECONDS = 0.1  # interval of checks for a cancelled job
_BLOCK = 1 << 18  # samples


class Wave:
    """Decoded samples at the model's rate, in a file without a name."""

    def __init__(self, file: IO[bytes], samples: int, reservation: DiskReservation, warning: str | None = None):
        self.samples = samples
        self.warning = warning
        """Which part of the recording is missing, if any."""
        self._file = file
        self._reservation = reservation

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
        self._reservation.close()


class DecoderDied(Exception):
    """A decoder ended, or took too long; ``again``: whether a fresh one may succeed."""

    def __init__(self, how: str, again: bool):
        super().__init__(how)
        self.again = again


class _Decoder:
    """One decoding process."""

    def __init__(self, command: Sequence[str], memory: int, file_bytes: int):
        self._socket, theirs = socket.socketpair()
        environment = helper_process.environment(_ENVIRONMENT) | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
        with theirs:
            self.process = subprocess.Popen(
                [*command, str(theirs.fileno()), str(memory), str(file_bytes)], pass_fds=[theirs.fileno()],
                env=environment, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                start_new_session=True)  # Ctrl-C is for the server, which finishes requests in flight
        # Not select, which takes no descriptor from 1024 on: a busy server's connections have those below.
        self._poll = select.poll()
        self._poll.register(self._socket, select.POLLIN)
        self._ready = False  # whether it has said that it runs
        self._used = False

    @property
    def fresh(self) -> bool:
        """Whether it is alive and unused: if it dies then, the request is to blame."""
        return not self._used and self.process.poll() is None

    def start(self, job: Job) -> None:
        """Wait until it runs; raises ``ApiError`` 503 if it can't be started."""
        if not self._ready:
            try:
                self._ready = self._read_line(job, time.monotonic() + _START_SECONDS) == READY
            except DecoderDied as error:
                raise not_ready(f"a process that decodes audio {error}") from None
            if not self._ready:
                raise not_ready("a process that decodes audio could not be started")

    def decode(self, request: dict[str, Any], files: Sequence[int], reserve: Callable[[int], bool], job: Job,
               seconds: float) -> dict[str, Any]:
        """Process a request and return the reply; ``reserve`` says whether it may write this many bytes."""
        self.start(job)
        deadline = time.monotonic() + seconds
        try:
            socket.send_fds(self._socket, [json.dumps(request).encode() + b"\n"], list(files))
            reply = json.loads(self._read_line(job, deadline))
            while "room" in reply:  # it asks for disk space before it goes on
                self._socket.sendall(YES if reserve(reply["room"]) else NO)
                reply = json.loads(self._read_line(job, deadline))
        except OSError:
            raise DecoderDied("ended", again=True) from None
        self._used = True
        return reply

    def _read_line(self, job: Job, deadline: float) -> bytes:
        line = b""
        while not line.endswith(b"\n"):
            job.check()
            if time.monotonic() > deadline:
                raise DecoderDied("took too long", again=False)
            if self._poll.poll(1000 * _POLL_SECONDS):  # milliseconds; also when it has ended
                try:
                    received = self._socket.recv(1 << 16)
                except OSError:
                    received = b""
                if not received:
                    raise DecoderDied("ended", again=True)
                line += received
        return line

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

    def __init__(self, limits: Limits, restarted: Callable[[], object] = lambda: None,
                 command: Sequence[str] = _COMMAND, disk: Disk | None = None):
        self._limits = limits
        self._command = command
        self._disk = disk or Disk(limits.disk_bytes)
        self._restarted = restarted
        self._queue = FairQueue(limits.decoders, limits.client_share)
        self._memory = _BASE_MEMORY + 4 * limits.upload_bytes
        self._file_bytes = int(4 * _HIGHEST_RATE * (limits.max_audio_seconds + 60))
        self._free: queue.LifoQueue[_Decoder | None] = queue.LifoQueue()  # None: could not be restarted
        self.running: set[_Decoder] = set()
        """The processes, whether busy or free."""
        for _ in range(limits.decoders):
            self._free.put(self._start())

    def check(self) -> None:
        """Wait until the processes run; raises ``SbkitError`` if they can't."""
        for decoder in list(self.running):
            try:
                decoder.start(Job())
            except ApiError as error:
                raise SbkitError("decoder-not-started", error.message,
                                 hint=f"try it by hand: {' '.join(self._command)} 0 0 0") from None

    def decode(self, upload: IO[bytes], rate: int, job: Job, work: Work | None = None) -> Wave:
        """Decode an upload into samples; raises ``ApiError`` with the reason if it can't. ``work`` grows with them."""
        with contextlib.ExitStack() as on_failure:
            reservation = on_failure.enter_context(contextlib.closing(DiskReservation(self._disk, job.client)))

            def grow(size: int) -> None:
                if work is not None:
                    work.grow(size / 4 / rate)
                reservation.grow(size)

            with disk_errors_as_api_error():
                out = on_failure.enter_context(tempfile.TemporaryFile(prefix="sbkit-"))
                upload.fileno()  # moves it from memory to the disk
            with self._queue.slot(job):
                reply = self._decode(upload, out, grow, rate, job)
            if "code" in reply:
                if reply["code"] == NO_ROOM:
                    grow(reply["bytes"])  # raises with the reason, unless there is room by now
                raise self._error(reply)

            samples: int = reply["samples"]
            reservation.resize(4 * samples)
            if work is not None:
                work.correct(samples / rate)
            on_failure.pop_all()
            return Wave(out, samples, reservation, reply["warning"])

    def _error(self, reply: dict[str, Any]) -> Exception:
        """Return the error that a decoder reports instead of samples."""
        code, message = reply["code"], reply["message"]
        if code == INVALID_AUDIO:
            return invalid(code, f"the audio {message}", "file")
        if code == AUDIO_TOO_LONG:
            return invalid(code, f"the audio is {message}; the limit of this server is "
                           f"{self._limits.max_audio_seconds:g} s", "file")
        if code == NO_ROOM:
            return no_room(message)
        if code == DISK_FULL:
            return no_room("the server's temporary folder is full")
        return RuntimeError(f"a recording could not be decoded: {message}")

    def _decode(self, upload: IO[bytes], out: IO[bytes], grow: Callable[[int], None], rate: int,
             job: Job) -> dict[str, Any]:
        """Ask a decoder for its reply. If one dies that was used or idle before, ask a fresh one again."""
        request = {"rate": rate, "seconds": self._limits.max_audio_seconds, "cpu_seconds": self._limits.decode_seconds}

        def reserve(size: int) -> bool:
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
                reply = decoder.decode(request, (upload.fileno(), out.fileno()), reserve, job,
                                        2 * self._limits.decode_seconds)
            except BaseException as error:
                replacement = self._replace(decoder)
                if isinstance(error, DecoderDied) and error.again and not fresh and replacement is not None:
                    decoder = replacement
                    continue
                self._free.put(replacement)
                if isinstance(error, DecoderDied):
                    raise invalid(INVALID_AUDIO, f"the audio can't be decoded: the decoder {error}; is the file "
                                  "damaged?", "file") from None
                raise
            self._free.put(decoder)
            return reply

    def _take(self, job: Job) -> _Decoder:
        """Wait for a free decoder."""
        while True:
            job.check()
            with contextlib.suppress(queue.Empty):
                decoder = self._free.get(timeout=_POLL_SECONDS)
                break
        if decoder is not None:
            return decoder
        try:
            with disk_errors_as_api_error():
                return self._start()
        except BaseException:
            self._free.put(None)
            raise

    def _replace(self, decoder: _Decoder) -> _Decoder | None:
        """End a decoder, which may be in the middle of a request; None if the machine has no room for another now."""
        self.running.discard(decoder)
        decoder.close()
        self._restarted()
        try:
            return self._start()
        except OSError:
            return None

    def _start(self) -> _Decoder:
        decoder = _Decoder(self._command, self._memory, self._file_bytes)
        self.running.add(decoder)
        return decoder

    def close(self) -> None:
        for decoder in list(self.running):
            decoder.close()
