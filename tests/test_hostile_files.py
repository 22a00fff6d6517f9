"""Spoiled files of bundles, corpora and language models are used or refused, in one line, soon, in bounded memory."""

import json
import os
import subprocess
import sys
from pathlib import Path

import hostile_files
import pytest
import tried

#: Ways to spoil each kind; SBKIT_HOSTILE_FILES=20000 tries more.
COUNT = int(os.environ.get("SBKIT_HOSTILE_FILES", "40"))


@pytest.mark.slow
@pytest.mark.parametrize("kind", hostile_files.KINDS)
def test_a_spoiled_file_is_used_or_refused_in_one_line(tmp_path, kind):
    program = Path(hostile_files.__file__)
    done = subprocess.run([sys.executable, str(program), kind, str(COUNT), "0", str(tmp_path)], capture_output=True,
                          text=True, timeout=60 + COUNT, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": f"{program.parents[1]}:{program.parent}"})
    assert done.returncode == 0, f"it ended with {done.returncode} at {done.stderr.splitlines()[-3:]}"
    told = json.loads(done.stdout.splitlines()[-1])
    print({name: value for name, value in told.items() if name != "found"})
    assert not told["found"]
    tried.record(tried.FILES, told["count"], long=tried.LONG)
    assert told["refused"] > COUNT / 10, "something was spoiled"
    assert told["megabytes"] < told["loaded"] + 870, "without what the program itself and its libraries take"
