"""A machine that can't have a fake GPU is told why."""

import importlib.util
import os
import platform
import shutil
from types import SimpleNamespace

import pytest

from sbkit.errors import SbkitError
from sbkit.rehearsal.fake_gpu import active, build

CUDA, HEADERS = "torch/lib/libtorch_cuda.so", "nvidia/cuda/include/cuda_runtime_api.h"


def test_this_process_is_not_on_it():
    assert active() == ("sbkit/kernels" in os.environ.get("LD_PRELOAD", ""))


@pytest.mark.parametrize("system, files, why", [
    ("Darwin", [CUDA, HEADERS], "Linux, not Darwin"), ("Linux", [], "a CUDA build of torch is needed"),
    ("Linux", [CUDA], "CUDA's headers"), ("Linux", [CUDA, HEADERS], r"no C compiler .*; apt install g\+\+")])
def test_the_error_says_why_a_machine_cannot_have_a_fake_gpu(monkeypatch, tmp_path, system, files, why):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(SbkitError, match=why):
        build()
