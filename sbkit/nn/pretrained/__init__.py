"""Encoders that somebody has trained already, by transformers' layers: waveforms in, states out."""

from sbkit.nn.pretrained.encoder import Encoder, Head, Weights

__all__ = ["Encoder", "Head", "Weights"]
