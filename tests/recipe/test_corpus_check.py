"""Checks of a recipe's corpus: that its source is there."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import run_folders
import soundfile
from speechbrain.utils.run_opts import RunOptions
from written import BASED, write

from sbkit.data.corpus import Corpus
from sbkit.data.sources.base import Source
from sbkit.data.tokens import Tokenizer
from sbkit.recipe.check import check
from sbkit.recipe.load import open_recipe
from sbkit.system import disk

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("without_trials")]


class Mine(Tokenizer):
    """Names its model in its own way."""

    def __init__(self, folder, name):
        super().__init__(folder, 24, model=name)


def made(root):
    return Corpus(root, language="en")


@pytest.fixture
def elsewhere(tmp_path):
    return write(tmp_path, f"{BASED}    seed: 2\n    data_folder: {tmp_path / 'gone'}\n")


def test_a_corpus_on_another_machine_is_a_warning(elsewhere, tmp_path):
    report = check(elsewhere)
    assert [(each.code, Path(each.file), each.line) for each in report.warnings] == [("no-such-path", elsewhere, 3)]
    assert f"{tmp_path / 'gone'}: no such file or folder on this machine" in report.problems()
    assert not report.errors


def test_a_corpus_and_a_rate_that_no_run_could_have_are_told_without_building_anything(elsewhere, tmp_path):
    report = check(elsewhere, {"opt_class": {"lr": -1}}, run=False)
    assert [(each.code, each.line) for each in report.findings] == [("wrong-value", 0), ("no-such-path", 3)]
    assert [each.code for each in check(elsewhere, {"data_folder": "./gone"}, run=False).errors] == ["no-such-path"]
    assert check(elsewhere, {"data_folder": ""}, run=False).findings == []  # the demo corpus
    mixture = write(tmp_path, f"{BASED}    corpus: !new:sbkit.data.mixture.Mixture\n        folder: {tmp_path}\n"
                              f"        parts: {{a: !new:sbkit.data.corpus.Corpus {{source: {tmp_path / 'gone'}}}}}\n")
    assert [(each.code, each.line) for each in check(mixture, run=False).warnings] == [("no-such-path", 4)]


@pytest.mark.parametrize("starting, given", [(True, {}), (True, {"data_folder": "./gone"}),
                                             (False, {"data_folder": "./gone"})])
def test_a_corpus_that_is_missing_where_the_run_starts_is_an_error(elsewhere, starting, given):
    report = check(elsewhere, given, starting=starting)
    assert [each.code for each in report.errors] == ["no-such-path"]
    assert ("--data_folder: ./gone" if given else f"{elsewhere}:3: error: data_folder") in report.problems()


@pytest.mark.parametrize("kind, key", [
    *((kind, "augment: !new:sbkit.data.augment.Augment\n        stages: [!new:sbkit.data.augment."
       f"{kind} {{folder: !ref <noise>}}]") for kind in ("AddNoise", "AddReverb")),
    ("nonspeech", "nonspeech: {folder: !ref <noise>}"),
])
def test_a_folder_of_noise_that_is_missing_or_empty_is_reported_before_anything_is_prepared(tmp_path, kind, key):
    path = write(tmp_path, f"{BASED}    noise: {tmp_path / 'noise'}\n    {key}\n")
    report = check(path)
    [finding] = [each for each in report.warnings if each.code == "no-such-path" and each.key == "noise"]
    assert (Path(finding.file), finding.line, finding.key) == (path, 2, "noise") and not report.errors
    assert finding.message == f"{kind}: {tmp_path / 'noise'} is not a folder on this machine"
    (tmp_path / "noise").mkdir()
    [finding] = check(path, {"data_folder": None}, starting=True).errors
    assert finding.code == "no-audio-files" and finding.message == f"{kind}: no audio files in {tmp_path / 'noise'}"


def test_a_tokenizer_of_ones_own_that_is_missing_is_told_before_anything_is_prepared(tmp_path):
    path = write(tmp_path, f"{BASED}    tokenizer: {{model: {tmp_path / 'my.model'}}}\n")
    write(tmp_path, f"{BASED}    tokenizer: !new:test_corpus_check.Mine {{folder: {tmp_path}, name: my.model}}\n")
    assert [each.code for each in check(path).warnings] == ["no-such-path"]
    write(tmp_path, f"{BASED}    tokenizer: {{model: {tmp_path / 'my.model'}}}\n")
    [finding] = check(path).warnings
    assert (finding.code, finding.line) == ("no-such-path", 2) and "my.model: no such file on this" in finding.message
    assert [each.code for each in check(path, {"data_folder": None}, starting=True).errors] == ["no-such-path"]


def test_an_output_folder_that_cannot_be_written_is_told_before_anything_is_prepared(tmp_path):
    (tmp_path / "file").touch()
    path = write(tmp_path, f"{BASED}    output_folder: {tmp_path / 'file' / 'out'}\n")
    [finding] = check(path).warnings
    assert (finding.code, finding.line, finding.key) == ("not-writable", 2, "output_folder")
    assert finding.message == (f"cannot write {tmp_path / 'file' / 'out' / 'hyperparams.yaml'}: Not a directory "
                               "on this machine")
    [finding] = check(path, {"data_folder": None}, starting=True).errors
    assert finding.code == "not-writable"


@pytest.mark.parametrize(("lists", "code", "told"), [
    ("ID,wav,wrd\na,{0}/here.wav,caf\u00e9\n".encode("latin-1"), "not-utf8", "line 2, column 'wrd': not UTF-8"),
    (b"ID,sound,wrd\na,{0}/here.wav,cafe\n", "missing-column", "no column for the audio"),
    (b"ID,wav,wrd\na,$data_root/gone.wav,cafe\n", "missing-audio", "such as {0}/gone.wav"),
    (b"ID,wav,wrd\n" + b"a,gone.wav,cafe\n" * 20 + b"b,here.wav,cafe\n", "", ""),
    (b"ID,wav,wrd\na,here.wav?offset=0&size=0,cafe\n", "", ""),
])
def test_what_is_wrong_in_a_short_list_is_told_before_anything_is_prepared(tmp_path, lists, code, told):
    (tmp_path / "here.wav").touch()
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.csv").write_bytes(lists.replace(b"{0}", str(tmp_path).encode()))
    path = write(tmp_path, f"{BASED}    data_folder: {tmp_path}\n")
    found = check(path, starting=True).errors
    assert [each.code for each in found] == ([code] if code else [])
    assert all(told.format(tmp_path) in each.message for each in found)
    if code == "missing-audio":
        assert [each.code for each in check(path).warnings] == [code], "the recipe may be for another machine"


def test_of_a_common_voice_release_the_clips_and_the_language_are_looked_at(tmp_path, caplog):
    (tmp_path / "cv" / "clips").mkdir(parents=True)
    for name in ("train", "dev", "test"):
        (tmp_path / "cv" / f"{name}.tsv").write_text("client_id\tpath\tsentence\tlocale\nann\ta.mp3\tcafe\tcs\n")
    path = write(tmp_path, f"{BASED}    data_folder: {tmp_path / 'cv'}\n")
    found = check(path, {"corpus": {"language": "nl"}}, starting=True).errors
    assert [each.code for each in found] == ["missing-audio"] and "a.mp3" in found[0].message
    assert "holds cs, but the language is set to nl" in caplog.text
    (tmp_path / "cv" / "clips" / "a.mp3").touch()
    assert not check(path, starting=True).errors


def test_a_recipe_that_would_save_into_another_run_is_told(tmp_path):
    """As a run's hyperparams.yaml does with another --output_folder."""
    (tmp_path / "run" / "save").mkdir(parents=True)
    (tmp_path / "run" / "hyperparams.yaml").touch()
    path = write(tmp_path, f"{BASED}    checkpointer:\n        checkpoints_dir: {tmp_path / 'run' / 'save'}\n")
    for folder, told in (("other", ["another-run"]), ("run", [])):
        assert [each.code for each in check(path, {"output_folder": str(tmp_path / folder)}).errors] == told


