"""What uvicorn is told about connections: which classes of ours run them, and their limits."""

from __future__ import annotations

import functools
from typing import Any

from sbkit.serve.connection_limit import ConnectionLimit
from sbkit.serve.http_connection import TimedConnection
from sbkit.serve.live_socket import MAX_FRAME_BYTES, LiveSocket

#: Bytes of a request's headers, with its path.
_MAX_HEADER_BYTES = 1 << 14


def protocol_options(limit: ConnectionLimit) -> dict[str, Any]:  # uvicorn's options, of several types
    """Return uvicorn's options for connections that ``limit`` admits."""
    return {
        "loop": "asyncio",
        "http": functools.partial(TimedConnection, limit),
        "h11_max_incomplete_event_size": _MAX_HEADER_BYTES,
        "ws": LiveSocket,
        # No limit for a ping's answer: it comes after audio that a busy server may not have read for long.
        "ws_ping_timeout": None,
        "ws_max_size": MAX_FRAME_BYTES,
        "ws_per_message_deflate": False,
    }
