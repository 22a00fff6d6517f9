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
from sbkit.decode.search_options import SearchRequest
from sbkit.errors import SbkitError, printable
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
    vad : whether words are written only where silero-vad hears somebody speak
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
        raise SbkitError(f"unknown format: {', '.join(unknown) or 'none was given'}", hint=f"use {', '.join(FORMATS)}")
    formats = list(dict.fromkeys(request.formats))
    recordings = collect(request.files, request.references, request.schemes)
    if request.output is None and len(recordings) > 1 and set(formats) & {"srt", "vtt"}:
        raise SbkitError("subtitles of several recordings can't be printed", hint="add --to FOLDER")
    if request.output is None and len(formats) > 1:
        raise SbkitError("several formats can't be printed", hint="add --to FOLDER")
    if request.output is not None:
        check_output_paths(request.output, recordings)
    with Engine(request.bundle, request.model, request.device, request.threads) as engine:
        print(engine.running, file=sys.stderr)
        waiting = recordings
        if request.output is not None:
            record_settings(request.output, request.bundle, {
                "model": engine.running.model, "search": request.search, "chunk_seconds": request.chunk_seconds,
                **({"vad": True} if request.vad else {}),  # older folders don't name it
            }, request.overwrite)
            waiting = [each for each in recordings if request.overwrite
                       or not all(output_path(request.output, each, name).exists() for name in formats)]
            if len(waiting) < len(recordings):
                print(f"{len(recordings) - len(waiting)} are already done", file=sys.stderr)
        return _run(engine, waiting, request, formats)


def _run(engine: Engine, recordings: list[Recording], request: TranscribeRequest, formats: list[str]) -> int:
    seconds_of, start = lengths(recordings, engine.config.sample_rate), time.perf_counter()
    pipeline = Pipeline(engine, Options(request.batch_seconds, request.chunk_seconds, request.readers, request.search,
                                        request.vad))
    found: dict[int, Transcript] = {}
    errors: dict[int, AudioError] = {}
    with contextlib.closing(run_files(
            recordings, pipeline.run, errors, what="seconds transcribed", seconds=seconds_of, named=SHOWN,
            order=sorted(range(len(recordings)), key=lambda i: -seconds_of[i]), in_order=request.output is None
            )) as transcripts:
        for index, transcript in transcripts:
            found[index] = transcript
            if request.output is not None:
                write_transcript(request.output, recordings[index], transcript, formats)
            else:
                if len(recordings) > 1 and formats == ["json"]:  # a line each
                    written = json.dumps(transcript.facts(), ensure_ascii=False) + "\n"
                elif len(recordings) > 1 and formats == ["txt"]:
                    written = f"{printable(transcript.id)}\t{transcript.text}\n"
                else:
                    written = FORMATS[formats[0]](transcript)
                sys.stdout.write(written)
                sys.stdout.flush()
    seconds = time.perf_counter() - start
    # In the recordings' order, because it decides the error rate's bootstrap interval.
    transcribed = [(recordings[index], each) for index, each in sorted(found.items())]
    warnings = [f"{each.name}: {result.warning}" for each, result in transcribed if result.warning is not None]
    print_first("warning", warnings)
    summarise(len(recordings), len(errors), sum(seconds_of), seconds, request.output)
    rows = [(each.id, each.reference, transcript.text) for each, transcript in transcribed if each.reference]
    if rows:
        unscored = [each.id for each, _ in transcribed if not each.reference]
        if unscored:
            print(f"not scored: {counted(len(unscored), 'recording')} without a reference: "
                  f"{printable(', '.join(unscored[:5]))}{', ...' if len(unscored) > 5 else ''}", file=sys.stderr)
        rates = _rates(rows)
        print(f"{rates}, {len(rows)} with a reference", file=sys.stderr)
        # Normalised by the language's rules, if that makes a difference.
        rules = TextRules.for_language(engine.config.language)
        rows = [(name, words, rules(text)) for name, reference, text in rows if (words := rules(reference))]
        if rows and (normalised := _rates(rows)) != rates:
            print(f"without case and punctuation: {normalised}", file=sys.stderr)
    return SOME_FAILED if errors else 0


def _rates(rows: Sequence[tuple[str, str, str]]) -> str:
    from sbkit.score.rates import ErrorRates
    from sbkit.score.significance import interval

    words, characters = ErrorRates("word"), ErrorRates("character")
    words.add(*zip(*rows, strict=True))
    characters.add(*zip(*rows, strict=True))
    low, high = interval(words)
    return f"WER {words.rate:.2f} % (95 % interval {low:.2f} to {high:.2f}), CER {characters.rate:.2f} %"


# ---------------------------------------------------------------------- writing


def write_transcript(output: Path, recording: Recording, transcript: Transcript, formats: Sequence[str]) -> None:
    """Write a recording's transcript into the output folder, a file for each format."""
    for name in formats:
        path = output_path(output, recording, name)
        try:
            with atomic_write(path) as file:
                file.write(FORMATS[name](transcript))
        except OSError as error:
            raise SbkitError(f"cannot write {path}: {error.strerror}",
                             hint="the same command continues from here") from error


def record_settings(output: Path, bundle: Path, options: Mapping[str, Any], redo: bool | None = None) -> None:
    """Record the settings of a folder's transcripts; raises if existing ones were made with others.

    options : the settings besides the bundle
    redo : whether existing transcripts are redone; None if the command can't
    """
    facts = {"bundle": hashlib.sha256((bundle / CONFIG).read_bytes()).hexdigest(), **options}
    path = output / SETTINGS
    try:
        existing = dict(json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        existing = None
    except (OSError, ValueError, TypeError) as error:
        raise SbkitError(f"{path} cannot be read: {error}", hint="choose another folder") from error
    if existing not in (None, facts) and not redo:
        before, now = ({**each, **(each.get("search") or {}), "search": None} for each in (existing, facts))
        changed = [name for name in dict.fromkeys([*now, *before]) if before.get(name) != now.get(name)]
        names = ", ".join(_ARGUMENTS.get(name, f"--{name.replace('_', '-')}") for name in changed)
        raise SbkitError(f"{output} contains transcripts made with another {names}",
                         hint="choose another folder" + ("" if redo is None else ", or redo them with --overwrite"))
    try:
        with atomic_write(path) as file:
            json.dump(facts, file, indent=1)
    except OSError as error:
        raise SbkitError(f"cannot write into {output}: {error.strerror}") from error
