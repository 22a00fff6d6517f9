"""The flagship's loss and its switches: what each adds, by hand, and that what is off changes nothing."""

import dataclasses
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from batches import noise
from refusals import refused
from speechbrain.core import Stage
from speechbrain.nnet.schedulers import NoamScheduler

from sbkit.decode.joint import JointSearch
from sbkit.decode.spans import Spelling
from sbkit.nn.ctc import consistency, ctc_loss
from sbkit.recipe import load
from sbkit.tasks import feature_statistics
from sbkit.tasks.ctc import CTC

RECIPE = Path(__file__).parents[3] / "hparams" / "ctc.yaml"
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 3, "d_ffn": 16, "cnn_first_channels": 4, "cnn_channels": 4,
         "dropout": 0.0, "CNN": {"dropout": 0.0}, "intermediate_ctc": 0.0}


OF_THE_RECIPE = object()


def brain(tmp_path, schedule=OF_THE_RECIPE, **given):
    hparams = load.load(RECIPE, {**SMALL, "output_folder": str(tmp_path), "spec_augment": None, **given})
    hparams["checkpointer"] = None
    if schedule is not OF_THE_RECIPE:
        hparams["schedule"] = schedule
    feature_statistics.allow_missing(hparams["normalize"])
    made = CTC(modules=hparams["modules"], hparams=hparams, run_opts={"device": "cpu"})
    made.modules.train()
    return made


TOKENS = [3, 4, 4, 5], [6, 7]
AS_NUMBERS = Spelling([f"▁{number}" for number in range(1000)], 0.04)


@pytest.fixture
def batch():
    return noise(16_000, 11_000, tokens=TOKENS, level=1.0)


@pytest.fixture
def hopeless():
    """The batch, with an utterance before it that has two frames for four tokens."""
    return noise(700, 16_000, 11_000, tokens=[[6, 3, 3, 8], *TOKENS], level=1.0)


def loss(made, batch, stage=Stage.TRAIN):
    scores = made.compute_forward(batch, stage)
    return scores, made.compute_objectives(scores, batch, stage)


def plain(scores, frames, batch):
    return ctc_loss(scores, batch.tokens, frames, batch.token_lengths).total


def test_by_itself_it_is_ctc(tmp_path, batch):
    scores, found = loss(brain(tmp_path), batch)
    assert scores.intermediate == [] and scores.attention is None
    torch.testing.assert_close(found.total, plain(scores.ctc, scores.frames, batch))
    assert found.count == 6


def test_intermediate_ctc_takes_its_share(tmp_path, batch):
    made = brain(tmp_path, intermediate_ctc=0.3)
    made.keys.intermediate_layers = [1, 2]
    scores, found = loss(made, batch)
    last, first, second = (plain(each, scores.frames, batch) for each in (scores.ctc, *scores.intermediate))
    torch.testing.assert_close(found.total, 0.7 * last + 0.3 * (first + second) / 2)
    found.total.backward()
    assert all(p.grad is not None for p in made.keys.ctc_lin.parameters())
    made.keys.intermediate_layers = None
    scores, _ = loss(made, batch)
    torch.testing.assert_close(plain(scores.intermediate[0], scores.frames, batch), first)  # the middle of three


def test_an_encoder_of_the_users_own_is_left_alone(tmp_path, batch):
    made = brain(tmp_path, intermediate_ctc=0.3)
    made.acoustic_model.encoder = torch.nn.Sequential(torch.nn.Linear(80, 16))
    assert loss(made, batch)[0].intermediate == []


def test_an_encoder_of_one_layer_has_nothing_between(tmp_path, batch):
    scores, _ = loss(brain(tmp_path, intermediate_ctc=0.3, num_encoder_layers=1), batch)
    assert scores.intermediate == []


def test_two_views_that_are_equal_are_ctc_twice(tmp_path, batch):
    made = brain(tmp_path, consistency=0.2)
    scores, found = loss(made, batch)  # no dropout, no augmentation: nothing to disagree about
    assert len(scores.ctc) == 4
    torch.testing.assert_close(found.total, 2 * plain(scores.ctc[:2], scores.frames[:2], batch))
    assert found.count == 12, "so that the mean is as without"
    once = loss(brain(tmp_path), batch)[1]
    torch.testing.assert_close(found.total / found.count, once.total / once.count, rtol=1e-4, atol=1e-4)


