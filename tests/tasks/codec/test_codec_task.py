"""The codec's task: its loss by hand, its switches, its metric and what a test measures."""

import dataclasses
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from batches import noise
from host_syncs import HostSyncs
from refusals import refused
from run_folders import sound
from speechbrain.core import Stage

from sbkit.data.batch import dummy_batch
from sbkit.data.manifest import Manifest
from sbkit.export.layout import CodecConfig as Config
from sbkit.nn.codec import ResidualVectors
from sbkit.recipe import load
from sbkit.recipe.check import check
from sbkit.runs import initial
from sbkit.tasks.codec import Codec
from sbkit.tasks.codec.exported import ExportedCodec
from sbkit.tasks.codec.results import CodecFacts, CodecResults, CodecRow, perplexity

RECIPE = Path(__file__).parents[3] / "hparams" / "codec.yaml"
SMALL = {"n_mels": 20, "size": 16, "hidden": 24, "encoder_layers": 1, "slow_layers": 1, "fast_layers": 1, "noise": 0.0}
ADVERSARIAL = {"adversarial_from": 2, "discriminators": {"channels": 4, "sizes": [128, 256]}}
RESIDUAL = f"""
recipe: !include:{RECIPE}
    code_size: 12
    quantiser: !new:sbkit.nn.codec.ResidualVectors {{size: 12, entries: 64}}
"""


def brain(folder, recipe=RECIPE, transcribe=None, **given):
    hparams = load.load(recipe, {**SMALL, "output_folder": str(folder), **given})
    hparams["checkpointer"] = None
    made = Codec(modules=hparams["modules"], hparams=hparams, opt_class=hparams["opt_class"],
                 run_opts={"device": "cpu"}, transcribe=transcribe)
    made.modules.train()
    return made


@pytest.fixture
def batch():
    return noise(16_000, 11_000, texts=["one two", "three"])


def loss(made, batch, stage=Stage.TRAIN):
    return made.compute_objectives(made.compute_forward(batch, stage), batch, stage)


@pytest.mark.parametrize("given", [{}, {"adversarial_from": 1, "discriminators": ADVERSARIAL["discriminators"]}],
                         ids=["plain", "adversarial"])
