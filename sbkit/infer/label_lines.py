"""The file of recordings that were transcribed, a line each, so that none is transcribed twice."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from sbkit.infer.recordings import Recording
from sbkit.system import untrusted


def place_of(audio: str, start: float) -> tuple[str, float]:
    """Return where a recording is, however the command line or a list names it."""
    return audio if "://" in audio else os.path.abspath(audio), start


def key_of(recording: Recording) -> str:
    """Return the key of a recording, the same however the command line names it."""
    return json.dumps([*place_of(str(recording.audio), recording.start), recording.duration])


def path_of(key: str) -> str:
    """Return the path of a recording; bytes that aren't UTF-8, which no list can hold, are escaped."""
    return str(json.loads(key)[0]).encode("utf-8", "backslashreplace").decode()


def read_lines(path: Path) -> Iterator[dict[str, Any]]:  # JSON
    """Read the lines of the file, except interrupted ones."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield untrusted.parse_json(line)
