"""The Python API: load a bundle, give it audio, read the transcript."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import overload

from sbkit.export import layout
from sbkit.infer.device import Placement
from sbkit.infer.engine import AUTO, Engine
from sbkit.infer.graph_model import GraphEngine, GraphModel
from sbkit.infer.pipeline import Options, Pipeline
from sbkit.infer.recordings import Recording, Source
from sbkit.infer.transcript import Transcript


class Model:
    """A loaded recogniser, which any number of threads may call.

    Arguments
    ---------
    engine : runs the model
    options : how recordings are cut into chunks and batched
    """

    def __init__(self, engine: Engine, options: Options | None = None):
        self.engine = engine
        self._pipeline = Pipeline(engine, options)

    @property
    def running(self) -> Placement:
        """The requested device, and the one the model runs on."""
        return self.engine.running

    @overload
    def transcribe(self, audio: list[Source]) -> list[Transcript]: ...
    @overload
    def transcribe(self, audio: Source) -> Transcript: ...
    def transcribe(self, audio: Source | list[Source]) -> Transcript | list[Transcript]:
        """Transcribe recordings of any format and length.

        Arguments
        ---------
        audio : a path, the bytes of a file, a binary file, or float samples [S] at the model's rate; or a list of
            these, whose transcripts come in the same order

        Raises ``sbkit.data.audio.AudioError`` for the first recording that can't be read.
        """
        if not isinstance(audio, list):
            return self.transcribe([audio])[0]
        found: dict[int, Transcript] = {}
        for done in self._pipeline.run([_recording(each) for each in audio]):
            if done.error is not None:
                raise done.error
            assert done.transcript is not None, "a recording has a transcript or an error"
            found[done.index] = done.transcript
        return [found[i] for i in range(len(audio))]

    def close(self) -> None:
        """Release the model."""
        self.engine.close()

    def __enter__(self) -> Model:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _recording(source: Source) -> Recording:
    if isinstance(source, Recording):
        return source
    name = Path(source).stem if isinstance(source, (str, os.PathLike)) else ""
    return Recording(source, name)


def load(bundle: str | Path, device: str = AUTO, model: str = AUTO, threads: int | None = None,
         compile: str | None = None, options: Options | None = None, buckets: Sequence[tuple[int, float]] | None = None
         ) -> Model | GraphModel:
    """Load a bundle: a recogniser has ``transcribe``, a model of another task ``run``.

    >>> model = load("bundle")                            # doctest: +SKIP
    >>> print(model.transcribe("clip.mp3").text)          # doctest: +SKIP

    Arguments
    ---------
    bundle : the folder that ``sbkit export`` made
    device : ``auto``, ``cpu``, ``cuda`` or ``cuda:N``; an unavailable one is an error, never a silent fallback
    model : ``onnx``, ``int8`` or ``torch``; ``auto`` takes the first that the bundle has
    threads : CPU threads of one run
    compile : a mode of ``torch.compile``, for ``model="torch"``
    options : how recordings are cut into chunks and batched
    buckets : shapes (utterances, seconds) that the model is compiled for
    """
    if isinstance(layout.read(bundle), layout.Graph):
        return GraphModel(GraphEngine(bundle, model, device, threads, compile, buckets))
    return Model(Engine(bundle, model, device, threads, compile, buckets), options)
