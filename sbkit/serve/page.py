"""The page at /: one file with its style and script, which contacts only this server."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

from fastapi.responses import HTMLResponse

_FILE = Path(__file__).with_name("page.html")
_INLINE = re.compile(r"<(script|style)>(.*?)</\1>", re.DOTALL)


@functools.cache
def _read() -> tuple[str, str]:
    """Read the page, and make the policy that allows only its own script and style."""
    text = _FILE.read_text(encoding="utf-8")
    digests = {kind: base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()
               for kind, inside in _INLINE.findall(text)}
    policy = (f"default-src 'none'; script-src 'sha256-{digests['script']}' blob:; worker-src blob:; "
              f"style-src 'sha256-{digests['style']}'; connect-src 'self'; img-src data:; media-src blob:; "
              "base-uri 'none'; form-action 'none'; frame-ancestors 'none'")
    return text, policy


def response() -> HTMLResponse:
    """The response for /."""
    text, policy = _read()
    return HTMLResponse(text, headers={"content-security-policy": policy, "referrer-policy": "no-referrer",
                                       "cache-control": "no-cache"})
