"""Annotations: a bare `Any` says nothing to a reader, so each that is left has its reason beside it."""

import ast
import io
import textwrap
import tokenize
from pathlib import Path

import pytest

import sbkit

HOME = Path(sbkit.__file__).parent


def bare_in(code):
    """Lines with an annotation or an alias that is `Any`, alone or in a union, and with no comment.

    ``*args`` and ``**kwargs`` are what they are passed on to, and in ``dict[str, Any]`` the rest says enough.
    """
    lines = {node.lineno for node in annotations_in(ast.parse(code)) if is_any(node)}
    return sorted(lines - commented_in(code))


def annotations_in(tree):
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            given = node.args
            yield from (each.annotation for each in (*given.posonlyargs, *given.args, *given.kwonlyargs))
            yield node.returns
        elif isinstance(node, ast.AnnAssign):
            yield node.annotation
        elif isinstance(node, ast.Assign):
            yield node.value


def is_any(node):
    if isinstance(node, ast.BinOp):
        return is_any(node.left) or is_any(node.right)
    return isinstance(node, ast.Name) and node.id == "Any"


def commented_in(code):
    tokens = tokenize.generate_tokens(io.StringIO(code).readline)
    return {token.start[0] for token in tokens if token.type == tokenize.COMMENT}


@pytest.mark.parametrize("code", [
    "def f(x: Any): pass", "def f(x: Any, /): pass", "def f(*, x: Any = None): pass", "async def f() -> Any: pass",
    "def f(x: int | Any | None): pass", "class C:\n    x: Any = 1", "def f():\n    def g(x: Any): pass", "Tree = Any",
    "x: Any = 'a # in a text'",
])
def test_a_bare_any_is_found(code):
    assert bare_in(code) == [next(i for i, line in enumerate(code.splitlines(), 1) if "Any" in line)]


@pytest.mark.parametrize("code", [
    "def f(*args: Any, **kwargs: Any): pass", "def f(x: dict[str, Any]) -> list[Any]: pass", "x: Callable[..., Any]",
    "Tree = Any  # as YAML gives it", "def f(x: Any) -> None:  # ctypes' pointer\n    pass", "x = [Any]",
])
def test_an_any_that_says_enough_or_why_is_left_alone(code):
    assert bare_in(code) == []


def test_a_reason_stands_on_the_line_of_its_any():
    code = textwrap.dedent("""\
        def f(x: Any,  # the first has one
              y: Any,
              z: int) -> None:  # of something else
            pass
        """)
    assert bare_in(code) == [2]


def test_every_bare_any_has_its_reason():
    files = {path: path.read_text(encoding="utf-8") for path in sorted(HOME.rglob("*.py"))
             if path.parent.name != "own"}  # what sbkit new writes, as docs/extend.md explains it
    bare = [f"{path.relative_to(HOME.parent)}:{line}" for path, code in files.items() for line in bare_in(code)]
    assert bare == [], "give it a type, or say on its line why it has none"
