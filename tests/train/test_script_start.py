"""A script for SpeechBrain with one changed name: what it prints at its start, and how a mistyped option ends it."""

import subprocess
import sys

import pytest

pytestmark = pytest.mark.slow

SCRIPT = """\
import sys

import speechbrain as sb
from hyperpyyaml import load_hyperpyyaml

import sbkit


class Mine(sbkit.Brain):
    pass


path, run_opts, overrides = sb.parse_arguments(sys.argv[1:])
with open(path) as file:
    hparams = load_hyperpyyaml(file, overrides)
print("epochs", hparams["number_of_epochs"])
"""
RECIPE = """\
seed: 1
__set_seed: !apply:speechbrain.utils.seed_everything [!ref <seed>]
number_of_epochs: 3
train_logger: !new:speechbrain.utils.train_logger.FileTrainLogger
    save_file: log.txt
"""


@pytest.fixture
def run(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    (tmp_path / "train.yaml").write_text(RECIPE)

    def start(*words):
        return subprocess.run([sys.executable, "train.py", "train.yaml", *words], cwd=tmp_path, text=True,
                              capture_output=True)

    return start


def test_a_start_prints_nothing_of_figures(run):
    ended = run("--number_of_epochs", "2")
    assert (ended.returncode, ended.stdout) == (0, "epochs 2\n")
    assert "torchvision" not in ended.stderr


@pytest.mark.parametrize(("word", "hint"), [
    ("number_of_epoch", "did you mean --number_of_epochs?"), ("precison", "did you mean --precision?"),
    ("zzz", "its keys are seed, number_of_epochs, train_logger")])
def test_a_mistyped_option_is_one_line_with_a_suggestion(run, word, hint):
    ended = run(f"--{word}", "2")
    assert ended.returncode == 1 and "Traceback" not in ended.stderr
    told = ended.stderr.splitlines()[-1]
    assert told.endswith(f"train.py:15: error: the recipe has no key {word}; {hint} [unknown-key]")
