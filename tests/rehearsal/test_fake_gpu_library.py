"""A machine that can't have a fake GPU is told why."""

import importlib.util
import os
import platform
import shutil
from types import SimpleNamespace

import pytest
from refusals import refused

from sbkit.rehearsal.fake_gpu import active, build

CUDA, HEADERS = "torch/lib/libtorch_cuda.so", "nvidia/cuda/include/cuda_runtime_api.h"


def test_this_process_is_not_on_it():
    assert active() == ("sbkit/kernels" in os.environ.get("LD_PRELOAD", ""))


@pytest.mark.parametrize("system, files, code", [
    pytest.param("Darwin", [CUDA, HEADERS], "no-fake-gpu", id="not Linux"),
    pytest.param("Linux", [], "no-fake-gpu", id="no CUDA"),
    pytest.param("Linux", [CUDA], "no-fake-gpu", id="no headers"),
    pytest.param("Linux", [CUDA, HEADERS], "no-compiler", id="no compiler")])
def test_the_error_says_why_a_machine_cannot_have_a_fake_gpu(monkeypatch, tmp_path, system, files, code):
    for name in files:
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).touch()
    found = SimpleNamespace(origin=str(tmp_path / "torch" / "__init__.py"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: found)
    monkeypatch.setattr(platform, "system", lambda: system)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with refused(code):
        build()
