"""The flagship's loss and its switches: what each adds, by hand, and that what is off changes nothing."""

from pathlib import Path

import pytest
import torch
from speechbrain.core import Stage

from sbkit.data.batch import Batch
from sbkit.nn.consistency import consistency
from sbkit.nn.ctc import ctc_loss
from sbkit.recipe import load
from sbkit.tasks.ctc import CTC

RECIPE = Path(__file__).parents[2] / "hparams" / "ctc.yaml"
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 3, "d_ffn": 16, "cnn_first_channels": 4, "cnn_channels": 4,
         "dropout": 0.0, "CNN": {"dropout": 0.0}, "intermediate_ctc": 0.0}


def brain(tmp_path, **given):
    hparams = load.load(RECIPE, {**SMALL, "output_folder": str(tmp_path), "spec_augment": None, **given})
    hparams["checkpointer"] = None
    made = CTC(modules=hparams["modules"], hparams=hparams, run_opts={"device": "cpu"})
    made.modules.train()
    return made


@pytest.fixture
def batch():
    generator = torch.Generator().manual_seed(0)
    return Batch(ids=["a", "b"], signals=torch.randn(2, 16_000, generator=generator),
                 signal_lengths=torch.tensor([16_000, 11_000]), tokens=torch.tensor([[3, 4, 4, 5], [6, 7, 0, 0]]),
                 token_lengths=torch.tensor([4, 2]), texts=["", ""], samples=27_000)


def loss(made, batch):
    scores = made.compute_forward(batch, Stage.TRAIN)
    return scores, made.compute_objectives(scores, batch, Stage.TRAIN)


def plain(scores, frames, batch):
    return ctc_loss(scores, batch.tokens, frames, batch.token_lengths).total


def test_by_itself_it_is_ctc(tmp_path, batch):
    scores, found = loss(brain(tmp_path), batch)
    assert scores.intermediate == [] and scores.attention is None
    torch.testing.assert_close(found.total, plain(scores.ctc, scores.frames, batch))
    assert found.count == 6


def test_intermediate_ctc_takes_its_share(tmp_path, batch):
    made = brain(tmp_path, intermediate_ctc=0.3)
    made.hparams.intermediate_layers = [1, 2]
    scores, found = loss(made, batch)
    last, first, second = (plain(each, scores.frames, batch) for each in (scores.ctc, *scores.intermediate))
    torch.testing.assert_close(found.total, 0.7 * last + 0.3 * (first + second) / 2)
    found.total.backward()
    assert all(p.grad is not None for p in made.hparams.ctc_lin.parameters())
    made.hparams.intermediate_layers = None
    scores, _ = loss(made, batch)
    torch.testing.assert_close(plain(scores.intermediate[0], scores.frames, batch), first)  # the middle of three


def test_an_encoder_of_the_users_own_is_left_alone(tmp_path, batch):
    made = brain(tmp_path, intermediate_ctc=0.3)
    made.recognizer.encoder = torch.nn.Sequential(torch.nn.Linear(80, 16))
    assert loss(made, batch)[0].intermediate == []


def test_an_encoder_of_one_layer_has_nothing_between(tmp_path, batch):
    scores, _ = loss(brain(tmp_path, intermediate_ctc=0.3, num_encoder_layers=1), batch)
    assert scores.intermediate == []


def test_intermediate_ctc_is_for_training_alone(tmp_path, batch):
    made = brain(tmp_path, intermediate_ctc=0.3, consistency=0.2)
    made.modules.eval()
    made.rows = []
    scores = made.compute_forward(batch, Stage.VALID)
    assert len(scores.ctc) == 2 and not scores.intermediate


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
    made.hparams.schedule.total_steps = 100  # 10 steps of warming up
    for step, share in ((0, 0.1), (4, 0.5), (50, 1.0)):
        made.optimizer_step = step
        scores, found = loss(made, batch)
        apart = consistency(scores.ctc.log_softmax(-1), scores.frames)
        assert apart > 0
        expected = plain(scores.ctc, scores.frames, batch.repeated(2)) + 0.2 * share * apart
        torch.testing.assert_close(found.total, expected)


def test_all_of_it_with_the_attention_decoder(tmp_path, batch):
    made = brain(tmp_path, consistency=0.2, intermediate_ctc=0.3, ctc_weight=0.3)
    scores, found = loss(made, batch)
    assert scores.attention.shape == (4, 5, 28)
    found.total.backward()
    assert torch.isfinite(found.total) and made.utterance_losses(scores, batch).shape == (2,)
