"""The trial of a recogniser on what a test set doesn't have: ``sbkit evaluate --behaviour``."""

from __future__ import annotations

import contextlib
import math
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import soundfile

from sbkit.data.audio import AudioError, audio_info, read_audio, read_utterance
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe
from sbkit.runs.evaluation import transcribe
from sbkit.runs.evaluation_options import searching
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.score.behaviour import SECONDS, Behaviour, silences, speeches, words_in_noises

if TYPE_CHECKING:
    from sbkit.compat.brain import Brain

#: Utterances of a test set that the battery changes.
CLIPS = 20
#: Recordings of the user's noises in which it looks for speech, or stretches of long ones, at most.
NOISES = 100


def try_behaviour(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, rate: int) -> Behaviour:
    """Try the battery of ``sbkit.score.behaviour`` on all ranks: silence, and changed utterances of the manifest."""
    clips = _clips(manifest, rate)
    trials = [*silences(rate), *speeches([(signal, text) for signal, text in clips if text.split()], rate)]
    noises = _user_noises(recipe, rate)
    signals = [*(trial.signal for trial in trials), *(signal for _, signal in noises)]
    with tempfile.TemporaryDirectory(prefix="sbkit-") as folder:  # of this rank
        wavs = [f"{folder}/{number:05}.wav" for number in range(len(signals))]
        for wav, signal in zip(wavs, signals, strict=True):
            soundfile.write(wav, signal, rate, subtype="FLOAT")
        battery = Manifest(ids=[Path(wav).stem for wav in wavs], wavs=wavs,
                           texts=[trial.reference for trial in trials] + [""] * len(noises),
                           durations=[len(signal) / rate for signal in signals])
        with searching(brain):
            transcribe(request, recipe, brain, battery, "behaviour")
    hypotheses = {row.id: row.hypothesis for row in brain.all_rows()}
    texts = [hypotheses[name] for name in battery.ids]
    options = request.label().strip("-")
    behaviour = Behaviour.of(trials, texts[:len(trials)], rate, f", with {options}" if options else "")
    noise_table = words_in_noises([name for name, _ in noises], [len(signal) / rate for _, signal in noises],
                                  texts[len(trials):])
    if noise_table is None:
        return behaviour
    return Behaviour([*behaviour.tables, noise_table], behaviour.figures)


def _clips(manifest: Manifest, rate: int) -> list[tuple[np.ndarray, str]]:
    """Read utterances spread over the manifest, each with its text, and others for those that can't be read."""
    clips: list[tuple[np.ndarray, str]] = []
    for row_number in range(0, len(manifest), max(1, len(manifest) // CLIPS)):
        if len(clips) == CLIPS:
            break
        row = manifest.row(row_number)
        with contextlib.suppress(AudioError):
            signal = read_utterance(row.wav, row.start, row.duration, sample_rate=rate, remote=manifest.remote)
            clips.append((signal, row.text))
    return clips


def _user_noises(recipe: Recipe, rate: int) -> list[tuple[str, np.ndarray]]:
    """Read stretches of the recordings of ``nonspeech``, in which somebody may speak, each with its name."""
    nonspeech = vars(recipe.keys).get("nonspeech")
    paths: list[str] = []
    if nonspeech is not None and nonspeech.files is not None:
        with contextlib.suppress(SbkitError):  # the folder may be gone or empty by now
            paths = nonspeech.files.check()
    # Each recording is tried in one place, and long ones in more while there is room: the first places come first.
    rng = np.random.default_rng(0)
    stretches: list[tuple[int, str, float, float]] = []  # turn, path, start, seconds of the recording
    for path in paths[::max(1, math.ceil(len(paths) / NOISES))]:
        with contextlib.suppress(AudioError):
            seconds = audio_info(path)[0]
            starts = rng.permutation(np.arange(0.0, max(seconds - 1, SECONDS), SECONDS)).tolist()
            stretches += [(turn, path, start, seconds) for turn, start in enumerate(starts)]
    noises = []
    for _, path, start, seconds in sorted(stretches)[:NOISES]:
        with contextlib.suppress(AudioError):
            signal = read_audio(path, start=start, duration=min(SECONDS, seconds - start), sample_rate=rate)
            noises.append((path if seconds <= SECONDS else f"{path}, from {start:.0f} s", signal))
    return noises
