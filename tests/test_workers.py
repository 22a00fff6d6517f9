"""Tests in several processes are told of as in one, and what dies takes one test with it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
FIXTURE = """
import os, pytest

@pytest.fixture(scope="session")
def log(tmp_path_factory):
    log = tmp_path_factory.getbasetemp() / "log"
    yield log
    with open(log, "a") as file: file.write(f"end {os.getpid()}\\n")
"""
ONE = """
import os, pytest, warnings

warnings.warn("on import")

@pytest.mark.parametrize("n", range(3))
def test_uses(log, n):
    with open(log, "a") as file: file.write(f"{__name__} {os.getpid()}\\n")

def test_warns(): warnings.warn("careful")
def test_skips(): pytest.skip("why")
def test_fails(): print("printed"); assert 1 == 2
"""
DIES = """
import os, pytest

@pytest.mark.parametrize("n", range(3))
def test_dies(n):
    if n == 1: os._exit(3)
"""
LONG = """
import contextlib, time

def test_waits():
    for _ in range(30):
        with contextlib.suppress(Exception): time.sleep(1)
"""
FAILS = """
import time
from pathlib import Path

def test_fails():
    while not Path(__file__).with_name("pid").exists(): time.sleep(0.01)
    raise ValueError
"""
WAITS = """
import os, signal, time
from pathlib import Path

def test_waits():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    Path(__file__).with_name("writing").write_text(str(os.getpid()))
    Path(__file__).with_name("writing").rename(Path(__file__).with_name("pid"))
    time.sleep(60)
"""


def session(folder, *words, **files):
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "conftest.py").write_text(FIXTURE)
    command = [sys.executable, "-m", "pytest", "-p", "workers", "-p", "no:cacheprovider", "-q", "--rootdir",
               str(folder), "--basetemp", str(folder / "temp"), *words, str(folder)]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
                          timeout=120, check=False)


@pytest.mark.long
@pytest.mark.slow
def test_every_test_is_told_of_once_and_the_session_ends_once_in_each_process(tmp_path):
    done = session(tmp_path, "--workers", "2", "-rs", one=ONE, two=ONE, three=ONE, dies=DIES)
    assert done.returncode == 1
    assert "4 failed, 14 passed, 3 skipped, 6 warnings" in done.stdout, done.stdout + done.stderr
    for said in ("test_dies[1]: the process ended with code 3", "Captured stdout call", "careful", "why", "[100%]"):
        assert said in done.stdout
    lines = [line.split() for line in (tmp_path / "temp" / "log").read_text().splitlines()]
    used, ended = ({(what, pid) for what, pid in lines if (what == "end") is end} for end in (False, True))
    assert len(used) == 3, "a file is run by one process"
    assert {pid for _, pid in used} == {pid for _, pid in ended} and len(ended) == sum(w == "end" for w, _ in lines)


@pytest.mark.long
@pytest.mark.slow
def test_a_test_that_takes_too_long_is_stopped_even_where_errors_are_ignored(tmp_path):
    done = session(tmp_path, "--workers", "1", "--timeout", "1", long=LONG)
    assert "Failed: Timeout" in done.stdout and "1 failed" in done.stdout, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_at_the_first_failure_all_processes_end(tmp_path):
    done = session(tmp_path, "--workers", "2", "-x", failing=FAILS, waiting=WAITS)
    assert done.returncode == 1 and "stopping after 1 failures" in done.stdout, done.stdout + done.stderr
    with pytest.raises(ProcessLookupError):
        os.kill(int((tmp_path / "pid").read_text()), 0)


@pytest.mark.long
@pytest.mark.slow
def test_a_session_whose_processes_cannot_start_ends(tmp_path):
    done = session(tmp_path, "--workers", "2", "-p", "no:capture", one=ONE)
    assert done.returncode == 4 and "before it took a test" in done.stderr, done.stdout + done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_a_fixture_of_the_session_that_fails_in_the_end_fails_it(tmp_path):
    done = session(tmp_path, "--workers", "1", one="import os\ndef test_of_a_log(log): os.mkdir(log)")
    assert done.returncode == 1 and "1 failed, 1 passed" in done.stdout, done.stdout + done.stderr
    assert "IsADirectoryError" in done.stderr


@pytest.mark.long
@pytest.mark.slow
def test_nothing_runs_where_a_file_cannot_be_imported(tmp_path):
    done = session(tmp_path, "--workers", "2", one=ONE, broken="import nothing_of_this_name")
    assert done.returncode == 2 and "1 error during collection" in done.stdout
    assert not (tmp_path / "temp" / "log").exists()
