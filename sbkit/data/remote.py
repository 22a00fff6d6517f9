"""Recordings behind URLs: which may be opened at all, how much of one is read, and for how long.

A row of a corpus is a text that anyone may have written. Opened as it stands, a URL asks whatever server it names,
and one within another (``reference://...::http://...``) has had programs run. So a row's URL is opened only where
whoever runs the command has said so.
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
#: A server that is silent for so long is not waited for.
_SILENT_SECONDS = 20.0


def scheme_of(url: str) -> str | None:
    """``s3`` of ``s3://bucket/clip.wav``; None of a path."""
    match = _SCHEME.match(url)
    return match[1].lower() if match else None


def check_schemes(where: str, schemes: Iterable[str]) -> tuple[str, ...]:
    """Refuse what no row may name, whoever allows it."""
    schemes = tuple(schemes)
    if alien := [scheme for scheme in schemes if scheme not in SCHEMES]:
        raise SbkitError(f"{where} names {alien[0]!r}", hint=f"it may name {', '.join(SCHEMES)}")
    return schemes


@dataclass(frozen=True)
class Remote:
    """What of the URLs among recordings may be opened; by default none.

    Arguments
    ---------
    schemes : kinds of URL, of ``SCHEMES``
    megabytes, seconds : that one recording may have and take
    """

    schemes: tuple[str, ...] = ()
    megabytes: float = 512.0
    seconds: float = 120.0

    def refusal(self, url: str) -> str:
        """Why a URL is not opened; empty where it is."""
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
        """The bytes behind a URL, or ``size`` of them from ``offset`` on; ``OSError`` says why not."""
        if why := self.refusal(url):
            raise OSError(why)
        most = int(self.megabytes * 1e6)
        if size is not None and size > most:
            raise OSError(self._too_large)
        wanted = most + 1 if size is None else size
        try:
            if scheme_of(url) in _HTTP:
                data = _over_http(url, offset, wanted, self.seconds)
            else:
                data = _from_store(url, offset, wanted, self.seconds)
        except OSError:
            raise
        except Exception as error:  # no credentials, a package that is not installed: each client has its own
            raise OSError(str(error) or type(error).__name__) from error
        if len(data) > most:
            raise OSError(self._too_large)
        return data

    @property
    def _too_large(self) -> str:
        return f"larger than {self.megabytes:g} MB (corpus.url_megabytes)"


NOWHERE = Remote()


def _from_store(url: str, first: int, most: int, seconds: float) -> bytes:
    import fsspec  # only who reads from an object store pays for the import

    filesystem, inside = fsspec.core.url_to_fs(url)
    deadline = {"timeout": seconds} if filesystem.async_impl else {}
    try:
        return filesystem.cat_file(inside, start=first, end=first + most, **deadline)
    except TimeoutError:
        raise OSError(_late(seconds)) from None


def _late(seconds: float) -> str:
    return f"not there after {seconds:g} s (corpus.url_seconds)"


def _over_http(url: str, first: int, most: int, seconds: float) -> bytes:
    """At most so many bytes, from that server alone: no redirect is followed, and nothing is sent but the question."""
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
            "Range": f"bytes={first}-{first + most - 1}", "Accept-Encoding": "identity"})
        data = _body(connection.getresponse(), first, most)
    except Exception:
        if not late.is_set():
            raise
    finally:
        watch.cancel()
        connection.close()
    if late.is_set():
        raise OSError(_late(seconds))
    return data


def _hang_up(connected: socket.socket, late: threading.Event) -> None:
    late.set()
    with contextlib.suppress(OSError):  # it is closed just now
        connected.shutdown(socket.SHUT_RDWR)


def _body(response: http.client.HTTPResponse, first: int, most: int) -> bytes:
    if response.status in (301, 302, 303, 307, 308):
        raise OSError(f"it leads on to {response.getheader('Location')}, and redirects are not followed")
    if response.status not in (200, 206):
        raise FileNotFoundError if response.status == 404 else OSError(
            f"the server says {response.status} {response.reason}")
    if first and response.status == 200:
        raise OSError("the server gives no parts of files")
    length = response.length
    data = response.read(most)
    if length is not None and len(data) < min(length, most):
        raise OSError(f"the connection ended after {len(data)} of {length} bytes")
    return data
