"""A check in a process of its own: however it ends, the next one isn't touched, and what it has said counts."""

import contextlib
import time
from pathlib import Path

import pytest

from sbkit.rehearsal import fake_gpu
from tools.gpu.bench import Bench, CheckProcess
from tools.gpu.check import DRY_RUN, FAILED, NOT_RUN, NOT_SHOWN, OK, SHORT, Check, Expect

pytestmark = pytest.mark.long

EXPECTS = Expect("one", "the first", "good", on_fake_gpu=True), Expect("two", "the second", "good")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs one of the functions of ``gpu_ends.py`` as a check."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (tmp_path / "home").mkdir()
    settings = {"device": "cpu", "dry_run": False, "cards": 1, "gib": None, "home": tmp_path / "home"}

    def one(name, limit=60.0, **changes):
        check = Check(name, "", f"gpu_ends:{name}", 5, EXPECTS)
        return CheckProcess(check, settings | changes, tmp_path, limit).result()

    return one


def test_what_a_check_finds_is_handed_over(run):
    done = run("well")
    assert [(each.seen, each.verdict) for each in done.seen] == [("fine", OK), ("slow", SHORT)]
    assert done.seen[0].figures == {"figure": 1.5} and done.notes == ["a note"]
    assert "well: two: slow (short)" in Path(done.log).read_text()


def test_a_dry_run_does_not_judge_what_only_a_card_can_reach(run):
    assert [each.verdict for each in run("well", dry_run=True).seen] == [OK, DRY_RUN]


def test_a_fake_gpu_shows_what_needs_neither_values_nor_speed(run, monkeypatch):
    monkeypatch.setattr(fake_gpu, "active", lambda: True)
    assert [(each.seen, each.verdict) for each in run("well").seen] == [
        ("fine", OK), ("a fake GPU can't show it: slow", NOT_SHOWN)]


def test_a_crash_and_an_error_are_told_and_what_was_found_before_stays(run):
    crashed = run("crashes")
    assert [each.verdict for each in crashed.seen] == [OK, FAILED]
    assert crashed.seen[1].seen == "its process was ended by SIGSEGV"
    raised = run("raises")
    assert raised.seen[0].seen == "RuntimeError: CUDA error: an illegal memory access was encountered"
    assert raised.verdict == FAILED and "Traceback" in Path(raised.log).read_text()


@pytest.mark.long
def test_a_check_that_hangs_is_cut_off_with_all_that_it_started(run, tmp_path):
    started = time.monotonic()
    done = run("hangs", limit=3.0)
    assert time.monotonic() - started < 60
    assert [each.verdict for each in done.seen] == [OK, NOT_RUN] and "its limit" in done.seen[1].seen
    assert (tmp_path / "home" / "hangs" / "child").exists()
    assert not _writing_to(done.log)


def _writing_to(log):
    """Processes that still have the log open."""
    found = []
    for output in Path("/proc").glob("[0-9]*/fd/1"):
        with contextlib.suppress(OSError):
            found += [output] if str(output.readlink()) == log else []
    return found


def test_a_bench_runs_programs_and_calls_in_processes_of_their_own(tmp_path):
    bench = Bench("it", "cpu", False, 1, None, tmp_path, tmp_path)
    assert bench.call(divmod, 7, 3) == (2, 1)
    with pytest.raises(Exception, match=r"divmod: ZeroDivisionError"):
        bench.call(divmod, 7, 0)
    done = bench.program(["transcribe", "nowhere", "nothing"])
    assert done.code == 2 and done.last_line().startswith("error: ")
