"""Runs a model that gives tensors on recordings; writes its outputs to the screen or to a folder."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.errors import SbkitError
from sbkit.infer.formats import ModelRequest
from sbkit.infer.graph_model import GraphEngine, GraphModel, Output
from sbkit.infer.inputs import below, collect, refuse_meeting
from sbkit.infer.recordings import Recording
from sbkit.infer.transcription import SOME_FAILED
from sbkit.system.console import atomic_write, progress, time_span

#: Numbers of a recording that the screen takes; more belong into files.
_SHOWN = 10_000


@dataclass(frozen=True)
class RunRequest(ModelRequest):
    """What to run on what.

    bundle : the folder that ``sbkit export`` made
    files : files, folders, manifests, ``-``
    output : the folder for files; None for lines of JSON on the screen
    formats : any of ``npz`` (all outputs), ``json`` and ``wav`` (the first output, if it is sound)
    schemes : URL schemes allowed in manifests
    """

    bundle: Path
    files: Sequence[str]
    output: Path | None = None
    formats: Sequence[str] = ("npz",)
    schemes: Sequence[str] = ()


def run(request: RunRequest) -> int:
    recordings = collect(request.files, None, request.schemes)
    if request.output is None and "wav" in request.formats:
        raise SbkitError("wav can't be printed", hint="add --output FOLDER")
    if request.output is not None:
        refuse_meeting(request.output, recordings)
    errors, audio, began = 0, 0.0, time.perf_counter()
    with GraphModel(GraphEngine(request.bundle, request.model, request.device, request.threads)) as model:
        print(model.running, file=sys.stderr)
        config = model.engine.config
        for recording in progress(recordings, what="running", show=len(recordings) > 1):
            try:
                seconds = recording.seconds(config.sample_rate)
                audio += seconds
                made = model.run(recording)
            except AudioError as error:
                errors += 1
                print(f"left out: {error}", file=sys.stderr)
                continue
            assert isinstance(made, Output), "of one recording"
            if request.output is None:
                if made.size > _SHOWN:
                    raise SbkitError(f"{recording.name} has {made.size:,} output values, too many to print",
                                     hint="write files: --output FOLDER")
                sys.stdout.write(_line(recording, made))
            else:
                _write(request.output, recording, made, request.formats, config.sample_rate, seconds)
    where = f" -> {request.output}" if request.output is not None else ""
    print(f"{len(recordings) - errors} of {len(recordings)} recordings, {audio:.1f} s of audio in "
          f"{time_span(time.perf_counter() - began)}{where}", file=sys.stderr)
    return SOME_FAILED if errors else 0


def _line(recording: Recording, made: Output) -> str:
    return json.dumps({"id": recording.id, **made.facts()}, ensure_ascii=False) + "\n"


def _write(folder: Path, recording: Recording, made: Output, formats: Sequence[str], rate: int,
           seconds: float) -> None:
    for name in formats:
        path = below(folder, recording, name)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if name == "json":
                with atomic_write(path) as file:
                    file.write(_line(recording, made))
            elif name == "wav":
                path.write_bytes(made.wav(rate, seconds * rate))
            else:
                np.savez(path, allow_pickle=False, **made.outputs)
        except OSError as error:
            raise SbkitError(f"cannot write {path}: {error.strerror}") from error
