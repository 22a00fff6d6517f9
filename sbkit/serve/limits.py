"""What one client may cost the others: sizes, lengths, counts and times, all of them bounded."""

from __future__ import annotations

from dataclasses import dataclass, fields

from sbkit.errors import SbkitError

MEGABYTE = 1 << 20


@dataclass(frozen=True)
class Limits:
    """All above 0."""

    max_upload_mb: float = 25.0
    """Of one request, counted while it comes in."""
    max_audio_seconds: float = 7200.0
    """Of one recording, counted while it is decoded."""
    max_requests: int = 64
    """In the house at once, those that still upload or wait included; the next one gets a 429."""
    max_active: int = 16
    """Of those, how many are worked on at once; so many recordings lie decoded in the temporary folder."""
    max_live: int = 16
    """Live sessions at once."""
    client_share: float = 0.5
    """Of the places for requests, and of those for live sessions, that one address may have."""
    max_connections: int = 1024
    """Open at once; fewer where this process may not open so many files."""
    max_disk_mb: float = 8192.0
    """That uploads and decoded recordings may take of the temporary folder, all together."""
    min_upload_kbs: float = 16.0
    """Kilobytes a second that an upload has to come in at, ..."""
    upload_grace_seconds: float = 10.0
    """... after so many seconds."""
    request_seconds: float = 300.0
    """For one request, from its first byte to the answer."""
    decoders: int = 2
    """Processes that decode audio."""
    decode_seconds: float = 120.0
    """Of processor time for one recording; twice as much by the clock."""
    idle_seconds: float = 60.0
    """That a live session may send nothing."""

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if not value > 0:
                raise SbkitError(f"--{each.name.replace('_', '-')} is {value} and must be above 0")

    @property
    def upload_bytes(self) -> int:
        """As a number of bytes."""
        return int(self.max_upload_mb * MEGABYTE)

    @property
    def disk_bytes(self) -> int:
        """As a number of bytes."""
        return int(self.max_disk_mb * MEGABYTE)
