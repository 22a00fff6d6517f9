"""A step that changes what only Python knows is not captured, and the reason names the layer."""

import random
import re

import numpy as np
import pytest
import torch
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


@pytest.mark.parametrize(("generator", "draw"), [
    (torch.Generator(), lambda generator: torch.rand(3, generator=generator)),
    (np.random.default_rng(0), lambda generator: generator.random()),
    (np.random.Generator(np.random.MT19937(0)), lambda generator: generator.random()),
    (np.random.PCG64(0), lambda generator: generator.random_raw()),
    (np.random.RandomState(0), lambda generator: generator.rand()),
    (random.Random(0), lambda generator: generator.random())], ids=lambda value: type(value).__name__)
def test_a_step_that_draws_from_a_generator_that_a_layer_keeps_is_refused(generator, draw):
    model = layers().append(nn.Identity())
    model[-1]._generator = generator
    hooks = brain(modules=model).trainer.hooks
    before = HostState(hooks)
    HostState(hooks).refuse_changes(before)
    draw(generator)
    with pytest.raises(NotRepeatable, match=re.escape(f"model.{len(model) - 1} (Identity)._generator, and")):
        HostState(hooks).refuse_changes(before)
