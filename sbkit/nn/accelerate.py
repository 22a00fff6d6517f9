"""Replaces SpeechBrain's layers with faster equivalents, anywhere in a model."""

from __future__ import annotations

import logging
from collections import Counter

from speechbrain.lobes import features as lobes
from speechbrain.lobes.models import convolution
from speechbrain.lobes.models.transformer import Conformer
from speechbrain.nnet import CNN, attention
from speechbrain.processing import features
from torch import nn

from sbkit.nn.fast import attention as fast_attention
from sbkit.nn.fast import conformer as fast_conformer
from sbkit.nn.fast import dropout as fast_dropout
from sbkit.nn.fast import front_end
from sbkit.nn.native import library

logger = logging.getLogger(__name__)

FASTER: dict[type, type] = {
    nn.Dropout: fast_dropout.Dropout,
    CNN.Conv2d: front_end.Conv2d,
    convolution.ConvBlock: front_end.ConvBlock,
    Conformer.ConformerEncoderLayer: fast_conformer.ConformerEncoderLayer,
    Conformer.ConvolutionModule: fast_conformer.ConvolutionModule,
    attention.PositionalwiseFeedForward: fast_conformer.PositionalwiseFeedForward,
    attention.RelPosMHAXL: fast_attention.RelPosMHAXL,
    attention.RoPEMHA: fast_attention.RoPEMHA,
    attention.MultiheadAttention: fast_attention.MultiheadAttention,
    lobes.Fbank: front_end.Fbank,
    features.STFT: front_end.STFT,
    features.Filterbank: front_end.Filterbank,
    features.InputNormalization: front_end.InputNormalization,
}


def accelerate(module: nn.Module) -> Counter[str]:
    """Swap the class of each layer that has a faster equivalent; parameters and checkpoint keys don't change.

    A user's subclass of a layer is not swapped. Returns how many layers of each class were swapped. :func:`restore`
    undoes it.
    """
    return swap(module, FASTER)


def restore(module: nn.Module) -> Counter[str]:
    """Undo :func:`accelerate`; returns how many layers of each class were swapped back."""
    return swap(module, {fast: slow for slow, fast in FASTER.items()})


def compile_kernels(module: nn.Module) -> None:
    """Compile and load the kernels for training on a CPU if ``module`` has layers that use them."""
    supported = fast_conformer.ConformerEncoderLayer, front_end.ConvBlock
    kinds = Counter(type(layer).__name__ for layer in module.modules() if isinstance(layer, supported))
    if kinds:
        problem = library.load()
        if problem is None:
            logger.info("%d layers of this run train with sbkit's compiled kernels (%s)", kinds.total(),
                        ", ".join(kinds))
        else:
            logger.info("sbkit's compiled kernels can't be used, so steps take about a quarter longer: %s", problem)


def swap(module: nn.Module, table: dict[type, type]) -> Counter[str]:
    """Swap the class of each layer that is in a table; returns how many of each class were swapped."""
    swapped: Counter[str] = Counter()
    for layer in module.modules():
        if type(layer) in table:
            swapped[type(layer).__name__] += 1
            layer.__class__ = table[type(layer)]
    return swapped
