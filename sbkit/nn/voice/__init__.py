"""Modules of a voice: text to durations, and those to the codes of a codec."""

from sbkit.nn.voice.code_head import CodeHead
from sbkit.nn.voice.durations import Durations
from sbkit.nn.voice.frame_decoder import FrameDecoder
from sbkit.nn.voice.text_encoder import TextEncoder

__all__ = ["CodeHead", "Durations", "FrameDecoder", "TextEncoder"]
