"""What all tests need: SpeechBrain's lazy modules must not be imported by tools that only look around."""

import sys

import pytest


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_collection_modifyitems():
    """hypothesis asks each module for its file; SpeechBrain's redirections then import k2 and others."""
    lazy = [name for name, module in sys.modules.items() if "LazyModule" in map(_name, type(module).__mro__)]
    for name in lazy:
        del sys.modules[name]
    yield


def _name(kind):
    return kind.__name__
