"""``refused``: what ends in an ``SbkitError`` is told by its code and fields; its wording stands in tests/messages/.

``make messages`` writes these files anew. A reviewer reads there what changed in the words, and no test repeats them.
"""

import contextlib
import fcntl
import json
import os
import re
from pathlib import Path

import pytest

from sbkit.errors import SbkitError

FOLDER = Path(__file__).parent / "messages"
ROOT = Path(__file__).parent.parent
# Folders of tests and of this checkout, addresses in memory, ports, hashes and free space differ from run to run.
_VARIES = [(re.compile(r"(?:/[^\s'\":;,]*)?/pytest-of-[^/\s]+/pytest-\d+/(?:popen-gw\d+/)?[^/\s'\":;,]+"), "TMP"),
           (re.compile(re.escape(str(ROOT))), "REPOSITORY"),
           (re.compile(r"0x[0-9a-f]{6,}"), "ADDRESS"),
           (re.compile(r"(127\.0\.0\.1|localhost):\d+"), r"\1:PORT"),
           (re.compile(r"\b[0-9a-f]{12,}\b"), "HASH"),
           (re.compile(r"free: [\d.]+ [kMGT]?B"), "free: SPACE")]

_rewriting = False
_rewritten = set()  # the tests whose messages this process has written anew


def rewrite():
    """From now on write down what is said, instead of comparing it."""
    global _rewriting
    _rewriting = True


@contextlib.contextmanager
def refused(code, *, wording=True, kind=SbkitError, **fields):
    """The block must end in an error with this code and these fields: ``file``, ``line``, ``key``, ``value``.

    wording : False where the message differs from run to run, as with figures of the machine, or generated values
    """
    with pytest.raises(kind) as caught:
        yield caught
    error = caught.value
    assert error.code == code, f"the code is {error.code}, not {code}, of: {error}"
    told = {name: getattr(error, name) for name in fields}
    assert {name: _plain(value) for name, value in told.items()} == \
        {name: _plain(value) for name, value in fields.items()}
    if wording:
        check_wording(str(error))


def check_wording(message):
    """Compare a message with what stands in the messages of the test that runs."""
    path, test = _test_that_runs()
    message = normalised(message)
    if _rewriting:
        write(path, test, message)
        return
    assert message in read(path).get(test, []), \
        f"{path.name} has another message of {test}: make messages writes it anew\n{message}"


def normalised(message):
    for pattern, name in _VARIES:
        message = pattern.sub(name, message)
    return message


def read(path):
    """The messages in a file, by test."""
    messages = {}
    if path.exists():
        for block in path.read_text(encoding="utf-8").split("\n\n"):
            test, _, lines = block.strip("\n").partition("\n")
            messages[test] = [json.loads(f'"{line.removeprefix("    ")}"') for line in lines.split("\n")]
    return messages


def write(path, test, message):
    """Write a message of a test, in place of what it said before this session; other processes write others."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(FOLDER / ".lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        tests = read(path)
        if (path, test) not in _rewritten:
            _rewritten.add((path, test))
            tests[test] = []
        if message not in tests[test]:
            tests[test].append(message)
        blocks = []
        for name in sorted(tests):
            lines = ["    " + json.dumps(each, ensure_ascii=False)[1:-1] for each in tests[name]]
            blocks.append("\n".join([name, *lines]) + "\n")
        path.write_text("\n".join(blocks), encoding="utf-8")


def _test_that_runs():
    """The file of messages of the test that runs, and the test's name there."""
    file, _, test = os.environ["PYTEST_CURRENT_TEST"].rpartition(" (")[0].partition("::")
    return FOLDER / Path(file).relative_to("tests").with_suffix(".txt"), test


def _plain(value):
    return os.fspath(value) if isinstance(value, os.PathLike) else value
