"""Arithmetic in a recipe's references: what HyperPyYAML computes, refused where it would take for ever."""

from __future__ import annotations

import ast
from typing import Any

from hyperpyyaml.core import parse_arithmetic


class _Rough(ast.NodeTransformer):
    """Whole numbers become floats: a tower of powers overflows at once, where they would fill the memory."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(float(node.value)) if isinstance(node.value, int) else node


def compute(text: str) -> Any:
    """What a reference's text comes to, itself where it is no arithmetic.

    ArithmeticError or ValueError says why it can't be computed.
    """
    try:
        tree = ast.parse(text, mode="eval")
        if _repeats_text(tree):
            raise ValueError("a quoted text can't be multiplied")
        parse_arithmetic(ast.unparse(_Rough().visit(tree)))
        return parse_arithmetic(text)
    except SyntaxError:
        return text
    except OverflowError:
        raise OverflowError("the number is too large") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None


def _repeats_text(tree: ast.AST) -> bool:
    """Whether texts may become long: by ``*``, and by ``%``, which is told a width."""
    nodes = list(ast.walk(tree))
    return any(isinstance(node, (ast.Mult, ast.Mod)) for node in nodes) and any(
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) for node in nodes)