def test_views_that_differ_are_drawn_together_more_and_more(tmp_path, batch):
    made = brain(tmp_path, consistency=0.2, dropout=0.5)
    made.keys.schedule.total_steps = 100  # 10 steps of warming up
    for step, share in ((0, 0.1), (4, 0.5), (50, 1.0)):
        made.optimizer_step = step
        made.write_numbers(step + 1)
        scores, found = loss(made, batch)
        apart = consistency(scores.ctc.log_softmax(-1), scores.frames)
        assert apart > 0
        expected = plain(scores.ctc, scores.frames, batch.repeated(2)) + 0.2 * share * apart
        torch.testing.assert_close(found.total, expected)


@pytest.mark.parametrize("schedule", [None, NoamScheduler(0.1, 3)], ids=["none", "SpeechBrain's"])
def test_views_are_drawn_together_more_and_more_under_any_schedule(tmp_path, batch, schedule):
    made = brain(tmp_path, schedule, consistency=0.2, dropout=0.5)
    made.keys.tokenizer = SimpleNamespace(entropy=lambda texts: 3.0)
    made.open_run(["a b"], 100)  # 10 steps of warming up
    for number, share in ((1, 0.1), (5, 0.5), (51, 1.0)):
        made.write_numbers(number)
        scores, found = loss(made, batch)
        apart = consistency(scores.ctc.log_softmax(-1), scores.frames)
        expected = plain(scores.ctc, scores.frames, batch.repeated(2)) + 0.2 * share * apart
        torch.testing.assert_close(found.total, expected)


def test_a_warm_up_of_the_consistency_is_refused_in_a_run_of_unknown_length(tmp_path):
    made = brain(tmp_path, None, consistency=0.2)
    with refused("unknown-steps"):
        made.fit([1], [])


@pytest.mark.parametrize("weight", [0.0, -0.5, 1.5, float("nan")])
def test_a_weight_that_leaves_ctc_untrained_is_refused(tmp_path, weight):
    with refused("bad-value", key="ctc_weight"):
        brain(tmp_path, ctc_weight=weight)


@pytest.mark.parametrize("given", [{}, {"ctc_weight": 0.3}, {"intermediate_ctc": 0.3}, {"consistency": 0.2},
                                   {"ctc_weight": 0.3, "intermediate_ctc": 0.3, "consistency": 0.2}], ids=str)
def test_an_utterance_too_short_for_its_tokens_counts_for_nothing(tmp_path, batch, hopeless, given):
    made = brain(tmp_path, **given)
    _, expected = loss(made, batch)
    _, found = loss(made, hopeless)
    assert found.count == expected.count
    torch.testing.assert_close(found.total, expected.total, rtol=1e-4, atol=1e-3)


def test_views_that_differ_cost_nothing_where_the_utterance_is_too_short(tmp_path, batch, hopeless):
    made = brain(tmp_path, consistency=0.2, dropout=0.5)
    scores, found = loss(made, hopeless)
    log_probs, rows = scores.ctc.log_softmax(-1), [1, 2, 4, 5]
    short = consistency(log_probs[[0, 3]], scores.frames[[0, 3]])
    assert short > 0
    apart = consistency(log_probs[rows], scores.frames[rows])
    made.keys.schedule.total_steps = 0
    expected = plain(scores.ctc[rows], scores.frames[rows], batch.repeated(2)) + 0.2 * apart
    torch.testing.assert_close(found.total, expected)
    assert found.count == 12


@pytest.mark.parametrize("smoothing", [0.0, 0.1, 0.5])
def test_the_decoders_part_is_the_smoothed_cross_entropy_of_tokens_and_end(tmp_path, batch, smoothing):
    scores, found = loss(brain(tmp_path, ctc_weight=0.3, label_smoothing=smoothing), batch)
    log_probs, spoken = scores.attention.log_softmax(-1), 0.0
    for row, tokens in enumerate([[3, 4, 4, 5, 2], [6, 7, 2]]):
        for place, token in enumerate(tokens):
            here = log_probs[row, place]
            spoken -= (1 - smoothing) * here[token] + smoothing * here.mean()
    expected = 0.3 * plain(scores.ctc, scores.frames, batch) + 0.7 * spoken
    torch.testing.assert_close(found.total, expected)


