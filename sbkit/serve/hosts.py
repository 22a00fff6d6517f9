"""The names that a server answers to: a page elsewhere whose name was made to point here (DNS rebinding) isn't one."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

_OWN = ("localhost", "127.0.0.1", "[::1]")


def loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return ipaddress.ip_address(address).is_loopback


class Hosts:
    """What may stand in a request's ``Host``.

    Arguments
    ---------
    address : that is listened on; a loopback address answers to its own names alone
    allowed : further names; given with another address, it too answers to these and its own alone
    called : what the address was called when the server was started
    """

    def __init__(self, address: str, allowed: Iterable[str] = (), called: str = ""):
        own = [*_OWN, *(f"[{each}]" if ":" in each else each for each in (address, called) if each)]
        self._names = frozenset(map(_name, [*own, *allowed]))
        self._all = not (loopback(address) or list(allowed))

    def allow(self, host: str | None) -> bool:
        """Whether it is one of them, at any port; a request without any comes from no browser."""
        return self._all or host is None or _name(host) in self._names


def _name(host: str) -> str:
    """Without the port."""
    host = host.strip().lower()
    name, colon, port = host.rpartition(":")
    if colon and (not port or port.isdecimal()) and not name.endswith(":") and (":" not in name or name[-1:] == "]"):
        host = name
    return host.rstrip(".")
