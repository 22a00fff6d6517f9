"""The names that a server answers to: a page elsewhere whose name was made to point here (DNS rebinding) isn't one."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable

_OWN = ("localhost", "127.0.0.1", "[::1]")


def loopback(host: str) -> bool:
    """Whether only this machine reaches it."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


class Hosts:
    """What may stand in a request's ``Host``.

    Arguments
    ---------
    listening : the address that is listened on; a loopback address answers to its own names alone
    allowed : further names; given with another address, it too answers to these and its own alone
    """

    def __init__(self, listening: str, allowed: Iterable[str] = ()):
        self._names = frozenset(map(_name, [*_OWN, f"[{listening}]" if ":" in listening else listening, *allowed]))
        self._all = not (loopback(listening) or list(allowed))

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
