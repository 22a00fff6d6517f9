"""Transcribes recordings and prints the transcripts or writes them to a folder; interrupted runs resume."""

from __future__ import annotations

import contextlib
import hashlib
import json
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sbkit.data.audio import AudioError
from sbkit.data.text import TextRules
from sbkit.decode.file_errors import unwritable
from sbkit.decode.search_options import SearchRequest
from sbkit.errors import SbkitError, printable, shown_names
from sbkit.export.layout import CONFIG
from sbkit.infer.engine import Engine
from sbkit.infer.files import SHOWN, SOME_FAILED, print_first, run_files, summarise
from sbkit.infer.inputs import FilesRequest, check_output_paths, collect, lengths, output_path
from sbkit.infer.pipeline import Options, Pipeline
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import FORMATS, Transcript
from sbkit.system.console import atomic_write, counted

#: File in a folder of transcripts with the model and options that they were made with.
SETTINGS = ".sbkit-transcribe.json"
_ARGUMENTS = {"bundle": "BUNDLE", "shards": "--shard", "hot_words": "--hot-word"}  # options whose names differ


@dataclass(frozen=True)
class TranscribeRequest(SearchRequest, FilesRequest):
    """What to transcribe, and how.

    output : the folder for transcripts; None: print them
    formats : any of ``txt, json, srt, vtt, ctm``
    overwrite : redo existing transcripts
    references : a manifest, or lines ``name<TAB>text``, to score against
    vad : whether words are written only where silero-vad detects speech
    """

    output: Path | None = None
    formats: Sequence[str] = ("txt",)
    batch_seconds: float | None = None
    chunk_seconds: float | None = None
    readers: int = 2
    overwrite: bool = False
    references: str | None = None
    vad: bool = False


def transcribe(request: TranscribeRequest) -> int:
    unknown = [name for name in request.formats if name not in FORMATS]
    if unknown or not request.formats:
        what = f"there is no format {shown_names(unknown)}" if unknown else "no format was given"
        raise SbkitError("bad-value", what,
                         hint=f"use {', '.join(FORMATS)}", key="--format")
    formats = list(dict.fromkeys(request.formats))
    recordings = collect(request.files, request.references, request.schemes)
    if request.output is None and len(recordings) > 1 and set(formats) & {"srt", "vtt"}:
        raise SbkitError("missing-option", "subtitles of several recordings can't be printed", hint="add --to FOLDER",
                         key="--to")
    if request.output is None and len(formats) > 1:
        raise SbkitError("missing-option", "several formats can't be printed", hint="add --to FOLDER", key="--to")
    if request.output is not None:
        check_output_paths(request.output, recordings)
    with Engine(request.bundle, request.model, request.device, request.threads) as engine:
        print(engine.running, file=sys.stderr)
        waiting = recordings
        if request.output is not None:
            settings: dict[str, Any] = {"model": engine.running.model, "search": request.search,
                                        "chunk_seconds": request.chunk_seconds}
            if request.vad:  # otherwise left out, as in folders of older versions
                settings["vad"] = True
            record_settings(request.output, request.bundle, settings, request.overwrite)
            if not request.overwrite:
                waiting = [recording for recording in recordings
                           if not all(output_path(request.output, recording, name).exists() for name in formats)]
            if len(waiting) < len(recordings):
                print(f"{len(recordings) - len(waiting)} are already done", file=sys.stderr)
        return _run(engine, waiting, request, formats)


def _run(engine: Engine, recordings: list[Recording], request: TranscribeRequest, formats: list[str]) -> int:
    seconds_of = lengths(recordings, engine.config.sample_rate)
    start = time.perf_counter()
    pipeline = Pipeline(engine, Options(request.batch_seconds, request.chunk_seconds, request.readers, request.search,
                                        request.vad))
    transcripts: dict[int, Transcript] = {}
    errors: dict[int, AudioError] = {}
    longest_first = sorted(range(len(recordings)), key=lambda i: -seconds_of[i])
    results = run_files(recordings, pipeline.run, errors, what="seconds transcribed", seconds=seconds_of, named=SHOWN,
                        order=longest_first, in_order=request.output is None)
    with contextlib.closing(results):
        for index, transcript in results:
            transcripts[index] = transcript
            if request.output is not None:
                write_transcript(request.output, recordings[index], transcript, formats)
            else:
                sys.stdout.write(_printed(transcript, formats[0], alone=len(recordings) == 1))
                sys.stdout.flush()
    elapsed = time.perf_counter() - start
    # In the recordings' order, because it decides the error rate's bootstrap interval.
    transcribed = [(recordings[index], transcript) for index, transcript in sorted(transcripts.items())]
    warnings = [f"{recording.name}: {transcript.warning}" for recording, transcript in transcribed
                if transcript.warning is not None]
    print_first("warning", warnings)
    summarise(len(recordings), len(errors), sum(seconds_of), elapsed, request.output)
    _print_error_rates(transcribed, engine.config.language)
    return SOME_FAILED if errors else 0


