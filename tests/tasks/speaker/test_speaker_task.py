"""The task of speakers: its loss, vectors that don't depend on a batch, its trials, its export, and that it learns."""

import json
from pathlib import Path

import numpy as np
import processes
import pytest
import soundfile
import torch
from batches import noise
from host_syncs import HostSyncs
from refusals import refused
from speechbrain.core import Stage
from speechbrain.nnet.losses import AdditiveAngularMargin, LogSoftmaxWrapper
from trained_runs import here, options

import sbkit.infer
from sbkit.data.batch import dummy_batch
from sbkit.data.manifest import Manifest
from sbkit.recipe import load
from sbkit.recipe.check import check
from sbkit.score.verification import all_pairs, rates
from sbkit.tasks.speaker import Verification
from sbkit.tasks.speaker.task import SpeakerRow, VerificationResults, scored

RECIPE = Path(__file__).parents[3] / "hparams" / "speaker.yaml"
SMALL = {"channels": 16, "embedding_size": 8, "speakers": ["s0", "s1", "s2"], "n_speakers": 3}
XVECTOR = f"""recipe: !include:{RECIPE}
    embedding_model: !new:sbkit.nn.speaker.XVector
        {{input_size: !ref <n_mels>, output_size: !ref <embedding_size>, channels: !ref <channels>}}
"""


def brain(folder, recipe=RECIPE, **given):
    torch.manual_seed(0)
    hparams = load.load(recipe, {**SMALL, "output_folder": str(folder), **given})
    hparams["checkpointer"] = None
    return Verification(modules=hparams["modules"], hparams=hparams, opt_class=None, run_opts={"device": "cpu"})


@pytest.fixture
def batch():
    return noise(16_000, 9_000, 15_000, columns={"speaker": ["s1", "who", "s2"]},
                 labels={"speaker": torch.tensor([1, -1, 2])})


def test_the_loss_is_speechbrains_over_the_speakers_that_are_known(tmp_path, batch):
    task = brain(tmp_path)
    task.modules.eval()
    outputs = task.compute_forward(batch, Stage.VALID)
    loss = task.compute_objectives(outputs, batch, Stage.TRAIN)
    theirs = LogSoftmaxWrapper(AdditiveAngularMargin(margin=0.2, scale=30))
    expected = theirs(outputs[1][[0, 2]][:, None], torch.tensor([[1], [2]]))
    assert int(loss.count) == 2
    torch.testing.assert_close(loss.mean, expected)
    torch.testing.assert_close(outputs[0].norm(dim=1), torch.ones(3))


@pytest.mark.parametrize("kind", ["ecapa", "xvector"])
def test_a_vector_is_the_same_alone_and_in_a_batch(tmp_path, batch, kind):
    recipe = tmp_path / "xvector.yaml"
    recipe.write_text(XVECTOR)
    task = brain(tmp_path, recipe if kind == "xvector" else RECIPE)
    task.modules.eval()
    with torch.no_grad():
        together = task.compute_forward(batch, Stage.VALID)[0]
        alone = task.compute_forward(noise(9_000), Stage.VALID)[0]
    torch.testing.assert_close(alone[0], together[1], atol=1e-5, rtol=1e-4)


def test_a_training_step_never_waits_for_the_device(tmp_path, batch):
    task = brain(tmp_path)
    task.modules.train()
    with HostSyncs() as syncs:
        task.compute_objectives(task.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN).total.backward()
    assert not syncs.found, syncs.found


def test_a_placeholder_counts_for_nothing(tmp_path, batch):
    task = brain(tmp_path)
    task.modules.eval()
    task.open_stage(Stage.VALID)
    empty = dummy_batch(utterances=2, tokens=False)
    empty.columns, empty.labels = {"speaker": ["", ""]}, {"speaker": torch.zeros(2, dtype=torch.long)}
    for given in (empty, batch):
        with torch.no_grad():
            task.compute_objectives(task.compute_forward(given, Stage.VALID), given, Stage.VALID)
    assert [(row.id, row.speaker) for row in task.rows] == [("a", "s1"), ("b", "who"), ("c", "s2")]


# ---------------------------------------------------------------- trials


def rows(count=12, voices=4, apart=1.0):
    drawn = np.random.default_rng(0)
    centres = drawn.standard_normal((voices, 8))
    vectors = apart * centres[np.arange(count) % voices] + drawn.standard_normal((count, 8))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    return [SpeakerRow(f"u{i:02}", f"s{i % voices}", vector.astype(np.float32)) for i, vector in enumerate(vectors)]


def test_all_pairs_are_scored_by_their_cosine():
    given = rows()
    found = scored(given)
    pairs = [(i, j) for i in range(12) for j in range(i + 1, 12)]
    scores = np.array([given[i].embedding @ given[j].embedding for i, j in pairs])
    same = np.array([i % 4 == j % 4 for i, j in pairs])
    assert found.scores == pytest.approx(scores, abs=1e-6)
    assert found.stats["EER"] == pytest.approx(rates(scores, same).eer)


def test_a_list_of_trials_is_scored_instead(tmp_path):
    path = tmp_path / "trials.txt"
    path.write_text("1 u00.wav u04.wav\n0 u00.wav u01.wav\n0 u02.wav u03.wav\n1 u02.wav gone.wav\n")
    found, given = scored(rows(), str(path)), rows()
    assert found.scores == pytest.approx([given[i].embedding @ given[j].embedding for i, j in ((0, 4), (0, 1), (2, 3))])
    assert found.trials.same.tolist() == [True, False, False]


