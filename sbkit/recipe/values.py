"""Python values of a recipe's scalars, and a check for texts that were meant as numbers, tuples, bools or null."""

from __future__ import annotations

import functools
import re
from typing import Any

from sbkit.recipe.source import UNKNOWN, Findings, Node

TUPLE = re.compile(r"\(.*\)")
_NUMBER = re.compile(r"[-+]?(\d[\d_]*\.?[\d_]*|\.\d[\d_]*)([eE][-+]?\d[\d_]*)?")
_GROUPED = re.compile(r"[-+]?[1-9]\d{0,2}([, ]\d{3})+(\.\d+)?")
_COMMA = re.compile(r"([-+]?\d+),(\d+)")
_CUT = re.compile(r"([-+]?\d+\.?\d*)[eE][-+]?")
_EXPRESSION = re.compile(r"[\d.\s()eE_]+((\*\*|//|[*/+])[-\d.\s()eE_]+)+")
_SPECIAL = {"inf": ".inf", "+inf": ".inf", "-inf": "-.inf", "infinity": ".inf", "nan": ".nan"}
#: Words that YAML 1.1 reads as true or false, and HyperPyYAML as texts.
TRUTHS = {"yes": "true", "no": "false", "on": "true", "off": "false"}


def static(node: Node) -> object:
    """The Python value of a scalar; the node itself for lists, mappings and objects; UNKNOWN if it is known later."""
    if node.value is UNKNOWN or node.tag in ("!ref", "!copy"):
        return UNKNOWN
    if not (node.tag or node.quoted) and is_tuple(node.value):
        return as_tuple(node.value)
    if node.tag.startswith(("!apply", "!module:", "!!")):
        return UNKNOWN
    return node.value if node.scalar and not node.tag else node


def data(node: Node) -> object:
    """The Python value of a scalar, list or mapping; UNKNOWN if any of it is an object or known later."""
    value = static(node)
    if not isinstance(value, Node):
        return value
    if value.tag:
        return UNKNOWN
    inside = [data(child) for child in value.children()]
    if any(each is UNKNOWN for each in inside):
        return UNKNOWN
    return dict(zip(value.value, inside, strict=True)) if isinstance(value.value, dict) else inside


def is_tuple(value: object) -> bool:
    """Whether a value is a text in the form of a tuple."""
    return isinstance(value, str) and TUPLE.fullmatch(value) is not None


def as_tuple(text: str) -> Any:  # a tuple, or UNKNOWN
    """The tuple that HyperPyYAML reads from ``(3, 3)``; PyYAML reads its items, so ``1e-3`` is a text."""
    import yaml  # takes a tenth of the time in which the command line refuses a wrong word

    try:
        return tuple(yaml.safe_load(f"[{text[1:-1]}]"))
    except yaml.YAMLError:
        return UNKNOWN


def looks_like_number(text: str) -> str | None:
    """The number that was meant, spelt correctly; None if the text wasn't meant as a number.

    >>> looks_like_number("1,000"), looks_like_number("0,5"), looks_like_number("1e-3"), looks_like_number("fr")
    ('1000', '0.5', '1e-3', None)
    """
    text = text.strip()
    if text.lower() in _SPECIAL:
        return _SPECIAL[text.lower()]
    if _NUMBER.fullmatch(text):
        return text.replace("_", "")
    if _GROUPED.fullmatch(text):
        return re.sub("[, ]", "", text)
    if match := _COMMA.fullmatch(text):
        return f"{match[1]}.{match[2]}"
    if match := _CUT.fullmatch(text):
        return match[1]
    return None


def expression(text: str) -> bool:
    """Whether a text is arithmetic, such as ``1/3`` or ``2 * 80``, which YAML doesn't compute."""
    return bool(_EXPRESSION.fullmatch(text.strip())) and any(char.isdigit() for char in text)


def check_text(node: Node, findings: Findings, in_list: bool = False) -> None:
    """Add a finding about a scalar that is a text though a number, a tuple, true, false or null was meant."""
    text = node.value
    if node.source is not None:
        return  # reported where it is written
    if not (node.tag or node.quoted) and is_tuple(text):
        parts = as_tuple(text)
        written = f"[{text[1:-1]}]"
        if "(" in text[1:-1]:
            findings.wrong(node, "tuple-as-text", f"{text!r} can't be read: a tuple can't contain tuples",
                           "write lists: [[3, 3], [2, 2]]")
        elif parts is UNKNOWN or "!ref" in text or "<" in text:
            findings.wrong(node, "tuple-as-text", f"{text!r} can't be read: a tuple can't contain references",
                           f"write {written}")
        else:
            for part in parts:
                if isinstance(part, str) and (number := looks_like_number(part)):
                    mantissa, _, power = number.partition("e")
                    hint = f"write {mantissa}.0e{power}" if power and "." not in mantissa else f"write {number}"
                    findings.wrong(node, "number-as-text",
                                   f"{text!r} contains {part!r}, which inside a tuple is a text",
                                   f"{hint}, or a list: {written}")
        # HyperPyYAML writes values that it has computed to text, and reads them again.
        if node.computed and not findings.is_reported(node):
            findings.warning("tuple-as-text", node.place, node.key,
                             f"{text!r} is a tuple in the first recipe that a program loads, and a text in the next",
                             f"write a list: [{text[1:-1]}]")
        return
    if node.tag or not isinstance(text, str):
        return
    if node.quoted and is_tuple(text):
        if all(looks_like_number(part) for part in text[1:-1].split(",") if part.strip()):
            findings.wrong(node, "tuple-as-text", f"{text!r} is a text, not a tuple", f"write a list: [{text[1:-1]}]")
        return
    if node.quoted:
        return
    if in_list and re.fullmatch(r"\(\s*[-+.\d]+", text):
        findings.wrong(node, "tuple-as-text", f"{text!r} is half a tuple: inside [ ] its comma separates items",
                       "write a list inside the list: [[3, 3], [2, 2]]")
    elif re.fullmatch(r"\(\s*[-+.\d].*", text):
        findings.wrong(node, "tuple-as-text", f"{text!r} is a text: the bracket is not closed", f"write [{text[1:]}]")
    elif text.lower() not in _SPECIAL and (number := looks_like_number(text)):  # nan is also a language code
        hint = f"write {number}" if number != text else "write the number itself, without !ref or quotes"
        if _COMMA.fullmatch(text) and not _GROUPED.fullmatch(text):
            hint += f", or [{text.replace(',', ', ')}] for two numbers"
        findings.wrong(node, "number-as-text", f"{text!r} is a text, not a number", hint)
    elif expression(text):
        findings.warning("number-as-text", node.place, node.key, f"{text!r} is a text and is not computed",
                         "write the number; arithmetic works after !ref with a <key> in it")
    elif text == "None":
        findings.warning("null-as-text", node.place, node.key, f"{text!r} is a text, not null", "write null")
    elif text in TRUTHS and node.key.rpartition(".")[2] != "language":
        findings.warning("truth-as-text", node.place, node.key, f"{text!r} is a text, not true or false",
                         f"write {TRUTHS[text]}, or quote it if the word is meant")


def unwrapped(value: object) -> tuple[Any, dict[str, Any]]:
    """Return the function or class inside partials, and its options; outer ones replace inner ones.

    >>> unwrapped(functools.partial(functools.partial(int, base=8), base=2))
    (<class 'int'>, {'base': 2})
    """
    options: dict[str, Any] = {}
    while isinstance(value, functools.partial):
        options = {**value.keywords, **options}
        value = value.func
    return value, options
