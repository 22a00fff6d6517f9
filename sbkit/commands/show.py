"""``sbkit show RECIPE.yaml [--key value ...]``: print the recipe as one file, with where each value comes from."""

from __future__ import annotations

import contextlib
import sys

from sbkit.errors import SbkitError
from sbkit.system.environment import check_torch

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
    from sbkit.recipe.resolve import compute
    from sbkit.recipe.source import BASE, REFERENCE, Findings, Node

    request = arguments.parse(argv)
    read(request.path, request.overrides, findings := Findings())
    report = Report(str(request.path), built=False)
    report.add(findings)
    try:
        root = load.resolved(request.path, request.overrides)
    except SbkitError:
        if not report.errors:
            raise
        print(report.problems(), file=sys.stderr)
        return 1
    # References stay, so that what is printed follows --key value as the recipe does: a corpus sets output_neurons. One
    # can name a key of the whole file with a plain value, or with a reference further above, as HyperPyYAML reads them.
    values = {f"<{key}>": node.value for key, node in root.items() if node.scalar and not node.tag}
    later = {f"<{key}>" for key, node in root.items() if node.reference}
    kept: dict[Node, str] = {}
    for key, top in root.items():
        for node in top.walk():
            text = node.reference.replace(f"<{BASE}[", "<").replace("]>", ">")
            names = set(REFERENCE.findall(text))
            if names and values.keys() >= names and later.isdisjoint(names):
                with contextlib.suppress(ArithmeticError, ValueError):  # the same names in another file of its own
                    value = values[text] if text in names else compute(
                        REFERENCE.sub(lambda name: str(values[name[0]]), text))
                    if value == node.value:
                        kept[node] = text
        later.discard(f"<{key}>")
    for node in root.walk():
        node.comments = {}
        for key, child in node.items():
            words = [writing.scalar(child.value)] if child in kept else []
            words += [str(node.origin_of(key)[0])] if isinstance(node.value, dict) else []
            if words:
                node.comments[key] = [], f"# {', '.join(words)}"
    for node, text in kept.items():
        node.tag, node.value = "!ref", text
    print(writing.text(root), end="")
    for name, known in declared(root).items():
        if name not in root.value and not known.needed:
            print(f"{name}: {writing.scalar(known.default) if known.default != () else '[]'}    # default")
    if findings:
        print(report.problems(), file=sys.stderr)
    return 1 if report.errors else 0
