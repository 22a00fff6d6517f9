"""Fixtures of tests that compile kernels."""

import pytest


@pytest.fixture(scope="module")
def kernels_of_module(tmp_path_factory):
    """A folder for compiled kernels, so that those of a module's tests are compiled once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture
def own_kernels(kernels_of_module, monkeypatch):
    """Kernels are allowed, and are neither taken from the user's cache nor put there."""
    monkeypatch.setenv("SBKIT_CACHE", str(kernels_of_module))
    monkeypatch.delenv("SBKIT_KERNELS", raising=False)
