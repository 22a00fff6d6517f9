"""Conformer layers whose norms and biases do something, for tests of kernels."""

import torch
from speechbrain.lobes.models.transformer.Conformer import ConformerEncoder

from sbkit.nn.accelerate import accelerate


def encoder(width=16, heads=2, dropout=0.2, fast=True, **options):
    """Two of SpeechBrain's layers, or the fast ones of the same weights."""
    torch.manual_seed(0)
    module = ConformerEncoder(2, width, 3 * width, heads, dropout=dropout,
                              **{"attention_type": "RoPEMHA", "kernel_size": 7, **options})
    if fast:
        accelerate(module)
    with torch.no_grad():  # gains of 1 and shifts of 0 would hide what they do
        for p in module.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.2)
    return module


def padding(*lengths):
    """True for frames beyond an utterance's end."""
    return torch.arange(max(lengths)) >= torch.tensor(lengths)[:, None]
