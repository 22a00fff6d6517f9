"""Keys that nothing reads are reported, with what they resemble; the list of those is what the code reads."""

from pathlib import Path

import pytest
from written import SMALL, write

from sbkit.recipe import load
from sbkit.recipe.check import check
from sbkit.recipe.reading import read
from sbkit.recipe.source import Findings

TEXT = SMALL.read_text(encoding="utf-8")


def unread(path: Path) -> dict:
    findings = Findings()
    read(path, {}, findings)
    return {f.key: f.suggestion for f in findings if f.code == "unread-key"}


@pytest.mark.parametrize("key, meant", [
    ("keep_checkpoint", "keep_checkpoints"), ("ckpt_interval", "ckpt_interval_minutes or ckpt_interval_steps"),
    ("Max_grad_norm", "max_grad_norm"), ("label_smoothng", "label_smoothing"),
])
def test_a_misspelt_key_is_told(tmp_path, key, meant):
    path = write(tmp_path, f"{TEXT}\n{key}: 5\n")
    assert unread(path) == {key: f"did you mean {meant}?"}


@pytest.mark.parametrize(("key", "hint"), [
    ("noam_annealing", "here its name is schedule"),
    ("number_of_ctc_epochs", "leave it out: CTC has the weight ctc_weight in all epochs"),
    ("batch_size", "here its name is max_batch_seconds. It counts seconds of audio, not utterances")])
def test_a_key_of_speechbrains_recipes_is_told_by_its_name_here(tmp_path, key, hint):
    text = f"{TEXT}\nschedule: null\nmax_batch_seconds: 10\n__used: !ref <max_batch_seconds>\n{key}: 5\n"
    assert unread(write(tmp_path, text)) == {key: hint}


@pytest.mark.parametrize("key", ["colours", "train_log", "sos_index", "wer_file", "layer1"])
def test_a_key_of_ones_own_is_told_where_it_has_no_effect(tmp_path, key):
    path = write(tmp_path, f"{TEXT}\n{key}: 5\n")
    assert unread(path) == {key: "leave it out"}
    for used in (f"{key}: 5\n__note: !ref <{key}>", f"{key}: null  # as one leaves out what an included file calls"):
        path.write_text(f"{TEXT}\n{used}\n")
        assert unread(path) == {}


def test_of_a_recipe_without_references_only_what_differs_and_what_is_given_is_told(tmp_path):
    text = TEXT.replace("!ref ", "")
    assert "lr" not in unread(write(tmp_path, f"{text}\nlr: 0.001\n"))
    path = write(tmp_path, f"{text}\nlr: 0.1\n")
    assert unread(path)["lr"] == "change that (line 61) too"
    findings = Findings()
    read(path, {"lr": 0.2}, findings)
    [found] = [each for each in findings if each.code == "unread-key" and each.key.endswith("lr")]
    assert found.severity == "error" and found.key == "--lr" and found.code == "unread-key"
    assert found.suggestion == "opt_class has a lr of its own: give --opt_class.lr"


def test_what_decides_is_told_where_its_copy_is_given(tmp_path):
    report = check(write(tmp_path, f"{TEXT}\nnumber_of_epochs: 2\n"), {"epoch_counter": {"limit": 9}}, run=False)
    assert "it is 9, and number_of_epochs is 2; give --number_of_epochs 9 instead" in str(report.errors[0])


RUN = """# Generated 2026-01-01 from:
output_folder: /old/run
save: /old/run/save
init_from: /old/run/source
other: /old/runner
seed: 7
__set_seed: !apply:speechbrain.utils.seed_everything [7]
batching: !new:sbkit.data.plan.Batching {max_batch_seconds: 7, seed: 7}
number_of_epochs: 2
data_folder: null
epoch_counter: !new:speechbrain.utils.epoch_loop.EpochCounter {limit: 2}
corpus: !new:sbkit.data.corpus.Corpus {source: null, folder: /old/run/manifests}
"""


def test_what_is_given_to_the_recipe_of_a_run_reaches_what_were_references(tmp_path):
    path, given = write(tmp_path, RUN), {"output_folder": "/new", "number_of_epochs": 5, "data_folder": "/data",
                                            "seed": 8}
    found = load.resolved(path, given).texts()
    assert {key: found[key] for key in ("save", "other", "init_from", "epoch_counter.limit", "corpus.source",
                                        "corpus.folder")} == {
        "save": "/new/save", "other": "/old/runner", "init_from": "/old/run/source", "epoch_counter.limit": "5",
        "corpus.source": "/data", "corpus.folder": "/new/manifests"}
    assert [found[f"batching.{key}"] for key in ("seed", "max_batch_seconds")] == ["8", "7"]
    assert load.resolved(path, {}).texts()["save"] == "/old/run/save"
    assert load.resolved(write(tmp_path, RUN.replace("# Gen", "# I gen")), given).texts()["save"] == "/old/run/save"


def test_a_number_of_epochs_that_does_not_reach_all_is_refused(tmp_path):
    path = write(tmp_path, f"{RUN}annealing: {{epoch_count: 2}}\n")
    report = check(path, {"number_of_epochs": 5}, run=False)
    assert "it is 2, and number_of_epochs is 5; write `limit: !ref <number_of_epochs>`, or give --epoch_counter" in str(
        report.errors[0])


@pytest.mark.parametrize(("name", "there", "moved"), [
    ("hyperparams.yaml", True, True), ("hyperparams.yaml", False, False), ("mine.yaml", True, True)])
def test_the_recipe_of_a_run_whose_folder_was_copied_is_of_the_copy(tmp_path, name, there, moved):
    path = write(tmp_path, RUN).rename(tmp_path / name)
    if there:
        (tmp_path / "save").mkdir()
    assert load.resolved(path, {}).texts()["save"] == (f"{tmp_path}/save" if moved else "/old/run/save")


@pytest.mark.parametrize("line", [
    "__set_seed: !apply:speechbrain.utils.seed_everything [1]", "drawn: !apply:torch.manual_seed [1]",
    "max_grad_norm: 5.0", "brain2: !ref <brain>\nbrain3: !ref <brain2>\n__set: !ref <brain3>"])
def test_what_is_called_or_read_is_not_told(tmp_path, line):
    path = write(tmp_path, f"{TEXT}\n{line}\n")
    assert unread(path) == {}


def test_what_is_written_once_and_named_by_an_alias_is_not_told(tmp_path):
    """As ``sbkit show RECIPE > mine.yaml`` writes what several references name."""
    text = TEXT.replace("model: !new:", "model: &model !new:").replace("model: !ref <model>", "model: *model")
    assert text.count("*model") > 1 and "!ref <model>" not in text
    assert unread(write(tmp_path, text)) == {}


def test_a_brain_of_ones_own_may_read_what_it_likes(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "mine_reads.py").write_text(
        "from sbkit.tasks.ctc import CTC\n\n\nclass Mine(CTC):\n    def on_fit_start(self):\n"
        "        super().on_fit_start()\n        print(getattr(self.hparams, 'keep_checkpoint', 1))\n")
    text = TEXT.replace("sbkit.tasks.ctc.CTC", "mine_reads.Mine")
    path = write(tmp_path, f"{text}\nkeep_checkpoint: 5\nkeep_everi: 5\n")
    assert unread(path) == {"keep_everi": "did you mean keep_every?"}
