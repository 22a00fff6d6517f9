"""Nowhere in sbkit is a key read that no class declares, or with a default of the reader's own."""

import ast
from pathlib import Path

import pytest

import sbkit
from sbkit.recipe.names import RUN_OPTIONS
from sbkit.tasks.ctc import CTC

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
        if node.func.id != "getattr" or len(node.args) < 3:
            return False
        return _holds(node.args[0]) or (_reads(node.args[0]) and _reads(node.args[2]))
    if isinstance(node, ast.Call):
        return _takes_default(node) and len(node.args) + len(node.keywords) > 1
    if isinstance(node, ast.BoolOp):
        last = node.values[-1]
        return isinstance(node.op, ast.Or) and _reads(node.values[0]) and (isinstance(last, _LITERALS) or _reads(last))
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


def names_read(tree):
    """Lines in which a recipe's values are read by a name, with that name."""
    return sorted((node.lineno, name) for node in ast.walk(tree) if (name := _name_read(node)) is not None)


def _name_read(node):
    if isinstance(node, ast.Call) and _takes_default(node) and node.args:
        return _constant(node.args[0])
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "getattr" and _holds(node.args[0], HOLDERS[:1]):
        return _constant(node.args[1])
    if isinstance(node, ast.Subscript) and _holds(node.value, HOLDERS[:1]):
        return _constant(node.slice)
    if isinstance(node, ast.Attribute) and _holds(node.value, HOLDERS[:1]) and node.attr not in dir(dict):
        return node.attr
    return None


def _constant(node):
    return node.value if isinstance(node, ast.Constant) else None


@pytest.mark.parametrize("line", [
    "getattr(self.hparams, 'seed', 0)", "getattr(hparams, name, None)", "getattr(self.keys, 'seed', 0)",
    "hparams.get('seed', 0)", "built.hparams.pop('seed', None)", "vars(self.hparams).get('seed', 0)",
    "hparams.setdefault('seed', 0)", "hparams.get('seed', default=0)", "hparams.get('seed') or 0",
    "self.hparams.seed or 0", "hparams['seed'] or []", "hparams['seed'] if 'seed' in hparams else -1",
    "getattr(hparams.get('batching'), 'seconds', hparams.get('seconds'))", "hparams.get('seed') or hparams['draw']",
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


@pytest.mark.slow
def test_no_file_has_one():
    found = {name: lines for name, path in FILES.items()
             if (lines := own_defaults(ast.parse(path.read_text(encoding="utf-8"))))}
    assert len(FILES) > 200 and found == {}, "declare the key, with its default, in the class that reads it"


@pytest.mark.parametrize("line", ["hparams.get('seed')", "self.hparams.seed", "built.hparams['seed']",
                                  "getattr(hparams, 'seed')", "getattr(hparams.get('seed'), 'limit', 1)"])
def test_a_name_that_is_read_is_found(line):
    assert names_read(ast.parse(f"\n{line}")) == [(2, "seed")]


@pytest.mark.parametrize("line", ["hparams.get(name)", "hparams[name]", "hparams.items()", "keys.seed", "self.hparams"])
def test_what_is_no_name_is_not(line):
    assert names_read(ast.parse(line)) == []


@pytest.mark.slow
def test_every_name_that_is_read_is_declared():
    declared = {*CTC.Keys.declared(), *RUN_OPTIONS}
    found = {name: undeclared for name, path in FILES.items() if (undeclared := [
        read for read in names_read(ast.parse(path.read_text(encoding="utf-8"))) if read[1] not in declared])}
    assert found == {}, "declare the key in the class that reads it"
