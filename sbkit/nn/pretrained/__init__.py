"""Pretrained encoders from waveforms to states, built with the layers of transformers."""

from sbkit.nn.pretrained.encoder import Encoder, Head, Weights

__all__ = ["Encoder", "Head", "Weights"]
