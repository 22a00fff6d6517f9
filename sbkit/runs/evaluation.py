"""Evaluation of a run: the request, the corpus to score, the scoring on all ranks, the folder with the results."""

from __future__ import annotations

import contextlib
import json
import math
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import soundfile
import torch
from speechbrain.core import Stage

from sbkit.data.audio import AudioError, audio_info, read_audio, read_utterance
from sbkit.data.columns import BatchColumns, Declared
from sbkit.data.corpus import Corpus
from sbkit.data.loader import EvalLoader
from sbkit.data.manifest import Manifest
from sbkit.data.remote import Remote
from sbkit.data.sources import ONE_SPLIT, Named, Source
from sbkit.data.splits import ALIASES
from sbkit.errors import SbkitError
from sbkit.recipe.load import Recipe
from sbkit.runs import trained_on
from sbkit.runs.evaluation_options import searching
from sbkit.runs.evaluation_request import EvaluateRequest
from sbkit.score.behaviour import SECONDS, Behaviour, silences, speeches, words_in_noises
from sbkit.score.report import write_report
from sbkit.score.results import Results
from sbkit.score.run_files import CORPORA, RESULT
from sbkit.system import disk
from sbkit.system.console import atomic_write, stored_json
from sbkit.system.environment import command, describe
from sbkit.train.distributed import ranks

if TYPE_CHECKING:
    from sbkit.compat.brain import Brain

#: Utterances of a test set that the battery of a recogniser's behaviour changes.
BEHAVIOUR_CLIPS = 20
#: Recordings of the user's noises in which it looks for speech, or stretches of long ones, at most.
BEHAVIOUR_NOISES = 100
_TEST = ("test", "testing")  # names of the split that is scored by default
_SCORED = ("source", "manifest", "checkpoints", "decoder", "precision")  # keys of result.json that identify a result


class CheckpointResult(NamedTuple):
    """The result for one checkpoint; ``facts`` is the content of result.json."""

    results: Results
    facts: dict[str, Any]
    metric: str
    replaced: str = ""  # the command of a different result that had the same name


def corpus(request: EvaluateRequest, recipe: Recipe) -> tuple[str, Path, Remote]:
    """The name of the results, the manifest to score, and the allowed URLs in it."""
    own = recipe.keys.corpus
    if (request.on or "").startswith("{"):
        raise SbkitError(f"--data_folder: {request.on} is a mapping, and one split is scored",
                         hint="name its list: --data_folder test.csv")
    split = request.split or "test"
    as_it_was = request.on is None and request.data_root is None
    if request.split and as_it_was and not own.manifest_path(split).is_file() and split not in own.names():
        split = next((name for name, aliases in ALIASES.items() if split.lower() in aliases), split)
    if as_it_was and own.manifest_path(split).is_file():
        trained_on.check(request.run, own, split)
        name, corpus = request.name or split, own
    else:
        split = "test"
        source = own.source if request.on is None else request.on
        name, corpus = prepare(request, own, source, recipe.task.needs_text(), recipe.task.columns)
    recipe.task.check_manifest(recipe.keys, split, corpus.manifest(split))
    return name, corpus.manifest_path(split), corpus.remote


def prepare(request: EvaluateRequest, own: Corpus, source: Named | Source | None, needs_text: bool = True,
            columns: Declared | None = None) -> tuple[str, Corpus]:
    """Prepare the split to score: the run's own, or another corpus's with texts normalised by the run's rules."""
    title = request.name or (Path(str(source).split("?")[0]).name.split(".")[0] if source else "demo")
    if isinstance(source, Source):
        title = request.name or source.kind
    if isinstance(source, str) and source.endswith(ONE_SPLIT):
        source = {"test": source}
    corpora = request.folder / CORPORA

    def corpus_of(split: str, folder: Path) -> Corpus:
        if request.on is None and request.data_root is None:
            return own.only_split(split, folder)
        root: str | Path | None = request.data_root
        if root is None and _is_of(request.on or "", own):
            root = own.data_root
        own_names = {role: name for role, name in own.columns.items() if role in (columns or {})}
        return Corpus(source, own.language, folder, splits={"test": split}, text=own.text, only=("test",),
                      columns=own_names, data_root=root, schemes=own.schemes, url_megabytes=own.url_megabytes,
                      url_seconds=own.url_seconds)

    split = request.split
    try:
        if split is None:
            names = corpus_of("test", corpora / title).names()
            # A run's own only list is what it was trained on.
            alone = names[0] if len(names) == 1 and request.on is not None else None
            split = next((name for name in names if name.lower() in _TEST), alone)
            if split is None:
                raise SbkitError(f"{source} has no test split (it has {', '.join(names) or 'none'})",
                                 hint="choose one with --split")
        if split.lower() not in _TEST and request.name is None:
            title += f"-{split}"
        corpus = corpus_of(split, corpora / title)
        with disk.writing_into(corpora, "--to"):
            corpus.prepare(needs_text=needs_text, columns=columns)
    except SbkitError as error:
        if request.on is not None:
            raise
        # The command did not name this corpus.
        raise SbkitError(f"the corpus of {request.run}: {error.message}", hint=error.hint) from error
    print(corpus.summary(), file=sys.stderr)
    return title, corpus


