"""Which weights of a run are meant: how they are asked for and called."""

from types import SimpleNamespace

import pytest
import torch
from refusals import refused

from sbkit.score import weights as weights_module
from sbkit.score.weights import (
    AVERAGE_VALUES,
    AVERAGES,
    BEST_CHECKPOINT,
    LAST,
    Average,
    ChosenWeights,
    Mean,
    average_of,
)

CHECKPOINTS = [SimpleNamespace(path=f"save/CKPT+{name}", meta={"WER": wer}) for name, wer in (("b", 1.0), ("a", 2.0))]


def test_each_average_of_the_file_is_in_the_table():
    classes = {kind for kind in vars(weights_module).values()
               if isinstance(kind, type) and issubclass(kind, Average) and kind is not Average}
    assert classes and classes <= set(AVERAGES.values())


@pytest.mark.parametrize("name", AVERAGES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_average_of_equal_weights_is_these_weights(name, dtype):
    weights = torch.randn(3, 2).to(dtype)
    combined = average_of(f"{name}-of-2").combine([weights, weights.clone()], CHECKPOINTS)
    assert torch.equal(combined.to(dtype), weights)


@pytest.mark.parametrize("name", AVERAGES)
def test_an_average_changes_no_weights_that_it_reads(name):
    tensors = [torch.ones(2), torch.zeros(2)]
    average_of(f"{name}-of-2").combine(tensors, CHECKPOINTS)
    assert torch.equal(tensors[0], torch.ones(2)) and torch.equal(tensors[1], torch.zeros(2))


@pytest.mark.parametrize("name", AVERAGES)
def test_what_asks_for_an_average_is_read_again(name):
    average = average_of(f"{name}-of-3")
    assert average.name == name and average.count == 3 and average_of(str(average)) == average


@pytest.mark.parametrize("value", [0, -1, True, 1.5, None, "", "mean", "mean-of-", "mean-of-0", "odd-of-2", "2.0"])
def test_what_asks_for_no_average_is_no_value_of_a_key(value):
    assert value not in AVERAGE_VALUES
    assert 1 in AVERAGE_VALUES and "3" in AVERAGE_VALUES and "mean-of-3" in AVERAGE_VALUES


def test_an_average_of_one_checkpoint_is_that_checkpoint():
    assert all(average_of(f"{name}-of-1") == Mean() for name in AVERAGES)
    with refused("bad-value"):
        average_of(0)


@pytest.mark.parametrize("weights, label, options, words", [
    (BEST_CHECKPOINT, "best", "", "the checkpoint `best`"),
    (ChosenWeights(LAST), "last", " --checkpoint last", "the checkpoint `last`"),
    (ChosenWeights("epoch1"), "CKPT+b", " --checkpoint epoch1", "the checkpoint `epoch1`"),
    (ChosenWeights(average=Mean(3)), "best-mean-of-2", " --average 3", "the mean of 3 checkpoints (`best`)"),
    (ChosenWeights(LAST, Mean(2), 0.25), "last-mean-of-2", " --mean 0.25 --checkpoint last --average 2",
     "0.25 of the mean of 2 checkpoints (`last`) and 0.75 of the initial weights")])
def test_weights_have_a_name_in_files_their_options_and_words(weights, label, options, words):
    assert weights.label("CKPT+b", 2) == label and weights.label_from(weights.facts(CHECKPOINTS)) == label
    assert weights.options() == options and weights.describe() == words
