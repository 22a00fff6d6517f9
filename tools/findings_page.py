"""Writes docs/reference/findings.md, which explains each code of an error or a finding: ``make docs``.

It also compares the codes that the source uses with those that ``sbkit/explanations`` explains, and fails if they
differ.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable, Iterator, Mapping
from itertools import groupby
from pathlib import Path

from sbkit.explanations import Explanation, all_explanations

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "reference" / "findings.md"
#: OpenAI's own codes of HTTP errors have underscores.
_CODE = re.compile(r"[a-z0-9]+(-[a-z0-9]+)*")

_HEAD = """# Errors and findings

Made by `make docs` from the files in `sbkit/explanations`; edit those, not this page.

Each error that ends a command has a code, and so has each finding of `sbkit check`, of `sbkit doctor` and of a run's
report. On the screen it stands in brackets at the end of the message:

    error: results/rnu does not exist; name the output_folder of a run [no-such-path]

`sbkit explain CODE` prints what stands here. With `--json`, `sbkit check` has the code of each finding, and the error
that ends a command is `{"error": {"code": ..., "message": ..., "hint": ..., "file": ..., "line": ..., "key": ...,
"value": ...}}` on stdout, without the fields that it lacks. Programs can rely on codes. The words of messages may
change.

The server answers with OpenAI's form of an error, `{"error": {"message", "type", "param", "code"}}`, also in an event
of a stream and in the last message of a live session. Where OpenAI has a code for the cause, that is used:
`invalid_value` for `bad-value`. Other codes are spelt as OpenAI spells its own: `audio_too_long` is what stands here as
`audio-too-long`.

A warning of `sbkit check` that doesn't matter for your recipe can be ignored: by an option, or by a key of the recipe.
Errors can't be ignored.

    sbkit check hparams/ctc.yaml --ignore unread-key

```yaml
ignore_findings: [unread-key]
```
"""


def findings_page() -> str:
    """Return the text of the page: the codes by area, in alphabetical order."""
    parts = [_HEAD]
    explanations = sorted(all_explanations().values(), key=lambda explanation: (explanation.area, explanation.code))
    for area, of_area in groupby(explanations, key=lambda explanation: explanation.area):
        parts.append(f"\n## {area}\n")
        parts += [f"\n{_section(explanation)}\n" for explanation in of_area]
    return "".join(parts)


def _section(explanation: Explanation) -> str:
    return f"#{explanation.text}"  # a level below the area's


def problems() -> list[str]:
    """Return a line for each code that is used and not explained, or explained and not used."""
    used = used_codes()
    explained = all_explanations()
    lines = [f"{code} is not explained in sbkit/explanations: {places[0]}"
             for code, places in sorted(used.items()) if code not in explained]
    lines += [f"{code} is explained under {explained[code].area}, and nothing uses it"
              for code in sorted(explained.keys() - used.keys() - all_texts())]
    return lines


def all_texts(package: Path = ROOT / "sbkit") -> set[str]:
    """Return all literal texts in a package's source: a code may stand in a table."""
    return {node.value for path in sorted(package.rglob("*.py"))
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)}


def used_codes(package: Path = ROOT / "sbkit") -> dict[str, list[str]]:
    """Return the codes that a package's source has, each with its places.

    A code is a literal that is given to a parameter, a field or a variable called ``code``.
    """
    modules = {path: ast.parse(path.read_text(encoding="utf-8")) for path in sorted(package.rglob("*.py"))}
    takers = _takers(modules.values())
    used: dict[str, list[str]] = {}
    for path, module in modules.items():
        constants = _constants(module)
        for expression in _code_expressions(module, takers):
            for code in _literals(expression, constants):
                used.setdefault(code, []).append(f"{path.relative_to(package.parent)}:{expression.lineno}")
    return used


def _takers(modules: Iterable[ast.Module]) -> dict[str, set[int]]:
    """Return the functions and classes that take a code, by their names: the positions of that argument."""
    takers: dict[str, set[int]] = {}
    bases: dict[str, list[str]] = {}
    for module in modules:
        for node in ast.walk(module):
            if isinstance(node, ast.FunctionDef) and node.name != "__init__":
                _add(takers, node.name, _position(_parameters(node)))
            elif isinstance(node, ast.ClassDef):
                parameters = _parameters_of_class(node)
                if parameters is None:
                    bases[node.name] = [_last_name(base) for base in node.bases]
                else:
                    _add(takers, node.name, _position(parameters))
    # A class without a constructor of its own takes what its base takes.
    found = True
    while found:
        found = False
        for name, of_class in bases.items():
            for base in of_class:
                if name not in takers and base in takers:
                    takers[name] = takers[base]
                    found = True
    return takers


