"""ECAPA-TDNN and the x-vector: SpeechBrain's for a recording alone, and the same in a batch and in a graph."""

import pytest
import torch
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN
from speechbrain.lobes.models.Xvector import Xvector

from sbkit.export import graph
from sbkit.nn.speaker import ECAPA, XVector

pytestmark = pytest.mark.slow

FRAMES = torch.tensor([60, 33, 9])


def pair(kind):
    """A model with statistics of its own, and SpeechBrain's with the same weights."""
    torch.manual_seed(0)
    if kind == "ecapa":
        mine = ECAPA(20, 16, 32, attention_channels=8, se_channels=8)
        theirs = ECAPA_TDNN(20, lin_neurons=16, channels=[32] * 4 + [96], attention_channels=8, se_channels=8)
    else:
        mine, theirs = XVector(20, 16, 32), Xvector(in_channels=20, lin_neurons=16, tdnn_channels=[32] * 4 + [96])
    for layer in mine.modules():
        if isinstance(layer, torch.nn.BatchNorm1d):
            layer.running_mean.normal_()
            layer.running_var.uniform_(0.5, 2)
    theirs.load_state_dict(mine.state_dict())
    return mine.eval(), theirs.eval()


@pytest.fixture(params=["ecapa", "xvector"])
def models(request):
    return request.param, *pair(request.param)


@torch.no_grad()
def test_a_vector_is_speechbrains_and_the_same_in_a_batch(models):
    kind, mine, theirs = models
    feats = torch.randn(3, 60, 20)
    together = mine(feats, FRAMES)
    # SpeechBrain adds noise of up to 9e-5 to the means of an x-vector
    near = {"atol": 1e-5, "rtol": 1e-4} if kind == "ecapa" else {"atol": 3e-4, "rtol": 1e-3}
    for row, frames in enumerate(FRAMES.tolist()):
        alone = feats[row:row + 1, :frames]
        torch.testing.assert_close(mine(alone, FRAMES[row:row + 1])[0], together[row], atol=1e-5, rtol=1e-4)
        torch.testing.assert_close(theirs(alone)[0, 0], together[row], **near)


@torch.no_grad()
@pytest.mark.parametrize("frames", [1, 2, 5])
def test_the_shortest_recordings_have_vectors(models, frames):
    _, mine, _ = models
    feats, count = torch.randn(1, frames, 20), torch.tensor([frames])
    found = mine(feats, count)
    assert found.isfinite().all()
    padded = torch.nn.functional.pad(feats, (0, 0, 0, 30))
    torch.testing.assert_close(mine(padded, count), found, atol=1e-5, rtol=1e-4)


def test_all_weights_learn(models):
    _, mine, _ = models
    mine.train()
    mine(torch.randn(3, 60, 20), FRAMES).square().sum().backward()
    assert all(each.grad is not None and each.grad.isfinite().all() for each in mine.parameters())


@pytest.mark.slow
@torch.no_grad()
def test_it_is_traced_for_any_batch_and_length():
    """As is an ECAPA, which tasks/speaker/test_speaker_task.py exports."""
    mine, _ = pair("xvector")
    program = graph.trace_module(mine, (torch.randn(2, 40, 20), torch.tensor([40, 20])),
                                 {"feats": (0, 1), "frames": (0,)}).module()
    feats = torch.randn(3, 60, 20)
    torch.testing.assert_close(program(feats, FRAMES), mine(feats, FRAMES), atol=1e-5, rtol=1e-4)
