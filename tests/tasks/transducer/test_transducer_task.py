"""A transducer's task: its loss, what it refuses, and that an utterance doesn't depend on its batch."""

import copy

import pytest
import torch
from batches import noise
from refusals import refused
from run_folders import corpus
from speechbrain.core import Stage
from streaming_runs import RECIPE, SMALL, brain, prepared

from sbkit.decode.beam import BeamSearch
from sbkit.decode.transducer_beam import TransducerBeam
from sbkit.nn.ctc import ctc_loss
from sbkit.nn.transducer import transducer_loss
from sbkit.recipe.check import check

pytestmark = pytest.mark.slow

TOKENS = [[3, 4, 5], [4]]
TRANSDUCER = RECIPE.with_name("transducer.yaml")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return corpus(tmp_path_factory.mktemp("data") / "data", train=6, dev=2, test=2)


@pytest.fixture(scope="module")
def made(data, tmp_path_factory):
    torch.manual_seed(0)
    found = brain(prepared(tmp_path_factory.mktemp("run"), data, TRANSDUCER, joint_size=12))
    found.modules.eval()
    return found


def test_the_loss_is_both_by_their_weight_and_counts_tokens(made):
    given = noise(32_000, 20_000, tokens=TOKENS)
    scores = made.compute_forward(given, Stage.TRAIN)
    assert scores.joined.shape[2:] == (4, made.keys.output_neurons)
    loss = made.compute_objectives(scores, given, Stage.TRAIN)
    whole = transducer_loss(scores.joined, given.tokens, scores.frames, given.token_lengths).sum()
    ctc = ctc_loss(scores.ctc, given.tokens, scores.frames, given.token_lengths).total
    torch.testing.assert_close(loss.total, 0.7 * whole + 0.3 * ctc)
    assert int(loss.count) == 4 and loss.extras["ctc"][0] is not None


@pytest.mark.parametrize("tokens, count", [([[], []], 2), ([[3, 4], []], 3)])
def test_a_row_without_words_has_a_loss_and_counts_as_one_token(made, tokens, count):
    given = noise(32_000, 20_000, tokens=tokens)
    loss = made.compute_objectives(made.compute_forward(given, Stage.TRAIN), given, Stage.TRAIN)
    assert int(loss.count) == count and torch.isfinite(loss.mean) and loss.mean > 0
    assert int(loss.extras["ctc"][1]) == sum(map(len, tokens))


def test_an_utterance_is_the_same_alone_and_in_a_batch(made):
    together, alone = noise(32_000, 20_000, tokens=TOKENS), noise(20_000, tokens=TOKENS[1:])
    with torch.no_grad():
        both, one = (made.compute_forward(each, Stage.VALID) for each in (together, alone))
    frames = int(one.frames[0])
    torch.testing.assert_close(both.joined[1, :frames, :2], one.joined[0, :frames], atol=1e-5, rtol=1e-4)


def test_a_token_that_is_in_no_vocabulary_is_named(made):
    given = noise(16_000, tokens=[[3, made.keys.output_neurons]])
    with refused("index-out-of-range"):
        made.compute_forward(given, Stage.TRAIN)


@pytest.mark.parametrize("keys, told", [
    ({"ctc_weight": 0.0}, "it is 0, but ctc_lin is set"), ({"ctc_weight": 0.0, "ctc_lin": None}, None),
    ({"ctc_lin": None}, "it is 0.3, but ctc_lin is missing"),
    ({"ctc_weight": 1.0}, "it is 1, so nothing trains the transducer"),
    ({"decoder": BeamSearch()}, "it is a BeamSearch, which can't search the outputs of a transducer"),
    ({"decoder": TransducerBeam()}, None)])
def test_what_does_not_go_together_is_told(made, keys, told):
    changed = copy.copy(made.keys)
    vars(changed).update(keys)
    assert [told in clash.message for clash in changed.clashes()] == [True] * (told is not None)


@pytest.mark.parametrize("keys, told", [
    ({"vocabulary": 20, "blank": 3}, ["it is 20, but output_neurons is", "it is 3, but blank_index is 0"]),
    ({"context": 17}, ["context is 17"]), ({"size": 0}, ["size is 0"])])
def test_the_check_compares_the_head_with_the_recipe(data, tmp_path, keys, told):
    report = check(TRANSDUCER, {"output_folder": str(tmp_path / "run"), "data_folder": str(data), **SMALL,
                                "transducer": keys})
    assert all(any(each in str(error) for error in report.errors) for each in told), report.errors


@pytest.mark.usefixtures("without_cost")
def test_without_ctc_the_check_sends_a_batch_through(data, tmp_path):
    report = check(TRANSDUCER, {"output_folder": str(tmp_path / "run"), "data_folder": str(data), **SMALL,
                                "ctc_weight": 0, "ctc_lin": None})
    assert not report.errors and report.sections["shapes"].values["Transformer"] == [2, 75, 16]
