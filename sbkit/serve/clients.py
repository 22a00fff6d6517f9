"""Client addresses, and the share of all places that one client may have."""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sbkit.serve.errors import busy

_OWN = ("127.0.0.1", "::1")  # from which a proxy on this machine connects
_HOME = 64  # bits of an IPv6 prefix that a provider assigns to one home, which owns all addresses in it


def address(scope: Mapping[str, Any]) -> str | None:
    """The client's address; None for this machine's own, which may be that of a proxy for everybody."""
    try:
        found = ipaddress.ip_address((scope.get("client") or ("",))[0].partition("%")[0])
    except ValueError:
        return None
    found = getattr(found, "ipv4_mapped", None) or found
    if str(found) in _OWN:
        return None
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, _HOME), strict=False))


class Shares:
    """Counts the places that each client has; clients without an address are not counted."""

    def __init__(self, places: int, share: float):
        self._most = max(1, round(places * share))
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, client: str | None, what: str) -> Iterator[None]:
        """Hold one place; raises ``ApiError`` 429 if the client has its full share."""
        if client is None:
            yield
            return
        if self._taken[client] >= self._most:
            raise busy(f"your address has {self._taken[client]} {what}, which is the limit per address", 5)
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            self._taken += Counter()  # drops clients without a place
