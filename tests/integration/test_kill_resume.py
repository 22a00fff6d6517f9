"""Killed with -9 at any moment: the next start finds a whole checkpoint."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def quick_disk(tmp_path):
    """A folder in memory where there is one: the kill ends the process, not the kernel that has the data."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.slow
def test_killed_at_every_operation_on_the_disk(quick_disk):
    done = subprocess.run(
        [sys.executable, str(Path(__file__).with_name("kill_points.py")), str(quick_disk)],
        capture_output=True, text=True, timeout=550, env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    for where in ("finely", "sync", "async", "replaced", "replaced, async"):
        operations, found = report[where]["operations"], report[where]["found"]
        assert len(found) == len(operations)
        assert {"fsync", "rename", "unlink", "rmdir", "mkdir", "write"} <= set(operations)
        # the old one until the rename, the new one from there on, and never back again
        assert set(found) == {1, 2} and found == sorted(found), f"{where}: {found}"
    assert report["finely"]["operations"].count("write") > 100
    for again in report["again"]:
        assert len(again["found"]) > 1 and len(set(again["found"])) == 1, again
    assert len(report["random"]["found"]) == 30
