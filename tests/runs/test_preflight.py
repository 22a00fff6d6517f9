"""What is looked at before a run: a recipe with mistakes does not start."""

from pathlib import Path

import pytest

from sbkit.errors import SbkitError
from sbkit.recipe import arguments, bill
from sbkit.runs import training

SMALL = Path(__file__).parents[1] / "recipe" / "small.yaml"
BROKEN = Path(__file__).parents[1] / "recipe" / "broken"


def request(path, *words):
    return arguments.parse([str(path), *words])


def test_a_run_with_mistakes_does_not_start(capsys):
    with pytest.raises(SbkitError, match="1 error") as error:
        training.before_run(request(BROKEN / "unknown_argument.yaml"))
    first, told = str(error.value).splitlines()
    assert error.value.exit_code == 1 and "--no-check" in first
    assert told.startswith(f"{BROKEN / 'unknown_argument.yaml'}:4: error: ") and "did you mean num_blocks?" in told
    assert capsys.readouterr().err == ""  # told once, by the command


def test_a_good_run_says_one_line(capsys):
    training.before_run(request(SMALL))
    assert capsys.readouterr().err.count("\n") == 1
    assert request(SMALL, "--no-check").check is False


@pytest.mark.slow
def test_a_bill_that_nobody_reads_is_made_only_where_a_batch_might_not_fit(monkeypatch, capsys):
    made, make = [], bill.make
    monkeypatch.setattr(bill, "make", lambda *args: made.append(make(*args)) or made[-1])
    training.before_run(request(SMALL))
    assert made == []
    monkeypatch.setattr(bill, "memory_of", lambda device: 1)
    training.before_run(request(SMALL))
    assert len(made) == 1 and "max_batch_seconds" in capsys.readouterr().err
