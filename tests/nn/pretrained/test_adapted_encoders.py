"""The layers that docs/how-to/finetune.md names for adapters are there in every family, and learn."""

import re
from pathlib import Path

import encoders
import pytest
import torch

from sbkit.nn.adapters import HOULSBY, LORA, Houlsby, LoRA
from sbkit.nn.pretrained import Encoder

PAGE = (Path(__file__).parents[3] / "docs" / "how-to" / "finetune.md").read_text(encoding="utf-8")
FAMILIES = {"wav2vec2-layer": "wav2vec 2.0", "hubert-group": "HuBERT", "wavlm-layer": "WavLM", "whisper": "Whisper",
            "w2v-bert": "w2v-BERT 2.0"}


def targets(kind):
    """What the page's table of targets says of a family."""
    rows = [row for row in PAGE.splitlines() if row.startswith("| ") and "`*." in row.partition(" | ")[2]]
    [row] = [row for row in rows if FAMILIES[kind] in row.partition(" | ")[0]]
    return re.findall(r"`(\*\.\w+)`", row)


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_layers_that_the_page_names_learn(tmp_path, kind):
    encoder = Encoder(str(encoders.make(tmp_path / "encoder", kind)), mask_time_prob=0.0)
    named, layers = targets(kind), len(Houlsby(encoder, "*.layers.*", size=4).layers)
    assert len(named) == 4 and layers == 2
    assert len(LoRA(encoder, named, rank=2).layers) == len(named) * layers
    encoder(torch.randn(2, 8_000), torch.tensor([8_000, 6_000])).square().sum().backward()
    last = {f"{LORA}.2.weight": len(named) * layers, f"{HOULSBY}.3.weight": layers}  # the first to move
    for name, count in last.items():
        found = [value for path, value in encoder.named_parameters() if path.endswith(f".{name}")]
        assert len(found) == count and all(value.grad is not None and value.grad.any() for value in found)
