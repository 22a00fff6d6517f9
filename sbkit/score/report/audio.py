"""Recordings small enough to be part of a page: mono MP3, which every browser plays, up to a given total size."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from typing import Protocol

import soundfile

from sbkit.data.audio import AudioError, read_audio
from sbkit.data.remote import NOWHERE, Remote

_RATE = 16_000
_COMPRESSION = 0.8  # variable bit rate, some 37 kbit/s for speech at 16 kHz
_LONGEST = 120.0  # seconds of one recording


class HasAudio(Protocol):
    """Where a recording is, and a name for it that no other has."""

    @property
    def id(self) -> str: ...
    @property
    def wav(self) -> str: ...
    @property
    def start(self) -> float: ...
    @property
    def duration(self) -> float: ...


class AudioEmbedder:
    """Makes data URIs until ``megabytes`` are used up, then gives the reason why there is none.

    Arguments
    ---------
    owned : whether a recording belongs to the run: a page is shown to others, and a run's results may name any file
    remote : which URLs may be opened
    """

    def __init__(self, megabytes: float, owned: Callable[[str], bool], remote: Remote = NOWHERE):
        self.owned, self.remote = owned, remote
        self.left = int(megabytes * 1e6)
        self.megabytes = megabytes
        self._known: dict[str, tuple[str | None, str | None]] = {}

    def get(self, one: HasAudio) -> tuple[str | None, str | None]:
        """Return (a data URI, None), or (None, the reason why there is none)."""
        if one.id not in self._known:
            self._known[one.id] = self._make(one)
        return self._known[one.id]

    def _make(self, one: HasAudio) -> tuple[str | None, str | None]:
        if self.left <= 0:
            return None, f"not embedded: the page's {self.megabytes:g} MB for recordings are used up"
        try:
            if not self.owned(one.wav):
                return None, "not embedded: it is neither in the run's folder nor in its manifests"
            signal = read_audio(one.wav, start=one.start, duration=min(one.duration, _LONGEST), sample_rate=_RATE,
                                remote=self.remote)
            encoded = io.BytesIO()
            soundfile.write(encoded, signal, _RATE, format="MP3", subtype="MPEG_LAYER_III",
                            bitrate_mode="VARIABLE", compression_level=_COMPRESSION)
        except AudioError as error:
            return None, f"the recording can't be read: {error.cause}"
        except ValueError as error:  # no path has zeros, or halves of surrogate pairs
            return None, f"not embedded: its path is none ({error})"
        except soundfile.LibsndfileError as error:  # some are built without MP3
            return None, f"not embedded: {error}"
        uri = "data:audio/mpeg;base64," + base64.b64encode(encoded.getvalue()).decode()
        if len(uri) > self.left:
            self.left = 0
            return self._make(one)
        self.left -= len(uri)
        return uri, None
