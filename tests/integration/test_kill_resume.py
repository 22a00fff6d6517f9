"""Killed at any moment: the next start finds a whole checkpoint, and ends as if it had never been stopped."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import tempfile
from collections import defaultdict
from pathlib import Path

import kill_points
import pytest
import resume_run
import tried
from processes import program, programs
from trained_runs import different


@pytest.fixture
def quick_disk(tmp_path):
    """A folder in memory where there is one: the kill ends the process, not the kernel that has the data."""
    shm = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=shm if os.access(shm, os.W_OK) else tmp_path) as folder:
        yield Path(folder)


@pytest.mark.slow
@pytest.mark.parametrize("asynchronous, name, finely", [
    (False, None, True), (True, None, False), (False, "best", False), (True, "best", False)],
    ids=["finely", "async", "replaced", "replaced, async"])
def test_killed_at_every_operation_on_the_disk(quick_disk, asynchronous, name, finely):
    """The old one until the rename, the new one from there on, and never back again."""
    kills = kill_points.killed_while_saving(str(quick_disk / "saved"), asynchronous, name, finely)
    assert {"fsync", "rename", "unlink", "rmdir", "mkdir", "write"} <= set(kills.names)
    assert not finely or kills.names.count("write") > 100
    found = [kill_points.next_start(each) for each in kills.copies]
    assert set(found) == {1, 2} and found == sorted(found)
    tried.record("operations on the disk at which a kill ends the writing of a checkpoint", len(found))


@pytest.mark.slow
def test_killed_again_at_every_operation_of_the_next_start(quick_disk):
    for left in kill_points.killed_while_saving(str(quick_disk / "saved"), False, "best").copies[::5]:
        found = kill_points.killed_again_while_tidying(left)
        assert len(found) > 1 and len(set(found)) == 1, left


@pytest.mark.slow
@pytest.mark.parametrize("times", ["4", pytest.param("40", marks=pytest.mark.long)])
def test_killed_at_any_moment(quick_disk, times):
    done = program(kill_points.killed_at_random, str(quick_disk / "saved"), times)
    assert done.returncode == 0, done.stderr[-3000:]


# ------------------------------------------------------------------ exact resume


def train(folder, place="", processes=1, **environment):
    """Train to the end or to the place where it is killed; (exit code, what it printed, its log).

    Of several processes it's the first one's end, and everyone's log.
    """
    ends = programs(processes, resume_run.script, str(folder), *([place] if place else []), **environment)
    code, printed, _ = ends[0]
    return code, json.loads(printed) if code == 0 else None, "\n".join(end.stderr for end in ends)


def finished(folder, **how):
    """What a run ended with, as ``train`` takes it to its end."""
    code, result, log = train(folder, **how)
    assert code == 0, log
    return result


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A folder for runs over one corpus."""
    return tmp_path_factory.mktemp("runs")


