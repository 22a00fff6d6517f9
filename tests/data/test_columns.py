"""Columns that a task declares: from any kind of list into manifests, from there into batches, checked on the way."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from types import SimpleNamespace

import corpora
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from refusals import refused
from sounds import encoded, speechlike

from sbkit.data.augment import Augment, Crop, Gain, SpeedPerturb
from sbkit.data.batch import Batch
from sbkit.data.columns import BatchColumns, LabelColumn, Padded, SignalColumn, TextColumn
from sbkit.data.corpus import Corpus
from sbkit.data.loader import EvalLoader, TrainLoader
from sbkit.data.plan import Batching, Plan
from sbkit.train import batches

CLIPS = 12
SECONDS = [0.5 + 0.05 * i for i in range(CLIPS)]
DECLARED = {"speaker": LabelColumn("speakers"), "mood": LabelColumn(), "clean": SignalColumn(),
            "voice": SignalColumn(aligned=False)}
KEYS = SimpleNamespace(speakers=("s0", "s1", "s2"))


@pytest.fixture(scope="module")
def sounds(tmp_path_factory):
    """Recordings, each with a clean one of its length and a longer one of its speaker's voice."""
    folder = tmp_path_factory.mktemp("sounds")
    for i, seconds in enumerate(SECONDS):
        for kind, length in (("noisy", seconds), ("clean", seconds), ("voice", 2 + 0.1 * i)):
            sound = speechlike(length, seed=i + 100 * (kind == "voice"))
            (folder / f"{kind}{i}.wav").write_bytes(encoded(sound, 16000))
    return folder


def rows(sounds, **changed):
    """A list of these recordings, with relative paths."""
    found = []
    for i, seconds in enumerate(SECONDS):
        found.append({"ID": f"u{i}", "duration": f"{seconds}", "wav": f"noisy{i}.wav", "spk_id": f"s{i % 3}",
                      "mood": ("glad", "sad")[i % 2], "clean_wav": f"clean{i}.wav", "voice": f"voice{i}.wav"})
        found[-1].update(changed.get(f"u{i}", {}))
    return found


def write(kind, folder, listed, sounds):
    folder.mkdir(parents=True, exist_ok=True)
    if kind == "csv":
        (folder / "train.csv").write_text("\n".join(map(",".join, [listed[0], *(row.values() for row in listed)])))
    elif kind == "jsonl":
        (folder / "train.jsonl").write_text("\n".join(map(json.dumps, listed)))
    else:  # as datasets on the hub have recordings
        embedded = [{**row, **{name: {"bytes": (sounds / row[name]).read_bytes(), "path": row[name]}
                               for name in ("wav", "clean_wav", "voice")}} for row in listed]
        pq.write_table(pa.Table.from_pylist(embedded), folder / "train.parquet")
    return Corpus(str(folder), folder=folder / "manifests", data_root=str(sounds), columns={"clean": "clean_wav"},
                  only=("train",))


def prepared(corpus, declared=None):
    return corpus.prepare(show_progress=False, needs_text=False, columns=DECLARED if declared is None else declared)


@pytest.fixture(scope="module")
def manifest(sounds, tmp_path_factory):
    return prepared(write("csv", tmp_path_factory.mktemp("list"), rows(sounds), sounds))["train"]


