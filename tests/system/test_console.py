"""Output that nobody can read any more fails nobody, and is in the log once."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import logging, os, sys, time
from tqdm import tqdm
from sbkit.system import console
console.open_missing_streams()
console.outlast_terminal()
print("first", flush=True)
time.sleep(0.3)  # whoever reads one line has left
print("on stdout")
print("on stderr", file=sys.stderr)
console.write_now("at once\\n")
handlers = [console.Terminal(sys.stderr), console.LogFile(sys.argv[1])]
logging.basicConfig(level=logging.INFO, format="%(message)s", handlers=handlers)
logging.info("by a logger")
for _ in tqdm(range(3), desc="bar"): pass
print("last")
console.write_error("error: why")
assert [os.readlink(f"/proc/self/fd/{fd}") for fd in map(int, sys.argv[2])] == ["/dev/null"] * len(sys.argv[2])
"""


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="the system doesn't list a process's files")
@pytest.mark.parametrize("streams, gone", [
    ("2>&1 | head -1", "12"), (">&- 2>&-", "12"), ("2>&-", "2"), ("<&- >&-", "01"), ("> /dev/full 2>&1", "12")])
def test_lines_that_nobody_can_read_are_in_the_log_once(streams, gone, tmp_path):
    log = tmp_path / "log.txt"
    done = subprocess.run(["bash", "-c", f'set -o pipefail; "$0" -c "$1" "$2" {gone} {streams}', sys.executable, SCRIPT,
                           log], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    lines = log.read_text().splitlines()
    shown = (done.stdout + done.stderr).splitlines()
    for line, fd in (("on stdout", "1"), ("last", "1"), ("on stderr", "2"), ("at once", "2")):
        assert (lines.count(line), shown.count(line)) == ((1, 0) if fd in gone else (0, 1)), line
    assert lines.count("by a logger") == lines.count("error: why") == 1
    assert shown.count("error: why") == ("2" not in gone)
    assert sum(line.startswith("bar: 100%") for line in lines) == ("2" in gone)
    assert "Traceback" not in done.stderr and "Exception" not in done.stderr
