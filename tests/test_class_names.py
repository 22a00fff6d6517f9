"""Names: one class for one name, and former names of public ones."""

import ast
from collections import defaultdict
from pathlib import Path

import pytest

import sbkit.codes
import sbkit.infer

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


@pytest.mark.parametrize("module, former, present", [
    (sbkit.infer, "Codec", "CodecModel"), (sbkit.infer, "Heard", "StreamResult"), (sbkit.codes, "State", "SlotState"),
    (sbkit.codes, "Utterance", "CodedUtterance")])
def test_a_former_name_is_understood_and_the_new_one_said(module, former, present):
    with pytest.warns(FutureWarning, match=rf"{module.__name__}\.{former} is now called {present}"):
        assert getattr(module, former) is getattr(module, present)
    with pytest.raises(AttributeError, match="has no attribute 'Nothing'"):
        module.Nothing  # noqa: B018
