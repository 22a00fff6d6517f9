"""A start that is killed or stopped while it prepares: the run that was there is as it was, to the byte."""

import os
import signal
from pathlib import Path

import pytest
import run_folders
from processes import program

from sbkit.cli import main
from sbkit.data.corpus import Corpus
from sbkit.runs import preparation

RECIPE = str(Path(__file__).parents[2] / "hparams" / "ctc.yaml")
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
    sizes = [word for key, value in run_folders.TINY.items() for word in (f"--{key}", str(value))]
    os._exit(main(["train", RECIPE, "--data_folder", data, "--output_folder", folder, *sizes, "--device", "cpu",
                   "--corpus.min_duration", "0.9", *words]))


def own(folder):
    """What belongs to the run: its recipe and manifests."""
    paths = [folder / "hyperparams.yaml", *(folder / "manifests").glob("[!.]*")]
    return {path.relative_to(folder): path.read_bytes() for path in paths}


@pytest.mark.slow
def test_whatever_ends_a_start_in_its_preparation_the_run_keeps_its_recipe_and_corpus(tmp_path):
    data = run_folders.corpus(tmp_path / "data", train=8, dev=2, test=2)
    folder = run_folders.run_with_model(tmp_path / "run", data, rates=(50.0,))
    before = own(folder)
    for moment in ("after the recipe", "after the manifests"):
        killed = program(start, str(folder), str(data), moment, str(int(signal.SIGKILL)), "--no-check")
        assert killed.returncode == -signal.SIGKILL and own(folder) != before
        refused = program(start, str(folder), str(data), "", "0")  # by the check
        assert refused.returncode == 1, refused.stderr
        assert own(folder) == before, moment
    ended = program(start, str(folder), str(data), "after the manifests", str(int(signal.SIGTERM)), "--no-check")
    assert ended.returncode == 143 and "Traceback" not in ended.stderr
    assert ended.stderr.splitlines()[-1] == "error: stopped by SIGTERM; run the same command to continue"
    assert own(folder) == before and not list(folder.glob(".before*"))
