"""The words that validation and evaluation judge are those that the exported bundle transcribes, also after pauses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import bundles
import numpy as np
import pytest
import torch
from letters import Letters
from speechbrain.core import Stage
from torch import nn

import sbkit.infer
from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.decode.beam import BeamSearch
from sbkit.decode.joint import JointSearch
from sbkit.decode.transducer_beam import TransducerBeam
from sbkit.infer import assembly, decoding
from sbkit.recipe import load
from sbkit.runs.evaluation_options import searching
from sbkit.tasks import feature_statistics
from sbkit.tasks.ctc import CTC
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.spelling import separates_words, spelling_of

HPARAMS = Path(__file__).parents[3] / "hparams"
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 1, "d_ffn": 16, "cnn_first_channels": 4, "cnn_channels": 4}


class Level(nn.Module):
    """The model of ``bundles``: a frame's level says its token."""

    def __init__(self):
        super().__init__()
        self.register_buffer("tokens", torch.arange(float(len(bundles.PIECES))))

    def frames(self, samples):
        return samples // bundles.FRAME + 1

    def forward(self, signals):
        levels = nn.functional.pad(signals, (0, bundles.FRAME))[:, ::bundles.FRAME, None] * bundles.LEVELS
        return -20.0 * (levels - self.tokens).square()


class Pieces(Letters):
    def silent_ids(self):
        return [1, 2]


def signal_with_pauses() -> np.ndarray:
    """Two sentences, whose second has no mark before its first word, 0.76 s after the first, and 0.6 s in a word."""
    first, second, rest = bundles.spell("hello you"), bundles.spell("good day")[3:], bundles.spell("xs")[3:]
    return bundles.voiced([*first, *[0] * 18, *second, *[0] * 14, *rest])


SAID = "hello you good dayxs"


@pytest.fixture
def brain(tmp_path):
    hparams = load.load(HPARAMS / "ctc.yaml", {**SMALL, "output_folder": str(tmp_path / "run")})
    hparams["checkpointer"] = None
    feature_statistics.allow_missing(hparams["normalize"])
    made = CTC(modules=hparams["modules"], hparams=hparams, run_opts={"device": "cpu"})
    made.use_acoustic_model(AcousticModel(None, Level(), nn.Identity(), hop_samples=1))
    made.keys.tokenizer, made.rows = Pieces(bundles.PIECES), []
    made.modules.eval()
    return made


def judged(brain, stage):
    """The text that a validation or test judges."""
    signal = torch.from_numpy(signal_with_pauses())[None]
    batch = Batch(ids=["a"], texts=[SAID], samples=signal.shape[1], signals=signal, tokens=torch.tensor([[8]]),
                  signal_lengths=torch.tensor([signal.shape[1]]), token_lengths=torch.tensor([1]))
    with torch.no_grad():
        brain.compute_objectives(brain.compute_forward(batch, stage), batch, stage)
    return brain.rows[-1].hypothesis


@pytest.mark.parametrize("search", [None, {"beam": 8}], ids=str)
def test_a_pause_ends_a_word_in_validation_and_test_as_in_the_bundle(brain, tmp_path, search):
    with sbkit.infer.load(bundles.make(tmp_path / "bundle"), device="cpu") as model:
        vocabulary, [log_probs] = model.engine.vocabulary, model.engine.run([signal_with_pauses()])
        assert model.transcribe(signal_with_pauses()).text == SAID
    decoder = decoding.decoder(vocabulary, search)
    [tokens] = decoder.tokens([[decoder.keep(log_probs)]])
    transcribed = vocabulary.text(assembly.join_tokens(tokens, vocabulary))
    brain.transcriber.search = None if search is None else BeamSearch(brain.keys.tokenizer, **search)
    assert judged(brain, Stage.VALID) == judged(brain, Stage.TEST) == transcribed == SAID


def test_it_does_where_the_searches_of_a_test_set_run_at_its_end(brain):
    brain.transcriber.search = BeamSearch(brain.keys.tokenizer, beam=8)
    with searching(brain):
        judged(brain, Stage.TEST)
    assert brain.rows[-1].hypothesis == SAID


@pytest.mark.parametrize("kind", [BeamSearch, JointSearch, TransducerBeam])
def test_each_search_of_a_task_writes_by_the_models_spelling(brain, kind):
    search = kind(None)
    assert brain.transcriber.complete(search) is search
    assert search.model_spelling is brain.transcriber.spelling and search.tokenizer is brain.keys.tokenizer


def test_the_bundle_has_the_spelling_of_the_task(brain, tmp_path):
    with sbkit.infer.load(bundles.make(tmp_path / "bundle"), device="cpu") as model:
        exported, own = model.engine.vocabulary.spelling, brain.transcriber.spelling
    assert list(exported.symbols) == list(own.symbols) and set(exported.silent) == set(own.silent) == {0, 1, 2}
    assert (exported.frame_seconds, exported.pause, exported.separator) == (own.frame_seconds, own.pause, own.separator)


def manifest(path, texts):
    count = len(texts)
    Manifest(ids=[str(i) for i in range(count)], durations=[1.0] * count, wavs=["a.wav"] * count,
             texts=texts).write(path)


@pytest.mark.parametrize("train, test, expected", [
    (["one two", ""], None, True), (["你好", "老农", "世界"], ["a b"], False), (None, ["你好"], False),
    (None, None, True), ([""], ["你好"], False), (["yes", "no", "стоп"], None, True), (["สวัสดี"], None, False)])
def test_texts_with_spaces_say_whether_spaces_separate_words(tmp_path, train, test, expected):
    for split, texts in (("train", train), ("test", test)):
        if texts is not None:
            manifest(tmp_path / f"{split}.csv", texts)
    corpus = SimpleNamespace(manifest_path=lambda split: tmp_path / f"{split}.csv")
    assert separates_words(corpus) == expected
    keys = SimpleNamespace(corpus=corpus, tokenizer=Pieces(bundles.PIECES), bos_index=None, eos_index=25,
                           blank_index=0, sample_rate=16_000)
    spelling = spelling_of(SimpleNamespace(hop_samples=160, subsampling=4), keys)
    assert spelling.space == (" " if expected else "") and spelling.frame_seconds == 0.04
    assert set(spelling.silent) == {0, 1, 2, 25}
