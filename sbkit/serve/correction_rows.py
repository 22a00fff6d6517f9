"""The rows of a list of corrections, which people may edit: each is as this server writes them, or is named."""

from __future__ import annotations

import re
from typing import Any

from sbkit.errors import is_storable, shown
from sbkit.system import untrusted

#: An id is the name of a recording's file, which a request may delete.
_ID = re.compile(r"\w[\w.-]{0,199}")


def parse_rows(data: bytes) -> dict[str, dict[str, Any]]:
    """Parse the rows of a list by their ids; raises ``ValueError`` with the line that is none."""
    rows: dict[str, dict[str, Any]] = {}
    # Not splitlines, which also splits at what JSON leaves as it is, such as U+2028.
    for number, line in enumerate(data.split(b"\n"), 1):
        if line.strip():
            try:
                row = _parse_row(line)
            except ValueError as error:
                raise ValueError(f"line {number}: {error}") from None
            rows[row["id"]] = row
    return rows


def _parse_row(line: bytes) -> dict[str, Any]:
    try:
        row = untrusted.parse_json(line)
    except ValueError as error:
        raise ValueError(f"not JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError("not a JSON object")
    for name in ("id", "text"):
        if not isinstance(row.get(name), str):
            raise ValueError(f"{name} is {shown(row.get(name))}, and not a text")
    for name, value in row.items():
        if not is_storable(name) or (isinstance(value, str) and not is_storable(value)):
            raise ValueError(f"{shown(name)} has a character that can't be printed: {shown(value)}")
        if isinstance(value, (dict, list)):
            raise ValueError(f"{shown(name)} is {shown(value)}, and neither a text nor a number")
    if not _ID.fullmatch(row["id"]):
        raise ValueError(f"the id is {shown(row['id'])}, and can't be the name of a file")
    return row
