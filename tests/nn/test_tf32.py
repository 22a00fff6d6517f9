"""fp32 is TF32 on a GPU, as in SpeechBrain, unless a recipe says otherwise, and never for features."""

import bundles
import pytest
import torch
from toys import brain

from sbkit.infer.engine import Engine
from sbkit.nn.kaldi import full_precision
from sbkit.nn.tf32 import allow_tf32
from sbkit.tasks.recognise.acoustic_model import AcousticModel


def allowed():
    return torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32


@pytest.fixture(autouse=True)
def as_speechbrain_has_it():
    before = allowed()
    allow_tf32(True)
    yield
    torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32 = before


@pytest.mark.parametrize("asked, found", [({}, True), ({"tf32": False}, False), ({"tf32": True}, True)])
def test_a_training_rounds_unless_its_recipe_says_otherwise(asked, found):
    brain(hparams=asked)
    assert allowed() == (found, found)


def test_a_bundles_program_is_exact(tmp_path):
    with Engine(bundles.make(tmp_path / "bundle", torch_too=True), model="torch", device="cpu"):
        assert allowed() == (False, False)


class Features(torch.nn.Module):
    def forward(self, signals):
        self.allowed = allowed()
        return signals.unfold(1, 400, 160)


def test_a_spectrum_is_exact_within_autocast_too():
    for enabled in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled), full_precision(torch.ones(1)):
            assert allowed() == (False, False) and not torch.is_autocast_enabled("cpu")
        assert allowed() == (True, True)


def test_features_are_exact_where_the_rest_rounds():
    features = Features()
    acoustic_model = AcousticModel(features, torch.nn.Identity(), torch.nn.Identity(), n_features=400)
    acoustic_model.features(torch.ones(2, 16000), torch.tensor([16000, 8000]))
    assert features.allowed == (False, False) and allowed() == (True, True)