def test_a_list_that_is_a_broken_link_is_told(tmp_path):
    for name in ("train", "dev", "test"):
        (tmp_path / f"{name}.csv").symlink_to(tmp_path / "gone")
    [finding] = check(write(tmp_path, f"{BASED}    data_folder: {tmp_path}\n")).errors
    assert "cannot be read (No such file or directory)" in finding.message


def test_a_disk_without_room_for_a_checkpoint_is_told_before_anything_is_prepared(tmp_path, monkeypatch):
    path = write(tmp_path, f"{BASED}    output_folder: {tmp_path / 'out'}\n")
    monkeypatch.setattr(disk, "free", lambda _: 20_000)
    [finding] = check(path, {"data_folder": None}, starting=True).errors
    assert finding.code == "no-room"
    assert finding.message == (
        f"a checkpoint in {tmp_path / 'out' / 'save'} needs about 122.7 kB, and 20.0 kB are free there")
    assert not check(path, {"data_folder": None}).problems(), "the run may be another machine's"
    tested = RunOptions(test_only=True)
    assert not check(path, {"data_folder": None}, starting=True, run_opts=tested).errors, "it saves nothing"
    (tmp_path / "out" / "save" / "CKPT+1").mkdir(parents=True)
    assert not check(path, {"data_folder": None}, starting=True).errors, "it may be at its end"


