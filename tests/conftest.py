"""What all tests need: Ctrl-C as in a terminal, and no imports by tools that only look around."""

import signal
import sys

import pytest

# A shell that starts us in the background has us, and what we start, ignore Ctrl-C. Tests of it need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_collection_modifyitems():
    """hypothesis asks each module for its file; SpeechBrain's redirections then import k2 and others."""
    lazy = [name for name, module in sys.modules.items() if "LazyModule" in map(_name, type(module).__mro__)]
    for name in lazy:
        del sys.modules[name]
    yield


def _name(kind):
    return kind.__name__
