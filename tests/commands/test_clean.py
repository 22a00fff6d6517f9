"""sbkit clean: what it refuses, and a whole one, which the same command takes up again."""

import contextlib
import csv
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import processes
import pytest
import run_folders

from sbkit import cli
from sbkit.data.suspects import Suspect
from sbkit.runs import folds
from sbkit.score.label_errors import LabelScore
from sbkit.tasks.ctc import label_scores

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "hparams" / "ctc.yaml"
WORDS = "the brave teacher finds an old ladder near green river".split()
TINY = {"d_model": 16, "nhead": 2, "num_encoder_layers": 1, "d_ffn": 16, "number_of_epochs": 1, "min_steps": 2,
        "num_workers": 0, "device": "cpu"}


@pytest.fixture
def words(tmp_path):
    """A corpus of ten recordings, and a command line for it."""
    for split, count in {"train": 10, "dev": 2, "test": 2}.items():
        rows = [f"{split}{i},{run_folders.sound(tmp_path / f'{split}{i}.wav', seed=i)},{WORDS[i]} {WORDS[i - 1]}"
                for i in range(count)]
        (tmp_path / "data").mkdir(exist_ok=True)
        (tmp_path / "data" / f"{split}.csv").write_text("\n".join(["ID,wav,wrd", *rows]) + "\n")
    keys = {"data_folder": tmp_path / "data", "output_folder": tmp_path / "out", **TINY}
    return [str(RECIPE), "--no-check", "--noprogressbar",
            *(word for key, value in keys.items() for word in (f"--{key}", str(value)))]


@pytest.fixture
def forked(monkeypatch):
    """Each fold's run is a process whose imports are done."""
    @contextlib.contextmanager
    def child(command):
        ended = processes.program(processes.command, os.getcwd(), *command[command.index("sbkit") + 1:])
        print(ended.stdout, end="", flush=True)
        print(ended.stderr, end="", file=sys.stderr, flush=True)
        yield SimpleNamespace(wait=lambda: ended.returncode, poll=lambda: ended.returncode)

    monkeypatch.setattr(folds.processes, "child", child)


@pytest.mark.parametrize("given, message", [
    (["--folds", "1"], "[bad-option]"),
    (["--number_of_epochs", "x"], "number_of_epochs: it is the text 'x', and must be a whole number"),
    (["--folds", "11"], "--folds 11: the training rows have 10 different sentences"),
    (["--folds", "many"], "--folds: invalid int value: 'many'"), (["--folds"], "--folds: expected one argument"),
    (["--fold", "2"], "ctc.yaml has no key fold"),
])
def test_what_cannot_be_done_is_refused(words, given, message, capsys):
    assert cli.main(["clean", *words, *given]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("recipe", ["codec", "transducer"])
def test_a_recipe_that_cannot_judge_labels_is_refused_with_one_that_can(recipe, tmp_path, capsys):
    assert cli.main(["clean", str(ROOT / "hparams" / f"{recipe}.yaml"), "--output_folder", str(tmp_path / "out")]) == 2
    error = capsys.readouterr().err
    assert "hparams/ctc.yaml" in error and "[wrong-task]" in error


def test_a_mixture_is_refused_because_each_part_has_a_list(tmp_path, capsys):
    recipe = tmp_path / "mix.yaml"
    recipe.write_text(f"""recipe: !include:{RECIPE}
    corpus: !new:sbkit.data.mixture.Mixture
        folder: {tmp_path}/manifests
        parts: {{one: !new:sbkit.data.corpus.Corpus {{}}, two: !new:sbkit.data.corpus.Corpus {{}}}}
    output_folder: {tmp_path}/out
""")
    assert cli.main(["clean", str(recipe)]) == 2
    assert "[needs-one-corpus]" in capsys.readouterr().err


def test_a_run_that_fails_is_named_and_nothing_is_listed(words, forked, tmp_path, capsys):
    assert cli.main(["clean", *words, "--init_from", str(tmp_path / "nowhere")]) == 1
    assert "the run of fold 1 ended with code 2" in capsys.readouterr().err
    assert not (tmp_path / "out" / "clean" / "suspects.csv").exists()


def test_labels_that_do_not_fit_the_model_end_it_before_a_fold_trains(words, forked, tmp_path, capfd):
    words.remove("--no-check")
    rows = tmp_path / "data" / "train.csv"
    header, *rest = rows.read_text().splitlines()
    rows.write_text("\n".join([header, *(row + " and so on" * 20 for row in rest)]) + "\n")
    assert cli.main(["clean", *words]) == 1
    err = capfd.readouterr().err
    assert "ctc.yaml: error: corpus: train: 5 of 5 utterances have fewer encoder frames" in err
    assert "CTC can't output all of their tokens" in err and "nothing is learned from them" in err
    assert "the labels don't fit the model" in err
    assert not list((tmp_path / "out" / "clean").glob("*/fold-*/save/CKPT*"))


def test_a_check_names_a_list_that_is_missing(words, capsys):
    given = [word for word in words if word not in ("--no-check", "--noprogressbar")]
    assert cli.main(["check", *given, "--corpus.exclude", "/nowhere.csv"]) == 1
    assert "corpus.exclude: corpus: exclude: there is no file /nowhere.csv" in capsys.readouterr().err


def test_models_that_learnt_nothing_end_it_after_one_fold_and_the_same_command_resumes(words, forked, tmp_path,
                                                                                      capfd, monkeypatch):
    words.remove("--no-check")
    (tmp_path / "data" / "test.csv").unlink()  # which cleaning doesn't need
    assert cli.main(["clean", *words]) == 1
    err = capfd.readouterr().err
    assert "the models have not learnt enough to judge labels" in err and "--number_of_epochs" in err
    assert err.count("ctc.yaml: nothing wrong") == 2, "before the corpus is prepared, and by the first fold's run"
    assert "nothing reads this key" not in err
    folder = tmp_path / "out" / "clean"
    assert [run.parent.name for run in folder.glob("*/fold-*/tested.json")] == ["fold-1"]
    assert not list(folder.glob("suspects*"))
    monkeypatch.setattr(label_scores, "score", lambda run, rows, device: [
        LabelScore(row.id, row.text, row.text, 0.0, 1.0) for row in rows])
    assert cli.main(["clean", *words]) == 0
    out = capfd.readouterr().out
    assert out.count("nothing left to do") == 1 and "none of 10 labels is probably wrong" in out
    assert len(list(folder.glob("*/fold-*/tested.json"))) == 2
    with (folder / "suspects.csv").open() as file:
        assert csv.DictReader(file).fieldnames == list(Suspect._fields)
    assert (folder / "suspects.html").exists()
