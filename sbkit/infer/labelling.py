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
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from sbkit.data.audio import AudioError
from sbkit.data.lock import locked
from sbkit.data.manifest import Manifest
from sbkit.data.text import TextRules
from sbkit.decode.search_options import SearchRequest
from sbkit.decode.spans import Word, at_pauses
from sbkit.errors import SbkitError
from sbkit.export.layout import Config
from sbkit.infer.engine import Engine
from sbkit.infer.files import SOME_FAILED, print_first, run_files
from sbkit.infer.inputs import STDIN, FilesRequest, collect
from sbkit.infer.pipeline import Options, Pipeline
from sbkit.infer.recordings import Recording
from sbkit.infer.transcript import mean_confidence
from sbkit.infer.transcription import record_settings
from sbkit.score.calibration import MIN_UTTERANCES, Calibration, reliability, word_accuracy
from sbkit.score.run_files import MANIFESTS, RECIPE
from sbkit.system import disk, untrusted
from sbkit.system.console import atomic_write, counted, table, time_span

FOLDER = "labelling"
CALIBRATION = "calibration.json"
#: Whether a row is kept, or why it is left out.
KEPT, UNREADABLE, NO_WORDS, NO_PAUSE, UNSURE, UNLIKE = (
    "kept", "unreadable", "no words", "no pause", "low confidence", "not calibrated")
#: The shortest pause to cut at, and the longest silence that a piece keeps at each end.
PAUSE_SECONDS, MARGIN_SECONDS = 0.4, 0.5
_KEEPS = (0.95, 0.9, 0.8, 0.7, 0.5)  # for which the hours are shown
_MAX_BYTES = 1 << 24  # of calibration.json
_HINT = "name a list with transcripts, such as manifests/dev.csv of the run that was exported"


class RecordingShard(NamedTuple):
    """One of ``shards`` parts of the recordings, counted from 1."""

    number: int = 1
    shards: int = 1

    @property
    def name(self) -> str:
        """The name of its files and split."""
        return "train" if self.shards == 1 else f"train-{self.number}-of-{self.shards}"

    def has(self, key: str) -> bool:
        """Whether a recording belongs to it, independent of the other recordings."""
        return zlib.crc32(key.encode()) % self.shards == self.number - 1


EVERYTHING = RecordingShard()


@dataclass(frozen=True)
class LabelRequest(SearchRequest, FilesRequest):
    """What to label, and which labels to keep.

    to : the folder of the corpus
    calibrate : a list with transcripts that the recogniser was not trained on
    keep : the minimum expected word accuracy of a row
    """

    to: Path
    calibrate: str
    keep: float = 0.9
    shard: RecordingShard = EVERYTHING
    batch_seconds: float | None = None
    readers: int = 2


def label(request: LabelRequest) -> int:
    """Transcribe the recordings that weren't yet, write the corpus, and return the exit code."""
    if STDIN in request.files:
        raise SbkitError("a corpus can't have recordings from standard input", hint="save them to files")
    to = request.to.resolve()
    if inside := [name for name in request.files if Path(name).resolve().is_relative_to(to)]:
        raise SbkitError(f"{inside[0]} is inside {request.to}, where labels are written", hint="choose another --to")
    recordings = {}
    for each in collect(request.files, None, request.schemes):
        key = json.dumps([*_place(str(each.audio), each.start), each.duration])  # however the command line names it
        if request.shard.has(key):
            recordings[key] = each
    with Engine(request.bundle, request.model, request.device, request.threads) as engine:
        print(engine.running, file=sys.stderr)
        work = request.to / FOLDER
        if request.to.exists() and not work.is_dir() and (request.to.is_file() or any(request.to.iterdir())):
            raise SbkitError(f"{request.to} exists and was not written by sbkit label", hint="choose another --to")
        pipeline = Pipeline(engine, Options(request.batch_seconds, None, request.readers, request.search))
        with disk.disk_errors_as_user_error(request.to):
            with locked(work / ".lock"):
                calibrated = any(work.glob("[!.]*"))
                settings = {"model": engine.running.model, "search": request.search, "shards": request.shard.shards}
                record_settings(work, request.bundle, settings, redo=None if calibrated else True)
                calibration = _calibration(request, pipeline)
            with locked(work / f".{request.shard.name}.lock"):
                transcribed = work / f"heard-{request.shard.name}.jsonl"
                errors = _transcribe(pipeline, recordings, transcribed)
                return _write(request, transcribed, calibration, errors)