def test_of_a_stand_in_no_transcript_is_made(tmp_path, batch):
    made = brain(tmp_path)
    made.transcriber.spelling, made.rows = AS_NUMBERS, []
    for stage in (Stage.VALID, Stage.TEST):
        loss(made, dataclasses.replace(batch, weight=0.0), stage)
    assert made.rows == []


@pytest.mark.parametrize("weight", [1.0, 0.3])
def test_validations_loss_is_trainings_and_it_transcribes(tmp_path, batch, hopeless, weight):
    made = brain(tmp_path, ctc_weight=weight)
    made.transcriber.spelling = AS_NUMBERS
    for given in (batch, hopeless):
        made.modules.train()
        scores, expected = loss(made, given)
        made.modules.eval()
        made.keys.intermediate_ctc = made.keys.consistency = 0.3  # for training alone
        for stage in (Stage.VALID, Stage.TEST):
            made.rows = []
            with torch.no_grad():
                scores, found = loss(made, given, stage)
            assert (found.count == expected.count) and not scores.intermediate and scores.encoded is None
            torch.testing.assert_close(found.total, expected.total, rtol=1e-5, atol=1e-4)
            best = [row[:n] for row, n in zip(scores.ctc.argmax(-1), scores.frames, strict=True)]
            paths = [[int(token) for token in row.unique_consecutive() if token] for row in best]
            assert [(row.id, row.hypothesis) for row in made.rows] == [
                (name, " ".join(map(str, path))) for name, path in zip(given.ids, paths, strict=True)]
        made.keys.intermediate_ctc = made.keys.consistency = 0.0


def test_a_joint_search_hears_the_test_with_the_decoder(tmp_path, batch):
    made = brain(tmp_path, ctc_weight=0.3)
    made.transcriber.spelling, made.keys.tokenizer, made.rows = AS_NUMBERS, SimpleNamespace(), []
    made.transcriber.search = JointSearch(beam=4)
    made.modules.eval()
    with torch.no_grad():
        _, expected = loss(made, batch, Stage.VALID)
        scores, found = loss(made, batch, Stage.TEST)
        straight = made.transcriber.search.decode(scores.ctc.log_softmax(-1), scores.frames, made.next_token(scores))
        one, two = (made.next_token(scores)(torch.tensor(tokens), torch.arange(2))
                    for tokens in ([[1], [1]], [[1, 3], [1, 6]]))
    torch.testing.assert_close(found.total, expected.total)
    torch.testing.assert_close(torch.stack([one, two], 1), scores.attention[:, :2].log_softmax(-1))
    assert [row.id for row in made.rows] == ["a", "b", "a", "b"]
    assert [row.hypothesis for row in made.rows[2:]] == [several[0].text for several in straight]
    assert [bool(row.nbest) for row in made.rows] == [False, False, True, True]


@pytest.mark.parametrize("given", [{}, {"ctc_weight": 0.3}, {"consistency": 0.2}, {"intermediate_ctc": 0.3}])
def test_a_step_of_silence_alone_has_a_loss_and_mixed_ones_keep_the_loss_per_token(tmp_path, batch, given):
    made = brain(tmp_path, **given)
    torch.manual_seed(0)
    silence = noise(8_000, 12_000, tokens=[[], []], level=1.0)
    _, alone = loss(made, silence)
    views = made.views
    assert alone.count == 2 * views and torch.isfinite(alone.mean) and alone.total > 0
    assert alone.extras["ctc"] == (0, 0)
    alone.total.backward()
    assert all(each.grad.isfinite().all() for each in made.modules.parameters() if each.grad is not None)
    both = noise(16_000, 11_000, 8_000, tokens=[*TOKENS, []], level=1.0)
    made.modules.eval()
    _, spoken = loss(made, batch)
    _, mixed = loss(made, both)
    assert mixed.count == 7 * views and mixed.extras["ctc"][1] == spoken.extras["ctc"][1] == 6 * views
    torch.testing.assert_close(mixed.extras["ctc"][0], spoken.extras["ctc"][0], rtol=1e-3, atol=1e-3)