def loader(manifest, *, augment=None, keys=KEYS, declared=DECLARED, **options):
    columns = BatchColumns(declared, keys)
    plan = Plan.of(manifest, Batching(12, 12), augment, 1, columns=columns)
    return TrainLoader(manifest, None, plan, augment=augment, columns=columns, **{"workers": 0, **options})


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet"])
def test_every_kind_of_list_gives_the_same_batches(kind, sounds, manifest, tmp_path):
    found = prepared(write(kind, tmp_path, rows(sounds), sounds))["train"]
    assert list(found.column("mood")) == ["glad", "sad"] * (CLIPS // 2)
    assert found.seconds("voice").tolist() == pytest.approx([2 + 0.1 * i for i in range(CLIPS)], abs=1e-3)
    for made, known in zip(loader(found).at(1), loader(manifest).at(1), strict=True):
        assert made.ids == known.ids
        for a, b in zip(made.tensors(), known.tensors(), strict=True):
            assert torch.equal(a, b)


def test_it_is_prepared_once_and_again_when_the_task_declares_others(sounds, tmp_path, caplog):
    corpus = write("csv", tmp_path, rows(sounds), sounds)
    assert len(prepared(corpus)["train"]) == CLIPS
    with caplog.at_level("INFO"):
        prepared(corpus)
        assert "already prepared" in caplog.text
        assert "voice_seconds" not in prepared(corpus, {"clean": SignalColumn()})["train"].meta
    assert "preparing" in caplog.text


def test_common_voice_keeps_a_column_of_its_own(tmp_path):
    folder = corpora.common_voice(tmp_path / "cv", train=["one two"] * 3, dev=["three"], test=["four"])
    lines = (folder / "train.tsv").read_text().splitlines()
    for tsv in (folder / f"{split}.tsv" for split in ("train", "dev", "test")):
        head, *others = tsv.read_text().splitlines()
        tsv.write_text("\n".join([f"{head}\tmood", *(f"{line}\tm{i}" for i, line in enumerate(others))]) + "\n")
    found = Corpus(folder, folder=tmp_path / "m").prepare(show_progress=False, columns={
        "mood": LabelColumn(), "speaker": LabelColumn()})
    assert set(found["train"].column("mood")) <= {f"m{i}" for i in range(len(lines))} and len(found["train"])


def test_a_column_that_is_not_there_is_named_with_those_that_are(sounds, tmp_path):
    corpus = write("csv", tmp_path / "csv", rows(sounds), sounds)
    wanted = {"accent": LabelColumn(), "clean": SignalColumn()}
    for act in (lambda: corpus.check_source(False, wanted), lambda: prepared(corpus, wanted)):
        with refused("missing-column", key="accent"):
            act()
    for kind in ("jsonl", "parquet"):
        other = write(kind, tmp_path / kind, rows(sounds), sounds)
        with refused("missing-column", key="colour"):
            other.check_source(False, {"colour": LabelColumn(), "clean": SignalColumn()})
    corpus.check_source(False, DECLARED)
    assert not list((tmp_path / "csv").glob("manifests/*.csv")), "a check prepares nothing"


def test_a_column_that_only_the_corpus_names_is_looked_for_too(sounds, tmp_path):
    write("csv", tmp_path, rows(sounds), sounds)
    for columns, missing in (({"text": "sentence"}, "text"), ({"speaker": "nobody"}, "text"),
                             ({"text": "mood", "speaker": "nobody"}, None), ({"text": "mood"}, None)):
        corpus = Corpus(tmp_path, folder=tmp_path / "m", columns=columns, data_root=sounds)
        with refused("missing-column", key=missing) if missing else contextlib.nullcontext():
            corpus.check_source(True, {})


def test_a_recordings_folder_has_no_columns(sounds, tmp_path):
    corpus = Corpus(str(sounds), folder=tmp_path / "m", splits={"train": "train"}, only=("train",))
    with refused("missing-column"):
        prepared(corpus, {"speaker": LabelColumn()})


def test_rows_that_lack_something_are_counted_and_named(sounds, tmp_path):
    changed = {"u1": {"mood": " "}, "u2": {"clean_wav": "gone.wav"}, "u3": {"clean_wav": "voice3.wav"},
               "u4": {"voice": "broken.wav"}}
    (sounds / "broken.wav").write_bytes(b"RIFF no sound")
    corpus = write("csv", tmp_path, rows(sounds, **changed), sounds)
    found = prepared(corpus)
    assert set(found["train"].ids) == {f"u{i}" for i in (0, *range(5, CLIPS))}
    left_out = corpus.report["splits"]["train"]["left_out"]
    examples = {reason: entry["examples"][0] for reason, entry in left_out.items() if entry["count"] == 1}
    assert examples["empty column"] == "u1: mood"
    assert examples["missing clip"] == f"u2: clean: {sounds}/gone.wav"
    assert examples["signals of different length"].startswith("u3: clean: 2.30 s, but 0.65 s from 0.00 s on")
    assert examples["undecodable"].startswith("u4: voice: ")


@pytest.mark.parametrize("missing", ["later.wav", "https://somewhere/clean.wav"])
def test_rows_whose_further_recording_is_missing_are_prepared_again_only_when_it_appears(missing, sounds, tmp_path,
                                                                                         caplog):
    declared = {"clean": SignalColumn()}
    recording = tmp_path / "recordings" / missing
    written = missing if "://" in missing else str(recording)
    corpus = write("csv", tmp_path, rows(sounds, u2={"clean_wav": written}), sounds)
    assert len(prepared(corpus, declared)["train"]) == CLIPS - 1

    with caplog.at_level("INFO"):
        assert len(prepared(corpus, declared)["train"]) == CLIPS - 1
    assert "already prepared" in caplog.text and "has appeared" not in caplog.text
    if "://" in missing:
        return

    recording.parent.mkdir()
    recording.write_bytes((sounds / "clean2.wav").read_bytes())
    with caplog.at_level("INFO"):
        assert len(prepared(corpus, declared)["train"]) == CLIPS
    assert f"{recording} was left out and has appeared" in caplog.text


def test_a_row_whose_further_recording_is_damaged_is_prepared_again_only_when_it_is_repaired(sounds, tmp_path, caplog):
    declared = {"clean": SignalColumn()}
    recording = tmp_path / "damaged.wav"
    recording.write_bytes(b"RIFF no sound")
    corpus = write("csv", tmp_path, rows(sounds, u2={"clean_wav": str(recording)}), sounds)
    with caplog.at_level("INFO"):
        for _ in range(2):
            assert len(prepared(corpus, declared)["train"]) == CLIPS - 1
        assert "already prepared" in caplog.text and "has appeared" not in caplog.text

        recording.write_bytes((sounds / "clean2.wav").read_bytes())
        assert len(prepared(corpus, declared)["train"]) == CLIPS
    assert f"{recording} was left out and has appeared or changed" in caplog.text


def test_a_further_recording_that_goes_on_is_told_with_its_column(sounds, tmp_path):
    data = (sounds / "voice2.wav").read_bytes()
    (tmp_path / "more.wav").write_bytes(data[:40] + (32_000).to_bytes(4, "little") + data[44:])
    corpus = write("csv", tmp_path, rows(sounds, u2={"voice": str(tmp_path / "more.wav")}), sounds)
    assert len(prepared(corpus)["train"]) == CLIPS
    assert corpus.report["splits"]["train"]["notices"] == [
        "1 recording longer than the header says, such as u2: voice: its header says 1.00 s, but it goes on to 2.20 s: "
        "the rest isn't read"]


def kinds_of_columns(held):
    """The type of each column and label of a batch by name; of tensors also their types of numbers and dimensions."""
    kinds = {}
    for field, by_name in held.items():
        for name, value in by_name.items():
            tensors = value if isinstance(value, Padded) else [value]
            kinds[field, name] = type(value), *((tensor.dtype, tensor.dim()) for tensor in tensors
                                                if isinstance(tensor, torch.Tensor))
    return kinds


@pytest.mark.parametrize("noise", [False, True])
def test_a_dummy_batch_has_all_columns_of_a_batch_that_was_read(manifest, noise):
    """The check sees only the one, and training mostly the other."""
    read = next(iter(loader(manifest).at(1)))
    dummy = BatchColumns(DECLARED, KEYS).dummy(read.signals, read.signal_lengths, noise=noise)
    assert {name for _, name in kinds_of_columns(dummy)} == set(DECLARED)
    assert kinds_of_columns(dummy) == kinds_of_columns({field: getattr(read, field) for field in dummy})


@dataclasses.dataclass(frozen=True)
class NumberColumn(TextColumn):
    """A kind of the user's: numbers, [B] float32."""

    dummy: str = dataclasses.field(default="1.5", kw_only=True)

    def of_rows(self, texts):
        return torch.tensor([float(text) for text in texts])


def test_a_kind_of_column_of_the_users_is_one_class(sounds, tmp_path):
    listed = [{**row, "level": f"{number / 4}"} for number, row in enumerate(rows(sounds))]
    declared = {"level": NumberColumn(), "clean": SignalColumn()}
    found = prepared(write("csv", tmp_path, listed, sounds), declared)["train"]
    assert len(found) == CLIPS
    for batch in loader(found, declared=declared, workers=1).at(1):
        assert batch.columns["level"].tolist() == [int(name[1:]) / 4 for name in batch.ids]
        assert batch.to("meta").columns["level"].device.type == "meta"
        assert batch.repeated(2).columns["level"].shape == (2 * len(batch),)
    dummy = BatchColumns(declared).dummy(torch.zeros(2, 10), torch.tensor([10, 10]))
    assert dummy["columns"]["level"].tolist() == [1.5, 1.5]


@pytest.mark.parametrize("augment", [None, Augment([SpeedPerturb([0.8, 1.1]), Crop(0.4), Gain()])])
def test_an_aligned_signal_is_cut_and_sped_up_as_its_recording_is(manifest, augment):
    """The clean recordings here have the samples of the others, so that each batch must have the same twice."""
    lengths = set()
    for batch in loader(manifest, augment=augment).at(1):
        clean = batch.columns["clean"]
        assert torch.equal(clean.data, batch.signals) and torch.equal(clean.lengths, batch.signal_lengths)
        lengths.update(batch.signal_lengths.tolist())
    assert len(lengths) == CLIPS if augment is None else max(lengths) <= 6400


class Noise:
    def __call__(self, signal, rng):
        return signal + 0.5 * rng.standard_normal(len(signal)).astype(np.float32)


def test_noise_is_on_the_recording_alone(manifest):
    plain = {name: row for batch in loader(manifest, augment=Augment([Gain()])).at(1)
             for name, row in zip(batch.ids, batch.columns["clean"].data, strict=True)}
    for batch in loader(manifest, augment=Augment([Gain(), Noise()])).at(1):
        assert not torch.allclose(batch.signals, batch.columns["clean"].data, atol=0.1)
        for name, row in zip(batch.ids, batch.columns["clean"].data, strict=True):
            assert torch.equal(row, plain[name])


def test_a_recording_can_be_its_own_second_signal(sounds, tmp_path):
    """Where the corpus names no clean one, that is the recording before noise, cut alike, even if a list has a column
    of that name; where it names one, that is read."""
    listed = [{**row, "clean": "gone.wav"} for row in rows(sounds)]
    corpus, declared = write("csv", tmp_path, listed, sounds), {"clean": SignalColumn(or_recording=True)}
    named = prepared(corpus, declared)["train"]
    assert named.column("clean")[0] == f"{sounds}/clean0.wav"
    corpus.columns = {}
    corpus.check_source(False, declared)
    found = prepared(corpus, declared)["train"]
    assert len(found) == CLIPS and "clean" not in found.meta
    stages, keys = [SpeedPerturb([0.8, 1.1]), Crop(0.4)], {"declared": declared, "keys": None}
    plain = {name: row for batch in loader(found, augment=Augment([*stages, Gain()]), **keys).at(1)
             for name, row in zip(batch.ids, batch.signals, strict=True)}
    for batch in loader(found, augment=Augment([*stages, Gain(), Noise()]), **keys).at(1):
        for name, noisy, clean in zip(batch.ids, batch.signals, batch.columns["clean"].data, strict=True):
            assert torch.equal(clean, plain[name]) and not torch.allclose(noisy, clean, atol=0.1)


def test_the_noise_of_an_evaluation_is_the_same_each_time(manifest):
    made = EvalLoader(manifest, None, max_batch_seconds=20, augment=Augment([Noise()]), workers=0,
                      columns=BatchColumns({"clean": SignalColumn()}))
    first, again = list(made), list(made)
    for one, other in zip(first, again, strict=True):
        assert one.ids == other.ids and torch.equal(one.signals, other.signals)
        assert not torch.allclose(one.signals, one.columns["clean"].data, atol=0.1)


def test_what_is_read_whole_is_no_recording_of_its_row():
    with pytest.raises(ValueError, match="aligned"):
        SignalColumn(aligned=False, or_recording=True)


def test_a_stage_that_would_part_them_is_named(manifest):
    class Half:
        def __call__(self, signal, rng):
            return signal[::2]

    with refused("unaligned-stage"):
        next(loader(manifest, augment=Augment([Half()])).at(1))


def test_a_signal_with_a_length_of_its_own_is_whole_and_planned(manifest):
    made = loader(manifest)
    assert made.plan.durations.tolist() == pytest.approx([2 + 0.1 * i for i in range(CLIPS)], abs=1e-3)
    for batch in made.at(1):
        for name, size in zip(batch.ids, batch.columns["voice"].lengths.tolist(), strict=True):
            assert size == round(16_000 * (2 + 0.1 * int(name[1:])))
        data = batch.columns["voice"].data
        assert data.shape[0] * data.shape[1] <= 12 * 16_000
    for batch in EvalLoader(manifest, None, max_batch_seconds=4, columns=BatchColumns(DECLARED, KEYS), workers=0):
        assert batch.columns["voice"].data.numel() <= 4 * 16_000


def test_labels_are_texts_and_numbers_in_the_recipes_list(manifest):
    known = dict(zip(manifest.ids, manifest.speakers, strict=True))
    for batch in loader(manifest, workers=1).at(1):
        assert batch.columns["speaker"] == [known[name] for name in batch.ids]
        assert [f"s{number}" for number in batch.labels["speaker"].tolist()] == batch.columns["speaker"]
        assert batch.labels["speaker"].dtype == torch.int64 and batch.labels.keys() == {"speaker"}
        assert set(batch.columns["mood"]) <= {"glad", "sad"}


def test_a_label_that_the_recipe_does_not_list_is_refused_in_training_and_minus_one_in_a_test(manifest):
    fewer = SimpleNamespace(speakers=("s2", "s0"))
    with refused("unlisted-label"):
        loader(manifest, keys=fewer)
    found = {name: number for batch in EvalLoader(manifest, None, max_batch_seconds=8, workers=0,
                                                  columns=BatchColumns(DECLARED, fewer))
             for name, number in zip(batch.ids, batch.labels["speaker"].tolist(), strict=True)}
    assert [found[f"u{i}"] for i in range(3)] == [1, -1, 0]


def test_a_list_that_is_null_is_that_of_the_training_set(manifest):
    null = BatchColumns(DECLARED, SimpleNamespace(speakers=None))
    null.check_classes(manifest)
    assert null.list_classes(manifest) == {"speakers": ["s0", "s1", "s2"]}
    for noise in (False, True):  # a check has no corpus yet
        labels = null.dummy(torch.zeros(4, 10), torch.full((4,), 10), noise=noise)["labels"]["speaker"]
        assert labels.tolist() == [0] * 4
    assert BatchColumns(DECLARED, KEYS).list_classes(manifest) == {}


def test_a_column_of_labels_is_written_into_fingerprints_as_it_always_was():
    """Otherwise all prepared corpora with labels would be prepared again, and continued runs refused."""
    assert repr(LabelColumn("speakers", dummy="s0")) == "LabelColumn(classes='speakers', stand_in='s0')"


@pytest.mark.parametrize("listed", [[], "s1", 3])
def test_a_key_without_a_list_is_named(listed):
    with refused("bad-value"):
        BatchColumns(DECLARED, SimpleNamespace(speakers=listed))


def test_a_damaged_signal_leaves_its_row_out(manifest, sounds):
    wavs = list(manifest.meta["clean"])
    wavs[4] = str(sounds / "broken.wav")
    (sounds / "broken.wav").write_bytes(b"RIFF no sound")
    damaged = manifest.replace(meta={**manifest.meta, "clean": wavs})
    made = loader(damaged)
    names = [name for batch in made.at(1) for name in batch.ids]
    assert len(names) == CLIPS - 1 and list(made.damaged) == ["u4"]


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 400), st.integers(1, 3))
def test_all_that_handles_batches_handles_their_columns(utterances, samples, times):
    signals, lengths = torch.randn(utterances, samples), torch.full((utterances,), samples)
    columns = BatchColumns(DECLARED, KEYS)
    batch = Batch(ids=[f"{i}" for i in range(utterances)], signals=signals, signal_lengths=lengths,
                  tokens=torch.zeros(utterances, 0, dtype=torch.long), token_lengths=torch.zeros(utterances),
                  texts=[""] * utterances, **columns.dummy(signals, lengths, noise=True))
    assert batch.labels["speaker"].max() < 3 and batch.columns["mood"] == [""] * utterances
    assert len(batch.tensors()) == 10 and {each.device.type for each in batch.to("meta").tensors()} == {"meta"}
    longer = batch.repeated(times)
    part = batches.rows(longer, utterances * (times - 1), utterances * times)
    assert isinstance(part.columns["clean"], Padded) and len(part.columns["mood"]) == utterances
    for a, b in zip(part.tensors(), batch.tensors(), strict=True):
        assert torch.equal(a, b)