def _printed(transcript: Transcript, format: str, alone: bool) -> str:
    """Format a transcript for printing: one of several is a line, if the format is text or JSON."""
    if alone or format not in ("json", "txt"):
        return FORMATS[format](transcript)
    if format == "json":
        return json.dumps(transcript.facts(), ensure_ascii=False) + "\n"
    return f"{printable(transcript.id)}\t{transcript.text}\n"


# ---------------------------------------------------------------------- scoring


def _print_error_rates(transcribed: Sequence[tuple[Recording, Transcript]], language: str | None) -> None:
    """Print the error rates of transcripts whose recordings have references, if any."""
    rows = [(recording.id, recording.reference, transcript.text) for recording, transcript in transcribed
            if recording.reference]
    if not rows:
        return
    unscored = [recording.id for recording, _ in transcribed if not recording.reference]
    if unscored:
        print(f"not scored: {counted(len(unscored), 'recording')} without a reference: "
              f"{printable(', '.join(unscored[:5]))}{', ...' if len(unscored) > 5 else ''}", file=sys.stderr)
    rates = _rates(rows)
    print(f"{rates}, {len(rows)} with a reference", file=sys.stderr)

    # Normalised by the language's rules, if that makes a difference.
    rules = TextRules.for_language(language)
    normalised = [(name, rules(reference), rules(text)) for name, reference, text in rows]
    scorable = [row for row in normalised if row[1]]
    if scorable:
        normalised_rates = _rates(scorable)
        if normalised_rates != rates:
            print(f"without case and punctuation: {normalised_rates}", file=sys.stderr)


def _rates(rows: Sequence[tuple[str, str, str]]) -> str:
    """Return the error rates of rows of a recording's id, its reference and its transcript."""
    from sbkit.score.rates import ErrorRates
    from sbkit.score.significance import interval_in_text

    ids, references, texts = zip(*rows, strict=True)
    words = ErrorRates("word")
    words.add(ids, references, texts)
    characters = ErrorRates("character")
    characters.add(ids, references, texts)
    return f"WER {words.rate:.2f} % (95 % interval {interval_in_text(words)}), CER {characters.rate:.2f} %"


# ---------------------------------------------------------------------- writing


def write_transcript(output: Path, recording: Recording, transcript: Transcript, formats: Sequence[str]) -> None:
    """Write a recording's transcript into the output folder, a file for each format."""
    for name in formats:
        path = output_path(output, recording, name)
        try:
            with atomic_write(path) as file:
                file.write(FORMATS[name](transcript))
        except OSError as error:
            raise unwritable(path, error, "the same command continues from here") from error


def record_settings(output: Path, bundle: Path, options: Mapping[str, Any], redo: bool | None = None) -> None:
    """Record the settings of a folder's transcripts; raises if existing ones were made with others.

    options : the settings except the bundle
    redo : whether existing transcripts are redone; None if the command can't
    """
    facts = {"bundle": hashlib.sha256((bundle / CONFIG).read_bytes()).hexdigest(), **options}
    path = output / SETTINGS
    try:
        existing = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        existing = None
    except (OSError, ValueError, TypeError) as error:
        raise SbkitError("damaged-output", f"{path} cannot be read: {error}", hint="choose another folder",
                         file=path) from error
    if existing not in (None, facts) and not redo:
        before = _flat(existing)
        now = _flat(facts)
        changed = [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
        names = ", ".join(_ARGUMENTS.get(name, f"--{name.replace('_', '-')}") for name in changed)
        raise SbkitError("other-settings", f"{output} contains transcripts made with another {names}",
                         hint="choose another folder" + ("" if redo is None else ", or redo them with --overwrite"),
                         file=output, value=names)
    try:
        with atomic_write(path) as file:
            json.dump(facts, file, indent=1)
    except OSError as error:
        raise unwritable(path, error) from error


def _flat(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with the options of the search among the others."""
    return {**settings, **(settings.get("search") or {}), "search": None}
