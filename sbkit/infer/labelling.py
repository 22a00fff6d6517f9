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
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
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
# Whether a row is kept, or why it is left out.
KEPT = "kept"
UNREADABLE = "unreadable"
NO_WORDS = "no words"
NO_PAUSE = "no pause"
UNSURE = "low confidence"
UNLIKE = "not calibrated"
PAUSE_SECONDS = 0.4
"""The shortest pause to cut at."""
MARGIN_SECONDS = 0.5
"""The longest silence that a piece keeps at each end."""
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
    for name in request.files:
        if Path(name).resolve().is_relative_to(to):
            raise SbkitError(f"{name} is inside {request.to}, where labels are written", hint="choose another --to")
    recordings = {}
    for recording in collect(request.files, None, request.schemes):
        # The same however the command line names it.
        key = json.dumps([*_place(str(recording.audio), recording.start), recording.duration])
        if request.shard.has(key):
            recordings[key] = recording
    with Engine(request.bundle, request.model, request.device, request.threads) as engine:
        print(engine.running, file=sys.stderr)
        work = request.to / FOLDER
        if request.to.exists() and not work.is_dir() and (request.to.is_file() or any(request.to.iterdir())):
            raise SbkitError(f"{request.to} exists and was not written by sbkit label", hint="choose another --to")
        pipeline = Pipeline(engine, Options(request.batch_seconds, None, request.readers, request.search))
        with disk.disk_errors_as_user_error(request.to):
            with locked(work / ".lock"):
                # Before the calibration there is nothing that other settings would contradict.
                has_results = any(work.glob("[!.]*"))
                settings = {"model": engine.running.model, "search": request.search, "shards": request.shard.shards}
                record_settings(work, request.bundle, settings, redo=None if has_results else True)
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
        calibration = Calibration(facts["confidences"], facts["accuracies"], facts["lowest"])
        rows = [(count, f"{100 * expected:.1f}", f"{100 * measured:.1f}") for count, expected, measured
                in facts["bins"]]
        other_list = facts["list"] != digest
        difference = 100 * facts["error"]
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise SbkitError(f"{path} is damaged, or an earlier sbkit wrote it: {error}",
                         hint="remove it to calibrate again") from error
    if other_list:
        raise SbkitError(f"{request.to} was calibrated on another list than {request.calibrate}",
                         hint="name that one again, or choose another --to")
    print(table(["utterances", "expected word accuracy %", "measured %"], rows))
    print(f"calibrated on {request.calibrate}: expected and measured word accuracy differ by {difference:.1f} points "
          "(expected calibration error, two-fold cross-validation)")
    return calibration


def _calibrate(request: LabelRequest, pipeline: Pipeline) -> dict[str, Any]:
    """Transcribe recordings with transcripts; returns the content of calibration.json, except the list's digest."""
    recordings = [recording for recording in collect([request.calibrate], None, request.schemes)
                  if recording.reference]
    if len(recordings) < MIN_UTTERANCES:
        raise SbkitError(f"{request.calibrate}: {len(recordings)} recordings with a transcript can't show how reliable "
                         "confidences are", hint=f"give at least {MIN_UTTERANCES}")
    _check_unseen(request, pipeline, recordings)
    rules = TextRules.for_language(pipeline.engine.config.language)
    references, hypotheses, confidences = [], [], []
    # Recordings that can't be read are neither counted nor named.
    for index, transcript in run_files(recordings, pipeline.run, {}, what="calibrating", in_order=True, named=0):
        if transcript.confidence is not None:
            reference = rules(recordings[index].reference or "")
            hypothesis = rules(transcript.text)
            references.append(_words(reference, transcript.spaced))
            hypotheses.append(_words(hypothesis, transcript.spaced))
            confidences.append(transcript.confidence)
    if not confidences:
        raise SbkitError(f"{request.calibrate}: the recogniser found no words in any recording that has a "
                         "transcript", hint=_HINT)
    accuracy, counts = word_accuracy(references, hypotheses)
    try:
        bins, expected_error = reliability(np.array(confidences), accuracy, counts)
    except SbkitError as error:
        raise SbkitError(f"{request.calibrate}: {error.message}", hint=error.hint) from None
    calibration = Calibration.fit(np.array(confidences), accuracy, counts)
    return asdict(calibration) | {"bins": bins, "error": expected_error}


def _words(text: str, spaced: bool) -> list[str]:
    """The words of a text or, in a language without spaces, its characters."""
    return text.split() if spaced else list(text.replace(" ", ""))


def _check_unseen(request: LabelRequest, pipeline: Pipeline, recordings: Sequence[Recording]) -> None:
    """Raise if the model was trained on some of the recordings, as far as its run's folder can be found."""
    # The bundle or the list may lie in the folder of the run. The list's is the run's if it has the checkpoint that
    # was exported.
    run = request.bundle.resolve().parent
    folder_of_list = Path(request.calibrate).resolve().parent.parent
    checkpoint = pipeline.engine.config.trained.get("checkpoint")
    if (folder_of_list / RECIPE).is_file() and any(path.name == checkpoint for path in folder_of_list.glob("*/CKPT*")):
        run = folder_of_list
    train = run / MANIFESTS / "train.csv"
    if not train.is_file():
        return
    manifest = Manifest.read(train)
    trained_on = {_place(wav, start) for wav, start in zip(manifest.wavs, manifest.starts.tolist(), strict=True)}
    seen = sum(_place(str(recording.audio), recording.start) in trained_on for recording in recordings)
    if seen:
        raise SbkitError(f"{request.calibrate}: the model was trained on {seen} of its {len(recordings)} "
                         f"recordings ({train}), and is overconfident on them", hint=_HINT)


