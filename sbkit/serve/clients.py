"""Who a client is, and the share of all places that one client may have."""

from __future__ import annotations

import contextlib
import ipaddress
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

from sbkit.serve.errors import busy

_HOME = 64  # bits of an IPv6 address that a provider gives to one house, which has all addresses behind them


def address(scope: Mapping[str, Any]) -> str | None:
    """Of the client; None for this machine's own, behind whose address a proxy may stand for everybody."""
    try:
        found = ipaddress.ip_address((scope.get("client") or ("",))[0].partition("%")[0])
    except ValueError:
        return None
    found = getattr(found, "ipv4_mapped", None) or found
    if found.is_loopback:
        return None
    return str(found) if found.version == 4 else str(ipaddress.ip_network((found, _HOME), strict=False))


class Shares:
    """How many of the places each client has; who has no address is not counted."""

    def __init__(self, places: int, share: float):
        self._most = max(1, round(places * share))
        self._taken: Counter[str] = Counter()

    @contextlib.contextmanager
    def place(self, client: str | None, what: str) -> Iterator[None]:
        """One of them; ``ApiError`` 429 for who has all that one may have."""
        if client is None:
            yield
            return
        if self._taken[client] >= self._most:
            raise busy(f"your address has {self._taken[client]} {what}, as many as one may have", 5)
        self._taken[client] += 1
        try:
            yield
        finally:
            self._taken[client] -= 1
            self._taken += Counter()  # drops who has none
