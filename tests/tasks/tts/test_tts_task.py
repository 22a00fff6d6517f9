"""The task of a voice: its loss by hand, what has no labels, stand-ins, its check, and what a test measures."""

import logging
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import soundfile
import torch
import toy_voice
from host_syncs import HostSyncs
from refusals import refused
from safetensors.torch import save_file
from speechbrain.core import Stage
from torch.nn import functional

from sbkit.data.batch import Batch, dummy_batch
from sbkit.errors import SbkitError
from sbkit.recipe.check import check
from sbkit.runs import initial
from sbkit.tasks.generation import SpeechTest
from sbkit.tasks.tts import TTS

TRAIN = {"t0": "ab ab", "t1": "c", "t2": "abcab", "t3": "b a"}
SPEAKERS = {"t0": "anna", "t1": "ben", "t2": "anna", "t3": "ben"}


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """The folder of a run whose corpus is labelled, and its manifests."""
    folder = tmp_path_factory.mktemp("run")
    keys = TTS.Keys.read(toy_voice.hparams(folder, speakers={"several": True}, n_speakers=2))
    manifests = {"train": toy_voice.recordings(folder / "wavs", TRAIN, SPEAKERS),
                 "dev": toy_voice.recordings(folder / "wavs", {"d0": "ab"}, {"d0": "ben"})}
    assert TTS.prepare(keys, manifests, {}) == {"n_symbols": 5, "n_speakers": 2}
    TTS.label(keys, manifests, toy_voice.Bundles())
    return folder, manifests


@pytest.fixture
def task(run):
    made = toy_voice.brain(run[0], n_symbols=5, n_speakers=2, speakers={"several": True})
    TTS.tokenizer(made.keys)
    return made


def batch(task, manifest, names, width=None, texts=None):
    """The batch of a manifest's utterances, as the loader makes it; ``width`` is of the texts."""
    rows = [manifest.row(list(manifest.ids).index(name)) for name in names]
    ids = [torch.tensor(task.keys.symbols.encode(row.text)) for row in rows]
    signals = [torch.from_numpy(soundfile.read(row.wav, dtype="float32")[0]) for row in rows]
    lengths = torch.tensor([len(each) for each in ids])
    tokens = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True)
    tokens = functional.pad(tokens, (0, (width or tokens.shape[1]) - tokens.shape[1]))
    return Batch(ids=list(names), signals=torch.nn.utils.rnn.pad_sequence(signals, batch_first=True),
                 signal_lengths=torch.tensor([len(each) for each in signals]), tokens=tokens, token_lengths=lengths,
                 texts=texts or [row.text for row in rows], samples=sum(len(each) for each in signals))


def loss(task, given, stage=Stage.TRAIN):
    return task.compute_objectives(task.compute_forward(given, stage), given, stage)


# ---------------------------------------------------------------- the loss


def test_the_loss_is_the_cross_entropy_of_frames_and_the_error_of_durations(task, run):
    given = batch(task, run[1]["train"], ["t0", "t1"])
    found, said = loss(task, given), task.compute_forward(given, Stage.TRAIN)
    codes = spread = frames = 0.0
    for i, name in enumerate(given.ids):
        label = task.labels.get("train", name, given.texts[i])
        logits = task.keys.code_head(said.states[i:i + 1, :len(label.codes)])
        chosen = task.keys.quantiser.chosen(torch.from_numpy(label.codes)[None])
        for slot, most in enumerate(task.keys.quantiser.choices):
            codes += functional.cross_entropy(logits[0, :, slot, :most], chosen[0, :, slot], reduction="sum")
        logs = torch.from_numpy(label.frames + 1).log()
        spread += (said.durations[i, :len(logs)] - logs).square().sum()
        frames += len(label.codes)
    torch.testing.assert_close(found.total, (codes + spread).float())
    assert found.count == frames
    torch.testing.assert_close(found.extras["codes"][0], codes)
    assert found.extras["durations"][1] == sum(len(text) + 2 for text in given.texts)


def test_durations_weigh_as_much_as_the_recipe_says(task, run):
    given = batch(task, run[1]["train"], ["t0"])
    parts = loss(task, given).extras
    task.keys.duration_weight = 3.0
    torch.testing.assert_close(loss(task, given).total, parts["codes"][0] + 3 * parts["durations"][0])


def test_an_utterance_changes_nothing_of_anothers_loss(task, run):
    names = list(TRAIN)
    together = loss(task, batch(task, run[1]["train"], names, width=9))
    alone = [loss(task, batch(task, run[1]["train"], [name])) for name in names]
    torch.testing.assert_close(together.total, sum(each.total for each in alone), rtol=1e-4, atol=1e-4)
    assert together.count == sum(each.count for each in alone)


def test_what_trains_has_gradients_and_the_codecs_parts_have_none(task, run):
    loss(task, batch(task, run[1]["train"], list(TRAIN))).total.backward()
    keys = task.keys
    for part in (keys.text_encoder, keys.durations, keys.frame_decoder, keys.code_head):
        assert all(each.grad is not None and each.grad.isfinite().all() for each in part.parameters())
    speakers = keys.text_encoder.speaker.weight.grad
    assert speakers[0].any() and speakers[1].any(), "both speakers are in the batch"
    frozen = [each for part in (keys.decoder, keys.head) for each in part.parameters()]
    assert frozen and not any(each.requires_grad or each.grad is not None for each in frozen)


