"""One run at a time in a folder: who is refused, who waits, and whose lock is taken over."""

import errno
import json
import os
import shutil
import threading
import time

import pytest
from processes import Beside
from refusals import refused

from sbkit.data.lock import Lock
from sbkit.errors import SbkitError
from sbkit.runs import lock
from sbkit.runs.lock import RunLock
from sbkit.system import processes
from sbkit.train.distributed import ending


def holds(pipe, folder, locks, runs, forks):
    """Hold a folder until the test says something."""
    if locks == "no locks":
        Lock.acquire = lambda self, **how: None
    lock.BEAT = 0.1
    with RunLock(folder, runs):
        if forks and os.fork() == 0:
            time.sleep(60)
            os._exit(0)
        pipe.send("held")
        pipe.recv()


class Other(Beside):
    """Another process that holds a folder until it's told to end, or is killed."""

    def __init__(self, folder, locks="locks", runs=True, forks=False, **environment):
        super().__init__(holds, folder, locks, runs, forks, **environment)

    def __enter__(self):
        assert self.pipe.recv() == "held"
        return self

    def end(self):
        self.pipe.send("end")
        self.process.join()


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(lock, "TOLD_AFTER", 0.2)
    monkeypatch.setattr(lock, "PATIENCE", 0.3)


@pytest.fixture(params=["locks", "no locks"])
def locks(request, monkeypatch):
    """A file system with and one without locks of the kernel."""
    if request.param == "no locks":
        monkeypatch.setattr(Lock, "acquire", lambda self, **how: None)
    return request.param


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_that_a_run_holds_is_refused_in_one_line_and_free_again_after_its_end(tmp_path, locks):
    with Other(tmp_path, locks) as other:
        before = files(tmp_path)
        with refused("folder-in-use", file=tmp_path, wording=False) as caught, RunLock(tmp_path):
            pass
        line, year = str(caught.value), time.strftime("%Y")
        assert f"process {other.process.pid} on " in line and f" since {year}-" in line and "\n" not in line
        assert caught.value.exit_code == 2
        assert files(tmp_path) == before
        other.end()
        with RunLock(tmp_path):
            assert files(tmp_path) == [".held-2.json"]


@pytest.mark.parametrize("forks", [False, True])
def test_a_killed_holder_is_followed_at_once_though_a_child_outlives_it(tmp_path, locks, forks):
    with Other(tmp_path, locks, forks=forks) as other:
        other.kill()
        began = time.monotonic()
        with RunLock(tmp_path):
            assert time.monotonic() - began < 5 and files(tmp_path) == [".held-2.json"]


def test_a_preparation_is_waited_for(tmp_path, caplog):
    with Other(tmp_path, runs=False) as other:
        threading.Timer(1.5, other.end).start()
        with RunLock(tmp_path):
            pass
    assert "is working there, waiting for it" in caplog.text


