"""What the check says of SpeechBrain's own recipes: no traceback and nothing false. Needs a snapshot of them:

    SBKIT_SPEECHBRAIN_RECIPES=speechbrain/recipes python -m pytest tests/recipe/test_speechbrain_recipes.py
"""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROWS = [line.split(" | ") for line in Path(__file__).with_name("speechbrain_recipes.txt").read_text().splitlines()
        if not line.startswith("#")]
SNAPSHOT = os.environ.get("SBKIT_SPEECHBRAIN_RECIPES")


def test_the_table_has_each_recipe_once_with_a_verdict():
    assert len({path for path, _ in ROWS}) == len(ROWS) > 60
    assert sum(verdict == "clean" for _, verdict in ROWS) > 15 and all(verdict for _, verdict in ROWS)


@pytest.mark.long
@pytest.mark.slow
@pytest.mark.skipif(SNAPSHOT is None, reason="SBKIT_SPEECHBRAIN_RECIPES names no snapshot of SpeechBrain's recipes")
@pytest.mark.parametrize(("path", "verdict"), ROWS, ids=[path for path, _ in ROWS])
def test_a_recipe_of_speechbrain_is_clean_or_told_right(path, verdict, tmp_path):
    recipe = Path(SNAPSHOT).resolve() / path
    asked = re.findall(r"^(\w+): *!PLACEHOLDER", recipe.read_text(), re.M)
    words = ["-m", "sbkit", "check", str(recipe), "--json", *(f"--{key}=/nowhere/x" for key in asked)]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, env={**os.environ, "HF_HUB_OFFLINE": "1"},
                          capture_output=True, text=True)
    report = json.loads(done.stdout)
    found = [each for each in [*report["errors"], *report["warnings"]] if "can't be built here" not in each["message"]]
    expected = [] if verdict in ("clean", "not fetched") else verdict.split("; ")
    assert len(found) == len(expected), found
    assert all(f"{each['key']}: {each['message']}".startswith(said) for each, said in zip(found, expected, strict=True))
