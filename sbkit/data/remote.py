"""Recordings behind URLs: which may be opened, and limits of size and time.

The rows of a corpus may come from anyone. Opening a URL from a row sends a request to any server that it names, and
chained URLs (``reference://...::http://...``) have been used to run programs. So a URL is opened only if the user who
runs the command allows it.
"""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import threading
from collections.abc import Iterable
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from sbkit.errors import SbkitError

#: Kinds of URL that can be allowed: object stores by their clients, the hub, and plain HTTP.
SCHEMES = ("s3", "s3a", "gs", "gcs", "az", "abfs", "abfss", "adl", "oci", "oss", "tos", "hf", "https", "http", "memory")
_HTTP = ("https", "http")
_SCHEME = re.compile(r"([A-Za-z][\w+.-]*)://")
_SAFE = "/%:@!$&'()*+,;=~-._?"
#: Seconds without an answer after which a request fails.
_SILENT_SECONDS = 20.0


def scheme_of(url: str) -> str | None:
    """The scheme of a URL, such as ``s3`` for ``s3://bucket/clip.wav``; None for a path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


def check_schemes(where: str, schemes: Iterable[str]) -> tuple[str, ...]:
    """Refuse schemes that can't be allowed; return the others as a tuple."""
    schemes = tuple(schemes)
    if unknown := [scheme for scheme in schemes if scheme not in SCHEMES]:
        raise SbkitError("bad-value", f"{where} names {unknown[0]!r}", hint=f"it may name {', '.join(SCHEMES)}",
                         value=unknown[0])
    return schemes


class UrlNotAllowed(OSError):
    """Raised for a URL that may not be opened."""


@dataclass(frozen=True)
class Remote:
    """Which URLs may be opened, by default none, and the limits for each.

    schemes : kinds of URL, among ``SCHEMES``
    megabytes, seconds : limits of size and download time for one recording
    """

    schemes: tuple[str, ...] = ()
    megabytes: float = 512.0
    seconds: float = 120.0

    def refusal(self, url: str) -> str:
        """Why a URL is not opened; empty if it may be opened."""
        scheme = scheme_of(url)
        if "::" in url:
            return "a URL within a URL (::) is never opened"
        if scheme not in SCHEMES:
            return f"URLs that begin with {url.partition('://')[0]}:// are never opened"
        if scheme not in self.schemes:
            return (f"{scheme}:// URLs are opened only where that is allowed "
                    f"(corpus.schemes: [{scheme}] in the recipe; --schemes {scheme} of shard, report and transcribe)")
        return ""

    def read(self, url: str, offset: int = 0, size: int | None = None) -> bytes:
        """Download the bytes behind a URL, or ``size`` of them from ``offset`` on; ``OSError`` if that fails."""
        if why := self.refusal(url):
            raise UrlNotAllowed(why)
        limit = int(self.megabytes * 1e6)
        too_large = f"larger than {self.megabytes:g} MB (corpus.url_megabytes)"
        if size is not None and size > limit:
            raise OSError(too_large)
        wanted = limit + 1 if size is None else size
        try:
            if scheme_of(url) in _HTTP:
                data = _over_http(url, offset, wanted, self.seconds)
            else:
                import asyncio

                import fsspec  # slow, and only needed for object stores

                filesystem, inside = fsspec.core.url_to_fs(url)
                deadline = {"timeout": self.seconds} if filesystem.async_impl else {}
                try:
                    data = filesystem.cat_file(inside, start=offset, end=offset + wanted, **deadline)
                except (asyncio.TimeoutError, TimeoutError):  # two in Python 3.10
                    raise OSError(f"not downloaded after {self.seconds:g} s (corpus.url_seconds)") from None
        except OSError:
            raise
        except Exception as error:  # clients have different ones, for missing credentials or packages
            raise OSError(str(error) or type(error).__name__) from error
        if len(data) > limit:
            raise OSError(too_large)
        return data


NO_REMOTE = Remote()


def _over_http(url: str, first: int, max_bytes: int, seconds: float) -> bytes:
    """Download at most ``max_bytes`` bytes from this server; redirects aren't followed, and no credentials are sent."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme.lower() == "https" else http.client.HTTPConnection
    connection = kind(parts.hostname or "", parts.port, timeout=min(seconds, _SILENT_SECONDS))
    late = threading.Event()
    connection.connect()
    watch = threading.Timer(seconds, _hang_up, (connection.sock, late))
    watch.daemon = True
    watch.start()
    try:
        target = quote(parts.path or "/", safe=_SAFE) + (f"?{quote(parts.query, safe=_SAFE)}" if parts.query else "")
        connection.request("GET", target, headers={
            "Range": f"bytes={first}-{first + max_bytes - 1}", "Accept-Encoding": "identity"})
        response = connection.getresponse()
        if response.status in (301, 302, 303, 307, 308):
            raise OSError(f"it redirects to {response.getheader('Location')}, and redirects are not followed")
        if response.status not in (200, 206):
            raise FileNotFoundError if response.status == 404 else OSError(
                f"the server answered {response.status} {response.reason}")
        if first and response.status == 200:
            raise OSError("the server does not support range requests")
        length = response.length
        data = response.read(max_bytes)
        if length is not None and len(data) < min(length, max_bytes):
            raise OSError(f"the connection ended after {len(data)} of {length} bytes")
    except Exception:
        if not late.is_set():
            raise
    finally:
        watch.cancel()
        connection.close()
    if late.is_set():
        raise OSError(f"not downloaded after {seconds:g} s (corpus.url_seconds)")
    return data


def _hang_up(connected: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):  # it was closed meanwhile
        connected.shutdown(socket.SHUT_RDWR)

