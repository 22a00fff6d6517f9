"""A run that learnt in chunks and its bundle, which several files look at: made once, as its export takes long."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import onnx
import pytest
from made_once import made_once
from packaging.version import Version
from run_folders import corpus
from streaming_runs import trained

from sbkit.cli import main
from sbkit.export import graph, layout
from sbkit.system.environment import version_of
from sbkit.tasks.recognise import exported as recogniser
from sbkit.tasks.recognise import sherpa_stream
from sbkit.tasks.recognise.streaming_graph import StreamingGraph


class Exported(NamedTuple):
    """Nobody changes any of it: other files look at it too."""

    data: Path
    run: Path
    bundle: Path


def exported(factory: pytest.TempPathFactory) -> Exported:
    """Return the run and its bundle in every format."""
    home = made_once(factory, "streaming-bundle", _make)
    return Exported(home / "data", home / "run", home / "bundle")


def exported_for_sherpa(factory: pytest.TempPathFactory) -> Exported:
    """The same run, and its bundle with sherpa-onnx's model."""
    shared = exported(factory)

    def export(home: Path) -> None:
        with pytest.MonkeyPatch.context() as patch:
            put_for_traces(shared.bundle, patch)
            assert main(["export", str(shared.run), "--to", str(home / "bundle"), "--clips", "3", "--formats", "onnx",
                         "--target", "sherpa"]) == 0

    return shared._replace(bundle=made_once(factory, "streaming-bundle-sherpa", export) / "bundle")


def sherpa_hears_streams() -> bool:
    """Whether sherpa-onnx is there, in a version that computes the features of streaming models."""
    found = version_of("sherpa-onnx")
    return found is not None and Version(found) >= Version(sherpa_stream.VERSION)


def put_for_traces(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundle's run is not traced and turned into ONNX again: the bundle has what comes of it."""
    to_onnx = graph.to_onnx
    monkeypatch.setattr(recogniser, "trace", lambda _: bundle / layout.MODELS["onnx"])
    monkeypatch.setattr(StreamingGraph, "trace", lambda _: bundle / layout.STREAMS["onnx"])
    monkeypatch.setattr(graph, "min_samples", lambda _: layout.read(bundle).min_samples)
    monkeypatch.setattr(graph, "to_onnx", lambda program, *names: (
        onnx.load(program) if isinstance(program, Path) else to_onnx(program, *names)))


def _make(home: Path) -> None:
    """Of one layer: that a second follows, test_sherpa_stream.py shows of such graphs."""
    (home / "run").mkdir()
    run = trained(home / "run", corpus(home / "data", train=6, dev=2, test=3), num_encoder_layers=1,
                  chunks={"sizes": [8, 16]})
    assert main(["export", str(run), "--to", str(home / "bundle"), "--clips", "3"]) == 0
