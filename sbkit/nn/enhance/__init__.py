"""Modules of speech enhancement that a recipe names."""

from sbkit.nn.enhance.enhancer import CausalConvolutions, Enhancer
from sbkit.nn.enhance.transform import FourierFrames, LearnedFrames

__all__ = ["CausalConvolutions", "Enhancer", "FourierFrames", "LearnedFrames"]
