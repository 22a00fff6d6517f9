"""Labels of a voice's corpus: made once, refused where checkpoints depend on others; what has none is told."""

import json
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import soundfile
import torch
import toy_voice
from refusals import refused
from safetensors.numpy import load_file, save_file
from speechbrain.core import Stage

from sbkit.codes import Codes
from sbkit.nn.codec import FiniteScalars
from sbkit.tasks.tts import TTS, labels
from sbkit.tasks.tts.labels import Label

TEXTS = {"train": {f"t{i}": "ab ab c"[: 3 + i % 5].strip() for i in range(12)}, "dev": {"d0": "abc", "d1": "c b"},
         "test": {"x0": "cab", "x1": "b"}}


class Made:
    """A run whose corpus is prepared and can be labelled."""

    def __init__(self, folder: Path, texts=TEXTS, speakers=None, **given):
        self.keys = TTS.Keys.read(toy_voice.hparams(folder, **given))
        self.manifests = {split: toy_voice.recordings(folder / "wavs", rows, speakers) for split, rows in texts.items()}
        self.bundles = toy_voice.Bundles()
        self.follows = TTS.prepare(self.keys, self.manifests, {})

    def label(self, bundles=None, manifests=None):
        TTS.label(self.keys, manifests or self.manifests, bundles or self.bundles)
        return self

    @property
    def facts(self):
        return json.loads(Path(self.keys.labels, "labels.json").read_text())

    def checkpoint(self):
        self.keys.checkpointer.save_checkpoint()


@pytest.fixture
def made(tmp_path):
    return Made(tmp_path)


@pytest.fixture(scope="module")
def labelled(tmp_path_factory):
    """One that is read only."""
    return Made(tmp_path_factory.mktemp("labelled")).label()


def stamps(keys):
    return {path: path.stat().st_mtime_ns for path in Path(keys.labels).rglob("*") if path.is_file()}


def test_each_utterance_has_its_codes_and_durations_that_add_up_to_them(labelled):
    found = labels.read(labelled.keys)
    assert len(found) == 16
    for split, manifest in labelled.manifests.items():
        for row in (manifest.row(i) for i in range(len(manifest))):
            label = found.get(split, row.id, row.text)
            signal = soundfile.read(row.wav, dtype="float32")[0]
            assert np.array_equal(label.codes, toy_voice.codes_of(signal))
            assert len(label.frames) == len(row.text) + 2 and label.frames.sum() == len(label.codes)
            assert (label.frames >= 0).all() and label.frames[1:-1].sum() > 0
    assert labelled.facts["splits"] == {split: {"rows": len(rows), "kept": len(rows), "left_out": 0}
                                        for split, rows in TEXTS.items()}


def test_the_codes_are_a_folder_that_any_reader_of_codes_reads(labelled):
    codes = Codes(Path(labelled.keys.labels, "train", "codes"), toy_voice.Codec().books)
    assert sorted(each.id for each in codes) == sorted(TEXTS["train"])
    assert {each.text for each in codes} == set(TEXTS["train"].values())


def test_they_are_made_once(made):
    made.label()
    before, signals = stamps(made.keys), made.bundles.made.signals
    made.label()
    assert stamps(made.keys) == before and made.bundles.made.signals == signals == 16
    assert made.bundles.made.closed == made.bundles.hears.closed == 2
    assert TTS.is_prepared(made.keys)