def _place(audio: str, start: float) -> tuple[str, float]:
    return audio if "://" in audio else os.path.abspath(audio), start


# ---------------------------------------------------------------------- calibration


def _calibration(request: LabelRequest, pipeline: Pipeline) -> Calibration:
    """Read the folder's calibration, or compute it; print how reliable it is."""
    path = request.to / FOLDER / CALIBRATION
    try:
        digest = disk.sha256(request.calibrate)
    except OSError as error:
        raise SbkitError(f"--calibrate {request.calibrate}: {error.strerror or error}", hint=_HINT) from None
    if not path.exists():
        computed = _calibrate(request, pipeline) | {"list": digest}
        with atomic_write(path) as file:
            json.dump(computed, file, indent=1)
    try:
        facts = untrusted.read_json(path, _MAX_BYTES)
        found = Calibration(facts["confidences"], facts["accuracies"], facts["lowest"])
        rows = [(each[0], f"{100 * each[1]:.1f}", f"{100 * each[2]:.1f}") for each in facts["bins"]]
        changed, difference = facts["list"] != digest, 100 * facts["error"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SbkitError(f"{path} is damaged, or an earlier sbkit wrote it: {error}",
                         hint="remove it to calibrate again") from error
    if changed:
        raise SbkitError(f"{request.to} was calibrated on another list than {request.calibrate}",
                         hint="name that one again, or choose another --to")
    print(table(["utterances", "expected word accuracy %", "measured %"], rows))
    print(f"calibrated on {request.calibrate}: expected and measured word accuracy differ by {difference:.1f} points "
          "(expected calibration error, two-fold cross-validation)")
    return found


def _calibrate(request: LabelRequest, pipeline: Pipeline) -> dict[str, Any]:
    recordings = [each for each in collect([request.calibrate], None, request.schemes) if each.reference]
    if len(recordings) < MIN_UTTERANCES:
        raise SbkitError(f"{request.calibrate}: {len(recordings)} recordings with a transcript can't show how reliable "
                         "confidences are", hint=f"give at least {MIN_UTTERANCES}")
    # If the bundle or the list is in the folder of the run, which the exported checkpoint's name identifies, it says
    # what the model was trained on.
    run, of_list = request.bundle.resolve().parent, Path(request.calibrate).resolve().parent.parent
    checkpoint = pipeline.engine.config.trained.get("checkpoint")
    if (of_list / RECIPE).is_file() and any(each.name == checkpoint for each in of_list.glob("*/CKPT*")):
        run = of_list
    train = run / MANIFESTS / "train.csv"
    if train.is_file():
        manifest = Manifest.read(train)
        trained = {_place(*row) for row in zip(manifest.wavs, manifest.starts.tolist(), strict=True)}
        if seen := sum(_place(str(each.audio), each.start) in trained for each in recordings):
            raise SbkitError(f"{request.calibrate}: the model was trained on {seen} of its {len(recordings)} "
                             f"recordings ({train}), and is overconfident on them", hint=_HINT)
    rules = TextRules.for_language(pipeline.engine.config.language)
    references, hypotheses, confidences = [], [], []
    # Recordings that can't be read are neither counted nor named.
    for index, transcript in run_files(recordings, pipeline.run, {}, what="calibrating", in_order=True, named=0):
        if transcript.confidence is not None:
            both = (rules(text) for text in (recordings[index].reference or "", transcript.text))
            words = [text.split() if transcript.spaced else list(text.replace(" ", "")) for text in both]
            references.append(words[0])
            hypotheses.append(words[1])
            confidences.append(transcript.confidence)
    if not confidences:
        raise SbkitError(f"{request.calibrate}: the recogniser found no words in any recording that has a "
                         "transcript", hint=_HINT)
    accuracy, counts = word_accuracy(references, hypotheses)
    try:
        bins, expected_error = reliability(np.array(confidences), accuracy, counts)
    except SbkitError as error:
        raise SbkitError(f"{request.calibrate}: {error.message}", hint=error.hint) from None
    curve = Calibration.fit(np.array(confidences), accuracy, counts)
    return asdict(curve) | {"bins": bins, "error": expected_error}


# ---------------------------------------------------------------------- transcribing


def _transcribe(pipeline: Pipeline, recordings: Mapping[str, Recording], path: Path) -> dict[str, str]:
    """Transcribe recordings that the file lacks, and append them; returns those that can't be read, and why."""
    known = {each["key"] for each in _read_lines(path)}
    errors = {key: "its path is not UTF-8: rename it" for key in recordings if _name(key) != json.loads(key)[0]}
    todo = [(key, each) for key, each in recordings.items() if key not in known and key not in errors]
    if done := len(recordings) - len(todo) - len(errors):
        print(f"{done} of {len(recordings)} are already done", file=sys.stderr)
    seconds, began, unreadable = 0.0, time.perf_counter(), dict[int, AudioError]()
    # Unbuffered, so that a process that is killed has written all complete lines.
    with open(path, "ab", buffering=0) as file, contextlib.closing(run_files(
            [each for _, each in todo], pipeline.run, unreadable, what="labelling", named=0)) as transcripts:
        if file.tell():
            file.write(b"\n")  # ends a line that was interrupted
        for index, transcript in transcripts:
            key, recording = todo[index]
            # A WAV that is longer than its header says is kept, as in training.
            mismatch = recording.mismatch
            if mismatch is not None and mismatch.damaged:
                errors[key] = mismatch.description
                continue
            seconds += transcript.duration
            pieces = cut_at_pauses(transcript.words, transcript.duration, pipeline.engine.config.chunk_seconds)
            text = pipeline.engine.vocabulary.text
            line = {"key": key, "id": recording.id, "duration": round(transcript.duration, 4), "pieces": [
                [round(recording.start + each.start, 3), round(each.end - each.start, 3), text(each.words),
                 mean_confidence(each.words)] for each in pieces]}
            data = json.dumps(line, ensure_ascii=False).encode("utf-8", "replace") + b"\n"
            if file.write(data) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
    errors |= {todo[index][0]: error.cause for index, error in unreadable.items()}
    elapsed = time.perf_counter() - began
    print(f"transcribed {time_span(seconds)} in {time_span(elapsed)}", file=sys.stderr)
    return errors


def _name(key: str) -> str:
    """The path of a recording; bytes that aren't UTF-8, which no list can hold, are escaped."""
    return str(json.loads(key)[0]).encode("utf-8", "backslashreplace").decode()


def _read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file of transcribed recordings, except interrupted ones."""
    if path.exists():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError):
                    yield untrusted.parse_json(line)


# ---------------------------------------------------------------------- pieces short enough for training


class Piece(NamedTuple):
    """A part of a recording in seconds, and its words."""

    start: float
    end: float
    words: list[Word]


def cut_at_pauses(words: Sequence[Word], duration: float, longest: float) -> list[Piece]:
    """Cut a recording longer than ``longest`` seconds at pauses; short neighbours are joined up to half of ``longest``.

    A recording that isn't longer, or has no words, is one piece. Audio between pieces has no words. A piece without a
    pause may be too long.
    """
    if duration <= longest or not words:
        return [Piece(0.0, duration, list(words))]
    joined: list[list[Word]] = []
    for run in at_pauses(words, PAUSE_SECONDS):
        if joined and run[-1].end - joined[-1][0].start <= longest / 2 and (
                run[0].start - joined[-1][-1].end <= 2 * MARGIN_SECONDS):
            joined[-1] += run
        else:
            joined.append(run)
    starts = [max(0.0, each[0].start - MARGIN_SECONDS) for each in joined]
    ends = [min(duration, each[-1].end + MARGIN_SECONDS) for each in joined]
    for i in range(1, len(joined)):
        if ends[i - 1] > starts[i]:  # a short pause: each piece gets half of it
            ends[i - 1] = starts[i] = (joined[i - 1][-1].end + joined[i][0].start) / 2
    return [Piece(*each) for each in zip(starts, ends, joined, strict=True)]


# ---------------------------------------------------------------------- the corpus


def _write(request: LabelRequest, path: Path, calibration: Calibration, errors: Mapping[str, str]) -> int:
    """Write the rows that are kept and those that are left out, print a summary, and return the exit code."""
    file, longest = f"{request.shard.name}.jsonl", Config.read(request.bundle).chunk_seconds
    rows: Counter[str] = Counter()
    hours: Counter[str] = Counter()
    candidates: list[tuple[float, float]] = []  # expected accuracies and hours
    with atomic_write(request.to / file) as kept, atomic_write(request.to / FOLDER / f"left_out-{file}") as rest:
        for recording in _read_lines(path):
            hours[NO_WORDS] += (recording["duration"] - sum(each[1] for each in recording["pieces"])) / 3600
            for start, duration, text, confidence in recording["pieces"]:
                name = recording["id"] + (f"-{start:.2f}" if len(recording["pieces"]) > 1 else "")
                row = {"id": name, "audio_filepath": json.loads(recording["key"])[0], "offset": start,
                       "duration": duration, "text": text}
                expected = 0.0 if confidence is None else float(calibration(np.float64(confidence)))
                reason = NO_WORDS if confidence is None else NO_PAUSE if duration > longest else (
                    UNLIKE if confidence < calibration.lowest else
                    KEPT if expected >= request.keep else UNSURE)
                rows[reason] += 1
                hours[reason] += duration / 3600
                if reason in (KEPT, UNSURE):
                    candidates.append((expected, duration / 3600))
                row["confidence"] = round(expected, 4)
                line = row if reason == KEPT else row | {"reason": reason}
                (kept if reason == KEPT else rest).write(json.dumps(line, ensure_ascii=False) + "\n")
        for key, problem in errors.items():
            rows[UNREADABLE] += 1
            line = {"audio_filepath": _name(key), "reason": UNREADABLE, "detail": problem}
            rest.write(json.dumps(line, ensure_ascii=False) + "\n")
    print_first("left out", [f"{_name(key)}: {problem}" for key, problem in errors.items()])
    print(table(["", "rows", "hours"], [(each, rows[each], f"{hours[each]:.2f}") for each in (
        KEPT, UNSURE, UNLIKE, NO_WORDS, NO_PAUSE, UNREADABLE) if each == KEPT or rows[each] or hours[each] > 0.005]))
    if rows[UNLIKE]:
        print(f"not calibrated: {counted(rows[UNLIKE], 'row')} with a lower confidence than every recording of "
              f"{request.calibrate}, so of unknown word accuracy; calibrate on recordings like these to keep some")
    sure = [each for each in candidates if each[0] >= request.keep]
    if total := sum(length for _, length in sure):
        mean = sum(expected * length for expected, length in sure) / total
        print(f"expected word accuracy of the rows that are kept: {100 * mean:.1f} %")
    if sure != candidates:
        print("hours kept with other values of --keep: " + ", ".join(
            f"{keep:g}: {sum(length for expected, length in candidates if expected >= keep):.2f} h" for keep in _KEEPS))
    print(f"{request.to / request.shard.name}.jsonl  (left out: {request.to / FOLDER}; another --keep reuses these "
          "transcripts)")
    return SOME_FAILED if errors else 0
