"""What all tests need: Ctrl-C as in a terminal, quiet imports, as many cards as they ask for, kernels of their own."""

import functools
import gc
import logging
import os
import shutil
import signal
import sys
from collections import Counter

import pytest
from hypothesis import HealthCheck, settings
from made_once import made_once

pytest_plugins = ["workers"]


def pytest_addoption(parser):
    parser.addoption("--rewrite-messages", action="store_true", help="write the messages of tests/messages/ anew")


def pytest_configure(config):
    if config.getoption("--rewrite-messages"):
        import refusals

        refusals.rewrite()


# How long one example takes is up to how busy the machine is.
settings.register_profile("sbkit", deadline=None, suppress_health_check=[HealthCheck.too_slow])  # CI is shared
settings.load_profile("sbkit")

# What is imported and collected stays, and searching it for garbage or fake tensors is a tenth of the tests' time.
gc.disable()
_modules = 0  # when what there was has last been kept out of that

# Checkpoints wait for the disk at each of their files, and nothing here outlives a machine that fails while it writes:
# tests write to memory where there is plenty.
MEMORY = "/dev/shm"
if os.access(MEMORY, os.W_OK) and shutil.disk_usage(MEMORY).free > 8 << 30:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", MEMORY)

# Threads that wait for a core by looping take that of another test.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

# torch tries this processor's vector instructions before it compiles, each in a program and a Python of its own.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")

# A shell that starts us in the background has us, and what we start, ignore Ctrl-C, and nohup the end of a terminal.
# Tests of them need them.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)


@pytest.hookimpl(tryfirst=True, hookwrapper=True)
def pytest_collection_modifyitems(items):
    """Files with slow tests first, and before them those of long ones, so that at the end no process waits for another.
    """
    slow = Counter(item.path for item in items if item.get_closest_marker("slow"))
    for item in items:
        if (limit := item.get_closest_marker("timeout")) and limit.args[0] > 600:
            slow[item.path] += 60
    items.sort(key=lambda item: -slow[item.path])
    _forget_redirections()
    yield


def _forget_redirections():
    """Drop SpeechBrain's lazy modules: hypothesis asks each module for its file, and these then import k2 and others.
    """
    lazy = [name for name, module in sys.modules.items() if "LazyModule" in map(_name, type(module).__mro__)]
    for name in lazy:
        del sys.modules[name]


def pytest_collection_finish(session):
    global _modules
    if session.config.getoption("workers"):
        from processes import share_server

        # One server of processes for all workers: it imports for five seconds. What these print is no line of ours.
        capture = session.config.pluginmanager.getplugin("capturemanager")
        capture.resume_global_capture()
        share_server()
        import warm  # noqa: F401 (for the workers, too)

        _forget_redirections()
        capture.suspend_global_capture()
    gc.freeze()  # before workers are forked, each of which would search all of it
    _modules = len(sys.modules)
    gc.enable()
    gc.set_threshold(50_000, 20, 50)  # what an export makes is looked through 1,400 times else, a tenth of its time
    if "sbkit.recipe.speed" in sys.modules:  # one product of matrices tells a CPU's speed well enough here
        sys.modules["sbkit.recipe.speed"].MEASURE_SECONDS = 0.0


def pytest_sessionfinish(session):
    if session.config.getoption("workers"):  # else pytest, and then Python, search all that was collected
        gc.freeze()


def pytest_runtest_setup(item):
    """A test marked ``gpu`` runs where there are as many CUDA cards as it asks for: ``gpu``, ``gpu(cards=2)``.

    One marked ``gpu(values=True)`` judges what a card computes, and doesn't run on one that computes nothing.
    """
    global _modules
    # What an export leaves, too: a check that searches everything for fake tensors then takes 2 to 8 times as
    # long. The counts are those of collections since the last whole one, at 50,000 objects each.
    if len(sys.modules) > _modules + 100 or any(gc.get_count()[1:]):
        gc.collect()
        gc.freeze()
        _modules = len(sys.modules)
    marker = item.get_closest_marker("gpu")
    if marker is not None:
        import torch

        from sbkit.rehearsal import fake_gpu

        if fake_gpu.active():
            if marker.kwargs.get("values"):
                pytest.skip("judges what a card computes, and this one computes nothing")
            _leave_values_out()
        asked, found = marker.kwargs.get("cards", 1), torch.cuda.device_count()
        if found < asked:
            pytest.skip(f"needs {asked} CUDA card{'s' if asked > 1 else ''}, and torch finds {found or 'none'} here")


@functools.cache
def _leave_values_out():
    from sbkit.rehearsal import no_values

    no_values.install()


def _name(kind):
    return kind.__name__


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A folder for ``SBKIT_CACHE``, in which all tests of a session find the kernels and the demo corpora of others."""
    return made_once(tmp_path_factory, "cache", lambda folder: None)


@pytest.fixture
def without_cost(monkeypatch):
    """For tests of the check that are not about what a recipe costs, to count which takes it a third of its time."""
    from sbkit.recipe import cost

    monkeypatch.setattr(cost, "estimate_cost", lambda *_: None)


@pytest.fixture
def without_trials(without_cost, monkeypatch):
    """For those that are about what it finds before it tries batches and moves the model, nor does it these."""
    from sbkit.recipe import devices, real_batches

    monkeypatch.setattr(real_batches, "try_batches", lambda *_: "")
    monkeypatch.setattr(devices, "check_moved", lambda *_: "")


@pytest.fixture(autouse=True)
def _kernels_of_its_own():
    """A test that trains leaves compiled kernels in its process; the next one is to run as if it were the first."""
    yield
    if "sbkit.nn.native.library" in sys.modules:
        sys.modules["sbkit.nn.native.library"].forget()


@pytest.fixture(autouse=True)
def _log_of_its_own():
    """A run that is trained in this process logs to its terminal and its log.txt, from INFO on; the next test doesn't.

    Else it would read other packages' lines among those that it is about.
    """
    logging.root.setLevel(logging.WARNING)
    yield
    for handler in logging.root.handlers[:]:
        if not type(handler).__module__.startswith("_pytest"):  # any other writes to a stream that ends with this test
            logging.root.removeHandler(handler)
            handler.close()
