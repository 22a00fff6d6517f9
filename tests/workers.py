"""``--workers N``: N processes run the test files; they are forked when all is imported and collected, once for all.

Each takes the next file when it has ended one, so that fixtures of a module are made once. One that dies fails the
test that it ran, and another takes the rest of the file.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import warnings
from collections import deque
from collections.abc import Iterator
from itertools import groupby
from multiprocessing.connection import Connection, wait
from typing import Any

import pytest

from sbkit.rehearsal import nullcard

_FORK = multiprocessing.get_context("fork")
#: Seconds after which a process is looked at whose pipe another may hold open.
_LOOK = 1.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run test files in N processes")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    with nullcard.without_driver() if session.config.getoption("workers") else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("workers")
    if not count or session.testsfailed or session.config.option.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # one folder for all processes
    files = deque(list(items) for _, items in groupby(session.items, key=lambda item: item.path))
    workers = [Worker(session, files) for _ in range(min(count, len(files)))]
    try:
        while workers:
            ready = wait([worker.pipe for worker in workers], _LOOK)
            for worker in workers[:]:
                if worker.pipe in ready or not worker.process.is_alive():
                    worker.listen()
                if worker.ended:
                    workers.remove(worker)
                    if files:
                        workers.append(Worker(session, files))
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.process.terminate()
    return True


class Worker:
    """One process, as seen from the one that collected the tests."""

    def __init__(self, session: pytest.Session, files: deque[list[pytest.Item]]):
        self.session, self.files, self.ended = session, files, False
        self.items: deque[pytest.Item] = deque()
        """Given to it, and not yet ended."""
        self.pipe, theirs = _FORK.Pipe()
        self.process = _FORK.Process(target=_work, args=(session, theirs))
        self.process.start()
        theirs.close()

    def listen(self) -> None:
        """Take what the process has to say, and give it the next file if it asks."""
        config = self.session.config
        try:
            while self.pipe.poll():
                kind, said = self.pipe.recv()
                if kind == "report":
                    config.hook.pytest_runtest_logreport(
                        report=config.hook.pytest_report_from_serializable(config=config, data=said))
                elif kind == "warning":
                    config.hook.pytest_warning_recorded.call_historic(kwargs=said)
                elif kind == "ended":
                    self.items.popleft()
                elif self.files:
                    items = self.files.popleft()
                    self.items.extend(items)
                    self.pipe.send([self.session.items.index(item) for item in items])
                else:
                    self.pipe.send(None)
            self.ended = not self.process.is_alive()
        except (EOFError, ConnectionResetError, BrokenPipeError):
            self.process.join()
            self.ended = True
        if self.ended and self.items:
            died = self.items.popleft()
            self.session.config.hook.pytest_runtest_logreport(report=pytest.TestReport(
                died.nodeid, died.location, {}, "failed",
                f"{died.nodeid}: its process ended with code {self.process.exitcode}", "call"))
            if self.items:
                self.files.appendleft(list(self.items))


# ------------------------------------------------------------------ in the process


def _work(session: pytest.Session, pipe: Connection) -> None:
    config = session.config
    config.pluginmanager.unregister(name="terminalreporter")
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its file is that of all
    capture.start_global_capturing()
    capture.suspend_global_capture()
    config.pluginmanager.register(_Reporter(config, pipe))
    with contextlib.suppress(KeyboardInterrupt):  # of a terminal, which the process that forked this one tells of
        _run(session, pipe)
    capture.stop_global_capturing()


def _run(session: pytest.Session, pipe: Connection) -> None:
    items = _asked(session, pipe)
    while items:
        following = None
        for item, after in zip(items, [*items[1:], None], strict=True):
            if after is None:  # fixtures of the session stay for the next file
                following = _asked(session, pipe)
            nextitem = after or (following[0] if following else None)
            session.config.hook.pytest_runtest_protocol(item=item, nextitem=nextitem)
            pipe.send(("ended", None))
        items = following


def _asked(session: pytest.Session, pipe: Connection) -> list[pytest.Item] | None:
    pipe.send(("next", None))
    places = pipe.recv()
    return places and [session.items[place] for place in places]


class _Reporter:
    def __init__(self, config: pytest.Config, pipe: Connection):
        self.config, self.pipe = config, pipe

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook.pytest_report_to_serializable
        self.pipe.send(("report", hook(config=self.config, report=report)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str,
                                location: Any) -> None:
        plain = warnings.WarningMessage(Warning(str(warning_message.message)), Warning, warning_message.filename,
                                        warning_message.lineno)
        self.pipe.send(("warning", {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}))
