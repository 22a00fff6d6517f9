"""What the loop's hooks make of a script's Brain."""

from types import SimpleNamespace

import pytest
from refusals import check_wording
from speechbrain.core import Stage

from sbkit.compat.hooks import objectives_of
from sbkit.errors import explanation_of


def first_output(outputs, batch, stage):
    return outputs[0]


def own_mistake(outputs, batch, stage):
    return batch.missing


def helpers_mistake(outputs, batch, stage):
    def length(table):
        return table.length

    return length(None)


BRAIN = SimpleNamespace(compute_objectives=first_output)


def test_objectives_that_fail_for_want_of_outputs_say_so():
    with pytest.raises(TypeError) as raised:
        objectives_of(BRAIN, None, "batch", Stage.TRAIN)
    explanation = explanation_of(raised.value)
    assert explanation.code == "no-forward-outputs"
    check_wording(str(explanation))


@pytest.mark.parametrize("brain, outputs", [
    (BRAIN, 1), (SimpleNamespace(compute_objectives=own_mistake), None),
    (SimpleNamespace(compute_objectives=helpers_mistake), None)])
def test_other_mistakes_of_objectives_are_shown_as_they_are(brain, outputs):
    with pytest.raises((TypeError, AttributeError)) as raised:
        objectives_of(brain, outputs, "batch", Stage.VALID)
    assert explanation_of(raised.value) is None
