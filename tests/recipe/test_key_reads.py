"""Nowhere in sbkit is a key read with a default of the reader's own: what a key is by default, its declaration says."""

import ast
from pathlib import Path

import pytest

import sbkit

HOME = Path(sbkit.__file__).parent
FILES = {str(path.relative_to(HOME)): path for path in sorted(HOME.rglob("*.py")) if "starter" not in path.parts}
#: Names of what holds a recipe's values, as attributes too: the built recipe, and what the task reads of it.
HOLDERS = ("hparams", "keys")
_LITERALS = (ast.Constant, ast.List, ast.Tuple, ast.Dict, ast.Set, ast.UnaryOp)


def own_defaults(tree):
    """Lines in which a value of a recipe is read together with what it is to be otherwise."""
    return sorted({node.lineno for node in ast.walk(tree) if _has_own_default(node)})


def _has_own_default(node):
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "getattr" and len(node.args) == 3 and _holds(node.args[0])
    if isinstance(node, ast.Call):
        return _takes_default(node) and len(node.args) + len(node.keywords) > 1
    if isinstance(node, ast.BoolOp):
        return isinstance(node.op, ast.Or) and _reads(node.values[0]) and isinstance(node.values[-1], _LITERALS)
    if isinstance(node, ast.IfExp):
        test = node.test
        asked = isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.In) and _holds(test.comparators[0])
        return asked and isinstance(node.orelse, _LITERALS) and not _is_none(node.orelse)
    return False


def _is_none(node):
    """Which says that it is not there, as ``hparams.get`` does, and nothing in its place."""
    return isinstance(node, ast.Constant) and node.value is None


def _takes_default(call):
    """``hparams.get("name", ...)``; ``keys.get(...)`` is of any dictionary's keys."""
    method = call.func
    return isinstance(method, ast.Attribute) and method.attr in ("get", "pop", "setdefault") and _holds(
        method.value, HOLDERS[:1])


def _reads(node):
    """Whether it is a value by its name in what was built."""
    if isinstance(node, ast.Call):
        return _takes_default(node) or (getattr(node.func, "id", "") == "getattr" and _holds(node.args[0]))
    return isinstance(node, (ast.Attribute, ast.Subscript)) and _holds(node.value, HOLDERS[:1])


def _holds(node, names=HOLDERS):
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "vars" and node.args:
        return _holds(node.args[0], names)
    return getattr(node, "id", getattr(node, "attr", "")) in names


@pytest.mark.parametrize("line", [
    "getattr(self.hparams, 'seed', 0)", "getattr(hparams, name, None)", "getattr(self.keys, 'seed', 0)",
    "hparams.get('seed', 0)", "built.hparams.pop('seed', None)", "vars(self.hparams).get('seed', 0)",
    "hparams.setdefault('seed', 0)", "hparams.get('seed', default=0)", "hparams.get('seed') or 0",
    "self.hparams.seed or 0", "hparams['seed'] or []", "hparams['seed'] if 'seed' in hparams else -1",
])
def test_such_a_read_is_found(line):
    assert own_defaults(ast.parse(f"x = 1\nif x:\n    y = {line}\n")) == [3]


@pytest.mark.parametrize("line", [
    "self.hparams.seed", "getattr(keys, name)", "built.hparams.get('tokenizer')", "keys.get(word, 0)",
    "hparams['seed'] if 'seed' in hparams else keys.seed", "getattr(keys.ema, 'decay', 1)", "'seed' in hparams",
    "keys.tokenizer if 'tokenizer' in vars(keys) else None",
])
def test_a_read_without_one_is_not(line):
    assert own_defaults(ast.parse(line)) == []


def test_no_file_has_one():
    found = {name: lines for name, path in FILES.items()
             if (lines := own_defaults(ast.parse(path.read_text(encoding="utf-8"))))}
    assert len(FILES) > 200 and found == {}, "declare the key, with its default, in the class that reads it"
