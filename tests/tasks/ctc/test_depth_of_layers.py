"""What ``layer_decay`` counts: the layers of the encoder's transformer, however few they are."""

from __future__ import annotations

from pathlib import Path

import encoders
import pytest

from sbkit.recipe import load
from sbkit.recipe.trace import build_brain

pytestmark = pytest.mark.slow

HPARAMS = Path(__file__).parents[3] / "hparams"


def factors(recipe, **keys):
    hparams = load.load(HPARAMS / recipe, {"layer_decay": 0.5, **keys})
    return hparams, build_brain(hparams["brain"], hparams, accelerate=False).rate_factors()


@pytest.mark.parametrize("kind, frozen", [("wav2vec2-layer", True), *(
    # HuBERT and MMS have the layers of wav2vec 2.0.
    pytest.param(kind, False, marks=[pytest.mark.long] * kind.startswith(("hubert", "mms")))
    for kind in encoders.KINDS)])
def test_the_convolutions_in_front_of_a_pretrained_encoder_lie_below_its_layers(tmp_path, kind, frozen):
    """There are three of them in most families, and two layers here, which have fewer parameters."""
    wide = {"conv_dim": (96,) * 3} if kind not in ("whisper", "w2v-bert") else {}
    hparams, found = factors("finetune.yaml", encoder_source=str(encoders.make(tmp_path / "source", kind, **wide)),
                             output_folder=str(tmp_path / "run"), freeze_front=frozen, mask_time_prob=0.1)
    network = hparams["encoder"].network
    depths = {id(p): depth for depth, layer in ((1.0, network.stack[1]), (0.5, network.stack[0]))
              for p in layer.parameters()}
    above = {"encoder.layer_norm.weight", "encoder.layer_norm.bias", "layer_norm.weight", "layer_norm.bias"}
    over = above if getattr(network, "norm_first", kind == "whisper") else {"out_norm.weight"}
    for name, parameter in network.named_parameters():
        if name != "embed_positions.weight":  # a table, used where the convolutions end
            expected = depths.get(id(parameter), 1.0 if name in over else 0.25)
            assert found.get(f"model.0.network.{name}", 1.0) == expected, name
    assert found["model.1.weight"] == pytest.approx(0.003 / 0.00005), "the head's own"


def test_a_decoder_of_more_parameters_than_the_encoder_is_not_what_counts(tmp_path):
    hparams, found = factors("ctc.yaml", output_folder=str(tmp_path), data_folder=str(tmp_path), ctc_weight=0.3,
                             d_model=16, nhead=2, num_encoder_layers=2, num_decoder_layers=3, d_ffn=16,
                             cnn_first_channels=4, cnn_channels=4)
    encoder, decoder = (list(part.layers) for part in (hparams["Transformer"].encoder, hparams["Transformer"].decoder))
    assert len(encoder) == 2 and len(decoder) == 3
    prefix = next(name for name in found if name.endswith("encoder.layers.0.norm1.norm.weight")).partition("encoder")[0]
    assert found[f"{prefix}encoder.layers.0.norm1.norm.weight"] == 0.5
    assert not [name for name in found if name.startswith((f"{prefix}encoder.layers.1", f"{prefix}decoder"))]
    assert {value for name, value in found.items() if name.startswith("model.0.")} == {0.25}
