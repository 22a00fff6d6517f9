"""The process that decodes audio for the server: it gets open files and limits, has no secrets, and may die.

Started by ``sbkit.serve.decoders``. A request is a line of JSON accompanied by two open files, the upload and the
target for float32 samples; the reply is a line of JSON. Before it, lines may ask for disk space.
"""

from __future__ import annotations

import errno
import json
import os
import resource
import socket
import sys
import time
from collections.abc import Callable
from typing import Any, BinaryIO

import soxr  # noqa: F401  loaded before the limits are set

from sbkit.data import audio
from sbkit.data.audio import AudioError, UnknownFormat
from sbkit.infer.recordings import Recording

#: More channels than any recording of speech has; libsndfile allows up to 1024, and a block has samples of each.
MAX_CHANNELS = 32
#: Higher than any recorder's rate; blocks grow with it.
MAX_RATE = 384_000
READY, YES, NO = b"ready\n", b"y", b"n"
#: Codes of a reply that reports an error. Those of the upload are the server's answer, too.
INVALID_AUDIO = "invalid_audio"
AUDIO_TOO_LONG = "audio_too_long"
NO_ROOM = "no_room"
DISK_FULL = "disk_full"
FAILED = "internal_error"
_FORMATS = "; send WAV, FLAC, MP3, Ogg, M4A or WebM"


def decode(file: BinaryIO, out: BinaryIO, rate: int, max_seconds: float,
           reserve: Callable[[int], bool] = lambda size: True) -> dict[str, Any]:
    """Write an upload as float32 samples at ``rate``; returns the reply: their number and what is missing of the
    recording, or an error's ``code`` and ``message``.

    reserve : whether there is disk space for this many bytes; asked first for the header's length, then as the output
        grows
    """
    try:
        data = file.read()
        seconds, file_rate, channels = audio.audio_info(data)
        if channels > MAX_CHANNELS:
            return _error(INVALID_AUDIO, f"claims {channels} channels in its header; the limit is {MAX_CHANNELS}")
        if file_rate > MAX_RATE:
            return _error(INVALID_AUDIO, f"claims {file_rate} samples per second in its header; the limit is "
                          f"{MAX_RATE}")
        if seconds > max_seconds:
            return _error(AUDIO_TOO_LONG, f"{seconds:.1f} s long")
        samples = 0
        reserved = 0  # bytes
        recording = Recording(data)
        for block in recording.blocks(rate):
            samples += len(block)
            if samples > max_seconds * rate:
                return _error(AUDIO_TOO_LONG, f"longer than {max_seconds:g} s")
            if 4 * samples > reserved:
                claimed = 4 * int(seconds * rate) if reserved == 0 else 0  # by the header
                reserved = max(4 * samples, claimed)
                if not reserve(reserved):
                    return {**_error(NO_ROOM, "there was no room on the server's disk"), "bytes": reserved}
            unwritten = memoryview(block.data).cast("B")
            while unwritten:  # a nearly full disk writes only part, and only the count shows it
                unwritten = unwritten[out.write(unwritten) :]
        out.flush()
        if not samples:
            return _error(INVALID_AUDIO, "has no samples")
        return {"samples": samples, "warning": recording.warning}
    except AudioError as error:
        return _error(INVALID_AUDIO, error.cause + (_FORMATS if isinstance(error, UnknownFormat) else ""))
    except MemoryError:
        return _error(INVALID_AUDIO, "needs too much memory to decode")
    except OSError as error:
        if error.errno == errno.EFBIG:
            return _error(AUDIO_TOO_LONG, "too long")
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return _error(DISK_FULL, error.strerror or "")
        return _error(FAILED, str(error))


def _error(code: str, message: str) -> dict[str, Any]:
    return {"code": code, "message": message}


def main(handle: int, memory: int, file_bytes: int) -> None:
    """Answer requests until the server closes its socket.

    handle : the socket's number
    memory, file_bytes : limits of this process
    """
    with socket.socket(fileno=handle) as server:
        limits = {resource.RLIMIT_FSIZE: file_bytes, resource.RLIMIT_CORE: 0}
        if sys.platform != "darwin":  # macOS can't limit address space
            limits[resource.RLIMIT_AS] = memory
        for kind, limit in limits.items():
            _, hard = resource.getrlimit(kind)
            if hard != resource.RLIM_INFINITY:
                limit = min(limit, hard)
            resource.setrlimit(kind, (limit, limit))
        server.sendall(READY)
        while True:
            line, handles, _, _ = socket.recv_fds(server, 4096, 2)
            if not line:
                return
            request = json.loads(line)
            # The kernel ends this process if the request takes longer.
            _, hard = resource.getrlimit(resource.RLIMIT_CPU)
            soft = int(time.process_time() + request["cpu_seconds"]) + 1
            resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
            with os.fdopen(handles[0], "rb") as file, os.fdopen(handles[1], "wb", buffering=0) as out:
                reply = decode(file, out, request["rate"], request["seconds"], lambda size: _reserve(server, size))
            server.sendall(json.dumps(reply).encode() + b"\n")


def _reserve(server: socket.socket, size: int) -> bool:
    """Ask the server, which answers with a byte."""
    server.sendall(json.dumps({"room": size}).encode() + b"\n")
    return server.recv(1) == YES


if __name__ == "__main__":
    main(*map(int, sys.argv[1:4]))
