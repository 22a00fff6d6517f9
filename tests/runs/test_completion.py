"""A run that is done says so when it is started again, and one that is not, or is to do more, does what is missing."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import sys
from pathlib import Path

import pytest
import run_folders
from processes import Ended, program
from trained_runs import latest

from sbkit.cli import main
from sbkit.recipe import flops
from sbkit.runs.restore import read_run

pytestmark = pytest.mark.slow

RECIPE = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
SMALL = {**run_folders.TINY, "number_of_epochs": 1, "precision": "fp32", "step_seconds": 6, "max_batch_seconds": 6}


def train(folder, *more):
    words = [word for key, value in SMALL.items() for word in (f"--{key}", str(value))]
    flops.operations_per_second = lambda *_: 1e6  # a tenth of what such a run takes
    sys.exit(main(["train", str(RECIPE), *words, "--data_folder", f"{folder}/data", "--output_folder", f"{folder}/out",
                   "--device", "cpu", "--no-check", *more]))


def train_until(place, *words):
    """Killed there."""
    from sbkit.runs import results
    from sbkit.tasks.ctc import CTC

    setattr(*{"testing": (CTC, "on_evaluate_start"), "writing": (results, "write_report")}[place],
            lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL))
    train(*words)


@pytest.fixture(scope="module")
def kept(tmp_path_factory):
    """A corpus and a run on it that is done, as they were."""
    home = tmp_path_factory.mktemp("done")
    run_folders.corpus(home / "data", train=8, dev=2, test=2)
    assert program(train, str(home)).returncode == 0
    assert [kinds(home / "out").count(kind) for kind in ("run", "epoch", "test")] == [1, 2, 1]
    return shutil.copytree(home, home / "kept", ignore=shutil.ignore_patterns("kept"))


@pytest.fixture
def tmp_path(kept):
    """The same places, with that run."""
    for name in ("data", "out"):
        shutil.rmtree(kept.parent / name)
        shutil.copytree(kept / name, kept.parent / name)
    return kept.parent


@pytest.fixture
def new(tmp_path):
    """There, without that run."""
    shutil.rmtree(tmp_path / "out")
    (tmp_path / "out").mkdir()


@pytest.fixture
def started(tmp_path, monkeypatch):
    monkeypatch.setattr(flops, "operations_per_second", None)  # which a start in this process sets

    def start(*more, until=None):
        """Its exit code, the epochs and tests it added to metrics.jsonl, and what it said."""
        before = kinds(tmp_path / "out")
        if until is None:
            said, errors = io.StringIO(), io.StringIO()
            with contextlib.redirect_stdout(said), contextlib.redirect_stderr(errors), pytest.raises(SystemExit) as end:
                train(tmp_path, *more)
            ended = Ended(end.value.code, said.getvalue(), errors.getvalue())
        else:
            ended = program(train_until, until, str(tmp_path), *more)
        added = kinds(tmp_path / "out")[len(before):]
        return ended.returncode, (added.count("epoch"), added.count("test")), ended.stdout or ended.stderr

    return start


def kinds(out):
    path = out / "metrics.jsonl"
    return [json.loads(line)["kind"] for line in path.read_text().splitlines()] if path.is_file() else []


def test_done_is_said_once_all_is_done_and_only_then(started, tmp_path):
    out = tmp_path / "out"
    epoch = 2  # lines of metrics.jsonl
    files = {path: path.read_bytes() for path in out.glob("[!.]*") if path.is_file() and path.name != "log.txt"}
    code, added, said = started("--noprogressbar")
    assert (code, added) == (0, (0, 0))
    assert said.startswith(f"nothing left to do: {out} is trained and tested, test WER ") and "wer_test.txt" in said
    assert said.count("\n") == 1
    written = {"hyperparams.yaml", "env.log"}  # at each start
    assert [path.name for path, data in files.items() if path.read_bytes() != data and path.name not in written] == []
    assert started("--test_only")[:2] == (0, (0, 1))
    code, added, said = started("--debug", "--number_of_epochs", "2")
    assert (code, added) == (2, (0, 0)) and f"--debug would replace the results in {out}; name another" in said
    assert started("--debug", "--output_folder", str(tmp_path / "new"))[0] == 0
    assert started()[1] == (0, 0), "and is still done"
    assert started("--number_of_epochs", "2")[:2] == (0, (epoch, 1))
    assert started("--number_of_epochs", "2")[1] == (0, 0)
    (out / "wer_test.txt").unlink()
    assert started("--number_of_epochs", "2")[1] == (0, 1)
    assert started("--number_of_epochs", "2", "--average_checkpoints", "2", "--test_only")[:2] == (0, (0, 0))
    assert kinds(out / "evaluations" / "test_only") == ["test"]


def test_the_record_of_a_finished_run_stays_what_made_it(started, tmp_path):
    out = tmp_path / "out"

    def record():
        lines = (out / "metrics.jsonl").read_text().splitlines()
        return (out / "hyperparams.yaml").read_text(), [
            line for line in lines if json.loads(line)["kind"] in ("step", "epoch")]

    before, written = record(), (out / "env.log").stat().st_mtime_ns
    code, added, said = started("--lr", "0.5")
    assert (code, added) == (2, (0, 0)) and record() == before and (out / "tested.json").exists()
    assert (out / "env.log").stat().st_mtime_ns == written, "a start that is refused leaves the run as it was"
    assert (f"{out} is finished, so these changes would have no effect: lr, opt_class.lr, schedule.peak: "
            "0.003 -> 0.5; choose another --output_folder; if the model stays the same, a larger") in said
    code, added, said = started("--precision", "bf16")
    assert (code, added) == (2, (0, 0)) and "so these changes would have no effect: precision: fp32 -> bf16" in said
    own = out / "evaluations" / "test_only"
    results = (out / "test_utterances.jsonl").read_bytes(), (out / "tested.json").read_bytes()
    for number, changed in enumerate((("--precision", "bf16"), ("--lr", "0.5")), 1):
        assert started(*changed, "--test_only")[:2] == (0, (0, 0)) and record() == before
        assert kinds(own) == ["test"] * number, "the run's report tells of its own test"
    assert results == ((out / "test_utterances.jsonl").read_bytes(), (out / "tested.json").read_bytes())
    assert not (own / "README.md").exists(), "nothing was trained with these values"
    assert "\nlr: 0.5" in (own / "hyperparams.yaml").read_text() and "0.5" in (own / "report.html").read_text()
    assert started()[:2] == (0, (0, 0)) and record() == before, "and is still done"
    assert started("--number_of_epochs", "2", "--lr", "0.5")[:2] == (0, (2, 1))
    assert "\nlr: 0.5" in record()[0] and len(record()[1]) > len(before[1])
    [change] = re.findall(r"Steps after (\d+) ran with changed values: ([^<]*)\.<", (out / "report.html").read_text())
    assert change[0] == "2" and "lr, opt_class.lr, schedule.peak: 0.003 -&gt; 0.5" in change[1]
    made, last = record(), ("--number_of_epochs", "2", "--lr", "0.5")
    assert started(*last, "--test_only")[:2] == (0, (0, 1)) and record() == made and started(*last)[1] == (0, 0)


def train_again(recipe, folder):
    flops.operations_per_second = lambda *_: 1e6
    # Run options aren't in a recipe; without this one a CPU that is fast at it trains in bf16.
    sys.exit(main(["train", recipe, "--output_folder", folder, "--device", "cpu", "--precision", "fp32", "--no-check"]))


def test_the_recipe_that_a_run_wrote_trains_the_same_weights_elsewhere(tmp_path):
    out, again = tmp_path / "out", tmp_path / "again"
    done = program(train_again, str(out / "hyperparams.yaml"), str(again))
    assert done.returncode == 0, done.stderr
    files = {path.name for path in latest(out).iterdir()} & {"model.ckpt", "ema.ckpt", "optimizer.ckpt"}
    assert "model.ckpt" in files
    for name in files:
        assert (latest(again) / name).read_bytes() == (latest(out) / name).read_bytes(), name
    assert f"{out}/" not in (again / "hyperparams.yaml").read_text().partition("\n\n")[2]


def test_killed_in_its_test_it_tests_when_started_again(started):
    assert started("--number_of_epochs", "2", until="writing")[0] == -signal.SIGKILL
    last = "--number_of_epochs", "2", "--num_workers", "0"  # what one changes after a test that has died
    assert started(*last)[:2] == (0, (0, 1)), "what was tested before is not what is there"
    assert started(*last)[:2] == (0, (0, 0))
    assert started(*last, "--lr", "0.5", "--test_only", until="testing")[0] == -signal.SIGKILL
    assert started(*last)[:2] == (0, (0, 0)), "whose test is not the run's"


def test_a_key_that_only_the_command_line_has_is_the_runs_own(new, started, tmp_path):
    out, words = tmp_path / "out", ("--log_interval", "0")
    assert started(*words, until="testing")[0] == -signal.SIGKILL
    assert started(*words)[:2] == (0, (0, 1)) and started(*words)[:2] == (0, (0, 0))
    told = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    steps = max(line["step"] for line in told if line["kind"] == "epoch")
    assert sum(line["kind"] == "step" for line in told) == steps > 1, "a line for each"
    assert main(["evaluate", str(out), "--device", "cpu", "--workers", "0"]) == 0
    assert read_run(out).keys.log_interval == 0


def test_a_start_that_is_refused_leaves_the_run_as_it_was(started, tmp_path):
    out = tmp_path / "out"
    kept = [out / "hyperparams.yaml", out / "tested.json", *(out / "manifests").glob("*.*")]
    before = {path: path.read_bytes() for path in kept}
    lines = (tmp_path / "data" / "train.csv").read_text().splitlines()
    (tmp_path / "data" / "train.csv").write_text("\n".join(lines[:-2]) + "\n")
    assert started("--d_model", "24")[0] == 2
    assert {path: path.read_bytes() for path in kept} == before and not (out / ".before-this-start").exists()
    (tmp_path / "data" / "train.csv").write_text("\n".join(lines) + "\n")
    code, _, said = started("--d_model", "24", "--number_of_epochs", "2")
    assert code == 2 and f"the checkpoints in {out} are of another model; what has changed: number_of_epochs, " in said
    assert "; d_model, " in said and " -> 24; use the recipe that this run started with" in said
    code, _, said = started("--d_model", "24", "--test_only")
    assert code == 2 and f"the checkpoints in {out} are of another model; what has changed: d_model, " in said
    assert kinds(out).count("run") == 1, "it is no start of the run"
    assert started()[:2] == (0, (0, 0)), "and it is still done"


def test_a_runs_own_recipe_trains_into_another_folder_and_leaves_that_run_as_it_is(started, tmp_path):
    out = tmp_path / "out"
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert main(["train", str(out / "hyperparams.yaml"), "--output_folder", str(tmp_path / "other"), "--no-check",
                 "--device", "cpu"]) == 0
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    assert (tmp_path / "other" / "tested.json").is_file() and list((tmp_path / "other" / "save").glob("CKPT+*"))


def test_what_was_never_trained_is_not_tested(new, started):
    code, added, _ = started("--test_only")
    assert (code, added) == (2, (0, 0))


def test_a_test_of_an_unfinished_run_says_that_it_is_and_nothing_of_training(new, started, tmp_path):
    assert started(until="testing")[0] == -signal.SIGKILL
    said = program(train, str(tmp_path), "--number_of_epochs", "2", "--test_only").stderr
    assert "out has not finished: it has trained 1 of 2 epochs" in said and "Model FLOPs" not in said


def test_another_test_set_is_tested(started, tmp_path):
    lines = (tmp_path / "data" / "test.csv").read_text().splitlines()
    (tmp_path / "data" / "test.csv").write_text("\n".join(lines[:-1]) + "\n")
    assert started()[1] == (0, 1)
