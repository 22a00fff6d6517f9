"""The source, parsed once: which package imports which, and what its messages advise."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

import sbkit

HOME = Path(sbkit.__file__).parent
#: From the ground up. A room imports those before it.
ORDER = ("errors", "explanations", "system", "nn", "data", "codes", "decode", "score", "recipe", "train", "compat",
         "runs", "export", "tasks", "infer", "serve", "rehearsal", "doctor", "commands", "cli", "__main__")
#: Rooms that are nobody's ground: whatever stands above them, only these import them.
ONLY_BY = {"doctor": {"commands"}, "commands": {"cli"}, "cli": {"__main__"}, "__main__": set()}
#: What one who uses a bundle has no use for.
TRAINING = {"train", "recipe", "tasks", "runs"}


def name_of(path):
    return ".".join(path.relative_to(HOME.parent).with_suffix("").parts).removesuffix(".__init__")


FILES = {name_of(path): path for path in sorted(HOME.rglob("*.py"))
         if "starter" not in path.parts}  # what `sbkit new` copies is no module


def nodes_in(code):
    return list(ast.walk(ast.parse(code)))


@cache
def nodes(path):
    """All that its code consists of."""
    return nodes_in(path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module", autouse=True)
def _forget():
    """Hundreds of megabytes are kept no longer than these tests."""
    yield
    nodes.cache_clear()


# ------------------------------------------------------------------ imports


@cache
def imports(module):
    """Its imports of sbkit's modules with their lines, wherever they stand."""
    return imports_in(nodes(FILES[module]), module)


def imports_in(nodes, module):
    found = {}
    for node in nodes:
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


def test_every_room_has_its_place():
    assert {room(module) for module in FILES} <= set(ORDER)


def told(module, other):
    return f"{module}, line {imports(module)[other]}, imports {other}"


def test_no_room_imports_one_above_it():
    up = [told(module, other) for module in FILES for other in imports(module)
          if ORDER.index(room(other)) > ORDER.index(room(module))]
    assert up == []


def test_one_place_unpickles_what_others_wrote():
    places = {module for module, path in FILES.items() for node in nodes(path) if isinstance(node, ast.Attribute)
              and node.attr == "load" and isinstance(node.value, ast.Name) and node.value.id == "torch"}
    assert places == {"sbkit.system.untrusted"}


def test_nobody_imports_a_command_or_the_doctor_but_those_who_call_them():
    wrong = [told(module, other) for module in FILES for other in imports(module)
             if room(other) != room(module) and room(module) not in ONLY_BY.get(room(other), {room(module)})]
    assert wrong == []


def test_no_module_imports_one_that_imports_it_in_the_end():
    around = sorted(module for module in FILES if module in reached(imports(module)))
    assert around == [], "each of these is in a cycle"


def test_no_task_imports_another_and_what_they_share_imports_none():
    tasks = {path.parent.name for path in (HOME / "tasks").glob("*/__init__.py")} - {"recognise"}

    def task(module):
        return next((part for part in module.split(".")[2:3] if room(module) == "tasks" and part in tasks), None)

    assert {"ctc", "speaker"} <= tasks
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
    code = "def f():\n    from sbkit.compat import brain\n    from sbkit.errors import SbkitError\n"
    assert imports_in(nodes_in(code), "sbkit.nn.ctc") == {"sbkit.compat.brain": 2, "sbkit.errors": 3}


# ---------------------------------------------------------------- what messages advise

#: Options of other programs, and examples.
NOT_OURS = {
    "--KEY.a.b", "--a", "--a.b", "--array", "--b.c", "--betas", "--cards", "--cpus", "--exclude-libs", "--flag",
    "--force-reinstall", "--gpu", "--gpus", "--index-url", "--key", "--nnodes", "--no-deps", "--query-gpu",
    "--shm-size", "--short", "--signal", "--signals-to-handle", "--undefined-only", "--version"}


def options_in(text):
    return {option.rstrip(".") for option in re.findall(r"(?<![\w-])--[A-Za-z][\w.-]*", text)}


def test_an_option_that_a_message_names_is_one():
    """Of a command, or a recipe's own key; what is within one is written with it, as ``--corpus.workers``."""
    reference = HOME.parent / "docs" / "reference"
    known = {option.replace("_", "-") for option in options_in((reference / "commands.md").read_text())}
    declared = (reference / "keys.md").read_text().partition("## Arguments of objects")[0]
    keys = set(re.findall(r"^\| `(\w+)` \|", declared, re.M)) | set(
        re.findall(r"`(\w+)`", declared.partition("## Run options")[2]))
    for recipe in HOME.parent.glob("hparams/**/*.yaml"):
        keys |= set(re.findall(r"^(?:    )?(\w+):", recipe.read_text(), re.M))
    keys = {key.replace("_", "-") for key in keys}
    unknown = {f"{option} in {name}" for name in FILES for node in nodes(FILES[name])
               if isinstance(node, ast.Constant) and isinstance(node.value, str)
               for option in options_in(node.value) - NOT_OURS
               if option.replace("_", "-") not in known
               and option[2:].replace("_", "-").split(".")[0] not in keys}
    assert unknown == set()
