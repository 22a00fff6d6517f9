"""Runs a model that outputs tensors on recordings; prints its outputs or writes them to a folder."""

from __future__ import annotations

import functools
import json
import sys
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.decode.file_errors import unwritable
from sbkit.errors import SbkitError
from sbkit.infer.files import SOME_FAILED, Result, run_files, summarise
from sbkit.infer.graph_model import GraphEngine, GraphModel, Output
from sbkit.infer.inputs import FilesRequest, check_output_paths, collect, output_path
from sbkit.infer.recordings import Recording
from sbkit.system.console import atomic_write

#: Maximum values of a recording that are printed; more must be written to files.
_MAX_PRINTED = 10_000


@dataclass(frozen=True)
class RunRequest(FilesRequest):
    """The model to run, and its recordings.

    output : the folder for files; None: print lines of JSON
    formats : any of ``npz`` (all outputs), ``json`` and ``wav`` (the first output, if it is audio)
    """

    output: Path | None = None
    formats: Sequence[str] = ("npz",)


def run(request: RunRequest) -> int:
    recordings = collect(request.files, None, request.schemes)
    if request.output is None and "wav" in request.formats:
        raise SbkitError("missing-option", "wav can't be printed", hint="add --to FOLDER", key="--format")
    if request.output is not None:
        check_output_paths(request.output, recordings)
    errors: dict[int, AudioError] = {}
    audio = 0.0  # seconds
    began = time.perf_counter()
    with GraphModel(GraphEngine(request.bundle, request.model, request.device, request.threads)) as model:
        print(model.running, file=sys.stderr)
        rate = model.engine.config.sample_rate
        run_each = functools.partial(_run, model)
        for index, (result, seconds) in run_files(recordings, run_each, errors, what="running", in_order=True):
            recording = recordings[index]
            audio += seconds
            if request.output is None:
                if result.size > _MAX_PRINTED:
                    raise SbkitError("missing-option",
                                     f"{recording.name} has {result.size:,} output values, too many to print",
                                     hint="write files: --to FOLDER", key="--to")
                sys.stdout.write(_line(recording, result))
            else:
                for name in request.formats:
                    _write(output_path(request.output, recording, name), name, recording, result, rate, seconds)
    summarise(len(recordings), len(errors), audio, time.perf_counter() - began, request.output)
    return SOME_FAILED if errors else 0


def _run(model: GraphModel, recordings: Sequence[Recording]) -> Generator[Result, None, None]:
    for index, output in enumerate(model.run_each(recordings)):
        if isinstance(output, AudioError):
            yield index, output
        else:
            yield index, (output, recordings[index].seconds(model.engine.config.sample_rate))


def _write(path: Path, format: str, recording: Recording, result: Output, rate: int, seconds: float) -> None:
    """Write a recording's result; ``seconds`` is the recording's length."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        if format == "json":
            with atomic_write(path) as file:
                file.write(_line(recording, result))
        elif format == "wav":
            path.write_bytes(result.wav(rate, seconds * rate))
        else:
            np.savez(path, allow_pickle=False, **result.outputs)
    except OSError as error:
        raise unwritable(path, error) from error


def _line(recording: Recording, result: Output) -> str:
    return json.dumps({"id": recording.id, **result.facts()}, ensure_ascii=False) + "\n"
