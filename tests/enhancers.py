"""A bundle of an enhancer whose weights are drawn, as an export writes it."""

from __future__ import annotations

from pathlib import Path

import torch

from sbkit.export import graph, layout
from sbkit.export.clips import ComparisonClips
from sbkit.nn.enhance import CausalConvolutions, Enhancer, FourierFrames
from sbkit.tasks.enhance.exported import ExportedEnhancer

RATE, HOP = 16_000, 16


def enhancer() -> Enhancer:
    torch.manual_seed(0)
    transform = FourierFrames(3 * HOP, HOP)
    return Enhancer(transform, CausalConvolutions(transform, size=6, hidden=8, layers=3, cycle=2), lookahead=1).eval()


def make(folder: Path) -> Path:
    """Write the bundle, in ONNX alone."""
    folder.mkdir(parents=True)
    exported = ExportedEnhancer.of(enhancer(), RATE)
    program = exported.trace()
    config = exported.config(program, ComparisonClips([], "none", 0.0))
    config.models = {layout.ONNX: layout.MODELS[layout.ONNX]}
    graph.write_onnx(program, folder / config.models[layout.ONNX], exported.inputs, exported.outputs, {})
    [streams] = exported.companions
    streams.describe(config, {layout.ONNX: layout.STREAMS[layout.ONNX]})
    graph.write_onnx(streams.trace(), folder / config.streams[layout.ONNX], streams.inputs, streams.outputs, {})
    config.files = {path.name: layout.fingerprint(path) for path in folder.iterdir()}
    (folder / layout.CONFIG).write_text(config.to_json())
    return folder
