"""Fixtures of tests that compile kernels."""

import pytest


@pytest.fixture
def own_kernels(cache, monkeypatch):
    """Kernels are allowed, and are neither taken from the user's cache nor put there."""
    monkeypatch.setenv("SBKIT_CACHE", str(cache))
    monkeypatch.delenv("SBKIT_KERNELS", raising=False)
