"""A codec of speech: modules that encode waveforms at a low bit rate, and decode them."""

from sbkit.nn.codec.coder import CodecDecoder, CodecEncoder, Coder, ConvNeXt
from sbkit.nn.codec.discriminators import Discriminators
from sbkit.nn.codec.fourier import LogMel, WaveHead
from sbkit.nn.codec.quantiser import FiniteScalars, Quantised, Quantiser, ResidualVectors
from sbkit.nn.codec.spectral_loss import MelDistance, SpectralLoss

__all__ = ["CodecDecoder", "CodecEncoder", "Coder", "ConvNeXt", "Discriminators", "FiniteScalars", "LogMel",
           "MelDistance", "Quantised", "Quantiser", "ResidualVectors", "SpectralLoss", "WaveHead"]
