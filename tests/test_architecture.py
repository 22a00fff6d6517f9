"""docs/architecture.md tells of the house as it stands."""

import re
import sys
from pathlib import Path

import pytest
from test_source import FILES, ORDER, room
from toys import ToyTrainLoader, brain

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")


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


def test_the_path_from_the_command_to_the_bundle_is_read_in_an_afternoon():
    table = PAGE.partition("## The path in files")[2].partition("## ")[0]
    files = re.findall(r"`([\w/]+\.py)`", table)
    assert len(files) > 15
    assert sum((ROOT / path).read_text(encoding="utf-8").count("\n") for path in files) <= 5000


WAY = re.findall(r"^\| (\d+) \| `(?:(\w+)\.)?(\w+)` \| (?:`([\w/.]+)`|(the task)) \|", PAGE, re.M)


def test_the_way_of_a_batch_is_short():
    assert [number for number, *_ in WAY] == [str(i + 1) for i in range(len(WAY))]
    assert 10 < len(WAY) <= 14 and len({path for *_, path, _ in WAY}) <= 6


def test_the_last_micro_batch_of_a_step_goes_that_way():
    toy, entered = brain(), []
    wanted = {(path or "tests/toys.py", name): int(number) for number, _, name, path, _ in WAY}

    def watch(frame, event, arg):
        path, name = frame.f_code.co_filename, frame.f_code.co_name
        found = next((number for (where, called), number in wanted.items() if path.endswith(where) and name == called),
                     None)
        if event == "call" and found is not None:
            entered.append(found)

    sys.setprofile(watch)
    try:
        toy.fit([1], ToyTrainLoader(3, micros=2), progressbar=False)
    finally:
        sys.setprofile(None)
    last = entered[len(entered) - 1 - entered[::-1].index(2):]
    assert list(dict.fromkeys(last)) == list(range(2, 15)) and entered[:6] == [1, 2, 3, 4, 5, 6]


def test_training_names_no_task():
    tasks = {path.name for path in (ROOT / "sbkit" / "tasks").iterdir() if (path / "__init__.py").is_file()}
    assert tasks
    named = {(path.name, task) for path in (ROOT / "sbkit" / "train").rglob("*.py") for task in tasks
             if re.search(rf"\b{task}\b", path.read_text(encoding="utf-8"), re.I)}
    assert not named
