"""``sbkit show RECIPE.yaml [--key value ...]``: print the recipe as one file, with where each value comes from."""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING

from sbkit.errors import SbkitError
from sbkit.system.environment import check_torch

if TYPE_CHECKING:
    from sbkit.recipe.source import Node

HELP = (
    "Behind each is a comment: the value of a reference, and its file and line, the command line, or that it is the\n"
    "default of the task. What is printed can be used as a recipe. Mistakes are printed as by check."
)


def run(argv: list[str]) -> int:
    check_torch()
    from sbkit.recipe import arguments, load, writing
    from sbkit.recipe.names import declared
    from sbkit.recipe.reading import read
    from sbkit.recipe.report import Report
    from sbkit.recipe.source import Findings

    request = arguments.parse(argv)
    findings = Findings()
    read(request.path, request.overrides, findings)
    report = Report(str(request.path), built=False)
    report.add(findings)
    try:
        root = load.resolved(request.path, request.overrides)
    except SbkitError:
        if not report.errors:
            raise
        print(report.problems(), file=sys.stderr)
        return 1
    references = _valid_references(root)

    def as_shown(node: Node) -> Node:
        """Return a node as it is shown: a reference that is still right, and after each key its value and its file."""
        if node in references:
            return dataclasses.replace(node, tag="!ref", value=references[node], comments={})
        comments = {}
        for key, child in node.items():
            remarks = []
            if child in references:
                remarks.append(writing.scalar(child.value))
            if isinstance(node.value, dict):
                remarks.append(str(node.origin_of(key)[0]))
            if remarks:
                comments[key] = list[str](), f"# {', '.join(remarks)}"
        return dataclasses.replace(node, comments=comments)

    print(writing.text(root.mapped(as_shown)), end="")
    for name, key in declared(root).items():
        if name not in root.value and not key.needed:
            default = "[]" if key.default == () else writing.scalar(key.default)
            print(f"{name}: {default}    # default")
    if findings:
        print(report.problems(), file=sys.stderr)
    return 1 if report.errors else 0


def _valid_references(root: Node) -> dict[Node, str]:
    """The references that can stay, so that what is printed follows --key value as the recipe does: a corpus sets
    output_neurons.

    One can name a key of the whole file with a plain value, or with a reference further above, as HyperPyYAML reads
    them.
    """
    from sbkit.recipe.resolve import compute
    from sbkit.recipe.source import BASE, REFERENCE

    values = {f"<{key}>": node.value for key, node in root.items() if node.scalar and not node.tag}
    later = {f"<{key}>" for key, node in root.items() if node.reference}
    references: dict[Node, str] = {}
    for key, top in root.items():
        for node in top.walk():
            reference = node.reference.replace(f"<{BASE}[", "<").replace("]>", ">")
            names = set(REFERENCE.findall(reference))
            if not names or not values.keys() >= names or not later.isdisjoint(names):
                continue
            # In a file that the recipe reads, the same name may stand for another value, or for no number.
            with contextlib.suppress(ArithmeticError, ValueError):
                if reference in names:
                    value = values[reference]
                else:
                    value = compute(REFERENCE.sub(lambda name: str(values[name[0]]), reference))
                if value == node.value:
                    references[node] = reference
        later.discard(f"<{key}>")
    return references