def _add(takers: dict[str, set[int]], name: str, position: int | None) -> None:
    if position is not None:
        takers.setdefault(name, set()).add(position)


def _position(parameters: list[str]) -> int | None:
    return parameters.index("code") if "code" in parameters else None


def _parameters(function: ast.FunctionDef) -> list[str]:
    """The names of its parameters, the positional ones first, without ``self``."""
    arguments = function.args
    names = [argument.arg for argument in (*arguments.posonlyargs, *arguments.args)]
    return [*names[names[:1] in (["self"], ["cls"]):], *(argument.arg for argument in arguments.kwonlyargs)]


def _parameters_of_class(node: ast.ClassDef) -> list[str] | None:
    """The parameters of a class's constructor, or its fields; None if it has neither."""
    for statement in node.body:
        if isinstance(statement, ast.FunctionDef) and statement.name == "__init__":
            return _parameters(statement)
    fields = [statement.target.id for statement in node.body
              if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)]
    return fields if "code" in fields else None


def _code_expressions(module: ast.Module, takers: Mapping[str, set[int]]) -> Iterator[ast.expr]:
    """Yield the expressions that are given where a code is taken."""
    for node in ast.walk(module):
        if isinstance(node, ast.Call):
            yield from _given(node, takers.get(_last_name(node.func), set()))
        elif isinstance(node, ast.ClassDef):
            of_bases = set().union(*(takers.get(_last_name(base), set()) for base in node.bases))
            for call in ast.walk(node):
                if isinstance(call, ast.Call) and ast.unparse(call.func) == "super().__init__":
                    yield from _given(call, of_bases)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if any(_last_name(target) == "code" for target in targets):
                yield node.value
        elif isinstance(node, ast.arguments):
            positional = [*node.posonlyargs, *node.args]
            with_defaults = [*zip(reversed(positional), reversed(node.defaults), strict=False),
                             *zip(node.kwonlyargs, node.kw_defaults, strict=True)]
            yield from (default for argument, default in with_defaults if argument.arg == "code" and default)


def _given(call: ast.Call, positions: set[int]) -> Iterator[ast.expr]:
    """Yield the arguments of a call that are codes."""
    yield from (argument for place, argument in enumerate(call.args) if place in positions)
    if positions:
        yield from (keyword.value for keyword in call.keywords if keyword.arg == "code")


def _constants(module: ast.Module) -> dict[str, ast.expr]:
    """The values of a module's own names."""
    return {target.id: node.value for node in module.body if isinstance(node, ast.Assign)
            for target in node.targets if isinstance(target, ast.Name)}


def _literals(expression: ast.expr, constants: Mapping[str, ast.expr]) -> Iterator[str]:
    """Yield the codes that an expression can be."""
    if isinstance(expression, ast.Constant):
        if isinstance(expression.value, str) and _CODE.fullmatch(expression.value):
            yield expression.value
    elif isinstance(expression, ast.IfExp):
        yield from _literals(expression.body, constants)
        yield from _literals(expression.orelse, constants)
    elif isinstance(expression, ast.BoolOp):
        for value in expression.values:
            yield from _literals(value, constants)
    elif isinstance(expression, ast.Name) and expression.id in constants:
        yield from _literals(constants[expression.id], {})
    elif isinstance(expression, ast.Subscript):
        yield from _literals(expression.value, constants)
    elif isinstance(expression, ast.Dict):
        for value in expression.values:
            yield from _literals(value, constants)


def _last_name(expression: ast.expr) -> str:
    """The last part of a name such as ``errors.SbkitError``; empty for other expressions."""
    if isinstance(expression, ast.Subscript):  # a generic class
        return _last_name(expression.value)
    if isinstance(expression, ast.Attribute):
        return expression.attr
    return expression.id if isinstance(expression, ast.Name) else ""


def main() -> int:
    """Write the page, unless a code is missing on either side."""
    found = problems()
    if found:
        print(*found, sep="\n", file=sys.stderr)
        return 1
    PAGE.write_text(findings_page(), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
