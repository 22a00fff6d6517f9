"""Layer norms over several dimensions, which torch's GPU kernels can't train beyond 65,536 rows."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as some
from run_folders import TINY
from torch import nn

from sbkit.nn.fast.norm import flatten_norms
from sbkit.recipe import files, flops, load, trace

HPARAMS = Path(__file__).parents[2] / "hparams"


class Dimensions(flops.FlopCounter):
    """Records over how many dimensions each layer norm goes."""

    def __init__(self, weights=()):
        super().__init__(weights)
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func in (torch.ops.aten.native_layer_norm.default, torch.ops.aten.native_layer_norm_backward.default):
            shape = args[1] if func is torch.ops.aten.native_layer_norm.default else args[2]
            self.found.append(len(shape))
        return super().__torch_dispatch__(func, types, args, kwargs)


@pytest.mark.slow
@pytest.mark.parametrize("recipe, accelerate", [("ctc.yaml", True), ("ctc.yaml", False), ("streaming.yaml", True)])
def test_a_training_normalises_over_one_dimension(recipe, accelerate, tmp_path):
    sizes = {key: value for key, value in TINY.items() if key in files.keys(load.chain(HPARAMS / recipe))}
    hparams = load.load(HPARAMS / recipe, {**sizes, "output_folder": str(tmp_path)})
    brain = trace.build_brain(hparams["brain"], hparams, accelerate=accelerate)
    several = [norm for norm in brain.modules.modules()
               if isinstance(norm, nn.LayerNorm) and len(norm.normalized_shape) > 1]
    found = flops.run(brain, 2, 3.0, Dimensions).found
    assert several and len(found) >= 2 * len(several) and set(found) == {1}


@settings(deadline=None, max_examples=20)
@given(some.lists(some.integers(1, 5), min_size=1, max_size=3), some.lists(some.integers(1, 5), min_size=2, max_size=3),
       some.booleans(), some.booleans(), some.sampled_from([torch.float32, torch.bfloat16]))
def test_it_is_the_same_to_the_bit(rows, shape, affine, turned, dtype):
    torch.manual_seed(0)
    module = nn.Sequential(nn.LayerNorm(shape, elementwise_affine=affine))
    for parameter in module.parameters():
        nn.init.normal_(parameter)
    x = torch.randn(*rows, *shape, dtype=dtype)
    x = (x.transpose(0, -1).contiguous().transpose(0, -1) if turned else x).requires_grad_()

    def trained():
        module.zero_grad()
        with torch.autocast("cpu", dtype, enabled=dtype != torch.float32):
            out = module(x)
        grads = torch.autograd.grad((out.float() ** 3).sum(), [x, *module.parameters()])
        return out, *grads

    expected, names = trained(), list(module.state_dict())
    flatten_norms(module)
    assert type(module[0]) is not nn.LayerNorm and list(module.state_dict()) == names
    for found, wanted in zip(trained(), expected, strict=True):
        assert found.dtype == wanted.dtype and torch.equal(found, wanted)


def test_of_one_dimension_it_stays_torchs():
    module = nn.Sequential(nn.LayerNorm(4), nn.LayerNorm((4,)))
    flatten_norms(module)
    assert {type(norm) for norm in module} == {nn.LayerNorm}
