"""Utterances longer than an encoder takes are reported by the check, and refused in preparation and evaluation."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import encoders
import numpy as np
import pytest
from refusals import refused
from run_folders import corpus

from sbkit.data.augment import Augment, SpeedPerturb
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.export.clips import choose_clips
from sbkit.export.layout import Config
from sbkit.recipe import load
from sbkit.recipe.check import check
from sbkit.recipe.source import Findings, Place
from sbkit.tasks.recognise import duration_limit

RECIPE = Path(__file__).parents[3] / "hparams" / "finetune.yaml"


@pytest.fixture(scope="module")
def whisper(tmp_path_factory):
    return str(encoders.make(tmp_path_factory.mktemp("window") / "whisper", "whisper"))


def keys(max_duration, augment=None, most=30.0):
    encoder = type("Limited", (), {"longest_seconds": most})()
    return SimpleNamespace(encoder_key="encoder", encoder=encoder, class_of=lambda name: type(encoder), augment=augment,
                           corpus=SimpleNamespace(max_duration=max_duration), sample_rate=16_000)


@pytest.mark.slow
@pytest.mark.usefixtures("without_trials")
@pytest.mark.parametrize("max_duration, problem", [
    (40.0, "the corpus allows utterances of 40 s, but the encoder takes at most 30 s"), (30.0, None)])
def test_the_check_reports_a_corpus_without_the_encoders_limit(tmp_path, whisper, max_duration, problem):
    given = {"encoder_source": whisper, "output_folder": str(tmp_path), "corpus": {"max_duration": max_duration}}
    found = [(error.code, error.key, error.message) for error in check(RECIPE, given).errors]
    assert found == ([] if problem is None else [("duration", "corpus.max_duration", problem)])


SLOW = Augment([SpeedPerturb(speeds=[0.9])])


@pytest.mark.parametrize("given, severity, message, hint", [
    (keys(28.0, SLOW), "error", "28 s (31.1 s when slowed down), but", "max_duration: 27 under corpus"),
    (keys(None), "warning", "of any length, but the encoder takes at most 30 s", "max_duration: 30"),
    (keys(27.0, SLOW), None, "", ""), (keys(None, most=None), None, "", ""), (keys(99.0, most=None), None, "", "")],
    ids=["slowed down", "any length", "short", "any, no limit", "long, no limit"])
def test_slowed_down_speech_counts_and_any_length_is_a_warning(given, severity, message, hint):
    findings, place = Findings(), Place("x", 1)
    node = SimpleNamespace(value={}, place=place, key="corpus", place_of=lambda name: place,
                           key_of=lambda name: f"corpus.{name}")
    built = SimpleNamespace(nodes={"corpus": node})
    assert duration_limit.durations_fit(given, built, findings) == (severity != "error")
    found = [(each.severity, each.message, each.suggestion) for each in findings]
    assert [each[0] for each in found] == ([severity] if severity else [])
    assert all(message in text and hint in suggestion for _, text, suggestion in found)


def manifest(*seconds):
    n = len(seconds)
    return Manifest(ids=[f"u{i}" for i in range(n)], durations=np.array(seconds), wavs=["x.wav"] * n, texts=["a"] * n)


def test_longer_utterances_are_refused_in_one_message():
    there = {"train": manifest(1.0, 30.0, 31.0), "dev": manifest(29.0), "test": manifest(40.0, 33.25)}
    with refused("clip-too-long") as raised:
        duration_limit.refuse_longer(keys(None), there)
    assert raised.value.message == (
        "train: 1 of 3 utterances are longer than the 30 s that the encoder takes: u2 (31.0 s); test: 2 of 2 "
        "utterances are longer than the 30 s that the encoder takes: u0 (40.0 s), u1 (33.2 s)")
    assert "max_duration: 30 and limit_splits: [train, dev, test] under corpus" in raised.value.hint
    duration_limit.refuse_longer(keys(None, most=None), there)
    duration_limit.refuse_longer(keys(None), {"dev": manifest(30.0)})
    with refused("clip-too-long"):
        duration_limit.refuse_longer(keys(None, SLOW), {"train": manifest(29.0), "dev": manifest(29.0)})


def test_the_task_refuses_them_when_it_prepares_and_before_it_scores(tmp_path, whisper):
    made = load.open_recipe(RECIPE, {"encoder_source": whisper, "output_folder": str(tmp_path)})
    long = {split: manifest(31.0) for split in ("train", "dev", "test")}
    with refused("clip-too-long"):
        made.task.prepare(made.keys, long, {})
    assert not made.keys.tokenizer.path.exists()
    with refused("clip-too-long"):
        made.task.check_manifest(made.keys, "test", long["test"])


def test_no_clip_of_a_comparison_is_longer_than_the_model_takes(tmp_path):
    there = Corpus(str(corpus(tmp_path / "data", train=4, dev=1, test=4)), folder=tmp_path / "manifests")
    there.prepare(show_progress=False)
    assert max(len(clip.signal) for clip in choose_clips(there, 16_000, 4).alone) > 16_000
    limited = choose_clips(there, 16_000, 4, 0.9)
    assert max(len(clip.signal) for clip in limited.alone) == 14_400
    assert limited.alone[-1].text is None, "some of its words are cut off"


def test_longer_chunks_than_the_model_takes_are_refused():
    made = Config(sample_rate=16_000, hop_samples=1, subsampling=320, vocabulary=4, longest_seconds=30.0)
    assert (made.chunk(None), made.chunk(25.0), made.chunk(30.0)) == (20.0, 25.0, 30.0)
    with pytest.raises(SbkitError, match="chunks of 31 s were requested, but the model takes at most 30 s at once"):
        made.chunk(31.0)