def test_a_recording_drawn_twice_is_no_trial_with_itself():
    whole, times = scored(rows()), np.array([2, 0, 1, 1, 2, 0, 0, 1, 3, 0, 1, 1])
    chosen = [i for i, count in enumerate(times) for _ in range(count)]
    given = rows()
    pairs = [(i, j) for at, i in enumerate(chosen) for j in chosen[at + 1:] if i != j]
    expected = rates(np.array([given[i].embedding @ given[j].embedding for i, j in pairs], np.float32),
                     np.array([i % 4 == j % 4 for i, j in pairs]))
    assert whole.resampled(times).rates.eer == pytest.approx(expected.eer)


def test_the_interval_of_the_rate_is_around_it(tmp_path):
    given = rows(60, 6)
    sure = brain(tmp_path).estimate(given)
    assert sure.value == scored(given).stats["EER"] and sure.interval[0] < sure.value < sure.interval[1]


def test_the_worst_trials_are_listed_and_to_be_heard(tmp_path):
    given = rows(apart=0.5)
    for row in given:
        soundfile.write(tmp_path / f"{row.id}.wav", np.zeros(800), 16_000)
    listed = ["ID,duration,wav,spk_id,wrd", *(f"{row.id},0.05,{tmp_path / row.id}.wav,{row.speaker}," for row in given)]
    (tmp_path / "test.csv").write_text("\n".join(listed) + "\n")
    found = VerificationResults.of(scored(given), given, {})
    found.write(tmp_path, Manifest.read(tmp_path / "test.csv"))
    assert found.players and all(len(each.sounds) == 2 for each in found.players)
    refused = [each for each in found.tables[1].rows if each[0] == "same speaker, rejected"]
    worst = min(zip(found.scored.scores[found.scored.trials.same], strict=True))[0]
    assert refused[0][1] == f"{worst:.3f}"
    assert json.loads((tmp_path / "results.json").read_text())["players"]
    threshold = f"{found.scored.rates.threshold:.3f}"
    assert f"from a score of {threshold} on" in found.lines()[0] and found.columns()[-1] == ("threshold", threshold)
    assert "EER" in found.headline() and found.columns()[0][1].endswith(" %")


def test_a_list_that_names_nobody_of_the_test_is_refused(tmp_path, caplog):
    task, path = brain(tmp_path), tmp_path / "trials.txt"
    (tmp_path / "test.csv").write_text("ID,duration,wav,spk_id,wrd\nu1,1,u1.wav,a,\nu2,1,u2.wav,b,\n")
    manifest, task.keys.trials = Manifest.read(tmp_path / "test.csv"), str(path)
    path.write_text("1 x y\n")
    with refused("trials-not-in-test"):
        Verification.check_manifest(task.keys, "test", manifest)
    Verification.check_manifest(task.keys, "dev", manifest)
    path.write_text("0 u1.wav u2.wav\n1 u1.wav gone.wav\n")
    Verification.check_manifest(task.keys, "test", manifest)
    assert "lacks a recording of 1 of the 2 trials" in caplog.text


# ---------------------------------------------------------------- the recipes


@pytest.mark.slow
@pytest.mark.usefixtures("without_cost")
def test_the_recipe_with_xvectors_is_checked_before_there_is_a_corpus(tmp_path):
    """recipe/test_shipped.py checks the one that is shipped."""
    recipe = tmp_path / "xvector.yaml"
    recipe.write_text(XVECTOR)
    report = check(recipe, {"channels": 16, "output_folder": str(tmp_path)})
    assert not report.errors and not report.warnings, [str(each) for each in (*report.errors, *report.warnings)]


@pytest.mark.slow
def test_it_learns_voices_and_knows_strangers_and_its_bundle_gives_its_vectors(tmp_path):
    run, bundle = tmp_path / "run", tmp_path / "bundle"
    small = {"corpus.demo_hours": 0.12, "channels": 32, "embedding_model.res2net_scale": 2, "embedding_size": 32,
             "crop_seconds": 1.5, "step_seconds": 24, "min_steps": 90, "lr": 0.005, "number_of_epochs": 2,
             "precision": "fp32", "output_folder": run}
    processes.sbkit("train", RECIPE, *options(**small), "--noprogressbar", "--no-check", cwd=tmp_path, cards=True)
    found = json.loads((run / "test_results.json").read_text())
    # 5 and 10 % are usual, a step of the 21 pairs of one speaker apart; chance is 50 %.
    assert found["stats"]["EER"] <= 15 and len(found["estimate"]["drawn"]) >= 100
    here("export", run, "--to", bundle, "--clips", "4", "--formats", "onnx")
    clips = list(Manifest.read(run / "manifests" / "test.csv"))
    model = sbkit.infer.load(bundle)
    vectors = np.stack([model.run(clip.wav).outputs["embedding"] for clip in clips])
    trials = all_pairs(list(Manifest.read(run / "manifests" / "test.csv").speakers))
    again = rates((vectors @ vectors.T)[trials.first, trials.second], trials.same)
    assert again.eer == pytest.approx(found["stats"]["EER"], abs=0.01)
