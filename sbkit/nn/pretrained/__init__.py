"""Pretrained encoders, built with the layers of transformers, that map waveforms to states."""

from sbkit.nn.pretrained.encoder import Encoder, Head, Weights

__all__ = ["Encoder", "Head", "Weights"]
