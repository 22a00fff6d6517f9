"""The battery of a recogniser's behaviour, around the search that answers it."""

import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
from refusals import refused

from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.nonspeech import NonSpeech
from sbkit.runs import behaviour, evaluation, scored_corpus
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.score.behaviour import silences


@pytest.mark.parametrize("recordings, heard", [
    ({"hum.wav": 0.5}, ["hum.wav"]), ({}, []), (None, []),
    ({"hum.wav": 0.5, "long.wav": 31.5}, ["hum.wav", *(f"long.wav, from {at} s" for at in (0, 10, 20, 30))]),
    ({f"{i}.wav": 21.0 for i in range(100)}, None),
], ids=["some", "emptied", "gone", "long", "many"])
def test_noises_of_the_folder_are_tried_if_it_still_has_any(recordings, heard, tmp_path, monkeypatch):
    folder = tmp_path / "noises"
    if recordings is not None:
        folder.mkdir()
    for name in recordings or ():
        soundfile.write(folder / name, np.full(round(recordings[name] * 1000), 0.1, np.float32), 1000)
    rows = []

    def transcribe(request, recipe, brain, battery, label):
        rows.extend(SimpleNamespace(id=row.id, hypothesis="words") for row in battery)

    monkeypatch.setattr(behaviour, "transcribe", transcribe)
    monkeypatch.setattr(behaviour, "silences", lambda rate: silences(rate, 0.5, 1))
    found = behaviour.try_behaviour(
        EvaluateRequest(tmp_path),
        SimpleNamespace(keys=SimpleNamespace(nonspeech=NonSpeech(folder=str(folder)))),
        SimpleNamespace(transcriber=None, all_rows=lambda: rows),
        Manifest(ids=[], wavs=[], texts=[], durations=[]), 1000)
    listed = [row[0] for table in found.tables if "Noises of nonspeech" in table.title for row in table.rows]
    if heard is None:
        assert len(rows) == len(silences(1000, 0.5, 1)) + 100, "each is tried once"
    else:
        assert sorted(listed) == [str(folder / name) for name in heard]


@pytest.mark.parametrize("on, data_root", [("lists", None), ("lists/test.csv", None), ("test.csv", "clips")])
def test_a_list_begins_where_that_of_the_run_did_or_where_it_is_told(on, data_root, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for folder in "clips", "lists":
        (tmp_path / folder).mkdir()
    soundfile.write(tmp_path / "clips" / "a.wav", np.full(16000, 0.1, np.float32), 16000)
    for path in "lists/test.csv", "test.csv":
        (tmp_path / path).write_text("ID,duration,wav,wrd\na,1.0,$data_root/a.wav,words\n")
    own = Corpus("lists", "en", "own", data_root="clips")
    request = EvaluateRequest(tmp_path / "run", on=on, data_root=data_root)
    _, corpus = scored_corpus.prepare(request, own, on)
    assert corpus.manifest("test").ids == ["a"]


def test_a_split_has_the_names_that_training_takes_and_a_mapping_has_several():
    own = SimpleNamespace(manifest_path=lambda split: Path(f"{split}.csv"), remote="none", manifest=str, source="x",
                          names=lambda: ["train", "dev", "eval"])
    given = SimpleNamespace(keys=SimpleNamespace(corpus=own), task=SimpleNamespace(
        check_manifest=lambda *_: None, needs_text=lambda: True, columns={}))

    def manifest(**request):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Path, "is_file", lambda path: path.stem in ("train", "dev", "test"))
            anew = SimpleNamespace(**vars(own) | {"manifest_path": lambda _: f"{request['split']} anew"})
            patch.setattr(scored_corpus, "prepare", lambda *_: (None, anew))
            return scored_corpus.find(EvaluateRequest(Path("run"), **request), given).manifest

    assert [str(manifest(split=name)) for name in (None, "valid", "dev", "train", "eval")] == [
        "test.csv", "dev.csv", "dev.csv", "train.csv", "eval anew"]
    with refused("bad-option", key="data_folder"):
        manifest(on="{train: a.csv, test: b.csv}")


def test_the_real_time_factor_holds_no_warm_up(tmp_path, monkeypatch):
    calls = []

    def transcribe(request, recipe, brain, manifest, label, show=True):
        if not calls:
            time.sleep(0.3)
        calls.append(len(manifest))
        return {}, 0.0

    monkeypatch.setattr(evaluation, "transcribe", transcribe)
    results = SimpleNamespace(check=lambda: None, utterances=3, parts={}, facts=dict)
    brain = SimpleNamespace(transcriber=None, all_rows=list, device="cpu", eval_precision="fp32",
                            tested_results=lambda *given: results, metric=SimpleNamespace(name="WER"))
    manifest = Manifest(ids=list("abc"), wavs=list("abc"), texts=list("abc"), durations=[0.1] * 3)
    scored = evaluation.score(EvaluateRequest(tmp_path), None, brain, manifest, "best")
    assert calls == [1, 3] and scored.facts["real_time_factor"] < 0.5
