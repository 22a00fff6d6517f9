"""Output that nobody can read any more fails nobody, and is in the log once."""

import logging
import os
import pkgutil
import re
import stat
import subprocess
import sys
import threading
import time
import tracemalloc
from pathlib import Path

import pytest

from sbkit.data.lock import locked
from sbkit.system import console
from sbkit.system.console import LastingStream, LogFile, atomic_write, progress

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
handlers = [console.TerminalHandler(sys.stderr), console.LogFile(sys.argv[1])]
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
def test_lines_without_a_reader_are_in_the_log_once(streams, gone, tmp_path):
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


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="the system has no disk that is always full")
def test_neither_a_full_disk_nor_a_dead_reader_fails_who_prints():
    done = subprocess.run([sys.executable, "-c", """
import logging, os, sys
from sbkit.system import console
ours, reader = os.pipe()
os.close(ours)
os.dup2(reader, 2)
console.outlast_terminal()
logging.basicConfig(level=logging.INFO, handlers=[console.TerminalHandler(sys.stderr), console.LogFile("/dev/full")])
for _ in range(3):
    print("a line", file=sys.stderr)
    logging.info("a record")
print("went on")
"""], capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("went on\n", 0)


@pytest.fixture
def log(tmp_path):
    handler = LogFile(tmp_path / "log.txt")
    logging.getLogger().addHandler(handler)
    mark(handler)  # what earlier tests have printed is before it
    yield handler
    logging.getLogger().removeHandler(handler)
    handler.close()


def mark(log):
    log.emit(logging.LogRecord("a", logging.INFO, __file__, 0, "MARK", None, None))


def lines(log):
    mark(log)
    written = Path(log.baseFilename).read_text().splitlines()
    return written[next(i for i, line in enumerate(written) if "MARK" in line) + 1:-1]


def test_who_prints_does_not_wait_for_who_writes_the_log(log):
    """Who writes it may wait for the stream that this one prints to."""
    def write():
        LastingStream(2, lost=True).write(b"a line\n")

    log.acquire()
    try:
        printing = threading.Thread(target=write, daemon=True)
        printing.start()
        printing.join(10)
        assert not printing.is_alive()
    finally:
        log.release()
    assert lines(log) == ["a line"]


def test_a_line_is_whole_in_whichever_pieces_it_came(log):
    stream, written = LastingStream(2, lost=True), "bar 1%\rbar 100%\ncaf\u00e9\r\nlast\n".encode()
    for at in range(len(written)):
        stream.write(written[at:at + 1])
    assert lines(log) == ["bar 100%", "caf\u00e9", "last"]


@pytest.mark.slow
def test_what_no_log_takes_has_bounds(tmp_path):
    stream = LastingStream(2, lost=True)
    tracemalloc.start()
    try:
        for _ in range(1000):
            stream.write(b"\r" + b"x" * 1000)  # a bar
        for _ in range(1000):
            stream.write(b"." * 1000)
        assert tracemalloc.get_traced_memory()[1] < 500_000
    finally:
        tracemalloc.stop()
    stream.write(b"\n" + b"a line\n" * 20_000)
    log = LogFile(tmp_path / "log.txt")
    assert len(lines(log)) <= 10_000
    log.close()


@pytest.mark.parametrize("total, said", [(3, "3/3 (100 %)"), (None, "3")])
def test_a_bar_without_a_terminal_is_one_line(total, said, capsys):
    with progress(what="speaking", total=total, unit="clip") as bar:
        for _ in range(3):
            bar.update()
            bar.refresh()
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(rf"speaking: {re.escape(said)}, took \d\d:\d\d, .*clip/s", line)


def test_a_long_bar_without_a_terminal_says_how_far_it_is(capsys, monkeypatch):
    monkeypatch.setattr(console, "LINE_SECONDS", 0.01)
    with progress(what="measuring", total=4, unit="file") as bar:
        bar.update(2)
        time.sleep(0.02)
        bar.refresh()
    half, last = capsys.readouterr().err.splitlines()
    assert re.match(r"measuring: 2/4 \(50 %\), \d\d:\d\d left, ", half)
    assert last.startswith("measuring: 2/4 (50 %), took ")


def test_what_the_configuration_of_logs_names_exists():
    names = re.findall(r"sbkit[\w.]+", Path(__file__).parents[2].joinpath("sbkit/runs/log-config.yaml").read_text())
    assert len(names) == 3 and all(map(pkgutil.resolve_name, names))


def test_a_script_ends_in_one_line_with_its_own_place(tmp_path):
    script = tmp_path / "train.py"
    script.write_text("from sbkit.errors import SbkitError, explain\nfrom sbkit.system import console\nimport sys\n"
                      "for _ in range(2): console.end_scripts_in_one_line()\n"
                      "def lose(): raise SbkitError('bad-loss', 'no loss', hint='return it')\n"
                      "def fail(error):\n"
                      "    explain(error, SbkitError('no-forward-outputs', 'they are None', hint='return them'))\n"
                      "    raise error\n"
                      "if 'none' in sys.argv: fail(TypeError('not subscriptable'))\n"
                      "if len(sys.argv) > 1: raise KeyError('own')\nlose()\n")
    ended = subprocess.run([sys.executable, script], capture_output=True, text=True)
    assert (ended.returncode, ended.stderr) == (1, f"{script}:5: error: no loss; return it [bad-loss]\n")
    none = subprocess.run([sys.executable, script, "none"], capture_output=True, text=True)
    assert none.stderr == f"{script}:8: error: they are None; return them [no-forward-outputs]\n"
    own = subprocess.run([sys.executable, script, "own"], capture_output=True, text=True)
    assert own.returncode == 1 and "Traceback" in own.stderr and own.stderr.endswith("KeyError: 'own'\n")


@pytest.mark.parametrize(("mask", "permissions"), [(0o022, 0o644), (0o027, 0o640), (0o077, 0o600)])
def test_a_written_file_has_the_permissions_of_the_umask_which_is_never_set(tmp_path, monkeypatch, mask, permissions):
    """To set it, even for a moment, is to set it for the files of all other threads."""
    before = os.umask(mask)
    try:
        with monkeypatch.context() as patch:
            patch.setattr(os, "umask", lambda mask: pytest.fail("the umask of the process is set"))
            for mode, content in (("w", "text"), ("wb", b"bytes")):
                with atomic_write(tmp_path / "file", mode) as file:
                    file.write(content)
                assert stat.S_IMODE((tmp_path / "file").stat().st_mode) == permissions
    finally:
        os.umask(before)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


WRITER = """
import sys, time
from sbkit.system.console import atomic_write
with atomic_write(sys.argv[1]) as file:
    file.write("half")
    file.flush()
    print("writing", flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_what_a_killed_writer_left_is_removed_and_what_another_writes_is_not(tmp_path):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, tmp_path / name], stdout=subprocess.PIPE, text=True)
               for name in ("killed", "alive")]
    try:
        for writer in writers:
            assert writer.stdout.readline() == "writing\n"
        writers[0].kill()
        writers[0].wait()
        foreign = tmp_path / ".others.txt"
        foreign.write_text("")
        assert len([*tmp_path.iterdir()]) == 3
        console.remove_partials(tmp_path)
        assert sorted(path.name.split(".")[1] for path in tmp_path.iterdir()) == ["alive", "others"]
    finally:
        for writer in writers:
            writer.kill()
            writer.communicate()
    with locked(tmp_path / "folder" / ".lock"):
        pass
    with locked(tmp_path / ".lock"):
        assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", ".others.txt", "folder"]
