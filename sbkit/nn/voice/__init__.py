"""Modules of a voice: text to durations, and those to the codes of a codec."""

from sbkit.nn.voice.voice import CodeHead, Durations, FrameDecoder, TextEncoder

__all__ = ["CodeHead", "Durations", "FrameDecoder", "TextEncoder"]