@pytest.fixture(scope="module")
def never_stopped(runs):
    """In this process, which has other hashes of texts than the others."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        resume_run.main(runs / "never")
    return json.loads(out.getvalue())


def steps(folder):
    """[epoch, step, ids] of each micro-batch of training, in the order they were run in."""
    return [json.loads(line) for line in (folder / "seen.jsonl").read_text().splitlines()]


PLACES = {
    "before the first checkpoint": ["train:1:0:3"],
    "right after a checkpoint, which is still being written": ["train:1:4:0"],
    "in mid-accumulation": ["train:2:4:1"],
    "in validation": ["evaluating:2:2:0"],
    "between the log's line and the checkpoint": ["logged:2:0:0"],
    "while an epoch's checkpoint is written": ["saving:2:0:0"],
}
MORE_PLACES = {
    "between steps": ["train:2:4:0"],
    "in the last micro-batch of an epoch": ["train:1:8:4"],
    "again and again": ["train:1:7:2", "train:1:8:1", "train:2:5:1", "logged:2:0:0", "train:3:8:2", "saving:3:0:0"],
}


@pytest.mark.slow
@pytest.mark.parametrize("places", [*PLACES.values(), *(pytest.param(each, marks=pytest.mark.long)
                                                        for each in MORE_PLACES.values())],
                         ids=[*PLACES, *MORE_PLACES])
def test_a_killed_run_ends_as_the_one_never_stopped(runs, never_stopped, places, request):
    """Weights, averages, optimizer, schedule, normaliser, random numbers, logs: equal in every bit."""
    folder = runs / request.node.name.replace(" ", "-")
    for place in places:
        assert train(folder, place)[0] == -signal.SIGKILL
    result = finished(folder)
    if places != PLACES["before the first checkpoint"]:
        assert len([line for line in steps(folder) if line[:2] == [1, 0]]) <= 7, "it began from scratch"
    assert different(result, never_stopped) == []


@pytest.mark.slow
@pytest.mark.parametrize("place, name, code", [
    ("train:1:0:0", "SIGINT", 130), ("train:2:4:1", "SIGUSR1", 138), ("saving:3:0:0", "SIGTERM", 143)])
def test_a_signal_ends_it_with_a_checkpoint_a_line_and_a_code(runs, never_stopped, place, name, code, request):
    folder = runs / request.node.name.replace(":", "-")
    returned, _, log = train(folder, place, SIGNAL=name, EVERY="0")
    assert returned == code, log
    last = log.strip().splitlines()[-1]
    assert last.startswith(f"stopped by {name} ") and "run the same command to" in last
    assert "Traceback" not in log and ("checkpoint saved at" in last) == (place != "saving:3:0:0")
    result = finished(folder)
    if place == "saving:3:0:0":  # nothing was left to train: no random numbers are drawn
        result["random"] = never_stopped["random"]
    assert different(result, never_stopped) == []


@pytest.fixture(scope="module")
def two_never_stopped(runs):
    return finished(runs / "two", processes=2, MIXTURE="1")


@pytest.mark.long
@pytest.mark.slow
def test_a_run_of_padded_batches_ends_as_the_run_never_stopped(runs):
    expected = finished(runs / "padded", processes=2, PADDED="1")
    assert train(runs / "padded-killed", "train:2:4:1", processes=2, PADDED="1")[0] not in (0, None)
    assert different(finished(runs / "padded-killed", processes=2, PADDED="1"), expected) == []


def seen(folder):
    """The utterances of each step, over ranks and micro-batches; the same however often it was run."""
    rows = defaultdict(set)
    for epoch, step, ids in steps(folder):
        rows[epoch, step] |= {name for name in ids if name.isdigit()}  # stand-ins have names of their own
    return rows


@pytest.mark.slow
def test_of_two_processes_one_is_killed_and_both_or_one_alone_go_on_with_a_mixture(runs, two_never_stopped):
    """What was heard of each part before a stop is heard no second time; one process takes the steps of two."""
    assert train(runs / "killed", "train:2:4:1", processes=2, MIXTURE="1")[0] not in (0, None)
    shutil.copytree(runs / "killed", runs / "alone")
    assert different(finished(runs / "killed", processes=2, MIXTURE="1"), two_never_stopped) == []
    code, result, log = train(runs / "alone", MIXTURE="1")
    assert code == 0 and "was written by 2 processes and now there are 1" in log, log
    assert result["steps"] == two_never_stopped["steps"]
    assert seen(runs / "alone") == seen(runs / "killed") == seen(runs / "two")
    heard = [int(name) for rows in seen(runs / "two").values() for name in rows]
    assert 0.4 < sum(not name % 4 for name in heard) / len(heard) < 0.6


@pytest.mark.long
@pytest.mark.slow
def test_what_one_process_began_two_end_in_the_same_order_of_steps(runs, never_stopped):
    assert train(runs / "grown", "train:2:4:1")[0] == -signal.SIGKILL
    code, result, log = train(runs / "grown", processes=2)
    assert code == 0 and "was written by 1 processes and now there are 2" in log, log
    assert result["steps"] == never_stopped["steps"] and seen(runs / "grown") == seen(runs / "never")


@pytest.mark.slow
def test_torchruns_restarts_end_as_the_run_never_stopped(runs, two_never_stopped):
    """It keeps the store, in which the addresses of the ranks before each restart are."""
    folder = runs / "restarted"
    places = "train:1:7:1@1,train:3:7:0@0"
    done = program(resume_run.restarting, str(folder), places, OMP_NUM_THREADS="1", MIXTURE="1")
    assert done.returncode == 0, done.stderr[-4000:]
    ends = re.findall(r"^ends at (.*)$", done.stderr, re.M)  # torchrun may name a rank that lost the killed one first
    assert ends == ["train 1 7 1 rank 1", "train 3 7 0 rank 0"]
    assert different(json.loads(done.stdout.splitlines()[-1]), two_never_stopped) == []
