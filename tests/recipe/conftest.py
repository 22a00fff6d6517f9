"""For tests of the check that are not about what a recipe costs."""

import pytest

from sbkit.recipe import cost


@pytest.fixture
def without_cost(monkeypatch):
    """The check counts no cost, which takes a third of its time."""
    monkeypatch.setattr(cost, "estimate_cost", lambda *_: None)
