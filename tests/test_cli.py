"""The command line says what it can do, and finds each command."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from refusals import refused

from sbkit import cli, commands
from sbkit.cli import COMMANDS, main
from sbkit.errors import SbkitError
from sbkit.recipe import arguments
from sbkit.runs.lock import RunLock
from sbkit.train.signals import Stopped

ROOT = Path(__file__).parents[1]


def test_help_lists_every_command(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--help"])
    assert done.value.code == 0
    out = " ".join(capsys.readouterr().out.split())
    for command in COMMANDS:
        what = cli.summary(command)
        assert f" {command} {what}" in out and what[0].islower() and what[-1] != ".", command


def test_no_command_at_all_shows_them(capsys):
    assert main([]) == 2
    assert "usage: sbkit" in (shown := capsys.readouterr().out) and " train " in shown


def test_the_version_is_that_of_the_package(capsys):
    with pytest.raises(SystemExit) as done:
        main(["--version"])
    assert done.value.code == 0 and capsys.readouterr().out == f"sbkit {metadata.version('sbkit')}\n"


def test_a_warning_is_told_without_the_name_of_the_file_that_has_it():
    script = "import logging, sbkit.cli; sbkit.cli.main(['info', 'nowhere']); logging.warning('all'); " \
             "logging.getLogger('sbkit.x').warning('is %d', 1); l = logging.getLogger('other'); " \
             "l.addHandler(logging.StreamHandler()); l.warning('once')"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.stderr.endswith("\nall\nis 1\nonce\n")


def test_every_command_has_its_file_and_every_file_is_a_command():
    files = {path.stem for path in Path(commands.__file__).parent.glob("*.py")} - {"__init__", "options"}
    assert sorted(files) == sorted(name.replace("-", "_") for name in COMMANDS)


@pytest.mark.parametrize("command", [name for name in COMMANDS if not cli.takes_recipe(name)])
def test_other_commands_explain_themselves_without_importing_what_they_run(command):
    code = ("import sys; from sbkit.cli import main\n"
            f"try: main([{command!r}, '--help'])\n"
            "finally: sys.exit(bool({'torch', 'numpy', 'pyarrow'} & sys.modules.keys()))")
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0 and done.stdout.startswith(f"usage: sbkit {command} ")


@pytest.mark.parametrize("command", [*filter(cli.takes_recipe, COMMANDS)])
def test_commands_of_a_recipe_explain_themselves(command, capsys):
    assert main([command, "--help"]) == 0
    assert f"usage: sbkit {command} RECIPE.yaml" in capsys.readouterr().out


@pytest.mark.parametrize("words, expected", [
    ("evaluate run --maxwer 15", "arguments: --maxwer 15; did you mean --max-wer? see sbkit evaluate --help"),
    ("evaluate run --maxwer=15", "arguments: --maxwer=15; did you mean --max-wer? see sbkit evaluate --help"),
    ("transcribe bundle a.wav --chunk 640", "--chunk 640; did you mean --chunk-seconds? see sbkit transcribe --help"),
    ("serve live=bundle --chunk 320", "--chunk 320; did you mean --chunk-seconds? see sbkit serve --help"),
    ("evaluate run --test_csv a.csv", "--test_csv a.csv; did you mean --data_folder? see sbkit evaluate --help"),
    ("evaluate run --batch_size 8", "--batch_size 8; did you mean --max-batch-seconds? see sbkit evaluate --help"),
    ("transcribe talk.wav", "required: FILES; write sbkit transcribe BUNDLE FILES; see sbkit transcribe --help"),
    ("export run", "required: --to; write sbkit export RUN --to BUNDLE; see sbkit export --help"),
    ("report run qqq", "unrecognized arguments: qqq; see sbkit report --help"),
    ("evaluat run", "there is no command evaluat; did you mean evaluate? see sbkit --help"),
    ("trian recipe.yaml", "there is no command trian; did you mean train? see sbkit --help"),
    ("evaluate run --max EER:5", "--max: 'EER:5' is not NAME=VALUE: write EER=5; see sbkit evaluate --help"),
    ("evaluate run --min EER=five", "'EER=five' is not NAME=VALUE: write EER=5; see sbkit evaluate --help"),
    ("evaluate run --precision bf61", "; did you mean bf16? see sbkit evaluate --help"),
    ("export run --to bundle --formats onxn", "'onxn' (choose from onnx, int8, torch, speechbrain); did you mean onnx? "
                                              "see sbkit export --help"),
    ("import owner/model --to bundle --formats onnx,", "'' (choose from onnx, int8, torch); see sbkit import --help"),
    ("train hparams/ctc.yaml --N_epochs 3", "has no key N_epochs; did you mean --number_of_epochs?"),
    ("train hparams/ctc.yaml --data_root x", "has no key data_root; did you mean --corpus.data_root?"),
    ("train hparams/ctc.yaml --max_duration 9", "has no key max_duration; did you mean --corpus.max_duration?"),
    ("train hparams/ctc.yaml --n_epochs 3 --lr_adam 1", "ctc.yaml has no keys lr_adam, n_epochs; --lr_adam: did you "
                                                        "mean --lr?; --n_epochs: did you mean --number_of_epochs?"),
    ("train hparams/ctc.yaml --trainer.max_epochs 3", "no key trainer; did you mean --number_of_epochs?"),
    ("train hparams/ctc.yaml --eval_only", "no key eval_only; did you mean --test_only?"),
    ("train hparams/ctc.yaml --beam_size 8", "afterwards, sbkit evaluate RUN --lm FILE --beam 16 does"),
    ("train hparams/ctc.yaml --lm_weight 0.6", "afterwards, sbkit evaluate RUN --lm FILE --lm-weight 0.5 does"),
    ("train hparams/ctc.yaml --trainer.devices 2 --trainer.max_epochs 3", "trainer; did you mean --number_of_epochs?"),
    ("train hparams/ctc.yaml --trainer.devices 2", "key trainer; sbkit show prints its keys"),
    ("train hparams/ctc.yaml --training 1", "key training; did you mean --train_log?"),
    ("train hparams/ctc.yaml --standalone", "torchrun --standalone train.py RECIPE ..."),
    ("train hparams/ctc.yaml --train_csv a.csv", "{train: FILE, dev: FILE, test: FILE}"),
    ("train hparams/ctc.yaml --local_rank 0", "; torchrun starts a process per device: torchrun --nproc_per_node=N "
                                              "train.py RECIPE ..."),
    ("check hparams/ctc.yaml --noprogressbar=True", "--noprogressbar: it is a switch, which takes no value; write it "
                                                    "without 'True'; --help says more"),
    ("check hparams/ctc.yaml --noprogressbar 1", "cannot read the argument '1'; overrides are written --key "
                                                    "value, and switches such as --debug without one"),
    ("check hparams/ctc.yaml --max_grad_norm abc", "write a number, such as 0.5, not 'abc'; --help says more"),
    ("train train.py hparams/ctc.yaml", "train.py is a script, not a recipe; name the recipe first, as sbkit train "
                                        "RECIPE.yaml; start a script with python"),
    ("clean hparams/ctc.yaml --fold 3", "has no key fold; did you mean --folds?"),
    ("check hparams/ctc.yaml --price 2,5", "'2,5' is not the price of a device per hour, such as 2.5; see sbkit check "
                                           "--help"),
])
def test_a_misspelt_word_gets_the_one_that_was_meant(words, expected, capsys):
    assert main(words.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert re.fullmatch(r"error: (.*) \[[a-z-]+\]", line)[1].endswith(expected)


@pytest.mark.parametrize(("words", "code", "fields"), [
    ("trian recipe.yaml", "unknown-command", {"value": "trian"}),
    ("evaluate run --maxwer=15", "unknown-option", {"key": "--maxwer"}),
    ("report run qqq", "unknown-option", {"key": "qqq"}),
    ("evaluate run --max EER:5", "bad-option", {"key": "--max"}),
    ("evaluate run --precision bf61", "bad-option", {"key": "--precision", "value": "bf61"}),
    ("export run --to bundle --formats onxn", "bad-option", {"key": "--formats"}),
    ("export run", "missing-option", {}),
])
def test_a_wrong_command_line_is_refused_by_a_code_and_the_option(words, code, fields):
    with refused(code, wording=False, **fields):  # argparse's words differ by the version of Python
        cli.dispatch(words.split())


def test_with_json_the_error_is_json_on_stdout_besides_the_line_on_stderr(capsys):
    assert main(["info", "nowhere", "--json"]) == 2
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"error": {
        "code": "no-such-path", "message": "nowhere does not exist", "file": "nowhere",
        "hint": "name the output_folder of a run, or a bundle"}}
    assert printed.out.count("\n") == 1 and printed.err.endswith(" [no-such-path]\n")
    assert main(["info", "nowhere"]) == 2 and capsys.readouterr().out == ""


def test_json_of_an_error_is_printed_once_by_a_run_of_several_ranks(capsys, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    assert main(["info", "nowhere", "--json"]) == 2
    assert capsys.readouterr().out == ""


def test_a_reader_of_json_that_is_gone_changes_nothing():
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as lost:
        done = subprocess.run([sys.executable, "-m", "sbkit", "info", "nowhere", "--json"], stdout=lost,
                              stderr=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.returncode == 2 and done.stderr.endswith(" [no-such-path]\n") and done.stderr.count("\n") == 1


def test_ctrl_c_outside_of_training_is_one_line(capsys, monkeypatch):
    def interrupted(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr("sbkit.cli.dispatch", interrupted)
    assert main(["evaluate", "run"]) == 130
    assert capsys.readouterr().err == "\nstopped by Ctrl-C; run the same command to continue\n"


def test_shard_packs_a_manifest(tmp_path, capsys):
    import numpy as np
    import soundfile

    from sbkit.data.manifest import Manifest

    soundfile.write(tmp_path / "a.wav", 0.1 * np.random.randn(16000), 16000)
    (tmp_path / "train.csv").write_text(f"ID,duration,wav,spk_id,wrd\na,1.0,{tmp_path}/a.wav,s,hello\n")
    assert main(["shard", str(tmp_path / "train.csv"), str(tmp_path / "out"), "--encode", "wav16k"]) == 0
    assert "1 utterance, " in capsys.readouterr().out
    packed = Manifest.read(tmp_path / "out" / "train.csv")
    assert ".tar?offset=" in packed.wavs[0] and packed.texts[0] == "hello"


def test_errors_of_arguments_paths_and_keys_come_before_torch_is_imported(tmp_path):
    wrong = {
        "check {root}/hparams": "is a folder, not a recipe; name one of its recipes: ",
        "check {root}/docs": "is a folder, not a recipe; a corpus comes after the recipe: --data_folder ",
        "train": "no recipe given", "train nowhere.yaml": "there is no recipe nowhere.yaml",
        "train {root}/hparams/ctc.yaml --nonsense 3": "has no key nonsense; did you mean --nonspeech?",
        "train {root}/hparams/ctc.yaml --outputs 3": "has no key outputs; ",  # a field of other classes
        "train {root}/hparams/ctc.yaml --adversarial_from 3": "has no key adversarial_from; ",  # of another task
        "train {root}/hparams/ctc.yaml --learning_rate 3": "did you mean --lr?",
        "train {root}/hparams/ctc.yaml --nproc_per_node 2": "it is an option of torchrun",
        "train {root}/hparams/ctc.yaml --data nowhere": "--data_folder: nowhere: no such file or folder",
        "train {root}/hparams/ctc.yaml --data {root}/README.md": "README.md: unknown format; expected a ",
        "train {root}/hparams/ctc.yaml --data {root}/docs": "docs is not a corpus that sbkit recognises",
        'prepare {root}/hparams/ctc.yaml --data {{"train":nowhere.csv}}': "--data_folder: ",
        "train script.yaml": "script.yaml lacks brain; if a SpeechBrain script trains it",
        "tune {root}/hparams/ctc.yaml --frehs": "did you mean --fresh?", "check nowhere.yaml": "there is no recipe",
        "train {root}/hparams/ctc.yaml --data nowhere --no-check": "--data_folder: nowhere: no such file or folder",
        "new": "required: FOLDER", "trian": "did you mean train?",
        "export nowhere --to x --target mine": "nowhere does not exist",
        "evaluate nowhere": "nowhere does not exist; name the output_folder of a run",
        "evaluate . --lm nowhere": "nowhere: there is no such language model",
        "evaluate . --lm {root}": "is a folder, and a language model is a file in ARPA's format; name the file",
        "evaluate . --hot-word @nowhere": "nowhere cannot be read: ",
        "evaluate . --recogniser nowhere": "nowhere does not exist; make one by sbkit export",
        "evaluate . --data_folder nowhere": "nowhere: no such file or folder",
        "evaluate . --data_folder nowhere.csv": "nowhere.csv: no such file",
        "rerun nowhere": "nowhere does not exist", "report nowhere": "nowhere does not exist",
        "transcribe nowhere a.wav": "a.wav: there is no such file",
        "transcribe . {root}/README.md --lm nowhere": "nowhere: there is no such language model",
        "label . {root}/README.md --to x --calibrate y --lm nowhere": "nowhere: there is no such language model",
        "serve . --lm nowhere": "nowhere: there is no such language model",
        "listen . --lm nowhere": "nowhere: there is no such language model",
        "speak nowhere hello --to a.wav": "nowhere does not exist",
        "tokenize nowhere corpus --to x": "nowhere does not exist", "new mine": ""}
    (tmp_path / "script.yaml").write_text("seed: 1\n")
    script = ("import sys\nfrom sbkit.cli import main\nfor words in sys.argv[1:]:\n    code = main(words.split())\n"
              "    print('ended', code, 'torch' in sys.modules, file=sys.stderr)\n")
    words = [each.format(root=ROOT) for each in wrong]
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, cwd=tmp_path,
                          env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    told = re.split(r"ended (\d) (\w+)\n", done.stderr)[:-1]
    for each, message, code, torch in zip(wrong, told[::3], told[1::3], told[2::3], strict=True):
        assert (wrong[each] in message, code, torch) == (True, "2" if wrong[each] else "0", "False"), (each, message)


def test_who_stops_a_run_is_not_told_of_an_error(monkeypatch, capsys):
    def stop(argv):
        raise Stopped.by(signal.SIGINT, "step 3", Path("save/CKPT+x"))

    monkeypatch.setattr("sbkit.cli.dispatch", stop)
    assert main(["train"]) == 130
    assert capsys.readouterr().err.startswith("stopped by SIGINT after step 3, checkpoint saved at save/CKPT+x")


def test_a_command_shows_warnings_of_libraries_but_not_what_they_log():
    script = ("import logging\nimport sbkit.cli\ndef log(argv):\n"
              "    for name in ('sbkit.runs', 'speechbrain.core'):\n"
              "        logger = logging.getLogger(name)\n        logger.setLevel(logging.INFO)\n"
              "        logger.info('info of %s', name)\n        logger.warning('warning of %s', name)\n    return 0\n"
              "sbkit.cli.dispatch = log\nsbkit.cli.main(['export'])\n")
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True,
                          env={**os.environ, "PYTHONPATH": str(ROOT)})
    assert done.stderr.splitlines() == ["info of sbkit.runs", "warning of sbkit.runs", "warning of speechbrain.core"]


@pytest.mark.slow
def test_a_preparation_that_fails_leaves_only_the_list_of_its_rows(tmp_path, capsys):
    for split in ("train", "dev", "test"):
        (tmp_path / f"{split}.csv").write_text("ID,duration,wav,wrd\na,1.0,no.wav,hello\n")
    before = {path.name for path in tmp_path.iterdir()}
    assert main(["prepare", str(ROOT / "hparams/ctc.yaml"), "--data", str(tmp_path),
                 "--output_folder", str(tmp_path / "results" / "run")]) == 2
    assert "rows of the test split were left out: 1 missing clip" in capsys.readouterr().err
    assert {path.name for path in tmp_path.rglob("*") if path.is_file()} == {*before, "left_out.csv"}


def test_options_take_hyphens_and_underscores(tmp_path, capsys):
    assert main(["evaluate", str(tmp_path / "no"), "--max_wer", "5", "--data-folder", "corpus"]) == 2
    assert "no does not exist" in capsys.readouterr().err


@pytest.mark.parametrize(("words", "message"), [
    ("replay run", "there is no command replay"),
    ("evaluate run --on corpus", "unrecognized arguments: --on"),
    ("transcribe bundle a.wav --output folder", "unrecognized arguments: --output"),
    ("train {root}/hparams/ctc.yaml --least_steps 3", "has no key least_steps"),
    ("train {root}/hparams/enhance.yaml --most_decibels 3", "has no key most_decibels"),
    ("train {root}/hparams/ssl.yaml", "there is no recipe {root}/hparams/ssl.yaml"),
    ("train {root}/hparams/ctc.yaml --tensorboard true", "has no key tensorboard"),
])
def test_a_former_name_is_refused_as_any_unknown_one(words, message, capsys):
    assert main(words.format(root=ROOT).split()) == 2
    assert message.format(root=ROOT) in capsys.readouterr().err


@pytest.mark.parametrize(("given", "read"), [
    (["--number-of-epochs", "3", "--lr=1"], ["--number_of_epochs", "3", "--lr=1"]),
    (["--as", "8xH100", "--no_run", "--data", "x"], ["--as", "8xH100", "--no-run", "--data", "x"]),
    (["--batching.min_steps=3", "--no_check"], ["--batching.min_steps=3", "--no-check"]),
    (["--corpus.max-duration=a-b", "--corpus.min-duration", "-1", "--corpus.splits.train-clean-100", "x"],
     ["--corpus.max_duration=a-b", "--corpus.min_duration", "-1", "--corpus.splits.train-clean-100", "x"]),
])
def test_words_of_a_recipes_command_are_read_as_it_writes_them(given, read):
    recipe = str(ROOT / "hparams/ctc.yaml")
    assert arguments.read_words([recipe, *given], ["no-run", "as"]) == [recipe, *read]


def test_several_unknown_keys_are_refused_at_once_with_each_hint_once():
    with pytest.raises(SbkitError) as error:
        arguments.read_words([str(ROOT / "hparams/ctc.yaml"), "--colour", "3", "--torchrun_x", "1"], [])
    assert error.value.message.endswith("ctc.yaml has no keys colour, torchrun_x")
    assert error.value.hint == "sbkit show prints its keys"


def test_keys_of_a_task_that_is_not_there_are_left_to_the_check(tmp_path):
    recipe = tmp_path / "misspelt.yaml"
    recipe.write_text("brain: !name:sbkit.tasks.ctcx.CTC\n")
    assert arguments.read_words([str(recipe), "--colour", "3"], []) == [str(recipe), "--colour", "3"]


@pytest.mark.parametrize(("given", "expected"), [
    (["--data", "x"], {"data_folder": "x"}), (["--min-steps", "3"], {"min_steps": 3}),
])
def test_data_is_short_for_data_folder_and_hyphens_are_underscores(given, expected):
    assert arguments.parse([str(ROOT / "hparams/ctc.yaml"), *given]).overrides == expected


@pytest.mark.parametrize(("given", "told"), [
    ("{CNN:true}", "{CNN:true}: there is no space after a colon"),
    ("{CNN: true", "{CNN: true: a bracket is not closed"),
    ("!new:torch.nn.Linear {in_features: 3", "in_features: 3: a bracket is not closed")])
def test_a_mapping_that_yaml_reads_otherwise_is_told(given, told):
    with pytest.raises(SbkitError, match=re.escape(told)):
        arguments.parse([str(ROOT / "hparams/ctc.yaml"), "--freeze", given])


def test_a_switch_may_be_followed_by_true_or_false():
    words = ["--noprogressbar", "true", "--debug", "false", "--no-check", "True", "--lr", "1", "--shuffle", "false"]
    asked = arguments.parse([str(ROOT / "hparams/ctc.yaml"), *words])
    assert asked.run_opts.noprogressbar and not asked.run_opts.debug and not asked.check
    assert asked.overrides == {"lr": 1, "shuffle": False}
    assert "debug" in asked.run_opts.overridden_args, "the recipe's own value doesn't count"
    given, rest = arguments.command_options(["--no-run", "false", "--debug", "--x", "y"], "", ("no-run",))
    assert not given.no_run and rest == ["--debug", "--x", "y"]


def test_show_prints_each_value_with_where_it_comes_from(capsys):
    assert main(["show", str(ROOT / "tests/recipe/small.yaml"), "--d_model", "32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "seed: 1    # small.yaml:2" and "d_model: 32    # command line" in lines
    assert "    source: !ref <data_folder>    # null, small.yaml:10" in lines
    assert "    folder: !ref <output_folder>/manifests    # results/small/1/manifests, small.yaml:11" in lines
    assert "layer_decay: 1.0    # default" in lines
    assert yaml.compose("\n".join(lines)) is not None


def test_show_tells_what_is_wrong_as_check_does(capsys):
    words = [str(ROOT / "tests/recipe/broken/references.yaml")]
    assert main(["show", *words]) == 1
    shown = capsys.readouterr().err.splitlines()
    assert main(["check", *words]) == 1
    told = capsys.readouterr().err.splitlines()
    assert len(shown) > 3 and any("circular" in line for line in shown)
    assert shown == [line for line in told if ": error: " in line or ": warning: " in line]
    assert main(["show", str(ROOT / "tests/recipe/small.yaml"), "--d_model", "abc"]) == 1
    printed = capsys.readouterr()
    assert "Transformer.d_model: TransformerASR's d_model must be a whole number" in printed.err
    assert "d_model: abc" in printed.out  # what resolves is shown all the same


def test_info_tells_a_run_from_a_bundle(tmp_path, capsys):
    with refused("neither-run-nor-bundle", file=tmp_path):
        cli.dispatch(["info", str(tmp_path)])
    (tmp_path / "hyperparams.yaml").write_text("seed: 1\n")
    (tmp_path / "metrics.jsonl").write_text('{"kind": "epoch", "epoch": 1, "step": 7}\n')
    assert main(["info", str(tmp_path)]) == 0
    assert re.search(r"run of a script\nstate +known to its script\nepochs +1\n", capsys.readouterr().out)
    (tmp_path / "hyperparams.yaml").write_text("seed: 1\nbrain: !name:sbkit.tasks.ctc.CTC\n")
    assert main(["info", str(tmp_path), "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    assert (facts["what"], facts["state"], facts["epochs"], facts["results"]) == ("run", "unfinished", 0, {})
    (tmp_path / "README.md").write_text("---\ntags: []\n---\n# mine\n")
    assert main(["info", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "not finished: the same command continues it" in out
    assert out.splitlines()[-1].endswith(str(tmp_path / "README.md")) and "# mine" not in out
    with RunLock(tmp_path):
        assert main(["info", str(tmp_path)]) == 0
    assert re.search(r"state +a process is working in it\n", capsys.readouterr().out)
    assert main(["info", str(tmp_path)]) == 0 and "not finished" in capsys.readouterr().out
    [held] = tmp_path.glob(".held-*")
    facts = json.loads(held.read_text()) | {"machine": "another"}
    del facts["ended"]
    for age, busy in ((5, True), (500, False)):  # what another machine renews every few seconds
        held.write_text(json.dumps(facts))
        os.utime(held, (time.time() - age,) * 2)
        assert main(["info", str(tmp_path)]) == 0
        assert ("a process is working in it" in capsys.readouterr().out) == busy


@pytest.mark.parametrize(("name", "hint"), [
    ("nope.yaml", "the working directory is "), ("hparams/nope.yaml", "there are hparams/codec.yaml, "),
    ("hparams/ctcs.yaml", "did you mean hparams/ctc.yaml?"), ("hparam/ctc.yaml", "did you mean hparams/ctc.yaml?"),
])
def test_only_a_recipe_of_a_similar_name_is_suggested(name, hint, monkeypatch):
    monkeypatch.chdir(ROOT)
    with pytest.raises(SbkitError) as error:
        arguments.locate(name)
    assert error.value.hint.startswith(hint)


def test_what_builds_nothing_is_no_recipe_of_a_folder(tmp_path):
    (tmp_path / "mine.yaml").write_text("model: !new:torch.nn.Identity\n")
    (tmp_path / "site.yml").write_text("theme: {x: !!python/name:a.b}\n")
    (tmp_path / "folder.yaml").mkdir()
    (tmp_path / "gone.yaml").symlink_to("nowhere")
    with pytest.raises(SbkitError) as error:
        arguments.locate(str(tmp_path))
    assert error.value.hint == f"name one of its recipes: {tmp_path / 'mine.yaml'}"


@pytest.mark.parametrize("value, problem", [("0", "can't average 0 checkpoints"), ("soon", "does not name an average")])
def test_a_wrong_average_is_named_with_its_option(value, problem, capsys):
    assert main(["evaluate", "run", "--average", value]) == 2
    told = capsys.readouterr().err
    assert "--average" in told and problem in told
