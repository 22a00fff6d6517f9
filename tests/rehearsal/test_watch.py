"""What is looked for in a rehearsed process, each thing by itself."""

import json

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import ShapeEnv

from sbkit.rehearsal.watch import Diary, find_stand_ins


def test_a_stand_in_is_found_with_who_holds_it_and_the_compilers_own_are_not(tmp_path):
    with FakeTensorMode():
        held = {"means": torch.ones(3, 4)}
    with FakeTensorMode(shape_env=ShapeEnv()):
        compiled = {"example_value": torch.ones(5, 6)}
    diary = Diary(tmp_path, "measure", 0)
    find_stand_ins(diary)
    said = [json.loads(line)["finding"]["message"] for line in diary.path.read_text().splitlines()]
    assert any("shape (3, 4)" in each and "held as means" in each for each in said)
    assert not any("shape (5, 6)" in each for each in said) and held and compiled
