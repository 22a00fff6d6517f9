"""Whatever ends a run or its start, a full disk or a signal: it keeps what it had, and the same command goes on."""

import os
import re
import signal

import pytest
import run_folders
from disks import REFUSED, small_disk
from processes import ROOT, program, sbkit
from trained_runs import options

from sbkit.cli import main
from sbkit.data.corpus import Corpus
from sbkit.runs import preparation

pytestmark = pytest.mark.slow

ROOM = 800_000  # for one checkpoint of some 500 kB


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    made = tmp_path_factory.mktemp("full")
    run_folders.corpus(made / "data", train=8, dev=2, test=2)
    return made


def train(home, out, *more, code=0):
    """What went to stderr."""
    keys = {**run_folders.TINY, "data_folder": home / "data", "output_folder": out, "number_of_epochs": 2,
            "precision": "fp32"}
    return sbkit("train", "hparams/ctc.yaml", *options(**keys), "--no-check", "--noprogressbar", *more,
                 code=code, SBKIT_CACHE=str(home / "cache")).stderr


def kept(out):
    """What a run is continued from."""
    names = [*(out / "manifests").glob("*.*"), *(out / "save").rglob("*.*")]
    return {path: path.read_bytes() for path in names if path.is_file()}


def test_a_run_ends_at_a_full_disk_and_the_same_command_goes_on_when_there_is_room(home, tmp_path):
    with small_disk(tmp_path / "small") as disk:
        out = disk.path / "run"
        if disk.mounted:
            with disk.full(ROOM):
                told = train(home, out, code=2)
            refused, = re.findall(r"^error: .*", told, re.M)
            assert "Traceback" not in told
            assert re.match(
                rf"error: the checkpoint {out}/save/CKPT\S+ could not be written: {REFUSED} \(it needs about "
                r"[45]\d\d\.\d kB, free: .* kB\); the last good one, .* is kept; free space", refused)
        else:
            train(home, out, "--number_of_epochs", "1")
        before = kept(out)
        with disk.full():
            told = train(home, out, "--lr", "0.5", code=2)
        refused, = re.findall(r"^error: .*", told, re.M)
        assert re.search(rf"{out}\S* could not be written: {REFUSED} \(", refused), told
        assert kept(out) == before
        train(home, out)
        epochs = re.findall(r"^epoch: (\d)", (out / "train_log.txt").read_text(), re.M)
        assert epochs == ["1", "2"] and (out / "wer_test.txt").is_file()


# ------------------------------------------------------------------ a start that ends while it prepares

MOMENTS = {"after the recipe": (preparation, "open_folder"), "after the manifests": (Corpus, "prepare")}


def start(folder, data, moment, signum, *words):
    """``sbkit train`` with another recipe, which gets a signal at a moment of its preparation."""
    if moment:
        owner, name = MOMENTS[moment]
        original = getattr(owner, name)

        def signalled(*args, **kwargs):
            done = original(*args, **kwargs)
            os.kill(os.getpid(), int(signum))
            return done

        setattr(owner, name, signalled)
    os._exit(main(["train", f"{ROOT}/hparams/ctc.yaml", "--data_folder", data, "--output_folder", folder,
                   *options(**run_folders.TINY), "--device", "cpu", "--corpus.min_duration", "0.9", *words]))


def own(folder):
    """What belongs to the run: its recipe and manifests."""
    paths = [folder / "hyperparams.yaml", *(folder / "manifests").glob("[!.]*")]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


@pytest.mark.long
def test_whatever_ends_a_start_in_its_preparation_the_run_keeps_its_recipe_and_corpus(home, tmp_path):
    data, folder = str(home / "data"), run_folders.run_with_model(tmp_path / "run", home / "data", rates=(50.0,))
    before = own(folder)
    for moment in MOMENTS:
        killed = program(start, str(folder), data, moment, str(int(signal.SIGKILL)), "--no-check")
        assert killed.returncode == -signal.SIGKILL and own(folder) != before, moment
    refused = program(start, str(folder), data, "", "0")  # by the check
    assert refused.returncode == 1 and own(folder) == before, refused.stderr
    ended = program(start, str(folder), data, "after the manifests", str(int(signal.SIGTERM)), "--no-check")
    assert ended.returncode == 143 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == "stopped by SIGTERM; run the same command to continue"
    assert own(folder) == before and not list(folder.glob(".before*"))
