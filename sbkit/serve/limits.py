"""Limits on what one client may use: sizes, lengths, counts and times."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import TypeVar

from sbkit.errors import SbkitError

MEGABYTE = 1 << 20
#: Seconds in which a server that got SIGTERM still accepts requests, and seconds to finish those in flight after that.
#: With the cleanup they are below 30 s, the default of Kubernetes until it kills a pod. It takes a pod out of its
#: services in a second or two.
DRAIN_SECONDS, GRACE_SECONDS = 5.0, 20.0
N = TypeVar("N", int, float)


def limit(default: N, help_text: str) -> N:
    """Declare a limit: its default, and its text in ``sbkit serve --help``."""
    declared: N = field(default=default, metadata={"help": help_text})
    return declared


@dataclass(frozen=True)
class Limits:
    """Limits of the server; all must be above 0."""

    max_upload_mb: float = limit(25.0, "megabytes per request")
    max_audio_seconds: float = limit(7200.0, "length of one decoded recording")
    max_requests: int = limit(64, "requests accepted at once; more get a 429")
    max_active: int = limit(16, "requests processed at once")
    max_live: int = limit(16, "live sessions at once")
    client_share: float = limit(
        0.5, "share of connections, requests, live sessions, threads, disk and queued audio for one address; no limit "
        "for 127.0.0.1 and ::1, or for clients of a proxy there")
    max_connections: int = limit(
        1024, "connections open at once, if ulimit -n allows it; beyond that the longest idle one is closed")
    max_disk_mb: float = limit(
        8192.0, "megabytes of the temporary folder for uploads and decoded audio, at most half of the free space; "
        "beyond that a request gets a 503")
    max_corrections_mb: float = limit(1024.0, "megabytes in the folder of --corrections")
    min_upload_kbs: float = limit(16.0, "slowest upload allowed, in kilobytes per second")
    upload_grace_seconds: float = limit(10.0, "time before the upload speed is checked")
    request_seconds: float = limit(300.0, "time limit for one request, including the upload")
    decoders: int = limit(2, "processes that decode audio")
    decode_seconds: float = limit(120.0, "processor time limit to decode one recording")
    idle_seconds: float = limit(60.0, "time without a message until a live session is closed")

    def __post_init__(self) -> None:
        for field_ in fields(self):
            value = getattr(self, field_.name)
            if not value > 0:
                option = f"--{field_.name.replace('_', '-')}"
                raise SbkitError("bad-value", f"{option} is {value}, but must be above 0", key=option, value=value)

    @property
    def upload_bytes(self) -> int:
        return int(self.max_upload_mb * MEGABYTE)

    @property
    def disk_bytes(self) -> int:
        return int(self.max_disk_mb * MEGABYTE)
