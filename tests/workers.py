"""``--workers N``: runs test files in N processes, which are forked after one collection.

Each takes the next file when it is done with one, so that fixtures of a module are made once. If a process dies, the
test that it ran has failed, and another one takes the rest of the file.
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

from sbkit.rehearsal import fake_gpu

_FORK = multiprocessing.get_context("fork")
#: Seconds between checks that workers are alive: a child of one may keep its pipe open.
_LOOK = 1.0
#: Seconds that a worker has to end once it is told to.
_END = 5.0


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--workers", type=int, default=0, metavar="N", help="run test files in N processes")


@pytest.hookimpl(wrapper=True)
def pytest_collection(session: pytest.Session) -> Iterator[None]:
    with fake_gpu.without_driver() if session.config.getoption("workers") else contextlib.nullcontext():
        return (yield)


@pytest.hookimpl(tryfirst=True)
def pytest_runtestloop(session: pytest.Session) -> bool | None:
    count = session.config.getoption("workers")
    if count < 1 or session.testsfailed or session.config.option.collectonly:
        return None
    session.config._tmp_path_factory.getbasetemp()  # one folder for all processes
    files = deque(list(items) for _, items in groupby(session.items, key=lambda item: item.path))
    workers: list[Worker] = []
    try:
        for _ in range(min(count, len(files))):
            Worker(session, files, workers)
        while workers:
            ready = wait([worker.pipe for worker in workers], _LOOK)
            for worker in workers[:]:
                if worker.pipe in ready or not worker.process.is_alive():
                    worker.listen()
                if worker.ended:
                    workers.remove(worker)
                    if files:
                        Worker(session, files, workers)
            if session.shouldfail:
                raise session.Failed(session.shouldfail)
            if session.shouldstop:
                raise session.Interrupted(session.shouldstop)
    finally:
        for worker in workers:
            worker.process.terminate()
        for worker in workers:
            worker.process.join(_END)
            worker.process.kill()
    return True


class Worker:
    """One process, as seen from the one that collected the tests.

    files : not yet given to any process
    workers : all others, to which this one is added
    """

    def __init__(self, session: pytest.Session, files: deque[list[pytest.Item]], workers: list[Worker]):
        self.session, self.files, self.ended, self.asked = session, files, False, False
        self.items: deque[pytest.Item] = deque()
        """Given to the process, and not yet ended."""
        self.pipe, theirs = _FORK.Pipe()
        workers.append(self)
        self.process = _FORK.Process(target=_work, args=(session, theirs, [worker.pipe for worker in workers]))
        self.process.start()
        theirs.close()

    def listen(self) -> None:
        """Take what the process has sent, and give it the next file if it asks."""
        config = self.session.config
        ended = not self.process.is_alive()  # asked first, so that all it has sent is read below
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
                else:
                    self.asked = True
                    items = self.files.popleft() if self.files else []
                    self.items.extend(items)
                    self.pipe.send([self.session.items.index(item) for item in items])
        except (EOFError, OSError):
            self.process.join()
            ended = True
        if ended and not self.asked:  # and none that follows would
            raise pytest.UsageError(f"a worker ended with code {self.process.exitcode} before it took a test")
        if ended and (self.items or self.process.exitcode):
            died = self.items.popleft() if self.items else None
            nodeid, location = (died.nodeid, died.location) if died else ("fixtures of a session", ("", None, ""))
            message = f"{nodeid}: the process ended with code {self.process.exitcode}"
            config.hook.pytest_runtest_logreport(
                report=pytest.TestReport(nodeid, location, {}, "failed", message, "call"))
            if self.items:
                self.files.appendleft(list(self.items))
        self.ended = ended


# ------------------------------------------------------------------ in the process


def _work(session: pytest.Session, pipe: Connection, others: list[Connection]) -> None:
    for other in others:  # so that this process ends where that which forked it does
        other.close()
    config = session.config
    reporter = _Reporter(config, pipe)
    config.pluginmanager.unregister(name="terminalreporter")
    config.pluginmanager.register(reporter, "terminalreporter")
    reporter.sends_warnings = True
    capture = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()  # its file is that of all
    capture.start_global_capturing()
    capture.suspend_global_capture()
    with contextlib.suppress(KeyboardInterrupt):  # the process that forked this one reports it
        while items := _next_file(session, pipe):
            for item, after in zip(items, [*items[1:], session], strict=True):  # fixtures of the session stay
                config.hook.pytest_runtest_protocol(item=item, nextitem=after)
                pipe.send(("ended", None))
        session._setupstate.teardown_exact(None)
    capture.stop_global_capturing()


def _next_file(session: pytest.Session, pipe: Connection) -> list[pytest.Item]:
    pipe.send(("next", None))
    return [session.items[place] for place in pipe.recv()]


class _Reporter:
    """Takes the place of pytest's terminal reporter, to which timeouts write."""

    def __init__(self, config: pytest.Config, pipe: Connection):
        self.config, self.pipe, self.sends_warnings = config, pipe, False
        self._tw = config.get_terminal_writer()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        hook = self.config.hook.pytest_report_to_serializable
        self.pipe.send(("report", hook(config=self.config, report=report)))

    def pytest_warning_recorded(self, warning_message: warnings.WarningMessage, when: str, nodeid: str,
                                location: Any) -> None:
        if not self.sends_warnings:  # those before the fork are repeated for each new plugin
            return
        plain = warnings.WarningMessage(Warning(str(warning_message.message)), Warning, warning_message.filename,
                                        warning_message.lineno)
        self.pipe.send(("warning", {"warning_message": plain, "when": when, "nodeid": nodeid, "location": location}))