# ---------------------------------------------------------------------- transcribing


def _transcribe(pipeline: Pipeline, recordings: Mapping[str, Recording], path: Path) -> dict[str, str]:
    """Transcribe recordings that the file lacks, and append them; returns those that can't be read, and why."""
    transcribed = {line["key"] for line in _read_lines(path)}
    errors = {key: "its path is not UTF-8: rename it" for key in recordings if _name(key) != json.loads(key)[0]}
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
                errors[key] = mismatch.description
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
    starts = [max(0.0, run[0].start - MARGIN_SECONDS) for run in joined]
    ends = [min(duration, run[-1].end + MARGIN_SECONDS) for run in joined]
    for i in range(1, len(joined)):
        if ends[i - 1] > starts[i]:  # a short pause: each piece gets half of it
            ends[i - 1] = starts[i] = (joined[i - 1][-1].end + joined[i][0].start) / 2
    return [Piece(start, end, run) for start, end, run in zip(starts, ends, joined, strict=True)]


# ---------------------------------------------------------------------- the corpus


@dataclass
class _Tally:
    """Rows and hours by the reason for which they are kept or left out."""

    rows: Counter[str] = field(default_factory=Counter)
    hours: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    judged: list[tuple[float, float]] = field(default_factory=list)
    """The expected word accuracy and the hours of each row that ``--keep`` decides on."""

    def add(self, reason: str, accuracy: float, seconds: float) -> None:
        self.rows[reason] += 1
        self.hours[reason] += seconds / 3600
        if reason in (KEPT, UNSURE):
            self.judged.append((accuracy, seconds / 3600))

    def hours_with(self, keep: float) -> float:
        """The hours that another value of ``--keep`` would keep."""
        return sum(hours for accuracy, hours in self.judged if accuracy >= keep)


def _write(request: LabelRequest, transcribed: Path, calibration: Calibration, errors: Mapping[str, str]) -> int:
    """Write the rows that are kept and those that are left out, print a summary, and return the exit code.

    transcribed : the file of transcribed recordings
    errors : why recordings can't be read, by their keys
    """
    file = f"{request.shard.name}.jsonl"
    longest = Config.read(request.bundle).chunk_seconds
    tally = _Tally()
    with atomic_write(request.to / file) as corpus, atomic_write(request.to / FOLDER / f"left_out-{file}") as left_out:
        for recording in _read_lines(transcribed):
            labelled = sum(duration for _, duration, _, _ in recording["pieces"])
            tally.hours[NO_WORDS] += (recording["duration"] - labelled) / 3600
            for start, duration, text, confidence in recording["pieces"]:
                accuracy = 0.0 if confidence is None else float(calibration(np.float64(confidence)))
                reason = KEPT
                if confidence is None:
                    reason = NO_WORDS
                elif duration > longest:
                    reason = NO_PAUSE
                elif confidence < calibration.lowest:
                    reason = UNLIKE
                elif accuracy < request.keep:
                    reason = UNSURE
                tally.add(reason, accuracy, duration)
                name = recording["id"] + (f"-{start:.2f}" if len(recording["pieces"]) > 1 else "")
                row = {"id": name, "audio_filepath": json.loads(recording["key"])[0], "offset": start,
                       "duration": duration, "text": text, "confidence": round(accuracy, 4)}
                if reason == KEPT:
                    corpus.write(json.dumps(row, ensure_ascii=False) + "\n")
                else:
                    left_out.write(json.dumps(row | {"reason": reason}, ensure_ascii=False) + "\n")
        for key, problem in errors.items():
            tally.rows[UNREADABLE] += 1
            row = {"audio_filepath": _name(key), "reason": UNREADABLE, "detail": problem}
            left_out.write(json.dumps(row, ensure_ascii=False) + "\n")
    print_first("left out", [f"{_name(key)}: {problem}" for key, problem in errors.items()])
    _print_summary(request, tally)
    return SOME_FAILED if errors else 0


def _print_summary(request: LabelRequest, tally: _Tally) -> None:
    lines = []
    for reason in (KEPT, UNSURE, UNLIKE, NO_WORDS, NO_PAUSE, UNREADABLE):
        if reason == KEPT or tally.rows[reason] or tally.hours[reason] > 0.005:
            lines.append((reason, tally.rows[reason], f"{tally.hours[reason]:.2f}"))
    print(table(["", "rows", "hours"], lines))
    if tally.rows[UNLIKE]:
        print(f"not calibrated: {counted(tally.rows[UNLIKE], 'row')} with a lower confidence than every recording of "
              f"{request.calibrate}, so of unknown word accuracy; calibrate on recordings like these to keep some")
    kept_hours = tally.hours_with(request.keep)
    if kept_hours:
        mean = sum(accuracy * hours for accuracy, hours in tally.judged if accuracy >= request.keep) / kept_hours
        print(f"expected word accuracy of the rows that are kept: {100 * mean:.1f} %")
    if tally.rows[UNSURE]:
        print("hours kept with other values of --keep: "
              + ", ".join(f"{keep:g}: {tally.hours_with(keep):.2f} h" for keep in _KEEPS))
    print(f"{request.to / request.shard.name}.jsonl  (left out: {request.to / FOLDER}; another --keep reuses these "
          "transcripts)")
