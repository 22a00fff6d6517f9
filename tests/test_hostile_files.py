"""Spoiled files of bundles, corpora and language models are used or refused, in one line, soon, in bounded memory."""

import json
import os

import hostile_files
import processes
import pytest
import tried

#: Ways to spoil each kind; SBKIT_HOSTILE_FILES=20000 tries more.
COUNT = int(os.environ.get("SBKIT_HOSTILE_FILES", "20"))


@pytest.mark.slow
@pytest.mark.parametrize("count", [COUNT, *([pytest.param(250, marks=pytest.mark.long)] if COUNT < 250 else [])])
@pytest.mark.parametrize("kind", hostile_files.KINDS)
def test_a_spoiled_file_is_used_or_refused_in_one_line(tmp_path, kind, count):
    """``python tests/hostile_files.py KIND 20000 0 FOLDER`` tries more."""
    done = processes.program(hostile_files.main, kind, str(count), "0", str(tmp_path), timeout=60 + count)
    assert done.returncode == 0, f"it ended with {done.returncode} at {done.stderr.splitlines()[-3:]}"
    told = json.loads(done.stdout.splitlines()[-1])
    print({name: value for name, value in told.items() if name != "found"})
    assert not told["found"]
    tried.record(tried.FILES, told["count"], long=tried.LONG)
    assert told["refused"] > count / 10, "something was spoiled"
    assert told["megabytes"] < 870, "without what the program itself and its libraries take"
