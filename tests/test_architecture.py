"""docs/explanation/architecture.md tells of the house as it stands."""

import re
from pathlib import Path

import pytest
from test_source import FILES, ORDER, room

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")


def test_every_file_and_folder_it_names_is_there():
    named = set(re.findall(r"`((?:sbkit|tests|docs)/[\w./]*)`", PAGE))
    assert len(named) > 20
    assert {path for path in named if not (ROOT / path).exists()} == set()


def test_its_table_of_rooms_is_in_the_order_in_which_they_import():
    rooms = re.findall(r"^\| `sbkit/(\w+)(?:/|\.py)` \|", PAGE, re.M)
    assert rooms == [name for name in reversed(ORDER) if name not in ("errors", "__main__")]


@pytest.mark.parametrize("part", sorted({module.split(".")[2] for module in FILES if room(module) == "train"
                                         and FILES[module].name == "__init__.py" and module.count(".") == 2}))
def test_each_part_of_training_says_what_it_never_does(part):
    assert f"`{part}/`" in PAGE.rpartition("Inside `sbkit/train/`")[2]


def test_training_names_no_task():
    tasks = {path.name for path in (ROOT / "sbkit" / "tasks").iterdir() if (path / "__init__.py").is_file()}
    assert tasks
    named = {(path.name, task) for path in (ROOT / "sbkit" / "train").rglob("*.py") for task in tasks
             if re.search(rf"\b{task}\b", path.read_text(encoding="utf-8"), re.I)}
    assert not named
