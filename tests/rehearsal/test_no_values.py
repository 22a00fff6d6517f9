"""What a fake GPU's values make meaningless is replaced, name by name, in versions of torch that were looked at."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist
from packaging.specifiers import SpecifierSet
from torch.distributed.tensor import DTensor

from sbkit.rehearsal.no_values import PATCHES

OF_TORCH = [patch for patch in PATCHES if patch.torch]


def allowed_torch():
    setup = (Path(__file__).parents[2] / "setup.cfg").read_text(encoding="utf-8")
    return re.search(r"^ +torch (>=.*)$", setup, re.M)[1]


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: f"{patch.owner.__name__}.{patch.name}")
def test_each_name_is_there_and_each_replacement_has_its_reason(patch):
    assert callable(getattr(patch.owner, patch.name)) and patch.why


def test_all_names_of_torch_say_in_which_versions_they_are():
    homes = [getattr(patch.owner, "__module__", patch.owner.__name__) for patch in PATCHES]
    assert [patch for patch, home in zip(PATCHES, homes, strict=True) if home.startswith("torch")] == OF_TORCH
    assert [patch.owner for patch in OF_TORCH] == [dist, DTensor]


@pytest.mark.parametrize("patch", OF_TORCH, ids=lambda patch: patch.name)
def test_an_installation_can_have_no_torch_that_nobody_looked_at(patch):
    assert SpecifierSet(patch.torch) == SpecifierSet(allowed_torch())


def test_names_of_torch_take_what_their_replacements_pass_on():
    taken = dist._broadcast_coalesced.__doc__.partition("->")[0]
    assert [name for name in ("process_group", "tensors", "buffer_size", "src") if name in taken] == re.findall(
        r"(\w+):", taken)
    assert list(inspect.signature(DTensor.full_tensor).parameters) == ["self", "grad_placements"]


@pytest.mark.slow
def test_a_name_that_is_gone_is_reported_instead_of_added():
    done = subprocess.run([sys.executable, "-c", """
from sbkit.nn.global_norm import GlobalNorm
from sbkit.rehearsal import no_values
del GlobalNorm.has_statistics
no_values.install()
"""], capture_output=True, text=True, timeout=120)
    assert done.returncode and "has no has_statistics any more, but: NaN" in done.stderr
