"""docs/explanation/architecture.md describes the packages and the path of a batch as they are."""

import re
import sys
from pathlib import Path

import pytest
from test_source import FILES, ORDER, room

from sbkit.cli import main
from tools import golden

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


#: A small model, and the update whose calls are noted: after the first ones, which load kernels and are timed.
SMALL = ("--language none --min_steps 0 --optimizer_step_limit 6 --d_model 72 --num_encoder_layers 2 "
         "--step_seconds 4 --max_batch_seconds 12 --num_workers 1 --device cpu --no-check --noprogressbar").split()
NOTED = 4


def calls_of_a_step(*words):
    """The functions that `sbkit train` enters from one call of ``train_step`` to the next, as (file, name)."""
    entered, noting = [], False

    def watch(frame, event, _):
        nonlocal noting
        code = frame.f_code
        if event != "call":
            return
        file = code.co_filename.removeprefix(f"{ROOT}/")
        if (file, code.co_name) == ("sbkit/train/trainer.py", "train_step"):
            done = frame.f_locals["self"].state.optimizer_step
            noting = done == NOTED
        if noting:
            entered.append((file, code.co_name))

    sys.setprofile(watch)
    try:
        assert main(["train", *words]) == 0
    finally:
        sys.setprofile(None)
    return entered


@pytest.mark.slow
def test_a_batch_takes_the_path_that_the_page_describes(tmp_path):
    golden.corpus(tmp_path / "data")
    entered = calls_of_a_step(str(ROOT / "hparams" / "ctc.yaml"), *SMALL, "--data_folder", str(tmp_path / "data"),
                              "--output_folder", str(tmp_path / "run"))
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \| `([\w/.]+)` \|", PAGE, re.M)
    assert len(rows) > 10
    path = [(file, name.rpartition(".")[2]) for _, name, file in rows]
    assert set(path) <= set(entered)
    assert sorted(path, key=entered.index) == path