def test_a_run_that_was_stopped_gets_time_to_save_and_who_waits_is_told_for_whom(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(lock, "PATIENCE", 30)
    with Other(tmp_path) as other:
        threading.Timer(1.5, other.end).start()
        with RunLock(tmp_path):
            pass
        assert f"process {other.process.pid} on " in caplog.text
    assert "is training there, waiting 30 s for its end" in caplog.text


def written(folder, number=1, **changes):
    """The file of a holder: this process, unless changes say something else."""
    facts = {"host": "far", "pid": os.getpid(), "born": processes.born(os.getpid()), "machine": processes.machine(),
             "namespace": processes.namespace(), "runs": True, "command": "sbkit train x.yaml",
             "locked": False, "since": "2026-01-01 00:00:00", **changes}
    path = folder / f".held-{number}.json"
    path.write_text(json.dumps(facts))
    return path


def test_the_number_of_a_process_that_is_another_by_now_holds_nothing(tmp_path):
    written(tmp_path)
    with refused("folder-in-use", file=tmp_path, wording=False) as caught:
        RunLock(tmp_path).__enter__()
    assert "on far since 2026-01-01 00:00:00" in caught.value.message
    written(tmp_path, born="1")
    with RunLock(tmp_path):
        pass


@pytest.mark.parametrize("locked", [True, False])
@pytest.mark.parametrize("elsewhere", ["another machine", "another container"])
def test_elsewhere_a_sign_of_life_counts_and_its_absence(tmp_path, monkeypatch, elsewhere, locked):
    """Clocks of machines differ: the file system's counts. A lock may be of one machine alone."""
    monkeypatch.setattr(lock, "DEAD_AFTER", 2.0)
    changes = {"machine": "far"} if elsewhere == "another machine" else {"namespace": "far", "locked": False}
    path = written(tmp_path, **{"locked": locked, **changes})
    over = threading.Event()

    def beat():
        while not over.wait(0.2):
            os.utime(path)

    thread = threading.Thread(target=beat)
    thread.start()
    with refused("folder-in-use", file=tmp_path, wording=False):
        RunLock(tmp_path).__enter__()
    over.set()
    thread.join()
    with RunLock(tmp_path):
        assert files(tmp_path) == [".held-2.json"]


def test_one_who_died_long_ago_elsewhere_is_not_waited_for(tmp_path):
    path = written(tmp_path, machine="far")
    os.utime(path, (time.time() - 1000,) * 2)
    with RunLock(tmp_path):
        pass


def test_a_file_of_which_only_the_name_was_written_is_waited_for_and_then_nobodys(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "DEAD_AFTER", 0.5)
    (tmp_path / ".held-4.json").touch()
    with RunLock(tmp_path):
        assert files(tmp_path) == [".held-5.json"]


def test_of_many_that_find_a_dead_holder_one_follows_it(tmp_path, locks, monkeypatch):
    monkeypatch.setattr(lock, "PATIENCE", 0)
    for attempt in range(10):
        folder = tmp_path / str(attempt)
        folder.mkdir()
        written(folder, born="1")
        together, held, refused = threading.Barrier(6), [], []

        def take(folder=folder, together=together, held=held, refused=refused):
            lock = RunLock(folder)
            together.wait()
            try:
                lock.__enter__()
                held.append(lock)
            except SbkitError:
                refused.append(lock)

        threads = [threading.Thread(target=take) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(held) == 1 and len(refused) == 5 and files(folder) == [".held-2.json"]
        held[0].__exit__()


def test_one_that_looked_long_ago_withdraws(tmp_path):
    written(tmp_path, 4)
    late = RunLock(tmp_path)
    assert not late._follow(1) and files(tmp_path) == [".held-4.json"]


def test_the_holder_gives_signs_of_life_and_leaves_no_thread(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    with RunLock(tmp_path):
        os.utime(tmp_path / ".held-1.json", (0, 0))
        until = time.monotonic() + 30
        while not (tmp_path / ".held-1.json").stat().st_mtime:
            assert time.monotonic() < until
            time.sleep(0.02)
    assert not [thread for thread in threading.enumerate() if thread.name == "run-lock"]
    assert "ended" in json.loads((tmp_path / ".held-1.json").read_text())


def test_a_folder_is_held_until_its_checkpoint_is_written(tmp_path):
    held = []

    def write():
        time.sleep(0.3)
        held.append(json.loads((tmp_path / ".held-1.json").read_text()).get("ended"))

    with RunLock(tmp_path):
        writer = threading.Thread(target=write)
        ending.writing.add(writer)
        writer.start()
    assert held == [None]


def test_a_holder_that_was_taken_for_dead_ends(tmp_path):
    with Other(tmp_path) as other:
        written(tmp_path, 2)
        other.process.join(60)
        assert other.process.exitcode == 1


@pytest.fixture
def ended(monkeypatch):
    """Set once a holder with a quick pulse ends its process."""
    told = threading.Event()
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock.ending, "exit_with_error", lambda code, reason: told.set())
    return told


@pytest.mark.parametrize("removed", [False, True], ids=["another number", "a new folder of the same name"])
def test_a_holder_sees_another_one_though_its_own_file_is_stale(tmp_path, monkeypatch, ended, removed):
    """On NFS nothing can be asked of a file that another machine removed."""
    def stale(*args, **options):
        raise OSError(errno.ESTALE, "Stale file handle")

    folder = tmp_path / "run"
    with RunLock(folder):
        monkeypatch.setattr(lock.os, "utime", stale)
        assert not ended.wait(0.3)
        if removed:
            shutil.rmtree(folder)
            folder.mkdir()
        written(folder, 1 if removed else 2)
        assert ended.wait(30)


def test_a_holder_whose_folder_was_removed_goes_on(tmp_path, ended):
    with RunLock(tmp_path / "run"):
        shutil.rmtree(tmp_path / "run")
        assert not ended.wait(0.3)


def test_a_process_lives_that_holds_a_lock_which_cannot_be_seen_from_here(tmp_path, monkeypatch):
    monkeypatch.setattr(Lock, "acquire", lambda self, **how: None)
    written(tmp_path, locked=True)
    with refused("folder-in-use", file=tmp_path, wording=False):
        RunLock(tmp_path).__enter__()


def test_a_folder_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "file").touch()
    with refused("not-writable", file=tmp_path / "file" / "run"):
        RunLock(tmp_path / "file" / "run").__enter__()
