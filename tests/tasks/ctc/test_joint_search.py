"""A joint search over a recipe's own decoder scores as training does, and finds the best of all sequences."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from conformers import conformer
from refusals import refused
from torch import nn
from torch.nn import functional

from sbkit.decode.joint import JointSearch
from sbkit.tasks.ctc import CTC, Scores
from sbkit.tasks.recognise.acoustic_model import AcousticModel

BOS, EOS, LABELS, SIZE = 1, 2, 6, 16
WEIGHT = 0.35


@pytest.fixture(params=["RelPosMHAXL", "RoPEMHA", "regularMHA"])
def task(request):
    torch.manual_seed(7)
    transformer = conformer(SIZE, LABELS, num_encoder_layers=1, num_decoder_layers=2, attention_type=request.param)
    for parameter in transformer.decoder.parameters():
        parameter.data.mul_(1.5)  # opinions
    brain = object.__new__(CTC)
    brain.acoustic_model = AcousticModel(nn.Identity(), transformer.eval(), nn.Linear(SIZE, LABELS))
    brain.keys = SimpleNamespace(seq_lin=nn.Linear(SIZE, LABELS))
    return brain


@pytest.mark.slow
@torch.no_grad()
def test_the_best_of_all_sequences_by_the_scores_of_training(task):
    feats, frames = torch.randn(3, 4, SIZE), torch.tensor([4, 2, 3])
    model = task.acoustic_model
    encoded, _ = model.encode(feats, frames)
    scores = Scores(3 * model.head(encoded), frames, encoded=encoded)
    log_probs = scores.ctc.log_softmax(-1)
    search = JointSearch(SimpleNamespace(decode=str), beam=130, ctc_weight=WEIGHT, nbest=3)
    found = search.decode(log_probs, frames, task.next_token(scores))
    for row, size in enumerate(frames.tolist()):
        expected = {}
        for length in range(size + 1):
            for tokens in itertools.product(range(3, LABELS), repeat=length):
                target = torch.tensor([tokens], dtype=torch.int64)
                ctc = -functional.ctc_loss(log_probs[row, :size, None], target, torch.tensor([size]),
                                           torch.tensor([length]), reduction="sum")
                # As in training: the whole batch with the whole target at once.
                _, _, decoded = model.encode_and_decode(feats, frames, torch.tensor([[BOS, *tokens]] * 3))
                spoken = task.keys.seq_lin(decoded[row]).log_softmax(-1)
                attention = spoken[range(length + 1), [*tokens, EOS]].sum()
                expected[tokens] = float(WEIGHT * ctc + (1 - WEIGHT) * attention)
        best = sorted(expected.values(), reverse=True)[:3]
        assert [one.score for one in found[row]] == pytest.approx(best, abs=1e-4)
        assert found[row][0].score == pytest.approx(expected[tuple(found[row][0].spans.ids.tolist())], abs=1e-4)


def test_a_recipe_whose_decoder_is_not_trained_is_refused(tmp_path):
    import run_folders

    from sbkit.recipe import load

    path = Path(__file__).parents[3] / "hparams" / "ctc.yaml"
    recipe = load.load(path, {**run_folders.TINY, "output_folder": str(tmp_path)})
    with refused("clash"):
        CTC(recipe["modules"], None, {**recipe, "decoder": JointSearch()}, {"device": "cpu"})
