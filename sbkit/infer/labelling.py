"""Labels recordings without transcripts: a recogniser's confident transcripts become a corpus. Interrupted runs resume.

    CORPUS/train.jsonl                      the rows that are kept: JSON lines, which a recipe reads like any corpus
    CORPUS/labelling/left_out-train.jsonl   the other rows, each with its reason
    CORPUS/labelling/heard-train.jsonl      a line for each recording that was transcribed, so that none is twice
    CORPUS/labelling/calibration.json       how reliable the recogniser's confidence is

Each of several shards has its own files, such as ``train-3-of-16.jsonl``.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from sbkit.data.audio import AudioError
from sbkit.data.lock import locked
from sbkit.errors import SbkitError
from sbkit.infer.engine import Engine
from sbkit.infer.files import run_files
from sbkit.infer.inputs import STDIN, collect
from sbkit.infer.label_calibration import read_or_calibrate
from sbkit.infer.label_lines import key_of, path_of, read_lines
from sbkit.infer.label_pieces import cut_at_pauses
from sbkit.infer.label_request import FOLDER, LabelRequest
from sbkit.infer.labelled_corpus import Unreadable, write_corpus
from sbkit.infer.pipeline import Options, Pipeline
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import mean_confidence
from sbkit.infer.transcription import record_settings
from sbkit.system import disk
from sbkit.system.console import time_span


def label(request: LabelRequest) -> int:
    """Transcribe the recordings that weren't yet, write the corpus, and return the exit code."""
    if STDIN in request.files:
        raise SbkitError("bad-option", "recordings from standard input can't become rows of a corpus",
                         hint="save them to files")
    to = request.to.resolve()
    for name in request.files:
        if Path(name).resolve().is_relative_to(to):
            raise SbkitError("output-is-input", f"{name} is inside {request.to}, where labels are written",
                             hint="choose another --to", file=name, key="--to")
    recordings = {}
    for recording in collect(request.files, None, request.schemes):
        key = key_of(recording)
        if request.shard.has(key):
            recordings[key] = recording
    with Engine(request.bundle, request.model, request.device, request.threads) as engine:
        print(engine.running, file=sys.stderr)
        work = request.to / FOLDER
        if request.to.exists() and not work.is_dir() and (request.to.is_file() or any(request.to.iterdir())):
            raise SbkitError("output-exists", f"{request.to} exists and was not written by sbkit label",
                             hint="choose another --to", file=request.to, key="--to")
        pipeline = Pipeline(engine, Options(request.batch_seconds, None, request.readers, request.search))
        with disk.disk_errors_as_user_error(request.to):
            with locked(work / ".lock"):
                # Before the calibration there is nothing that other settings would contradict.
                has_results = any(work.glob("[!.]*"))
                settings = {"model": engine.running.model, "search": request.search, "shards": request.shard.shards}
                record_settings(work, request.bundle, settings, redo=None if has_results else True)
                calibration = read_or_calibrate(request, pipeline)
            with locked(work / f".{request.shard.name}.lock"):
                transcribed = work / f"heard-{request.shard.name}.jsonl"
                errors = _transcribe(pipeline, recordings, transcribed)
                return write_corpus(request, transcribed, calibration, errors)


def _transcribe(pipeline: Pipeline, recordings: Mapping[str, Recording], path: Path) -> dict[str, Unreadable]:
    """Transcribe recordings that the file lacks, and append them; returns those that can't be read, and why."""
    transcribed = {line["key"] for line in read_lines(path)}
    errors = {key: Unreadable("not-utf8", "its path is not UTF-8: rename it") for key in recordings
              if path_of(key) != json.loads(key)[0]}
    todo = [(key, recording) for key, recording in recordings.items() if key not in transcribed and key not in errors]
    already_done = len(recordings) - len(todo) - len(errors)
    if already_done:
        print(f"{already_done} of {len(recordings)} are already done", file=sys.stderr)
    seconds = 0.0
    began = time.perf_counter()
    unreadable: dict[int, AudioError] = {}
    results = run_files([recording for _, recording in todo], pipeline.run, unreadable, what="labelling", named=0)
    # Unbuffered, so that a process that is killed has written all complete lines.
    with open(path, "ab", buffering=0) as file, contextlib.closing(results):
        if file.tell():
            file.write(b"\n")  # ends a line that was interrupted
        for index, transcript in results:
            key, recording = todo[index]
            # A WAV that is longer than its header says is kept, as in training.
            mismatch = recording.mismatch
            if mismatch is not None and mismatch.damaged:
                errors[key] = Unreadable("damaged-audio", mismatch.description)
                continue
            seconds += transcript.duration
            pieces = []
            for piece in cut_at_pauses(transcript.words, transcript.duration, pipeline.engine.config.chunk_seconds):
                start = round(recording.start + piece.start, 3)
                duration = round(piece.end - piece.start, 3)
                text = pipeline.engine.vocabulary.text(piece.words)
                pieces.append([start, duration, text, mean_confidence(piece.words)])
            line = {"key": key, "id": recording.id, "duration": round(transcript.duration, 4), "pieces": pieces}
            data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    errors |= {todo[index][0]: Unreadable(error.code, error.cause) for index, error in unreadable.items()}
    elapsed = time.perf_counter() - began
    print(f"transcribed {time_span(seconds)} in {time_span(elapsed)}", file=sys.stderr)
    return errors
