"""A small run whose epochs go through the corpus several times: stopped, resumed and extended, it trains to its end."""

import json
import shutil

import processes
import pytest
import run_folders
from trained_runs import copied, different, here, metrics, options, saved_step, weights

SMALL = {**run_folders.TINY, "precision": "fp32", "step_seconds": 6, "max_batch_seconds": 6, "ckpt_interval_minutes": 0,
         "ckpt_interval_steps": 1, "log_interval": 0, "min_steps": 16, "number_of_epochs": 2}
PASS, PASSES = 2, 4  # steps; the 8 utterances fill two of them
LENGTH = PASS * PASSES

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return run_folders.corpus(tmp_path_factory.mktemp("data"), train=8, dev=2, test=2)


def words(out, data, **changed):
    keys = {**SMALL, **changed, "data_folder": data, "output_folder": out}
    return ["train", "hparams/ctc.yaml", "--noprogressbar", "--no-check", *options(**keys)]


def train(out, data, ranks=1, **changed):
    return processes.sbkit(*words(out, data, **changed), ranks=ranks).stderr


def trains_to_its_end(out, epochs, before=0):
    """Whether all epochs have the same length, and no step but the last has no learning rate.

    before : epochs after which the run had ended once
    """
    found = {line["step"]: line["lr"] for line in metrics(out, "step")}
    ends = [count * LENGTH - early for count in (before, epochs) for early in (0, 1)]  # told with the next step's rate
    return set(found) == set(range(1, epochs * LENGTH + 1)) and all(
        rate > 0 for step, rate in found.items() if step not in ends)


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """A run to its end, beside what a stop in its second epoch leaves, and its weights."""
    out = tmp_path_factory.mktemp("whole") / "out"
    with copied(out, LENGTH + PASS + 1, out.with_name("stopped")):
        said = here(*words(out, data))
    assert f"The corpus has {PASS} steps: an epoch goes through it {PASSES} times, and the run has {2 * LENGTH}" in said
    assert trains_to_its_end(out, 2)
    return out, weights(out)


@pytest.mark.long
def test_stopped_in_an_epoch_it_ends_as_the_run_that_was_never_stopped(data, whole, tmp_path):
    out = shutil.copytree(whole[0].with_name("stopped"), tmp_path / "out")
    saved = saved_step(out)
    with (out / "metrics.jsonl").open("a") as file:  # as if killed two steps after its last checkpoint
        file.write(json.dumps({"time": 0.0, "kind": "step", "step": saved + 2}) + "\n")
    said = train(out, data)
    assert (f"Continuing with epoch 2 of 2, after {saved - LENGTH} of its {LENGTH} steps. What was trained "
            f"since the last checkpoint, up to step {saved + 2} of the run, is repeated") in said
    assert different(weights(out), whole[1]) == []


@pytest.mark.long
def test_stopped_in_an_epoch_and_extended_on_two_devices_it_trains_to_its_end(data, whole, tmp_path):
    out = shutil.copytree(whole[0].with_name("stopped"), tmp_path / "out")
    said = train(out, data, ranks=2, number_of_epochs=3)
    assert f"the run has {3 * LENGTH} (min_steps: 16, spread over the 2 epochs that it began with)" in said
    assert "started with" not in said and trains_to_its_end(out, 3)


def test_finished_and_extended_it_trains_to_its_end(data, whole):
    out = whole[0]
    (out / "tested.json").unlink()  # as if killed in its test
    said = train(out, data)
    assert "Epoch 2 was the last, so only the test is left. Set a larger number_of_epochs" in said
    assert saved_step(out) == 2 * LENGTH
    assert "Continuing with epoch 3 of 4\n" in train(out, data, number_of_epochs=4)
    assert saved_step(out) == 4 * LENGTH and trains_to_its_end(out, 4, before=2)
