"""Which room imports which: none one above it, no cycles, and what uses a bundle reaches nothing that trains."""

import ast
from functools import cache
from pathlib import Path

import pytest

import sbkit

HOME = Path(sbkit.__file__).parent
#: From the ground up. A room imports those before it.
ORDER = ("errors", "system", "nn", "data", "codes", "decode", "score", "recipe", "train", "runs", "export", "tasks",
         "infer", "serve", "rehearsal", "doctor", "commands", "cli", "__main__")
#: Rooms that are nobody's ground: whatever stands above them, only these import them.
ONLY_BY = {"doctor": {"commands"}, "commands": {"cli"}, "cli": {"__main__"}, "__main__": set()}
#: What one who uses a bundle has no use for.
TRAINING = {"train", "recipe", "tasks", "runs"}


def name_of(path):
    return ".".join(path.relative_to(HOME.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(HOME.rglob("*.py"))
         if "starter" not in path.parts}  # what `sbkit new` copies is no module


@cache
def imports(module):
    """Its imports of sbkit's modules with their lines, wherever they stand."""
    return imports_in(ast.parse(FILES[module].read_text(encoding="utf-8")), module)


def imports_in(tree, module):
    found = {}
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}, line {node.lineno}: write out what is imported"
            names = [f"{node.module}.{alias.name}" for alias in node.names]
        for name in names:
            while name and name not in FILES:  # a class, a function
                name = name.rpartition(".")[0]
            if name and name != module:
                found.setdefault(name, node.lineno)
    return found


def room(module):
    """The second word of its name; the package itself, which holds nothing, is the ground's."""
    return [*module.split("."), "errors"][1]


def private_in(tree):
    """Private names that a module imports from another one of sbkit's, or reads as ``module._name``, and lines."""
    modules, found = set(), []
    for node in (each for each in ast.walk(tree) if isinstance(each, ast.ImportFrom)):
        modules |= {alias.asname or alias.name for alias in node.names if f"{node.module}.{alias.name}" in FILES}
        found += [(node.lineno, alias.name) for alias in node.names
                  if node.module in FILES and _is_private(alias.name)]
    return found + [(node.lineno, node.attr) for node in ast.walk(tree)
                    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)
                    and node.value.id in modules and _is_private(node.attr)]


def _is_private(name):
    return name.startswith("_") and not name.endswith("__")


def test_every_room_has_its_place():
    assert {room(module) for module in FILES} <= set(ORDER)


def told(module, other):
    return f"{module}, line {imports(module)[other]}, imports {other}"


def test_no_room_imports_one_above_it():
    up = [told(module, other) for module in FILES for other in imports(module)
          if ORDER.index(room(other)) > ORDER.index(room(module))]
    assert up == []


@pytest.mark.parametrize("text", [
    "from sbkit.data.audio import _handles", "from sbkit.data import audio\naudio._handles",
    "from sbkit.data import audio as sound\nif sound._handles: pass"])
def test_a_private_name_of_another_module_is_found(text):
    assert [name for _, name in private_in(ast.parse(text))] == ["_handles"]


def test_no_module_uses_a_private_name_of_another():
    """But for the doctor, who compares the ways among which a function chooses by itself."""
    used = {module: found for module in FILES if room(module) != "doctor"
            and (found := private_in(ast.parse(FILES[module].read_text(encoding="utf-8"))))}
    assert used == {}


def test_nobody_imports_a_command_or_the_doctor_but_those_who_call_them():
    wrong = [told(module, other) for module in FILES for other in imports(module)
             if room(other) != room(module) and room(module) not in ONLY_BY.get(room(other), {room(module)})]
    assert wrong == []


def test_no_module_imports_one_that_imports_it_in_the_end():
    around = sorted(module for module in FILES if module in reached(imports(module)))
    assert around == [], "each of these is in a cycle"


def test_no_task_imports_another_and_what_they_share_imports_none():
    tasks = {"codec", "ctc", "enhance", "speaker", "transducer", "tts"}

    def task(module):
        return next((part for part in module.split(".")[2:3] if room(module) == "tasks" and part in tasks), None)

    assert {path.parent.name for path in (HOME / "tasks").glob("*/__init__.py")} == {*tasks, "recognise"}
    wrong = [told(module, other) for module in FILES if room(module) == "tasks" for other in imports(module)
             if task(other) not in (None, task(module))]
    assert wrong == []


def reached(start, packages=False):
    """All that importing ``start`` may import: what stands in functions too, and the packages around each if asked."""
    seen, waiting = set(), list(start)
    while waiting:
        module = waiting.pop()
        if module not in seen:
            seen.add(module)
            waiting += imports(module)
            if packages and "." in module:
                waiting.append(module.rpartition(".")[0])
    return seen


@pytest.mark.parametrize("place", ["infer", "serve"])
def test_what_uses_a_bundle_reaches_nothing_that_trains(place):
    for module in (module for module in FILES if room(module) == place):
        wrong = sorted(other for other in reached([module], packages=True) if room(other) in TRAINING)
        assert wrong == [], f"{module} reaches them"


def test_an_import_in_a_function_counts_as_well():
    code = "def f():\n    from sbkit.train import brain\n    from sbkit.errors import SbkitError\n"
    assert imports_in(ast.parse(code), "sbkit.nn.ctc") == {"sbkit.train.brain": 2, "sbkit.errors": 3}
