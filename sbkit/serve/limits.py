"""Limits on what one client may use: sizes, lengths, counts and times."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sbkit.errors import SbkitError

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """Limits of the server; all must be above 0."""

    max_upload_mb: float = 25.0
    """Megabytes of one request, counted while it arrives."""
    max_audio_seconds: float = 7200.0
    """Length of one recording, counted while it is decoded."""
    max_requests: int = 64
    """Requests at once, including those uploading or waiting; the next one gets a 429."""
    max_active: int = 16
    """Requests processed at once, which is also the number of decoded recordings in the temporary folder."""
    max_live: int = 16
    """Live sessions at once."""
    client_share: float = 0.5
    """Share of connections, places, threads, decoders, disk and audio in work that one address may have."""
    max_connections: int = 1024
    """Connections open at once; fewer if this process may not open so many files."""
    max_disk_mb: float = 8192.0
    """Megabytes of the temporary folder for all uploads and decoded recordings together."""
    min_upload_kbs: float = 16.0
    """Lowest upload speed in kilobytes per second, ..."""
    upload_grace_seconds: float = 10.0
    """... checked after this many seconds."""
    request_seconds: float = 300.0
    """Time limit for one request, from its first byte to the answer."""
    decoders: int = 2
    """Processes that decode audio."""
    decode_seconds: float = 120.0
    """Processor time to decode one recording; twice as much wall-clock time."""
    idle_seconds: float = 60.0
    """Seconds for which a live session may send nothing."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not value > 0:
                raise SbkitError(f"--{each.name.replace('_', '-')} is {value}, but must be above 0")

    @property
    def upload_bytes(self) -> int:
        """The upload limit in bytes."""
        return int(self.max_upload_mb * MEGABYTE)

    @property
    def disk_bytes(self) -> int:
        """The disk limit in bytes."""
        return int(self.max_disk_mb * MEGABYTE)
