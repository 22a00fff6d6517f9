"""The table of what learns, until when what doesn't, and how fast."""

from pathlib import Path

import pytest
import torch
from torch import nn
from written import SMALL

from sbkit.recipe.check import check
from sbkit.recipe.parts import FOR_GOOD, ParameterGroups, trained_parts


def parts():
    """A model with 12 parameters in its front, 6 in its stack and 2 in its head."""
    front, stack, head = nn.Linear(3, 3), nn.ModuleList([nn.Linear(1, 1) for _ in range(3)]), nn.Linear(1, 1)
    modules = nn.ModuleDict({"model": nn.ModuleList([front, stack, head])})
    return ParameterGroups(modules, {"front": front, "stack": stack, "head": head})


def test_where_all_learns_at_one_rate_there_is_none():
    assert trained_parts(parts(), {}, {}, 0.1) is None


def test_it_says_of_each_part_what_is_frozen_for_how_long_and_its_rate():
    until = {"model.0.weight": FOR_GOOD, "model.1.0.weight": 5, "model.1.0.bias": 5, "model.1.1.bias": FOR_GOOD}
    found = trained_parts(parts(), until, {"model.1.1.weight": 0.5, "model.2.weight": 10, "model.2.bias": 10}, 0.002)
    assert found.columns == ["part", "trained", "frozen", "rate factor", "peak rate"]
    assert found.rows == [
        ["front", "3", "9 for good", "1", "0.002"],
        ["stack", "3", "2 until step 5, 1 for good", "0.5 to 1", "0.001 to 0.002"],
        ["head", "2", "", "10", "0.02"]]
    assert found.remarks == [
        "8 of 20 parameters are trained from the first step (40.0 %); frozen: 2 until step 5 and 10 for good"]
    assert found.values == {"learn": 8, "frozen": {"until step 5": 2, "for good": 10}}


def test_where_the_rate_is_not_known_and_nothing_thaws_that_is_left_out():
    found = trained_parts(parts(), {"model.2.weight": FOR_GOOD, "model.2.bias": FOR_GOOD}, {}, None)
    assert found.columns[-1] == "rate factor" and found.rows[-1] == ["head", "0", "2 for good", ""]
    assert found.remarks == ["18 of 20 parameters are trained (90.0 %); frozen: 2 for good"]


def test_a_weight_that_layers_share_is_counted_once():
    tied = nn.ModuleDict({"a": nn.Linear(3, 3, bias=False), "b": nn.Linear(3, 3, bias=False)})
    tied["b"].weight = tied["a"].weight
    found = trained_parts(ParameterGroups(tied, {}), {"a.weight": FOR_GOOD, "b.weight": FOR_GOOD}, {}, None)
    assert found.rows == [["a", "0", "9 for good", ""]] and torch.equal(tied["a"].weight, tied["b"].weight)


# ---------------------------------------------------------------- in the check

FLAGSHIP = Path(__file__).parents[2] / "hparams" / "ctc.yaml"


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_the_check_has_it_with_the_rates_of_layers():
    given = {"num_encoder_layers": 2, "freeze": {"CNN": True, "ctc_lin": 5}, "learning_rates": {"ctc_lin": 10},
             "layer_decay": 0.5}
    report = check(FLAGSHIP, given)
    assert not report.errors, report.problems()
    rows = {row[0]: row[1:] for row in report.sections["learning"].rows}
    assert rows["CNN"][0] == "0" and rows["CNN"][1].endswith(" for good") and rows["CNN"][2] == ""
    assert rows["ctc_lin"][1].endswith(" until step 5") and rows["ctc_lin"][2] == "10"
    assert " to " in rows["Transformer"][2] and rows["Transformer"][1] == ""


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_rates_by_depth_that_no_layers_can_have_are_an_error():
    (error,) = check(SMALL, {"layer_decay": 0.5}).errors
    assert (error.where, error.key, error.message) == ("command line", "layer_decay", "no layers repeat in this model")