def test_the_loss_is_a_mean_over_code_frames_and_no_utterance_changes_anothers(tmp_path, batch, given):
    made = brain(tmp_path, **given)
    made.optimizer_step = 1
    together, alone = loss(made, batch), [loss(made, noise(samples)) for samples in (16_000, 11_000)]
    assert together.count == 50 + 35
    torch.testing.assert_close(together.total, alone[0].total + alone[1].total, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("given", [{"noise": 0.5}, {**ADVERSARIAL, "adversarial_from": 1}],
                         ids=["noise", "adversarial"])
def test_a_training_step_never_waits_for_the_device(tmp_path, batch, given):
    made = brain(tmp_path, **given)
    made.optimizer_step = 1
    with HostSyncs() as syncs:
        loss(made, batch).total.backward()
    assert not syncs.found, syncs.found


def test_a_placeholder_counts_for_nothing(tmp_path):
    made = brain(tmp_path)
    made.open_stage(Stage.VALID)
    loss(made, dummy_batch(tokens=False), Stage.VALID)
    assert made.rows == []


# ---------------------------------------------------------------- the switches


def test_residual_vectors_add_their_penalty(tmp_path, batch):
    recipe = tmp_path / "residual.yaml"
    recipe.write_text(RESIDUAL)
    off, on = (brain(tmp_path, recipe, **given) for given in ({"quantiser_weight": 0.0}, {}))
    assert isinstance(on.keys.quantiser, ResidualVectors)
    on.modules.load_state_dict(off.modules.state_dict())
    quantised = on.compute_forward(batch, Stage.TRAIN).quantised
    penalty = quantised.penalty[0].sum() + quantised.penalty[1, :35].sum()
    torch.testing.assert_close(loss(on, batch).total - loss(off, batch).total, penalty, rtol=1e-3, atol=1e-3)


def test_discriminators_rest_until_their_step_and_then_train_with_the_codec_in_one_loss(tmp_path, batch):
    made = brain(tmp_path, **ADVERSARIAL)
    against, before = made.keys.discriminators, loss(made, batch)
    assert "noticed" not in before.extras
    made.optimizer_step = 2
    after = loss(made, batch)
    assert {"noticed", "apart", "mistaken"} <= set(after.extras)
    weights = {"noticed": made.keys.adversarial_weight, "apart": made.keys.feature_weight, "mistaken": 1.0}
    added = sum(weight * after.extras[name][0] for name, weight in weights.items())
    torch.testing.assert_close(after.total, before.total + added)
    after.total.backward()
    theirs = {name: each.grad.clone() for name, each in against.named_parameters()}
    codecs = [each.grad for each in made.coder.parameters()]
    assert all(each is not None for each in [*theirs.values(), *codecs])
    against.zero_grad()
    sounds = made.compute_forward(batch, Stage.TRAIN).sound.detach()[:, :16_000]
    real = torch.arange(16_000) < batch.signal_lengths[:, None]
    wrong = against.discriminator_loss(sounds * real, batch.signals, batch.signal_lengths)
    (wrong * torch.tensor([50, 35])).sum().backward()
    for name, each in against.named_parameters():  # from telling apart alone
        torch.testing.assert_close(each.grad, theirs[name], rtol=1e-3, atol=1e-4)


def test_a_step_of_the_adversarial_stage_changes_both_sides(tmp_path, batch):
    made = brain(tmp_path, **{**ADVERSARIAL, "adversarial_from": 1})
    made.on_fit_start()
    made.optimizer_step = 1
    sides = {name: getattr(made.keys, name) for name in ("encoder", "decoder", "head", "discriminators")}
    before = {name: [each.clone() for each in side.parameters()] for name, side in sides.items()}
    for step in range(3):
        made.fit_batch(dataclasses.replace(batch, step=step))
    for name, side in sides.items():
        assert not all(map(torch.equal, before[name], side.parameters())), name


@pytest.mark.parametrize("given", [
    {"adversarial_from": 5, "discriminators": None}, {"discriminators": {"adversarial_from": 3}},
], ids=["no discriminators", "nothing trains them"])
def test_half_of_the_adversarial_switch_is_refused(tmp_path, given):
    hparams = load.load(RECIPE, {**SMALL, "output_folder": str(tmp_path), **given})
    with refused("clash", key="adversarial_from"):
        load.read_keys(hparams, RECIPE)


@pytest.mark.parametrize(("given", "told"), [
    ({"code_size": 6, "compute_features": {"sample_rate": 8000}},
     {"encoder.output_size": "it is 6, but the quantiser takes 8 numbers a frame",
      "compute_features.sample_rate": "recordings are read at 16000"}),
    ({"head": {"hop": 128}}, {"head.hop": "a code frame has 320 samples"}),
    ({"decoder": {"fold": 4}}, {"head.hop": "a code frame has 320 samples"}),
])
def test_parts_that_contradict_each_other_are_errors_where_they_stand(tmp_path, given, told):
    report = check(RECIPE, {**SMALL, "output_folder": str(tmp_path), **given})
    found = [error for error in report.errors if error.code == "shape-mismatch"]
    for key, message in told.items():
        assert [error.key for error in found if message in error.message] == [key]
    assert all(error.where for error in found)


@pytest.mark.slow
def test_the_check_says_how_many_bits_a_second_takes(tmp_path):
    report = check(RECIPE, {**SMALL, "output_folder": str(tmp_path)})
    assert not report.errors and report.sections["shapes"].values["head"]
    assert "50 frames a second, each with one of 1,000 codes and one of 1,000 codes: 997 bit/s" in str(report)


# ---------------------------------------------------------------- validation and test


def test_the_metric_is_the_mel_distance_of_whole_clips_over_frames(tmp_path, batch):
    made = brain(tmp_path)
    made.modules.eval()
    made.open_stage(Stage.VALID)
    loss(made, batch, Stage.VALID)
    assert [(row.id, row.codes.shape) for row in made.rows] == [("a", (50, 2)), ("b", (35, 2))]
    stats = made.stats(made.all_rows())
    apart = [row.mel_distance for row in made.rows]
    assert stats["mel_distance"] == pytest.approx((50 * apart[0] + 35 * apart[1]) / 85)
    assert made.metric.lower_is_better and made.metric.name in stats


def test_a_test_measures_lets_a_recogniser_hear_and_keeps_clips_to_listen_to(tmp_path, batch):
    made = brain(tmp_path, transcribe=lambda signals: [f"one {len(signal)}" for signal in signals])
    made.modules.eval()
    made.open_stage(Stage.TEST)
    made.evaluate_batch(batch, Stage.TEST)
    results = made.results(made.all_rows(), 1.0, {})
    # "one 16000" for "one two", and "one 11000" for "three": three errors in three words
    assert results.stats["WER"] == results.stats["WER_of_recordings"] == pytest.approx(100)
    assert results.stats["coding_real_time_factor"] > 0 and results.stats["bit_rate"] == pytest.approx(996.58, abs=0.01)
    assert [table.title for table in results.tables] == ["How it sounds", "The codebooks", "The worst clips"]
    assert list(results.figures("WER")) == ["of the codec's output"]
    wavs = [sound(tmp_path / f"{name}.wav") for name in "ab"]
    results.write(tmp_path, Manifest(ids=["a", "b"], durations=[1.0, 0.6875], wavs=wavs, texts=batch.texts), "test")
    players = json.loads((tmp_path / "test_results.json").read_text())["players"]
    assert [[each["label"] for each in player["sounds"]] for player in players] == [["recording", "codec"]] * 2
    assert all((tmp_path / player["sounds"][1]["wav"]).stat().st_size > 44 for player in players)
    assert players[0]["title"] == "one two" and "transcript: one 16000" in players[0]["remark"]


def test_only_so_many_clips_are_kept_the_same_ones_on_any_number_of_ranks(tmp_path):
    from sbkit.tasks.generation import SAMPLES, ClipSampler, drop_other_sounds

    rows = [CodecRow(f"u{i}", "", 800, 1.0, np.zeros((3, 2), np.int32)) for i in range(40)]
    noise = 0.1 * np.random.default_rng(0).normal(size=(40, 800)).astype(np.float32)

    def kept(parts):
        found = []
        for part in parts:
            clips = ClipSampler()
            found += [rows[i]._replace(sound=clips.keep(rows[i].id, noise[i])) for i in part]
        return {row.id for row in drop_other_sounds(sorted(found, key=lambda row: row.id)) if row.sound is not None}

    alone = kept([range(40)])
    assert len(alone) == SAMPLES and alone == kept([range(0, 40, 2), range(1, 40, 2)])


@pytest.mark.parametrize(("counts", "expected"), [([5, 5, 5, 5], 4.0), ([7, 0, 0], 1.0), ([0, 0], 1.0)])
def test_perplexity_is_the_number_of_entries_that_are_used_alike(counts, expected):
    assert perplexity(np.array(counts)) == pytest.approx(expected)


def test_without_a_recogniser_there_is_no_word_error_rate():
    rows = [CodecRow("a", "one", 320, 2.0, np.array([[1, 2]], np.int32), seconds=0.01)]
    results = CodecResults.of(rows, 0.5, {}, CodecFacts((5, 5), 232.2, 16_000))
    assert "WER" not in results.stats and dict(results.figures("WER")) == {}
    assert results.facts()["codebooks"][0] == {"entries": 5, "used": 1, "perplexity": 1.0, "entropy_bits": 0.0}


def test_it_needs_no_texts_and_a_recogniser_does():
    from sbkit.tasks.ctc import CTC

    assert not Codec.needs_text() and CTC.needs_text()


def test_a_run_starts_from_the_weights_of_a_bundle(tmp_path):
    made, other = brain(tmp_path / "one"), brain(tmp_path / "two", init_from=str(tmp_path / "bundle"))
    with torch.no_grad():
        for each in made.coder.parameters():
            each.add_(0.01)
    (tmp_path / "bundle").mkdir()
    model = ExportedCodec.of(made.coder)
    config = Config(sample_rate=16_000, codec="0" * 64, books=[1000], stride=320, context=1)
    model.write_beside(tmp_path / "bundle", config)
    (tmp_path / "bundle" / "config.json").write_text(config.to_json())
    initial.load(other)
    found, wanted = other.coder.state_dict(), made.coder.state_dict()
    assert found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)
