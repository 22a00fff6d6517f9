"""A step that changes what only Python knows is not captured, and the reason names the layer."""

import re

import pytest
from torch import nn
from toys import brain, layers

from sbkit.train.graphs.repeatable import HostState, NotRepeatable


class Counts(nn.Identity):
    calls = 0


def test_a_layer_whose_attribute_a_step_changes_is_named_with_its_place():
    model = layers().append(nn.Sequential(nn.Identity(), Counts()))
    hooks = brain(modules=model).trainer.hooks
    before = HostState(hooks)
    HostState(hooks).refuse_changes(before)
    model[-1][1].calls = 1
    with pytest.raises(NotRepeatable, match=re.escape(f"a step changes model.{len(model) - 1}.1 (Counts).calls, and")):
        HostState(hooks).refuse_changes(before)
