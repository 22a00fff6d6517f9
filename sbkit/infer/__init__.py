"""Inference with a bundle, without torch or speechbrain: ``sbkit.infer.load("bundle").transcribe("clip.mp3").text``."""

from __future__ import annotations

from sbkit.decode.spans import Word
from sbkit.decode.streaming import StreamResult
from sbkit.infer.bundle_engine import LoadedBundle
from sbkit.infer.codec import CodecModel
from sbkit.infer.enhancer import EnhancerModel
from sbkit.infer.graph_model import GraphModel, Output
from sbkit.infer.kinds import add_kind, load
from sbkit.infer.model import Model
from sbkit.infer.pipeline import Options
from sbkit.infer.recordings import Recording
from sbkit.infer.stream import Stream
from sbkit.infer.stream_engine import StreamEngine
from sbkit.infer.symbols import UnknownCharacters, UnspeakableText
from sbkit.infer.transcript import Segment, Transcript
from sbkit.infer.voice import Speech, SpokenWord, Voice

__all__ = ["CodecModel", "EnhancerModel", "GraphModel", "LoadedBundle", "Model", "Options", "Output", "Recording",
           "Segment", "Speech", "SpokenWord", "Stream", "StreamEngine", "StreamResult", "Transcript",
           "UnknownCharacters", "UnspeakableText", "Voice", "Word", "add_kind", "load"]
