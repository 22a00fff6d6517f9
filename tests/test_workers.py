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


def session(folder, *words, **files):
    for name, text in files.items():
        (folder / f"test_{name}.py").write_text(text)
    (folder / "conftest.py").write_text(FIXTURE)
    command = [sys.executable, "-m", "pytest", "-p", "workers", "-p", "no:cacheprovider", "-q", "--rootdir",
               str(folder), "--basetemp", str(folder / "temp"), *words, str(folder)]
    paths = os.pathsep.join([str(TESTS), str(TESTS.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.run(command, cwd=folder, env={**os.environ, "PYTHONPATH": paths}, capture_output=True, text=True,
                          timeout=120, check=False)


@pytest.mark.slow
def test_every_test_is_told_of_once_and_the_session_ends_once_in_each_process(tmp_path):
    done = session(tmp_path, "--workers", "2", "-rs", one=ONE, two=ONE, three=ONE, dies=DIES)
    assert done.returncode == 1
    assert "4 failed, 14 passed, 3 skipped, 3 warnings" in done.stdout, done.stdout + done.stderr
    for said in ("test_dies[1]: its process ended with code 3", "Captured stdout call", "careful", "why", "[100%]"):
        assert said in done.stdout
    lines = [line.split() for line in (tmp_path / "temp" / "log").read_text().splitlines()]
    used, ended = ({(what, pid) for what, pid in lines if (what == "end") is end} for end in (False, True))
    assert len(used) == 3, "a file is run by one process"
    assert {pid for _, pid in used} == {pid for _, pid in ended} and len(ended) == sum(w == "end" for w, _ in lines)


@pytest.mark.slow
@pytest.mark.parametrize(("words", "said"), [(["-x"], "stopping after 1 failures"), (["--collect-only"], "18 tests")])
def test_other_options_work(tmp_path, words, said):
    done = session(tmp_path, "--workers", "2", *words, one=ONE, two=ONE, three=ONE)
    assert said in done.stdout, done.stdout + done.stderr


@pytest.mark.slow
def test_nothing_runs_where_a_file_cannot_be_imported(tmp_path):
    done = session(tmp_path, "--workers", "2", one=ONE, broken="import nothing_of_this_name")
    assert done.returncode == 2 and "1 error during collection" in done.stdout
    assert not (tmp_path / "temp" / "log").exists()
