"""One class for one name."""

import ast
from collections import defaultdict
from pathlib import Path

import sbkit

SBKIT = Path(sbkit.__file__).parent


def classes(files):
    """Where each class name is defined."""
    places = defaultdict(list)
    for file in files:
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{file.relative_to(SBKIT.parent)}:{node.lineno}")
    return places


def test_no_class_name_appears_twice():
    places = classes(sorted(SBKIT.rglob("*.py")))
    assert len(places) > 300
    assert not {name: where for name, where in places.items() if len(where) > 1}
