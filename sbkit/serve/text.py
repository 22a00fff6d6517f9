"""Text from clients, which must be UTF-8."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

from sbkit.errors import shown
from sbkit.serve.errors import invalid


def decode_utf8(data: bytes, what: str) -> str:
    """Decode bytes; ``what`` names them in the error."""
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid("not_utf8", f"{what} must be UTF-8: {error.reason} at byte {error.start}") from None


def parse_object(text: str, what: str) -> dict[str, Any]:
    """Parse a JSON object; ``what`` names it in errors. Duplicate keys are refused, and unpaired surrogates, which no
    response and no log could contain."""
    try:
        value = json.loads(text, object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)
        json.dumps(value, ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError:
        raise invalid("not_utf8", f"{what} has an unpaired surrogate, which is not a character") from None
    except (ValueError, RecursionError) as error:
        raise invalid("invalid_json", f"{what} is not JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise invalid("invalid_json", f"{what} must be a JSON object")
    return value


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        [(duplicate, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise invalid("duplicate_parameter", f"{shown(duplicate)} is given twice")
    return values


def _refuse_constant(name: str) -> float:
    raise invalid("invalid_json", f"{name} is not a valid JSON number")
