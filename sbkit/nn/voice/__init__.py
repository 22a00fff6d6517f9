"""Modules of a voice: text to durations, and those to the codes of a codec."""

from sbkit.nn.voice.durations import Durations
from sbkit.nn.voice.voice import CodeHead, FrameDecoder, TextEncoder

__all__ = ["CodeHead", "Durations", "FrameDecoder", "TextEncoder"]
