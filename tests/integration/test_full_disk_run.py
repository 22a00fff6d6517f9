"""A run whose disk fills up ends with one line, loses nothing, and goes on when there is room."""

import re
from pathlib import Path

import processes
import pytest
import run_folders
from disks import REFUSED, small_disk

ROOT = Path(__file__).resolve().parents[2]
ROOM = 800_000  # for one checkpoint of some 500 kB


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    made = tmp_path_factory.mktemp("full")
    run_folders.corpus(made / "data", train=8, dev=2, test=2)
    return made


def train(home, out, *more):
    """The exit code, and what went to stderr."""
    keys = {**run_folders.TINY, "data_folder": home / "data", "output_folder": out, "number_of_epochs": 2,
            "precision": "fp32", "device": "cpu"}
    words = [str(word) for name, value in keys.items() for word in (f"--{name}", value)]
    words += ["--no-check", "--noprogressbar", *more]
    done = processes.program(processes.command, str(home), "train", str(ROOT / "hparams" / "ctc.yaml"), *words,
                             timeout=400, SBKIT_CACHE=str(home / "cache"))
    return done.returncode, done.stderr


def kept(out):
    """What a run is continued from."""
    names = [*(out / "manifests").glob("*.*"), *(out / "save").rglob("*.*")]
    return {path: path.read_bytes() for path in names if path.is_file()}


@pytest.mark.slow
def test_a_run_ends_at_a_full_disk_and_the_same_command_goes_on_when_there_is_room(home, tmp_path):
    with small_disk(tmp_path / "small") as disk:
        out = disk.path / "run"
        if disk.mounted:
            with disk.full(ROOM):
                code, told = train(home, out)
            refused, = re.findall(r"^error: .*", told, re.M)
            assert code == 2 and "Traceback" not in told
            assert re.match(
                rf"error: the checkpoint {out}/save/CKPT\S+ could not be written: {REFUSED} \(it needs about "
                r"[45]\d\d\.\d kB, free: .* kB\); the last good one, .* is kept; free space", refused)
        else:
            code, told = train(home, out, "--number_of_epochs", "1")
            assert code == 0, told
        before = kept(out)
        with disk.full():
            code, told = train(home, out, "--lr", "0.5")
        refused, = re.findall(r"^error: .*", told, re.M)
        assert code == 2 and re.search(rf"{out}\S* could not be written: {REFUSED} \(", refused), told
        assert kept(out) == before
        code, told = train(home, out)
        assert code == 0, told
        epochs = re.findall(r"^epoch: (\d)", (out / "train_log.txt").read_text(), re.M)
        assert epochs == ["1", "2"] and (out / "wer_test.txt").is_file()
