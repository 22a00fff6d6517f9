"""A small recogniser that runs live, and signals for it."""

from __future__ import annotations

import numpy as np
import torch
from conformers import conformer
from torch import nn

from sbkit.export.layout import Config
from sbkit.nn.accelerate import accelerate
from sbkit.nn.causal import CausalFrontEnd
from sbkit.nn.chunks import Chunks
from sbkit.nn.global_norm import GlobalNorm
from sbkit.nn.kaldi import FilterBank
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.graph import reference
from sbkit.tasks.recognise.streaming_graph import run

BANDS, LABELS = 12, 7
CHUNKS = Chunks(sizes=[2, 4, 8], left_context=[8, 16], validate=4)
#: Samples: less than a frame of the encoder, two windows of the smallest chunk to the sample, and no round numbers.
LENGTHS = (100, 2_680, 5_003, 20_011)


def recogniser(features=None, norm=None, chunks=CHUNKS, frontend=None, fast=True, input_size=12, **changes):
    torch.manual_seed(0)
    frontend, head = frontend or CausalFrontEnd(BANDS, [4, 4]), nn.Linear(16, LABELS)
    encoder = conformer(input_size, LABELS, **changes)
    for part in (frontend, encoder, head):
        part.eval()
        for parameter in part.parameters():
            parameter.data.add_(0.1 * torch.randn(parameter.shape))
        if fast:
            accelerate(part)
    if norm is None:
        norm = GlobalNorm(BANDS, "nowhere")
        norm.set_statistics(torch.linspace(-9, -7, BANDS), torch.linspace(2, 3, BANDS))
    return AcousticModel(features or FilterBank(n_mels=BANDS, snip_edges=False), encoder, head, frontend, norm,
                      n_features=BANDS, chunks=chunks)


def signals():
    drawn = np.random.default_rng(0)
    return [(0.1 * drawn.standard_normal(size)).astype(np.float32) for size in LENGTHS]


def described(made):
    return Config(sample_rate=16_000, hop_samples=160, subsampling=4, vocabulary=LABELS, streaming=made.described())


def eager(made):
    def call(*inputs):
        with torch.no_grad():
            return [each.numpy() for each in made(*map(torch.from_numpy, inputs))]

    return call


def agrees(call, model, config, atol=1e-4):
    """Assert that a streaming graph gives what the recogniser does for every chunk, alone and in a batch."""
    for size in model.chunks.sizes:
        whole = reference(model, chunks=model.chunks.config(size))
        for signal, together in zip(signals(), run(call, config, size, signals()), strict=True):
            alone, = run(call, config, size, [signal])
            for found in (alone, together):
                np.testing.assert_allclose(found, whole(signal), atol=atol)