def test_a_training_step_never_waits_for_the_device(task, run):
    given = batch(task, run[1]["train"], list(TRAIN))
    task.compute_forward(given, Stage.TRAIN)  # labels are read when they are first needed
    with HostSyncs() as syncs:
        loss(task, given).total.backward()
    assert not syncs.found, syncs.found


# ---------------------------------------------------------------- what has no labels


def test_an_utterance_without_labels_is_no_part_of_the_loss(task, run):
    both = batch(task, run[1]["train"], ["t0", "t2"], texts=[TRAIN["t0"], "other"])
    found, alone = loss(task, both), loss(task, batch(task, run[1]["train"], ["t0"]))
    torch.testing.assert_close(found.total, alone.total, rtol=1e-4, atol=1e-4)
    assert found.count == alone.count


def test_a_corpus_that_was_never_labelled_is_spoken_and_has_no_loss(task, run):
    task.open_stage(Stage.TEST)
    given = batch(task, run[1]["train"], ["t0", "t1"], texts=["other", "words"])
    with torch.no_grad():
        found = loss(task, given, Stage.TEST)
    assert found.total == 0 and found.count == 0
    results = task.results(task.all_rows(), 0.0, {})
    assert set(results.stats) == {"real_time_factor"} and results.utterances == 2, "a loss of 0 would be no loss"
    assert all(row.frames == 0 and row.spoken > 0 for row in task.rows)


@pytest.mark.parametrize("given", [lambda task: dummy_batch(), lambda task: task.dummy_batch(3, 2.0, noise=True)],
                         ids=["placeholder", "check"])
