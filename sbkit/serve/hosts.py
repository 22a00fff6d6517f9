"""Host names that the server answers to, as a protection against DNS rebinding."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

_OWN = ("localhost", "127.0.0.1", "[::1]")


def loopback(address: str) -> bool:
    """Whether an address can only be reached from this machine."""
    return ipaddress.ip_address(address).is_loopback


class Hosts:
    """The allowed values of a request's ``Host`` header.

    Arguments
    ---------
    address : the address listened on; a loopback address answers only to its own names
    allowed : further names; if given, any other address too answers only to these and its own
    called : the address as given when the server was started
    """

    def __init__(self, address: str, allowed: Iterable[str] = (), called: str = ""):
        own = [*_OWN, *(f"[{each}]" if ":" in each else each for each in (address, called) if each)]
        self._names = frozenset(map(_name, [*own, *allowed]))
        self._all = not (loopback(address) or list(allowed))

    def allow(self, host: str | None) -> bool:
        """Whether a host is allowed, at any port; requests without a host don't come from browsers."""
        return self._all or host is None or _name(host) in self._names


def _name(host: str) -> str:
    """Strip the port."""
    host = host.strip().lower()
    name, colon, port = host.rpartition(":")
    if colon and (not port or port.isdecimal()) and not name.endswith(":") and (":" not in name or name[-1:] == "]"):
        host = name
    return host.rstrip(".")
