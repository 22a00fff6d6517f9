"""The flagship as a user starts it: one process, two processes, joint training, and every wrong command."""

import os
import runpy
import sys

import processes
import pytest
import torch
from processes import ON_A_CPU, ROOT, program, sbkit
from torch.distributed.launcher.api import LaunchConfig, elastic_launch
from trained_runs import metrics, weights

from sbkit.cli import main

TINY = (
    "--corpus.demo_hours 0.06 --number_of_epochs 1 --d_model 16 --nhead 2 --num_encoder_layers 1 --d_ffn 16 "
    "--cnn_first_channels 4 --cnn_channels 4 --num_workers 1 --precision fp32 --noprogressbar "
    "--step_seconds 30 --min_steps 0"
).split()
STILL = "--dropout 0 --CNN.dropout 0 --spec_augment null".split()


@pytest.fixture(scope="module")
def cache(cache):
    pytest.importorskip("espeakng_loader", reason="the demo corpus needs the extra 'demo'")
    return cache


def trained(out, cache, *more, ranks=1):
    """What is said by processes that train, as torchrun's with their imports done; they leave the weights."""
    done = sbkit("train", "hparams/ctc.yaml", *TINY, *STILL, "--output_folder", out, *more, ranks=ranks,
                 SBKIT_CACHE=str(cache))
    return done.stderr, weights(out)


def script(cwd, *words):
    """``python train.py WORDS`` with its imports done; test_wheel.py starts it as a user does."""
    os.chdir(cwd)
    sys.argv[:] = [str(ROOT / "train.py"), *words]
    runpy.run_path(sys.argv[0], run_name="__main__")


@pytest.fixture(scope="module")
def alone(cache, tmp_path_factory):
    """A run of one process, started in another working directory, without dropout and augmentation."""
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    done = program(script, str(elsewhere), "hparams/ctc.yaml", *TINY, *STILL, "--output_folder", "out", **ON_A_CPU,
                   SBKIT_CACHE=str(cache))
    assert done.returncode == 0, done.stderr[-4000:]
    return elsewhere / "out", done


@pytest.mark.slow
def test_one_command_leaves_everything_that_the_readme_lists(alone):
    out, done = alone
    assert "test WER" in done.stdout and "reference" in done.stdout and "hypothesis" in done.stdout
    assert (out / "wer_test.txt").read_text().startswith("%WER ")
    assert "epoch: 1, steps: " in (out / "train_log.txt").read_text()
    assert metrics(out, "epoch") and metrics(out, "test")
    for name in ("hyperparams.yaml", "log.txt", "env.log", "manifests/train.csv", "manifests/prepare_report.json",
                 "save/28_char.model", "cer_test.txt"):
        assert (out / name).stat().st_size > 0, name


@pytest.mark.slow
def test_layers_that_the_loss_never_reaches_are_named_and_not_trained(alone, tmp_path, monkeypatch):
    from hyperpyyaml import load_hyperpyyaml

    out, done = alone
    assert "Not trained, because the loss does not depend on them" in done.stderr
    assert "such as a decoder): Transformer.custom_tgt_module, Transformer.decoder, seq_lin\n" in done.stderr
    monkeypatch.chdir(tmp_path)  # the recipe makes its output folder, which it names from where the run was started
    with open(out / "hyperparams.yaml") as recipe:
        fresh = load_hyperpyyaml(recipe)["model"].state_dict()
    left = weights(out)
    decoder = [key for key in left if key.startswith(("1.decoder", "1.custom_tgt_module", "2."))]
    assert decoder and all(torch.equal(left[key], fresh[key]) for key in decoder)
    assert not torch.equal(left["3.w.weight"], fresh["3.w.weight"]), "ctc_lin is trained"


