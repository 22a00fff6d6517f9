"""A step stays small enough to be read: how many functions it enters, and which ones the architecture page names."""

import re
from pathlib import Path

import pytest
import torch
from processes import results
from toys import ToyTrainLoader, brain

from sbkit.recipe import flops
from sbkit.train.distributed import ranks
from tools import golden, stops

PAGE = (stops.ROOT / "docs" / "explanation" / "architecture.md").read_text(encoding="utf-8")
#: The most functions, files and calls of a step outside the model's layers, and calls between two steps.
LIMITS, MOST_BETWEEN = (75, 16, 150), 10


class Descent:
    """An optimizer that isn't one of torch's, whose ``step`` thus calls no hook of ``torch.optim``."""

    def __init__(self, parameters):
        self.param_groups, self.state = [{"params": list(parameters), "lr": 0.01}], {}

    def zero_grad(self, set_to_none=True):
        for parameter in self.param_groups[0]["params"]:
            parameter.grad = None

    @torch.no_grad()
    def step(self):
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is not None:
                parameter -= self.param_groups[0]["lr"] * parameter.grad


@pytest.fixture(scope="module")
def flagship(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stops")
    golden.corpus(folder / "data")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flops, "operations_per_second", lambda *_: 1e6)  # of a run, not of a step
        return stops.of_training(folder, str(stops.ROOT / stops.RECIPE), *stops.SMALL)


def toy(micros=1, opt_class=None):
    """The stops of a toy's step, on any number of ranks."""
    subject = brain(opt_class=opt_class)
    with stops.counted() as found:
        subject.fit([1], ToyTrainLoader(8, 8, ranks.rank(), ranks.world_size(), micros))
    return found


def of(found, file):
    return {name: count for (path, name), count in found.calls.items() if path == f"sbkit/train/{file}"}


@pytest.mark.slow
def test_a_step_of_the_flagship_is_small_outside_its_layers(flagship):
    size = flagship.size(without="sbkit/nn/")
    assert all(0 < count <= limit for count, limit in zip(size, LIMITS, strict=True)), flagship.text()
    assert flagship.size() > size


@pytest.mark.slow
def test_a_step_in_which_nothing_is_due_costs_nothing(flagship):
    assert 0 < sum(flagship.between.values()) <= MOST_BETWEEN, flagship.text()


@pytest.mark.slow
def test_a_batch_takes_the_path_that_the_architecture_page_describes(flagship):
    rows = re.findall(r"^\| (\d+) \| `([\w.]+)` \| `([\w/.]+)` \|", PAGE, re.M)
    assert [int(number) for number, *_ in rows] == list(range(1, len(rows) + 1)) and 10 < len(rows) <= 14
    assert len({file for *_, file in rows}) <= 6
    entered = [(file, name.rpartition(".")[2]) for file, name in flagship.calls]
    path = [(file, name.rpartition(".")[2]) for _, name, file in rows]
    assert sorted(path, key=entered.index) == path


def test_each_micro_batch_of_a_step_is_counted():
    one, three = toy(), toy(micros=3)
    assert of(one, "trainer.py")["Trainer.compute"] == 1 and of(three, "trainer.py")["Trainer.compute"] == 3
    assert one.calls.keys() == three.calls.keys() and one.between == three.between
    assert of(three, "step.py")["update"] == of(three, "trainer.py")["Trainer.train_step"] == 1


def test_an_optimizer_without_torchs_hooks_is_counted():
    plain = toy(opt_class=Descent)
    assert of(plain, "trainer.py") == of(toy(), "trainer.py")


@pytest.mark.slow
def test_a_step_of_two_ranks_is_that_of_one_and_the_exchange():
    first, _ = results(toy)
    alone = toy()
    assert {file for file, _ in first.calls.keys() - alone.calls.keys()} == {"sbkit/train/distributed/exchange.py"}
    assert alone.calls.keys() < first.calls.keys() and first.between == alone.between


def test_what_was_counted_is_printed(capsys):
    found = toy()
    first, without, between, *files = found.text().splitlines()
    assert first == "one step: {} functions in {} files, {} calls".format(*found.size())
    assert without.startswith("without the model's layers") and "Trainer.take_results" in between
    assert files[0].startswith("  sbkit/train/trainer.py: Trainer.train_step, ")
    assert len(files) == len({Path(file) for file, _ in found.calls})
