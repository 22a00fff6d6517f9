"""HTML that can't go unescaped by accident: strings are escaped unless they were built as tags here."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Any

_VOID = frozenset({"br", "hr", "img", "link", "meta", "source"})


class Markup(str):
    """A string that is already HTML."""

    __slots__ = ()


def tag(name: str, *children: Any, **attributes: Any) -> Markup:
    """Build an element. Plain strings in it and in its attributes are escaped; None is left out.

    >>> tag("p", "1 < 2 ", tag("b", "yes"), class_="note", data_count=3)
    '<p class="note" data-count="3">1 &lt; 2 <b>yes</b></p>'
    """
    parts = "".join(_attribute(key, value) for key, value in attributes.items())
    if name in _VOID:
        return Markup(f"<{name}{parts}>")
    return Markup(f"<{name}{parts}>{text(*children)}</{name}>")


def text(*children: Any) -> Markup:
    """Concatenate elements and escaped text; lists are flattened."""
    out: list[str] = []
    for child in children:
        if isinstance(child, Markup):
            out.append(child)
        elif isinstance(child, str) or not isinstance(child, Iterable):
            out.append("" if child is None else html.escape(str(child)))
        else:
            out.append(text(*child))
    return Markup("".join(out))


def _attribute(key: str, value: object) -> str:
    if value is None or value is False:
        return ""
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'