def test_labelling_that_was_interrupted_begins_again(made, monkeypatch):
    monkeypatch.setattr(toy_voice.Codec, "encode_each", lambda self, signals: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        made.label()
    assert labels.label_facts(made.keys) is None and not TTS.is_prepared(made.keys) and made.bundles.made.closed == 1
    monkeypatch.undo()
    assert len(labels.read(made.label().keys)) == 16


OTHERS = {"codec": toy_voice.Bundles(codec=toy_voice.Codec("b")),
          "recogniser": toy_voice.Bundles(aligner=toy_voice.Aligner("two")), "corpus": None}


@pytest.mark.parametrize("changed", OTHERS)
def test_other_labels_are_made_only_while_no_checkpoint_depends_on_them(made, changed, tmp_path):
    other, manifests = OTHERS[changed], made.manifests
    if changed == "corpus":
        manifests = {**manifests, "dev": toy_voice.recordings(tmp_path / "others", {"d0": "ab", "d1": "c"})}
    made.label()
    before = made.facts
    made.label(other, manifests)
    assert made.facts != before, "there is nothing yet that depends on the first"
    made.checkpoint()
    stamped = stamps(made.keys)
    with refused("changed-source") as error:
        made.label()
    assert "new output_folder" in error.value.hint and stamps(made.keys) == stamped
    made.label(other, manifests)


def test_damaged_facts_are_made_anew(made):
    made.label()
    for content in ("{", "[" * 10_000, "7", ""):
        Path(made.keys.labels, "labels.json").write_text(content)
        assert labels.label_facts(made.keys) is None
    made.label()
    assert made.facts["splits"]["train"]["kept"] == 12


# ---------------------------------------------------------------- what can't be labelled


def test_rows_without_labels_are_counted_and_named(tmp_path, caplog):
    many = {**TEXTS["train"], **{f"more{i}": "abc" for i in range(20)}, "bad": "a zz", "gone": "ab"}
    made = Made(tmp_path, {**TEXTS, "train": many, "dev": {**TEXTS["dev"], "new": "aéc"}})
    Path(made.manifests["train"].row(33).wav).unlink()
    with caplog.at_level(logging.WARNING):
        made.label()
    assert made.facts["splits"]["train"] == {"rows": 34, "kept": 32, "left_out": 2}
    assert made.facts["splits"]["dev"] == {"rows": 3, "kept": 2, "left_out": 1}
    said = caplog.text
    assert "bad of train is left out: nobody said that" in said and "gone of train is left out:" in said
    assert "labels: 2 of 34 rows of train are left out" in said
    assert "new of dev is left out: no training text has 'é'" in said
    found = labels.read(made.keys)
    assert len(found) == 36 and found.get("train", "bad", "a zz") is None and found.get("dev", "new", "aéc") is None


def test_a_recording_whose_codes_are_in_no_book_is_left_out_alone(made, caplog):
    wav = made.manifests["train"].row(5).wav
    soundfile.write(wav, np.full(soundfile.info(wav).frames, 1e6, np.float32), toy_voice.RATE, subtype="FLOAT")
    with caplog.at_level(logging.WARNING):
        made.label()
    assert made.facts["splits"]["train"] == {"rows": 12, "kept": 11, "left_out": 1}
    assert "t5 of train is left out: its codes are in no book" in caplog.text


@pytest.mark.parametrize("bad", [3, 12])
def test_a_split_of_which_much_cannot_be_labelled_is_refused_and_nothing_is_left_that_looks_whole(tmp_path, bad):
    train = {name: "a zz" if i < bad else text for i, (name, text) in enumerate(TEXTS["train"].items())}
    made = Made(tmp_path, {**TEXTS, "train": train})
    with refused("not-labelled") as error:
        made.label()
    assert "nobody said that" in error.value.message
    assert labels.label_facts(made.keys) is None and not Path(made.keys.labels, "train", "codes").exists()


def test_a_split_with_a_single_row_that_cannot_be_labelled_is_refused(tmp_path):
    with refused("not-labelled"):
        Made(tmp_path, {**TEXTS, "test": {"x": "zz"}, "train": {**TEXTS["train"], "z": "z"}}).label()


@pytest.mark.parametrize("name", ["codec", "recogniser"])
def test_without_one_of_the_bundles_nothing_is_opened(tmp_path, name):
    made = Made(tmp_path, **{name: None})
    with refused("missing-key", key=name) as error:
        made.label()
    assert f"--{name} BUNDLE" in error.value.hint and made.bundles.opened == []


# ---------------------------------------------------------------- reading


def test_an_utterance_of_another_corpus_has_no_labels_though_its_id_is_one_of_these(labelled):
    found = labels.read(labelled.keys)
    assert found.get("train", "t0", TEXTS["train"]["t0"]) is not None
    assert found.get("train", "t0", "ab abc") is None and found.get("train", "nobody", "ab") is None


def test_a_run_without_labels_has_none(tmp_path):
    assert len(labels.read(TTS.Keys.read(toy_voice.hparams(tmp_path)))) == 0


def _changed(**changes):
    def change(path):
        save_file({**load_file(path), **changes}, path)
    return change


def _shifted(path):
    """Durations that still add up, but for the text beside it."""
    found = load_file(path)
    found["ends"][0] -= 1
    save_file(found, path)


def _negative(path):
    found = load_file(path)
    found["frames"][:2] += np.array([-100, 100], np.int32)
    save_file(found, path)


@pytest.mark.parametrize("damage", [
    lambda path: path.write_bytes(path.read_bytes()[:40]), lambda path: path.write_text("no tensors"),
    lambda path: path.unlink(), _changed(frames=np.zeros((2, 3), np.int32)), _changed(ends=np.array([], np.int64)),
    _changed(ends=np.array([[3]], np.int64)), _changed(ends=np.array([9, 3], np.int64)),
    lambda path: save_file({"frames": np.zeros(3, np.int32)}, path), _shifted, _negative],
    ids=["cut", "text", "gone", "shape", "empty", "deep", "backwards", "part", "shifted", "negative"])
def test_a_damaged_file_of_durations_is_refused(made, damage):
    path = Path(made.label().keys.labels, "train", "durations.safetensors")
    damage(path)
    with refused("damaged-labels") as error:
        labels.read(made.keys)
    assert "remove the folder of labels" in error.value.hint


def test_durations_of_other_codes_are_refused(made):
    folder = Path(made.label().keys.labels)
    (folder / "dev" / "durations.safetensors").write_bytes((folder / "test" / "durations.safetensors").read_bytes())
    with refused("damaged-labels"):
        labels.read(made.keys)


# ---------------------------------------------------------------- a batch


def test_labels_of_a_batch_are_side_by_side_and_what_has_none_is_not_known():
    quantiser = FiniteScalars([4, 3], 2)
    one = Label(np.array([[11, 5], [0, 7], [3, 3]]), np.array([1, 1, 0, 1]), "")
    found = labels.targets([one, None], 4, 9, quantiser, torch.device("cpu"))
    assert found.frames[0].tolist() == [1, 1, 0, 1, 0, 0] and found.known.tolist() == [True, False]
    assert found.frames[1].sum() == 9 and (found.frames[1] > 0).all(), "shared evenly"
    assert found.chosen.shape == (2, 9, 4) and not found.chosen[0, 3:].any() and not found.chosen[1].any()
    assert torch.equal(quantiser.joined(found.chosen[:1, :3])[0], torch.from_numpy(one.codes))


def test_an_utterance_of_another_split_that_has_the_same_id_and_text_keeps_labels_of_its_own(tmp_path):
    train = toy_voice.recordings(tmp_path / "train", {"other": "c", "same": toy_voice.TEXT})
    dev = toy_voice.recordings(tmp_path / "dev", {"same": toy_voice.TEXT})
    task, _ = toy_voice.labelled(tmp_path, {"train": train, "dev": dev})
    frames = [int(task.compute_forward(toy_voice.batch(task, "same"), stage).targets.frames.sum())
              for stage in (Stage.TRAIN, Stage.VALID)]
    labelled = [len(task.labels.get(split, "same", toy_voice.TEXT).codes) for split in ("train", "dev")]
    assert frames == labelled and frames[0] != frames[1]


def test_a_run_with_checkpoints_keeps_to_its_codec_though_its_labels_were_removed(made, monkeypatch):
    made.label()
    shutil.rmtree(made.keys.labels)
    monkeypatch.setattr(labels.initial, "fresh", lambda keys: False)
    with refused("changed-source"):
        made.label(toy_voice.Bundles(codec=toy_voice.Codec("b")))
    made.label()
    assert labels.pinned_facts(made.keys)["codec"] == made.facts["codec"]


def test_codes_of_another_codec_among_the_labels_are_refused(labelled):
    folder = Path(labelled.keys.labels)
    facts = json.loads((folder / "labels.json").read_text())
    facts["books"]["codec"] = "f" * 64
    (folder / "labels.json").write_text(json.dumps(facts))
    with refused("other-codec"):
        labels.read(labelled.keys)
