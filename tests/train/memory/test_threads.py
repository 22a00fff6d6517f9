"""Work goes on in another thread as it would in this one, and a thread that can't begin keeps nobody waiting."""

import threading
import weakref

import pytest
import torch

from sbkit.errors import SbkitError
from sbkit.train.memory import host
from sbkit.train.memory.oom import Threads

STUCK = RuntimeError("could not create a primitive")


@pytest.fixture
def moved(monkeypatch):
    monkeypatch.setattr(host, "bounded", lambda: True)
    threads = Threads()
    assert threads.call(threading.get_ident) == threading.get_ident()
    threads.leave_if_stuck(ValueError("something else"))
    assert threads.call(threading.get_ident) == threading.get_ident()
    threads.leave_if_stuck(STUCK)
    return threads


def test_a_stuck_thread_is_replaced(moved):
    first = moved.call(threading.get_ident)
    assert first == moved.call(threading.get_ident) != threading.get_ident()
    moved.leave_if_stuck(STUCK)
    assert moved.call(threading.get_ident) not in (first, threading.get_ident())


def test_calls_in_another_thread_behave_the_same(moved):
    with torch.no_grad():
        assert moved.call(torch.is_grad_enabled) is False
    assert moved.call(torch.is_grad_enabled) is True and moved.call(int, "11", base=2) == 3
    with pytest.raises(ZeroDivisionError):
        moved.call(lambda: 1 / 0)
    assert moved.call(len, "abc") == 3


def test_a_call_leaves_no_references(moved):
    def fail(held):
        raise RuntimeError("no room")

    held = torch.zeros(3)
    gone = weakref.ref(held)
    with pytest.raises(RuntimeError, match="no room"):
        moved.call(fail, held)
    moved.call(len, "")
    del held
    assert gone() is None


def test_a_thread_that_does_not_begin_is_one_message(monkeypatch):
    def refuse(thread):
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(host, "bounded", lambda: True)
    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(SbkitError, match="there is none left to start a thread") as error:
        Threads().call(len, "")
    assert error.value.exit_code == 1
