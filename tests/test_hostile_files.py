"""Spoiled files of bundles, corpora and language models are used or refused, in one line, soon, in bounded memory."""

import json

import hostile_files
import processes
import pytest


@pytest.mark.slow
@pytest.mark.parametrize("count", [40, pytest.param(500, marks=pytest.mark.long)])
@pytest.mark.parametrize("kind", hostile_files.KINDS)
def test_a_spoiled_file_is_used_or_refused_in_one_line(tmp_path, kind, count):
    """``python tests/hostile_files.py KIND 20000 0 FOLDER`` tries more."""
    done = processes.program(hostile_files.main, kind, str(count), "0", str(tmp_path), timeout=60 + count)
    assert done.returncode == 0, f"it ended with {done.returncode} at {done.stderr.splitlines()[-3:]}"
    told = json.loads(done.stdout.splitlines()[-1])
    print({name: value for name, value in told.items() if name != "found"})
    assert not told["found"]
    assert told["refused"] > count / 10, "something was spoiled"
    assert told["megabytes"] < 600