@pytest.mark.long
@pytest.mark.slow
def test_two_processes_learn_what_one_learns(alone, cache, tmp_path):
    _, two = trained(tmp_path / "two", cache, ranks=2)
    torch.testing.assert_close(two, weights(alone[0]), atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize(("words", "says"), [
    ("train hparams/nope.yaml", "there is no recipe hparams/nope.yaml"),
    ("train hparams/ctc.yml", "did you mean hparams/ctc.yaml?"),
    ("train hparam/ctc.yaml", "did you mean hparams/ctc.yaml?"),
    ("train hparams/ctc.yaml --d_modle 3 --no-check", "has no key d_modle; did you mean --d_model?"),
    ("train hparams/ctc.yaml --learning_rate 3 --no-check", "has no key learning_rate; did you mean --lr?"),
    ("train hparams/ctc.yaml --language en d_model=3",
     "cannot read the argument 'd_model=3' after --language en; overrides are written --key value, and a value with"),
    ("train hparams/ctc.yaml --device cuda:99", "cuda:99"),
    ("train hparams/ctc.yaml --device gpu", "gpu"),
    ("train hparams/ctc.yaml --precision fp8 --no-check", "--precision: choose one of auto, fp32, fp16, bf16, not"),
    ("train hparams/ctc.yaml --output_folder /proc/nowhere --no-check", "/proc/nowhere"),
    ("train", "no recipe given; name it first"),
    ("train hparams/ctc.yaml --ckpt_interval_minutes 0.03",
     "--ckpt_interval_minutes: write a whole number, such as 5, not '0.03'; --help says more"),
    ("check hparams/ctc.yaml --as 2xH100 --prise 2.5", "has no key prise; did you mean --price?"),
    ("trian hparams/ctc.yaml", "[unknown-command]"),
    ("prepare hparams/ctc.yaml --output_folder {tmp}/o --data_folder {tmp}", "is not a corpus that sbkit recognises"),
])
def test_a_wrong_command_is_one_line_and_exit_code_2(words, says, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    assert main(words.format(tmp=tmp_path).split()) == 2
    err = capsys.readouterr().err
    errors = [line for line in err.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and says in errors[0], err
    assert "Traceback" not in err


@pytest.mark.slow
def test_mistakes_are_told_at_once_and_a_missing_corpus_before_all_else_by_train(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    words = ["hparams/ctc.yaml", "--log_interval", "often", "--output_folder", str(tmp_path),
             "--data_folder", "nowhere", *TINY]
    for command, code in ("check", 1), ("train", 2):
        assert main([command, *words]) == code
        told = capsys.readouterr().err
        assert "--data_folder: nowhere: no such file or folder" in told
        assert ("log_interval: it is the text 'often'" in told) == (command == "check")
    assert main(["train", *(word for word in words if word not in ("--data_folder", "nowhere"))]) == 1
    assert "log_interval: it is the text 'often'" in capsys.readouterr().err


@pytest.mark.slow
def test_the_process_ends_with_that_code_and_debug_shows_the_traceback_too():
    wrong = "report", "nowhere"
    assert "Traceback" not in sbkit(*wrong, code=2).stderr and "Traceback" in sbkit(*wrong, "--debug", code=2).stderr
    # Of training it is SpeechBrain's, for a few batches.
    assert "Traceback" not in sbkit("train", "hparams/nope.yaml", "--debug", code=2).stderr


def torchrun(*words):
    """Two ranks under torchrun's agent, whose imports are done."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="wrong", rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", monitor_interval=0.2, start_method="fork")
    elastic_launch(config, processes.command)(str(ROOT), *words)


@pytest.mark.slow
def test_under_torchrun_the_last_lines_say_what_was_wrong(cache):
    done = program(torchrun, "train", "hparams/ctc.yaml", "--d_modell", "3", *TINY, **ON_A_CPU, SBKIT_CACHE=str(cache))
    assert done.returncode == 1
    lines = [line for line in done.stderr.splitlines() if "is now called" not in line]
    said = "--d_modell: hparams/ctc.yaml has no key d_modell; did you mean --d_model?"
    assert lines[0].startswith(f"error: {said} [") and any(said in line for line in lines[-4:]), lines
