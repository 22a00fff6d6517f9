"""Inference with a bundle, without torch or speechbrain: ``sbkit.infer.load("bundle").transcribe("clip.mp3").text``."""

from __future__ import annotations

from sbkit.infer.graph_model import GraphModel, Output
from sbkit.infer.model import Model, load
from sbkit.infer.pipeline import Options
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import Segment, Transcript

__all__ = ["GraphModel", "Model", "Options", "Output", "Recording", "Segment", "Transcript", "load"]