def test_a_corpus_that_is_there_is_not_told_of(elsewhere, tmp_path):
    run_folders.corpus(tmp_path / "gone", 1.0, train=2, dev=1, test=1)
    assert not check(elsewhere, starting=True).problems()


def test_utterances_longer_than_a_step_are_no_problem_if_the_run_measures_what_fits(tmp_path):
    longer = "corpus: {max_duration: 20}\n    batching: {step_seconds: 15, max_batch_seconds: "
    message = "utterances of 20 s are kept, but a batch holds 15 s"
    assert message in check(write(tmp_path, f"{BASED}    {longer}15}}\n")).problems()
    assert "a batch holds" not in check(write(tmp_path, f"{BASED}    {longer}auto}}\n")).problems()


def test_a_mixture_without_a_dev_split_is_an_error_at_its_parts(tmp_path):
    for split in ("train", "test"):
        (tmp_path / f"{split}.csv").write_text("ID,duration,wav,spk_id,wrd\n")
    path = write(tmp_path, f"""{BASED}    corpus: !new:sbkit.data.mixture.Mixture
        folder: !ref <output_folder>/manifests
        parts:
            one: !new:sbkit.data.corpus.Corpus {{source: {tmp_path}, language: en}}
            two: !new:sbkit.data.corpus.Corpus {{source: {{train: {tmp_path}/train.csv}}, language: en}}
""")
    [finding] = check(path).errors
    assert (finding.code, finding.line) == ("missing-split", 4)
    assert "no part of the mixture has a dev split" in finding.message
    (tmp_path / "dev.csv").write_text("ID,duration,wav,spk_id,wrd\n")
    assert not check(path).errors


def test_a_corpus_without_a_split_or_transcripts_is_an_error_before_it_is_prepared(elsewhere, tmp_path):
    run_folders.corpus(tmp_path / "gone", 1.0, train=2, dev=1, test=1)
    (tmp_path / "gone" / "dev.csv").unlink()
    [finding] = check(elsewhere).errors
    assert (finding.code, finding.line) == ("missing-split", 3)
    assert finding.message.endswith("has no dev split (its splits: test, train)")
    assert not check(elsewhere, needed=("train", "test")).errors
    [finding] = check(elsewhere, {"corpus": {"only": ["test"]}}).errors
    assert (finding.code, finding.key) == ("missing-split", "corpus.only")
    assert "only leaves out train and dev" in finding.message
    (tmp_path / "alone").mkdir()
    soundfile.write(tmp_path / "alone" / "one.wav", np.zeros(1600), 16000)
    [finding] = check(elsewhere, {"data_folder": str(tmp_path / "alone")}).errors
    assert finding.code == "missing-text"
    assert finding.message == f"{tmp_path / 'alone'} has recordings but no list with their transcripts"


