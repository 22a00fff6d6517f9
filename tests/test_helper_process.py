"""Helper processes import nothing from where they happen to stand."""

import json
import os
import subprocess

import pytest

from sbkit import helper_process

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
    assert helper_process._HOME in path, "sbkit itself is found wherever it was started"


def test_the_environment_is_this_ones_or_what_is_named_of_it(monkeypatch):
    monkeypatch.setenv("SECRET", "1")
    monkeypatch.setenv("LANG", "C")
    monkeypatch.setenv("PYTHONPATH", "")
    assert helper_process.environment()["SECRET"] == "1" and "PYTHONPATH" not in helper_process.environment()
    assert helper_process.environment(["LANG", "NO_SUCH"]) == {"LANG": "C"}