def _is_of(path: str, corpus: Corpus) -> bool:
    """Whether a path is one of a corpus' sources, or lies directly in one."""
    real = os.path.realpath(path)
    sources = corpus.source.values() if isinstance(corpus.source, Mapping) else [corpus.source]
    real_sources = {os.path.realpath(source) for source in sources if isinstance(source, str)}
    return real in real_sources or os.path.dirname(real) in real_sources


def score(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str) -> CheckpointResult:
    """Score the manifest on all ranks; every rank gets the whole result."""
    device = torch.device(brain.device)
    # The first utterance waits for what is done once, such as loading kernels: no part of the real-time factor.
    with torch.random.fork_rng([device] if device.type == "cuda" else []), searching(brain):
        first = manifest.select(np.arange(min(ranks.world_size(), len(manifest))))
        transcribe(replace(request, workers=0), recipe, brain, first, label, show=False)
    ranks.barrier("ready")
    began = time.monotonic()
    with searching(brain):
        damaged, loss = transcribe(request, recipe, brain, manifest, label)
    took = max(ranks.gather_objects(time.monotonic() - began))
    damaged = {name: reason for part in ranks.gather_objects(damaged) for name, reason in part.items()}
    results = brain.tested_results(brain.all_rows(), loss, damaged)
    results.check()
    seconds = float(manifest.durations.sum(dtype="float64")) - sum(
        float(manifest.durations[i]) for i, name in enumerate(manifest.ids) if name in damaged)
    facts = {
        "utterances": results.utterances, "hours": seconds / 3600, **results.facts(), "seconds": took,
        **({"parts": {part: each.facts() for part, each in results.parts.items()}} if results.parts else {}),
        "real_time_factor": took / seconds, "devices": ranks.world_size(), "device": str(brain.device),
        "precision": brain.eval_precision, "damaged": damaged,
    }
    return CheckpointResult(results, facts, brain.metric.name)


def transcribe(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, label: str,
               show: bool = True) -> tuple[dict[str, str], float]:
    """Score this rank's share: fills ``brain.rows``, returns the unreadable recordings and the loss."""
    keys = recipe.keys
    if not request.max_batch_seconds and keys.batching is None:
        raise SbkitError("the recipe has no batching", hint="set the audio in one batch: --max-batch-seconds 120")
    loader = EvalLoader(
        manifest, recipe.task.tokenizer(keys), columns=BatchColumns(recipe.task.columns, keys),
        augment=keys.test_augment,
        max_batch_seconds=request.max_batch_seconds or keys.batching.max_batch_seconds,
        rank=ranks.rank(), world=ranks.world_size(), pin_memory=torch.device(brain.device).type == "cuda",
        workers=keys.num_workers if request.workers is None else request.workers, sample_rate=keys.sample_rate,
    )
    with loader, torch.no_grad():
        brain.open_stage(Stage.TEST)
        loss = brain.pass_over(loader, Stage.TEST, label, show=show and ranks.is_main())
    return loader.damaged, loss


def try_behaviour(request: EvaluateRequest, recipe: Recipe, brain: Brain, manifest: Manifest, rate: int) -> Behaviour:
    """Try the battery of ``sbkit.score.behaviour`` on all ranks: silence, and changed utterances of the manifest."""
    clips = _behaviour_clips(manifest, rate)
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


def _behaviour_clips(manifest: Manifest, rate: int) -> list[tuple[np.ndarray, str]]:
    """Read utterances spread over the manifest, each with its text, and others for those that can't be read."""
    clips: list[tuple[np.ndarray, str]] = []
    for row_number in range(0, len(manifest), max(1, len(manifest) // BEHAVIOUR_CLIPS)):
        if len(clips) == BEHAVIOUR_CLIPS:
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
    for path in paths[::max(1, math.ceil(len(paths) / BEHAVIOUR_NOISES))]:
        with contextlib.suppress(AudioError):
            seconds = audio_info(path)[0]
            starts = rng.permutation(np.arange(0.0, max(seconds - 1, SECONDS), SECONDS)).tolist()
            stretches += [(turn, path, start, seconds) for turn, start in enumerate(starts)]
    noises = []
    for _, path, start, seconds in sorted(stretches)[:BEHAVIOUR_NOISES]:
        with contextlib.suppress(AudioError):
            signal = read_audio(path, start=start, duration=min(SECONDS, seconds - start), sample_rate=rate)
            noises.append((path if seconds <= SECONDS else f"{path}, from {start:.0f} s", signal))
    return noises


def write(scored: CheckpointResult, manifest: Manifest) -> str:
    """Write all files of a result; returns the command and rate of one of another checkpoint, corpus or search that it
    replaced."""
    folder = Path(scored.facts["folder"])
    previous = stored_json(folder / RESULT)
    replaced = ""
    if previous and any(previous.get(key) != scored.facts.get(key) for key in _SCORED):
        replaced = f"{previous.get('command')} ({scored.metric} {previous.get(scored.metric, float('nan')):.2f})"
    with disk.writing_into(folder, "--to"):
        folder.mkdir(parents=True, exist_ok=True)
        scored.results.write(folder, manifest)
        with atomic_write(folder / RESULT) as out:
            json.dump({**scored.facts, "command": command(), "environment": describe()}, out, indent=1,
                      ensure_ascii=False)
        write_report(folder, title=f"{Path(scored.facts['run']).name} on {folder.name}", remote=manifest.remote)
    return replaced


def source(on: str | None) -> str | None:
    """Normalise the name or path of a corpus."""
    return str(Path(on).resolve()) if on and Path(on).exists() else on