class Elsewhere(Source):
    """A corpus of ones own, whose folder is on another machine."""

    kind, where = "mine", "/data"

    def names(self):
        return os.listdir("/nowhere/at/all")

    def read(self, name, show_progress=True):
        raise AssertionError

    fingerprint = read


def test_a_source_of_ones_own_is_left_alone_and_a_corpus_built_by_a_function_is_looked_for(tmp_path):
    path = write(tmp_path, f"{BASED}    corpus: {{source: !new:test_corpus_check.Elsewhere ''}}\n")
    assert not check(path).errors
    write(tmp_path, f"{BASED}    corpus: !apply:test_corpus_check.made {{root: {tmp_path / 'gone'}}}\n")
    report = check(path)
    assert not report.errors and [each.code for each in report.warnings] == ["no-such-path"]


def test_a_demo_corpus_that_nobody_can_speak_is_told_before_the_run(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    path = write(tmp_path, f"{BASED}    corpus: {{language: klingon}}\n")
    [finding] = check(path, starting=True).errors
    assert (finding.code, Path(finding.file), finding.line) == ("unknown-language", path, 2)
    assert "has no language 'klingon'" in finding.message


def test_what_two_splits_of_a_prepared_corpus_share_is_in_the_report(tmp_path, tmp_path_factory):
    sentences = {"train": ("One sentence here.", "Another one."), "dev": ("Dev one.",), "test": ("Another one!",)}
    for split, texts in sentences.items():
        soundfile.write(tmp_path / f"{split}.wav", np.ones(16_000) / 2, 16_000)
        (tmp_path / f"{split}.csv").write_text("ID,start,duration,wav,spk_id,wrd\n" + "".join(
            f"{split}{i},{i / 2},0.5,{tmp_path}/{split}.wav,ann,{text}\n" for i, text in enumerate(texts)))
    path = write(tmp_path, f"{BASED}    data_folder: {tmp_path}\n    output_folder: {tmp_path / 'run'}\n")
    assert "leaks" not in check(path).sections
    open_recipe(path, {}).keys.corpus.prepare(show_progress=False)
    report = check(path)
    section = report.sections["leaks"]
    assert [row[:4] for row in section.rows] == [
        ["test", "dev", "speakers", 1], ["test", "train", "speakers", 1], ["test", "train", "sentences", 1],
        ["dev", "train", "speakers", 1]]
    assert "another one" in section.text() and "the error rate is partly measured on known speakers" in section.text()
    assert not report.problems(), "shared sentences are no mistake"
    other = shutil.copytree(tmp_path, tmp_path_factory.mktemp("other") / "data")
    [finding] = check(path, {"data_folder": str(other)}).warnings
    assert finding.code == "other-corpus" and f"was prepared from {tmp_path}: labels, leaks," in finding.message


COLUMNS = '''
from sbkit.data.columns import LabelColumn, SignalColumn
from sbkit.tasks.ctc import CTC


class Further(CTC):
    columns = {"clean": SignalColumn(), "speaker": LabelColumn()}
'''


def test_a_column_that_the_task_needs_and_the_corpus_lacks_is_an_error_where_the_corpus_is(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "gone").mkdir()
    for split in ("train", "dev", "test"):
        (tmp_path / "gone" / f"{split}.csv").write_text("ID,duration,wav,spk_id,wrd,clean_wav\n")
    (tmp_path / "further_columns.py").write_text(COLUMNS)
    path = tmp_path / "mine.yaml"
    text = f"{BASED}    data_folder: {tmp_path / 'gone'}\n    brain: !name:further_columns.Further\n"
    path.write_text(text)
    report = check(path)
    [finding] = [each for each in report.errors if each.code == "missing-column"]
    assert (Path(finding.file), finding.line, finding.key) == (path, 2, "data_folder")
    assert "has no column for the clean: looked for 'clean' among ID, duration, wav, spk_id, wrd, clean_wav" in \
        finding.message and "columns: {clean: NAME}" in report.problems()
    path.write_text(f"{text}    corpus: {{columns: {{clean: clean_wav}}}}\n")
    assert not [each for each in check(path).errors if each.code == "missing-column"]
