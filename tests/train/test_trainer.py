"""The loop knows hooks and no Brain; nobody reads a Brain's private names."""

import ast
import re
from pathlib import Path

import pytest

import sbkit

HOUSE = Path(sbkit.__file__).parent

def test_no_other_file_reads_a_private_name_of_a_brain():
    private = re.compile(r"\b(?:brain|toy)\._[a-z]\w*")
    found = {str(path.relative_to(HOUSE)): names for path in HOUSE.rglob("*.py") if path.parent.name != "compat"
             if (names := private.findall(path.read_text(encoding="utf-8")))}
    assert found == {}


LOOP = ["trainer.py", "runner.py", "hooks.py", "loss.py", "update.py", "results.py",
        *sorted(f"graphs/{path.name}" for path in (HOUSE / "train" / "graphs").glob("*.py"))]


@pytest.mark.parametrize("name", LOOP)
def test_the_loop_knows_no_brain(name):
    """It is given hooks; SpeechBrain's Brain has them in ``sbkit.compat``."""
    tree = ast.parse((HOUSE / "train" / name).read_text(encoding="utf-8"))
    imported = [alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    named = [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    assert not {"Brain", "brain", "sb"} & {*imported, *named}
