"""What is looked at before a run: a recipe with mistakes does not start."""

from pathlib import Path

import pytest
import torch
from processes import outcomes
from refusals import refused

from sbkit.errors import SbkitError
from sbkit.recipe import arguments, cost
from sbkit.runs import same_start, start, training
from sbkit.system import memory
from sbkit.train.distributed import ranks
from sbkit.train.distributed.ranks import PeerFailed

SMALL = Path(__file__).parents[1] / "recipe" / "small.yaml"
BROKEN = Path(__file__).parents[1] / "recipe" / "broken"


def request(path, *words):
    return arguments.parse([str(path), *words])


def test_a_run_with_mistakes_does_not_start(capsys):
    with refused("failed-check", file=BROKEN / "unknown_argument.yaml", wording=False) as error:
        training.before_run(request(BROKEN / "unknown_argument.yaml"))
    told, last = str(error.value).splitlines()
    assert error.value.exit_code == 1 and "--no-check" in last
    assert told.startswith(f"{BROKEN / 'unknown_argument.yaml'}:4: CNN") and "did you mean num_blocks?" in told
    assert capsys.readouterr().err == ""  # told once, by the command
    with refused("failed-check", wording=False) as error:
        training.before_run(request(SMALL, "--number_of_epochs", "0"))
    assert "--no-check" not in str(error.value), "a start refuses that, too"


@pytest.mark.slow
def test_a_bundle_is_not_written_over_by_a_run(tmp_path):
    (tmp_path / "config.json").touch()
    with refused("output-exists", file=tmp_path):
        start.run([str(SMALL), "--no-check", "--output_folder", str(tmp_path)], lambda: None)


@pytest.mark.slow
def test_a_good_run_says_one_line(capsys):
    training.before_run(request(SMALL))
    assert capsys.readouterr().err.count("\n") == 1
    assert request(SMALL, "--no-check").check is False


@pytest.mark.slow
def test_a_cost_that_nobody_reads_is_made_only_where_a_batch_might_not_fit(monkeypatch, capsys):
    made, make = [], cost.estimate_cost
    monkeypatch.setattr(cost, "estimate_cost", lambda *args: made.append(make(*args)) or made[-1])
    training.before_run(request(SMALL))
    assert made == []
    monkeypatch.setattr(cost, "memory_of", lambda device: 1)
    monkeypatch.setattr(memory, "total", lambda: 1)
    training.before_run(request(SMALL))
    assert len(made) == 1 and "max_batch_seconds" in capsys.readouterr().err


def started(words):
    """Begin as each rank does that was started with these words."""
    ranks.init(torch.device("cpu"))
    with ranks.failing_together():
        same_start.require(request(*words[ranks.rank()]))


@pytest.mark.slow
@pytest.mark.parametrize("other, told", [
    (["--seed", "7"], "seed is 1 on ranks 0, 2, 7 on rank 1;"),
    (["--output_folder", "elsewhere"], "output_folder is results/small/1 on ranks 0, 2, elsewhere on rank 1;"),
    (["--max_grad_norm", "3"], "max_grad_norm is not given on ranks 0, 2, 3.0 on rank 1;"),
    (["--no-check"], "check is True on ranks 0, 2, False on rank 1;"),
    (["--device", "cuda:1"], "device is cpu on ranks 0, 2, cuda on rank 1;"),
])
def test_ranks_that_were_started_differently_are_named_with_key_and_values(other, told):
    alike = [SMALL, "--device", "cpu"]
    first, *others = outcomes(started, [alike, [*alike, *other], alike], world=3)
    assert isinstance(first.error, SbkitError) and told in str(first.error)
    assert all(isinstance(each.error, PeerFailed) for each in others)


@pytest.mark.slow
def test_another_recipe_is_named_by_what_differs_in_it(tmp_path):
    copy = tmp_path / "copy.yaml"
    copy.write_text(SMALL.read_text())
    assert [each.error for each in outcomes(started, [[SMALL], [copy]])] == [None, None]
    copy.write_text(SMALL.read_text() + "extra: [1, 2]\n")
    first, _ = outcomes(started, [[SMALL], [copy]])
    assert "differently: extra[0] is not given on rank 0, 1 on rank 1; extra[1] is" in str(first.error)


@pytest.mark.slow
def test_each_rank_has_its_own_device_and_bar():
    words = [[SMALL, "--device", "cuda:0"], [SMALL, "--device", "cuda:1", "--noprogressbar"]]
    assert [each.error for each in outcomes(started, words)] == [None, None]
