"""Arithmetic in a recipe's references, as HyperPyYAML computes it; expressions that would never end are refused."""

from __future__ import annotations

import ast

from hyperpyyaml.core import parse_arithmetic


class _Rough(ast.NodeTransformer):
    """Turns whole numbers into floats, so that nested powers overflow at once instead of filling the memory."""

    def visit_Constant(self, node: ast.Constant) -> ast.Constant:
        return ast.Constant(float(node.value)) if isinstance(node.value, int) else node


def compute(text: str) -> object:
    """The result of a reference's text; the text itself if it isn't arithmetic.

    Raises ArithmeticError or ValueError, with the reason, if it can't be computed.
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
    """Whether an expression may produce long texts: by ``*``, or by ``%`` with a width."""
    nodes = list(ast.walk(tree))
    return any(isinstance(node, (ast.Mult, ast.Mod)) for node in nodes) and any(
        isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) for node in nodes)