def test_a_dummy_batch_costs_what_a_batch_does_though_the_corpus_is_labelled(task, given):
    made = given(task)
    found = loss(task, made)
    frames = len(made) * (made.signals.shape[1] // toy_voice.STRIDE + 1)
    assert found.count == frames and found.total.isfinite() and found.total > 0


def test_a_placeholder_is_no_row(task):
    task.open_stage(Stage.VALID)
    loss(task, dummy_batch(), Stage.VALID)
    assert task.rows == []


# ---------------------------------------------------------------- validation and test


def test_a_validation_measures_right_choices_and_durations(task, run):
    task.open_stage(Stage.VALID)
    given = batch(task, run[1]["dev"], list(run[1]["dev"].ids)[:2])
    with torch.no_grad():
        said = task.compute_forward(given, Stage.VALID)
        task.compute_objectives(said, given, Stage.VALID)
    right = frames = 0
    for i, name in enumerate(given.ids):
        label = task.labels.get("dev", name, given.texts[i])
        chosen, _ = task.keys.code_head.choose(said.states[i:i + 1, :len(label.codes)])
        wanted = task.keys.quantiser.chosen(torch.from_numpy(label.codes)[None])
        right, frames = right + (chosen == wanted).float().mean(-1).sum().item(), frames + len(label.codes)
        apart = said.durations[i, :len(label.frames)].clamp(min=0).exp() - 1 - torch.from_numpy(label.frames)
        assert task.rows[i].duration_error == pytest.approx(0.02 * apart.abs().mean().item(), rel=1e-4)
    stats = task.stats(task.rows)
    assert stats["right_choices"] == pytest.approx(100 * right / frames)
    assert stats["duration_error_ms"] == pytest.approx(1000 * np.mean([row.duration_error for row in task.rows]))


def test_a_test_transcribes_recordings_and_outputs_without_padding(task, run):
    transcribed = []

    def transcribe(signals):
        transcribed.extend(signals)
        return [f"{len(signal)}" for signal in signals]

    task.speech_test = SpeechTest(transcribe)
    task.open_stage(Stage.TEST)
    given = batch(task, run[1]["train"], ["t0", "t1"])
    with torch.no_grad():
        loss(task, given, Stage.TEST)
    assert [len(each) for each in transcribed[:2]] == given.signal_lengths.tolist()
    for row, said in zip(task.rows, transcribed[2:], strict=True):
        assert row.spoken == len(said) / toy_voice.RATE and row.output_transcript == str(len(said))
        assert row.sound.dtype == np.int16 and len(row.sound) == len(said) and row.seconds > 0
        np.testing.assert_allclose(row.sound / 32767, said.clip(-1, 1), atol=1e-4)
    assert task.rows[0].seconds / task.rows[0].spoken == pytest.approx(task.rows[1].seconds / task.rows[1].spoken)


def test_what_a_test_says_depends_neither_on_the_batch_nor_on_the_recording(task, run):
    task.modules.eval()
    with torch.no_grad():
        both = task.compute_forward(batch(task, run[1]["train"], ["t0", "t2"]), Stage.TEST)
        alone = task.compute_forward(batch(task, run[1]["train"], ["t0"]), Stage.TEST)
    size = int(alone.samples[0])
    assert int(both.samples[0]) == size
    torch.testing.assert_close(both.sound[0, :size], alone.sound[0], atol=1e-5, rtol=1e-4)


# ---------------------------------------------------------------- before a run


def test_the_corpus_must_fit_the_text_encoder(run):
    for name, more in (("symbols", {"n_symbols": 4}), ("speakers", {"n_symbols": 5, "n_speakers": 1})):
        keys = TTS.Keys.read(toy_voice.hparams(run[0], speakers={"several": True}, **more))
        with refused("vocabulary", key="text_encoder") as error:
            TTS.tokenizer(keys)
        assert f"{name}: !ref <n_{name}>" in error.value.hint


def test_characters_that_it_never_learnt_are_warned_of(task, caplog):
    with caplog.at_level(logging.WARNING):
        TTS.check_manifest(task.keys, "test", SimpleNamespace(texts=["ab c"]))
        assert not caplog.records
        TTS.check_manifest(task.keys, "test", SimpleNamespace(texts=["añ", "é"]))
    assert "2 characters of these texts, and leaves them out: 'é', 'ñ'" in caplog.text


def checked(tmp_path, **given):
    report = check(toy_voice.RECIPE, {**toy_voice.SMALL, "output_folder": str(tmp_path / "out"), **given})
    return {finding.key: finding for finding in report.findings if finding.severity == "error"}


@pytest.mark.slow
def test_a_recipe_without_bundles_is_checked_as_a_whole_and_says_which_are_missing(tmp_path):
    found = checked(tmp_path)
    assert set(found) == {"codec", "recogniser"}
    assert "it is null, but a voice can't be trained without it" in found["codec"].message
    assert "--codec BUNDLE: sbkit export makes one of a run of hparams/codec.yaml" in found["codec"].suggestion
    assert "hparams/ctc.yaml" in found["recogniser"].suggestion


@pytest.mark.parametrize(("given", "told"), [
    ({"init_from": "elsewhere"}, {"init_from": "the codec's own decoder has to be taken from"}),
    ({"decoder": {**toy_voice.SMALL["decoder"], "input_size": 8}, "head": {"input_size": 99},
      "durations": {**toy_voice.SMALL["durations"], "input_size": 17}, "code_head": {"input_size": 21}},
     {"decoder.input_size": "it is 8, but the quantiser gives 4 numbers a frame",
      "head.input_size": "it is 99, but the decoder's states have 12 numbers",
      "durations.input_size": "it is 17, but the text encoder's states have 16 numbers",
      "code_head.input_size": "it is 21, but the frames' states have 20 numbers"}),
])
def test_parts_that_do_not_fit_are_found_by_the_check(tmp_path, given, told):
    found = checked(tmp_path, **{name: toy_voice.bundle(tmp_path / name) for name in ("codec", "recogniser")}, **given)
    assert all(said in found[key].message for key, said in told.items())


def test_a_head_of_another_quantiser_is_found_by_the_check(tmp_path):
    recipe = tmp_path / "other.yaml"
    recipe.write_text(f"""
recipe: !include:{toy_voice.RECIPE}
    code_head: !new:sbkit.nn.voice.CodeHead
        input_size: 256
        quantiser: !new:sbkit.nn.codec.FiniteScalars {{levels: [8, 5, 5, 5], codebooks: 1}}
""")
    report = check(recipe, {"output_folder": str(tmp_path / "out")})
    assert "code_head.quantiser" in {finding.key.removeprefix("recipe.") for finding in report.findings
                                     if finding.severity == "error"}, report.problems()


@pytest.mark.parametrize(("freeze", "name"), [({"head": False}, "head"), ({"decoder": 100}, "decoder"),
                                              (None, "decoder")])
def test_the_codecs_own_parts_are_frozen_for_good(tmp_path, freeze, name):
    with refused("codec-not-frozen", key=name) as error:
        toy_voice.brain(tmp_path, freeze=freeze)
    assert f"{name}: true under freeze" in error.value.hint


def test_augmenting_recordings_that_are_labelled_is_refused(tmp_path):
    keys = TTS.Keys.read(toy_voice.hparams(tmp_path))
    assert not list(keys.clashes())
    keys.augment = object()
    assert [problem.key for problem in keys.clashes()] == ["augment"]


def test_decoder_and_head_come_from_the_codecs_bundle(tmp_path):
    made = toy_voice.brain(tmp_path)
    folder = Path(made.keys.codec)
    (folder / "config.json").write_text('{"format": "sbkit bundle", "version": 1, "task": "codec"}')
    wanted = {f"{name}.{key}": torch.full_like(value, 0.25) for name in ("decoder", "head")
              for key, value in getattr(made.keys, name).state_dict().items()}
    save_file(wanted, folder / "model.safetensors")
    initial.load(made)
    for name, value in made.modules.state_dict().items():
        assert (value == 0.25).all() == name.startswith(("model.5.", "model.6.")), name


def test_a_bundle_that_has_no_weights_to_start_from_is_refused(tmp_path):
    made = toy_voice.brain(tmp_path)
    with pytest.raises(SbkitError, match="codec"):
        initial.load(made)
