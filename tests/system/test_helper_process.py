"""Helper processes import nothing from where they happen to stand."""

import json
import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from sbkit.recipe import arguments
from sbkit.system import helper_process
from sbkit.train.memory.bounded_trial import BoundedTrial

SMALL = Path(__file__).parents[1] / "recipe" / "small.yaml"
LOOK = "import json, sys; print(json.dumps([__name__, sys.argv[1:], sys.path]))\n"


@pytest.fixture
def module(tmp_path, monkeypatch):
    """A module of sbkit's that tells what it sees, found through PYTHONPATH."""
    (tmp_path / "house" / "looks").mkdir(parents=True)
    (tmp_path / "house" / "looks" / "__init__.py").write_text("")
    (tmp_path / "house" / "looks" / "around.py").write_text("import sndhdr2, runpy\n" + LOOK)
    (tmp_path / "house" / "sndhdr2.py").write_text("")
    (tmp_path / "here").mkdir()
    for name in ("sndhdr2", "json", "runpy", "site"):
        (tmp_path / "here" / f"{name}.py").write_text(f"print('{name} of the working directory')\n")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(["", str(tmp_path / "house"), ""]))
    monkeypatch.chdir(tmp_path / "here")
    return "looks.around"


def test_nothing_is_imported_from_the_working_directory(module, tmp_path):
    done = subprocess.run([*helper_process.command(module), "7", "x y"], env=helper_process.environment(),
                          capture_output=True, text=True, timeout=60)
    name, words, path = json.loads(done.stdout)
    assert (name, words) == ("__main__", ["7", "x y"]), done.stderr
    assert str(tmp_path / "house") in path and not {"", str(tmp_path / "here")} & set(path)
    assert helper_process.HOME in path, "sbkit itself is found wherever it was started"


def test_the_environment_is_this_ones_or_what_is_named_of_it(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("LANG", "C")
    monkeypatch.setenv("PYTHONPATH", "")
    assert helper_process.environment()["SECRET"] == "1" and "PYTHONPATH" not in helper_process.environment()
    assert helper_process.environment(["LANG", "NO_SUCH"]) == {"LANG": "C"}


safe_path = pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no switch for it")


def leave_traps(folder, *names):
    """Modules that, imported, leave the file ``ran``."""
    for name in names:
        (folder / f"{name}.py").write_text("open('ran', 'a').write(__name__); raise ImportError('not this one')")
    return folder / "ran"


@safe_path
def test_spawned_processes_import_nothing_from_the_working_directory(tmp_path, monkeypatch):
    ran = leave_traps(tmp_path, "pickle", "socket", "signal")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with helper_process.without_working_directory():
        pool = ProcessPoolExecutor(1, multiprocessing.get_context("spawn"))
        asked = pool.submit(os.getpid)
    with pool:
        assert asked.result(60) != os.getpid()
    assert not ran.exists() and "PYTHONSAFEPATH" not in os.environ


@safe_path
def test_trials_import_nothing_from_the_working_directory(monkeypatch):
    """They ask for what the next test tries, whose server imports less."""
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)

    class Started(Exception):
        """Here a process would import."""

    def start(process):
        assert os.environ["PYTHONSAFEPATH"] == "1"
        raise Started

    monkeypatch.setattr(multiprocessing.process.BaseProcess, "start", start)
    with pytest.raises(Started):
        BoundedTrial(arguments.parse([str(SMALL), "--device", "cpu"]), 1 << 34).fits(1, 1.0)


@safe_path
def test_processes_of_a_server_import_nothing_from_there_wherever_temporary_files_lie(tmp_path):
    ran, long = leave_traps(tmp_path, "numpy", "pickle", "socket"), tmp_path / ("a" * 100)
    long.mkdir()
    program = ("import multiprocessing; from sbkit.system import helper_process\n"
               "if __name__ == '__main__':\n"
               "    context = multiprocessing.get_context('forkserver')\n"
               "    context.set_forkserver_preload(['numpy'])\n"
               "    started = context.Process(target=print, args=('started',))\n"
               "    with helper_process.without_working_directory():\n"
               "        started.start()\n"
               "    started.join()\n")
    (long / "program.py").write_text(program)
    done = subprocess.run([sys.executable, str(long / "program.py")], capture_output=True, text=True, timeout=60,
                          env={**os.environ, "TMPDIR": str(long), "PYTHONPATH": helper_process.HOME}, cwd=tmp_path)
    assert done.stdout == "started\n" and not ran.exists(), done.stderr
