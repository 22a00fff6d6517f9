"""Writes a resolved recipe as a YAML of one file, which HyperPyYAML loads without includes and references."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator

import yaml

from sbkit.recipe.source import Node
from sbkit.recipe.values import TUPLE

#: Texts that need no quotes: words and paths, unless they read as truth, null or a number.
_PLAIN = re.compile(r"(?!(?:null|true|false|yes|no|on|off|y|n|inf|nan)$)[a-z_/][\w./-]*(?: \w[\w./-]*)*", re.IGNORECASE)
_REFERENCE = re.compile(r"[\w<./][\w<>/.()*+ -]*>[\w<>/.()*+ -]*")
_WIDTH = 100  # of a list in one line


def text(root: Node) -> str:
    """A recipe as text, with its comments; a node with several references is written once, with an anchor."""
    return "".join(f"{line.rstrip()}\n" for line in _Writer(root).block(root, ""))


class _Writer:
    def __init__(self, root: Node):
        count = Counter(child for node in root.walk() for child in node.children() if child.tag or not child.scalar)
        self.shared = {each for each, times in count.items() if times > 1}
        self.anchors: dict[Node, str] = {}

    def block(self, node: Node, indent: str) -> Iterator[str]:
        """The lines of a mapping or list, one item per line."""
        for key, child in node.items():
            above, behind = node.comments.get(key, ([], ""))
            yield from (indent + line for line in above)
            first, *rest = self.lines(child, indent)
            if behind and rest and not child.tag and isinstance(child.value, list):  # else ruamel joins the lines below
                yield indent + behind
                behind = ""
            name = f"{scalar(key)}:" if isinstance(node.value, dict) else "-"
            yield f"{indent}{name} {first}{'    ' if behind else ''}{behind}"
            yield from rest
        yield from (indent + line for line in node.comments.get(None, ([], ""))[0])

    def lines(self, node: Node, indent: str) -> Iterator[str]:
        """The text after the key of a value, and the lines below it."""
        if node in self.anchors:
            yield f"*{self.anchors[node]}"
            return
        head = [node.tag] if node.tag else []
        if node in self.shared:
            self.anchors[node] = f"id{len(self.anchors) + 1:03}"
            head.insert(0, f"&{self.anchors[node]}")
        if node.scalar:
            if node.value or not node.tag:
                head.append(scalar(node.value, bool(node.tag), node.quoted))
            yield " ".join(head)
        elif (flow := self.flow(node)) is not None:
            yield " ".join([*head, flow])
        else:
            yield " ".join(head)
            yield from self.block(node, indent + "    ")

    def flow(self, node: Node) -> str | None:
        """A short list of plain values, or an empty one or mapping, in one line; None for anything else."""
        if not node.value:
            return "{}" if isinstance(node.value, dict) else "[]"
        inside = [scalar(child.value, quoted=child.quoted) if child.scalar else self.flow(child)
                  for child in node.children() if not child.tag and child not in self.shared]
        if isinstance(node.value, dict) or node.comments or None in inside or len(inside) < len(node.value) or any(
                str(each).startswith("!tuple") for each in inside):  # in brackets, its comma would separate items
            return None
        line = f"[{', '.join(map(str, inside))}]"
        return line if len(line) <= _WIDTH else None


def scalar(value: object, tagged: bool = False, quoted: bool = False) -> str:
    """A number, truth, null or text as YAML; a text in quotes is no tuple."""
    if isinstance(value, str):
        if TUPLE.fullmatch(value) and not (tagged or quoted):
            return f"!tuple {value}"
        if _PLAIN.fullmatch(value) or (tagged and _REFERENCE.fullmatch(value)):
            return value
    style = '"' if isinstance(value, str) else None
    written = yaml.safe_dump(value, default_style=style, width=math.inf, allow_unicode=True)
    return written.strip().removesuffix("...").strip()
