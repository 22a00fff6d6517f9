"""VoiceBank-DEMAND's layout: pairs of recordings by name, and two speakers that are dev."""

import corpora
import pytest

from sbkit.data.columns import SignalColumn
from sbkit.data.corpus import Corpus
from sbkit.errors import SbkitError

CLEAN = {"clean": SignalColumn(or_recording=True)}


def prepared(folder, where, columns=None, **options):
    columns = {"clean": "clean_wav"} if columns is None else columns
    corpus = Corpus(str(folder), folder=where, columns=columns, **options)
    return corpus, corpus.prepare(show_progress=False, needs_text=False, columns=CLEAN)


def test_pairs_are_found_by_their_names(tmp_path):
    folder = corpora.voicebank(tmp_path / "vb")
    corpus, found = prepared(folder, tmp_path / "m")
    assert corpus.report["source"]["kind"] == "VoiceBank-DEMAND"
    assert {name: sorted(set(rows.speakers)) for name, rows in found.items()} == {
        "train": ["p225", "p227"], "dev": ["p226"], "test": ["p232"]}
    assert sorted(found["test"].ids) == ["p232_001", "p232_002"]
    for name, kind in (("train", "trainset_28spk"), ("test", "testset")):
        rows = found[name]
        for wav, clean in zip(rows.wavs, rows.column("clean"), strict=True):
            assert wav.startswith(f"{folder}/noisy_{kind}_wav/") and clean == wav.replace("/noisy_", "/clean_")


def test_a_pair_without_its_clean_half_is_left_out_and_named(tmp_path):
    folder = corpora.voicebank(tmp_path / "vb")
    (folder / "clean_testset_wav" / "p232_001.wav").unlink()
    corpus, found = prepared(folder, tmp_path / "m")
    assert list(found["test"].ids) == ["p232_002"]
    [example] = corpus.report["splits"]["test"]["left_out"]["missing clip"]["examples"]
    assert example == f"p232_001: clean: {folder}/clean_testset_wav/p232_001.wav"


def test_both_training_sets_are_one(tmp_path):
    folder = corpora.voicebank(tmp_path / "vb")
    for kind in ("noisy", "clean"):
        corpora.recording(folder / f"{kind}_trainset_56spk_wav" / "p234_001.wav")
    assert "p234" in set(prepared(folder, tmp_path / "m")[1]["train"].speakers)


def test_what_it_has_no_column_for_is_refused(tmp_path):
    folder = corpora.voicebank(tmp_path / "vb")
    with pytest.raises(SbkitError, match="no column for the clean: looked for 'wet_wav' among id, audio, speak"):
        prepared(folder, tmp_path / "m", {"clean": "wet_wav"})
    with pytest.raises(SbkitError, match="recordings and no texts"):
        Corpus(str(folder), folder=tmp_path / "t").prepare(show_progress=False)
