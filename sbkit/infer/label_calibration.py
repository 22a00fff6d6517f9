"""How reliable a recogniser's confidences are, on recordings with transcripts that it was not trained on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.data.manifest import Manifest
from sbkit.data.text import TextRules
from sbkit.decode.file_errors import unreadable
from sbkit.errors import SbkitError
from sbkit.infer.files import run_files
from sbkit.infer.inputs import collect
from sbkit.infer.label_lines import place_of
from sbkit.infer.label_request import FOLDER, LabelRequest
from sbkit.infer.pipeline import Pipeline
from sbkit.infer.recordings import Recording
from sbkit.score.calibration import MIN_UTTERANCES, Calibration, reliability, word_accuracy
from sbkit.score.run_files import MANIFESTS, RECIPE
from sbkit.system import disk, untrusted
from sbkit.system.console import atomic_write, table

CALIBRATION = "calibration.json"
#: Bytes of that file.
_MAX_BYTES = 1 << 24
_HINT = "name a list with transcripts, such as manifests/dev.csv of the run that was exported"


def read_or_calibrate(request: LabelRequest, pipeline: Pipeline) -> Calibration:
    """Read the folder's calibration, or compute it; print how reliable it is."""
    path = request.to / FOLDER / CALIBRATION
    try:
        digest = disk.sha256(request.calibrate)
    except OSError as error:
        raise unreadable(request.calibrate, error, _HINT) from None
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
        raise SbkitError("damaged-output", f"{path} is damaged, or of an earlier version of sbkit: {error}",
                         hint="remove it to calibrate again", file=path) from error
    if other_list:
        raise SbkitError("other-settings", f"{request.to} was calibrated on another list than {request.calibrate}",
                         hint="pass that list again, or choose another --to", file=request.to, key="--calibrate")
    print(table(["utterances", "expected word accuracy %", "measured %"], rows))
    print(f"calibrated on {request.calibrate}: expected and measured word accuracy differ by {difference:.1f} points "
          "(expected calibration error, two-fold cross-validation)")
    return calibration


def _calibrate(request: LabelRequest, pipeline: Pipeline) -> dict[str, Any]:
    """Transcribe recordings with transcripts; returns the content of calibration.json, except the list's digest."""
    recordings = [recording for recording in collect([request.calibrate], None, request.schemes)
                  if recording.reference]
    if len(recordings) < MIN_UTTERANCES:
        raise SbkitError("bad-calibration-list", f"{request.calibrate} has {len(recordings)} recordings with a "
                         "transcript, too few to calibrate confidences", hint=f"give at least {MIN_UTTERANCES}",
                         file=request.calibrate, key="--calibrate")
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
        raise SbkitError("bad-calibration-list", f"{request.calibrate}: the recogniser found no words in any recording "
                         "that has a transcript", hint=_HINT, file=request.calibrate, key="--calibrate")
    accuracy, counts = word_accuracy(references, hypotheses)
    try:
        bins, expected_error = reliability(np.array(confidences), accuracy, counts)
    except SbkitError as error:
        raise SbkitError(error.code, f"{request.calibrate}: {error.message}", hint=error.hint,
                         file=request.calibrate) from None
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
    trained_on = {place_of(wav, start) for wav, start in zip(manifest.wavs, manifest.starts.tolist(), strict=True)}
    seen = sum(place_of(str(recording.audio), recording.start) in trained_on for recording in recordings)
    if seen:
        raise SbkitError("bad-calibration-list", f"{request.calibrate}: the model was trained on {seen} of its "
                         f"{len(recordings)} recordings ({train}), and is overconfident on them", hint=_HINT,
                         file=request.calibrate, key="--calibrate")
