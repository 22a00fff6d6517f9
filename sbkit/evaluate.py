"""What is done with a run's checkpoints afterwards: score any on any corpus, replay a step that went wrong."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write, table

logger = logging.getLogger(__name__)

FOLDER = "evaluations"  # in the run's folder
OVER_LIMIT = 1  # exit code
_TEST = ("test", "testing")  # what a corpus may call the split that is scored unless another is named
_ONE_FILE = (".csv", ".json", ".jsonl", ".parquet")
_SCORED = ("source", "manifest", "checkpoints", "decoder", "precision")  # of result.json: what makes it another result


@dataclass(frozen=True)
class Request:
    """What is to be scored.

    run : the output folder of a training
    on : a corpus of any kind; None for the run's own
    split : one of the corpus's; None for its test split, or the only one it has
    checkpoints : ``best``, ``last``, names of checkpoints
    average : score the mean of this many instead
    max_wer : per cent; more than this makes the exit code 1
    name : of the results, which the checkpoint's and the search's options follow; by default the corpus's
    out : the folder that results go to, by default ``RUN/evaluations``
    lm : a language model (ARPA or KenLM's binary) to search with
    tune_lm : find the two weights below on the run's dev split first
    lm_weight, word_score, beam : see ``sbkit.decode.beam.BeamSearch``. Where neither these nor a language model,
        hot words or nbest are given, the transcripts are each frame's best, or what the recipe's decoder finds
    hot_words : phrases to expect, each with ``=BOOST`` behind it or not; ``@FILE`` has one in each line
    nbest : transcripts of each utterance to write into nbest.jsonl, with their scores
    joint : search with the attention decoder and CTC together
    ctc_weight : of CTC in that search
    """

    run: Path
    on: str | None = None
    split: str | None = None
    checkpoints: Sequence[str] = ("best",)
    average: int = 1
    max_wer: float | None = None
    name: str | None = None
    out: Path | None = None
    lm: str | None = None
    tune_lm: bool = False
    lm_weight: float | None = None
    word_score: float | None = None
    beam: int | None = None
    hot_words: Sequence[str] = ()
    nbest: int | None = None
    joint: bool = False
    ctc_weight: float | None = None
    device: str | None = None
    precision: str | None = None
    max_batch_seconds: float | None = None
    workers: int | None = None

    @property
    def folder(self) -> Path:
        return self.out or self.run / FOLDER


class Scored(NamedTuple):
    """What came out for one checkpoint; ``facts`` is what result.json says."""

    rows: list[Any]
    words: Any
    characters: Any
    facts: dict[str, Any]
    replaced: str = ""  # the command of another result that had the same name


def evaluate(request: Request) -> int:
    """Score, write the files, print a table; the exit code says whether ``max_wer`` was kept."""
    from sbkit.system.environment import check_torch_pair

    check_torch_pair()
    from sbkit.runs import restore
    from sbkit.tasks import searches
    from sbkit.train import device as devices
    from sbkit.train.distributed import ranks

    ranks.init(devices.resolve(request.device))
    try:
        with ranks.failing_together():
            hparams = restore.read_run(request.run)
            name, path, remote = ranks.run_on_main(_corpus, request, hparams)
            brain = restore.build(hparams, request.device, eval_precision=request.precision)
            brain.decoder = searches.build(request, hparams)
            results = list(_results(request, hparams, brain, name, path, remote))
            return _tell(results, request.max_wer) if ranks.is_main() else 0
    finally:
        ranks.shutdown()


def replay(folder: Path, device: str | None = None) -> str:
    """Run the step that ``folder`` (a culprit's, or a run's) tells of once more; what each layer gave, as text."""
    from sbkit.runs import restore
    from sbkit.train.diagnose import replay as culprits

    culprit = culprits.find(folder)
    saved = culprits.read(culprit)
    hparams = restore.read_run(culprit.parent.parent)
    brain = restore.build(hparams, device, precision=saved["precision"])
    if brain.checkpointer.list_checkpoints():  # the culprit's own weights, where they were kept, come over these
        restore.take_weights(brain, restore.LAST)
    return culprits.replay(brain, culprit)


# ---------------------------------------------------------------- the corpus


def _corpus(request: Request, hparams: dict[str, Any]) -> tuple[str, Path, Any]:
    """What the results are called, the manifest to score, and which URLs in it may be opened."""
    own = hparams.get("corpus")
    if own is None or "tokenizer" not in hparams:
        raise SbkitError(f"the recipe of {request.run} names no corpus or no tokenizer",
                         hint="sbkit evaluate is for runs of sbkit train")
    split = request.split or "test"
    if request.on is None and own.manifest_path(split).is_file():
        name, corpus = request.name or split, own
    else:
        split = "test"
        name, corpus = _prepare(request, own, own.source if request.on is None else request.on)
    _tell_of_strange_characters(hparams["tokenizer"], corpus.manifest(split).texts)
    return name, corpus.manifest_path(split), corpus.remote


def _prepare(request: Request, own: Any, source: Any) -> tuple[str, Any]:
    """A corpus whose test split is the one to score: the run's own by its options, another with texts by its rules."""
    from sbkit.data.corpus import Corpus

    title = request.name or (Path(str(source).split("?")[0]).name.split(".")[0] if source else "demo")
    if isinstance(source, str) and source.endswith(_ONE_FILE):
        source = {"test": source}
    corpora = request.folder / "corpora"

    def corpus_of(split: str, folder: Path) -> Corpus:
        if request.on is None:
            return own.only_split(split, folder)
        return Corpus(source, own.language, folder, splits={"test": split}, text=own.text, only=("test",),
                      schemes=own.schemes, url_megabytes=own.url_megabytes, url_seconds=own.url_seconds)

    split = request.split
    with _naming_the_run(request):
        if split is None:
            names = corpus_of("test", corpora / title).names()
            split = next((name for name in names if name.lower() in _TEST), names[0] if len(names) == 1 else None)
            if split is None:
                raise SbkitError(f"{source} has no test split (it has {', '.join(names) or 'none'})",
                                 hint="choose one with --split")
        if split.lower() not in _TEST and request.name is None:
            title += f"-{split}"
        corpus = corpus_of(split, corpora / title)
        with _writing(corpora):
            corpus.prepare()
    print(corpus.summary(), file=sys.stderr)
    return title, corpus


@contextlib.contextmanager
def _naming_the_run(request: Request) -> Iterator[None]:
    """Whose corpus it is where that was not said in the command."""
    try:
        yield
    except SbkitError as error:
        if request.on is not None:
            raise
        raise SbkitError(f"the corpus of {request.run}: {error.message}", hint=error.hint) from error


def _tell_of_strange_characters(tokenizer: Any, texts: Sequence[str]) -> None:
    strange = tokenizer.coverage(texts)
    if strange:
        listed = ", ".join(f"{char!r} x {times}" for char, times in strange.most_common(10))
        logger.warning("The model cannot write %d characters of these texts, so each is an error: %s",
                       strange.total(), listed)


# ---------------------------------------------------------------- scoring


def _results(request: Request, hparams: dict[str, Any], brain: Any, name: str, path: Path,
             remote: Any) -> Iterator[Scored]:
    from sbkit.data.manifest import Manifest
    from sbkit.runs import restore
    from sbkit.tasks import searches
    from sbkit.train.distributed import ranks

    manifest = Manifest.read(path, remote=remote)
    for choice in request.checkpoints:
        used = [Path(ckpt.path).name for ckpt in restore.take_weights(brain, choice, request.average)]
        label = choice if choice in (restore.BEST, restore.LAST) else used[0]
        if request.average > 1:
            label += f"-mean-of-{len(used)}"
        tuned = searches.tune(brain, hparams, lambda dev: _hear(request, hparams, brain, dev, "dev")) \
            if request.tune_lm else {}
        label += searches.label(request)
        scored = _score(request, hparams, brain, manifest, label)
        if brain.decoder is not None:
            scored.facts["decoder"] = {**searches.describe(brain.decoder), **tuned}
        scored.facts.update(
            run=str(request.run.resolve()), corpus=request.on, source=_source(request.on),
            manifest=str(path.resolve()), checkpoint=label, checkpoints=used,
            folder=str(request.folder / f"{name}-{label}"))
        yield scored._replace(replaced=ranks.run_on_main(_write, scored, manifest))


def _score(request: Request, hparams: dict[str, Any], brain: Any, manifest: Any, label: str) -> Scored:
    """Transcribe the manifest on all ranks; every rank gets all of it."""
    from sbkit.score.significance import interval
    from sbkit.tasks.asr import score
    from sbkit.train.distributed import ranks

    rows, damaged, took = _transcribe(request, hparams, brain, manifest, label)
    words, characters = score(rows)
    if not len(words):
        raise SbkitError(f"none of the {len(manifest)} utterances has a reference, so there is nothing to score",
                         hint="a corpus to score on needs transcripts")
    seconds = float(manifest.durations.sum(dtype="float64")) - sum(
        float(manifest.durations[i]) for i, name in enumerate(manifest.ids) if name in damaged)
    facts = {
        "utterances": len(words), "hours": seconds / 3600, "WER": words.rate, "WER_interval": interval(words),
        "CER": characters.rate, "CER_interval": interval(characters), **_counts(words), "seconds": took,
        "real_time_factor": took / seconds, "devices": ranks.world_size(), "device": str(brain.device),
        "precision": brain.eval_precision, "damaged": damaged,
        "without_reference": [row.id for row in rows if not row.reference.split()],
    }
    return Scored(rows, words, characters, facts)


def _counts(words: Any) -> dict[str, Any]:
    summary = words.summary()
    return {name: summary[name] for name in ("SER", "insertions", "deletions", "substitutions", "num_scored_tokens")}


def _transcribe(request: Request, hparams: dict[str, Any], brain: Any, manifest: Any, label: str,
                ) -> tuple[list[Any], dict[str, str], float]:
    """All ranks' rows, what could not be read, and the seconds that the slowest rank took, reading included."""
    from sbkit.tasks import searches
    from sbkit.train.distributed import ranks

    ranks.meet("ready")
    began = time.monotonic()
    with searches.over_all(brain):
        damaged = _hear(request, hparams, brain, manifest, label)
    took = max(ranks.gather_objects(time.monotonic() - began))
    everywhere = {name: reason for part in ranks.gather_objects(damaged) for name, reason in part.items()}
    return brain.all_rows(), everywhere, took


def _hear(request: Request, hparams: dict[str, Any], brain: Any, manifest: Any, label: str) -> dict[str, str]:
    """One pass over this rank's share of a manifest: leaves ``brain.rows``, gives what could not be read."""
    import torch
    from speechbrain.core import Stage

    from sbkit.data.loader import EvalLoader
    from sbkit.train.distributed import ranks
    from sbkit.train.evaluation import evaluate

    loader = EvalLoader(
        manifest, hparams["tokenizer"], max_batch_seconds=request.max_batch_seconds or _batch_seconds(hparams),
        rank=ranks.rank(), world=ranks.world_size(), pin_memory=torch.device(brain.device).type == "cuda",
        workers=hparams.get("num_workers", 2) if request.workers is None else request.workers,
    )
    with loader, torch.no_grad():
        brain.on_stage_start(Stage.TEST)
        evaluate(brain, loader, Stage.TEST, label, show=ranks.is_main())
    return loader.damaged


def _batch_seconds(hparams: dict[str, Any]) -> float:
    batching = hparams.get("batching")
    if batching is None:
        raise SbkitError("the recipe has no batching", hint="say what a device holds at once: --max-batch-seconds 120")
    return batching.max_batch_seconds


# ---------------------------------------------------------------- results


def _write(scored: Scored, manifest: Any) -> str:
    """All files of a result; gives how another result was made that had been there."""
    from sbkit.score import utterances
    from sbkit.score.report import write_report
    from sbkit.score.report.data import EVALUATED, RESULT
    from sbkit.system.environment import command, describe
    from sbkit.tasks import searches

    folder = Path(scored.facts["folder"])
    replaced = _another(folder / RESULT, scored.facts)
    with _writing(folder):
        scored.words.write(folder / "wer.txt")
        scored.characters.write(folder / "cer.txt")
        utterances.write(folder / EVALUATED, utterances.join(scored.rows, manifest))
        if "decoder" in scored.facts:
            searches.write_nbest(folder / searches.NBEST, scored.rows)
        with atomic_write(folder / RESULT) as out:
            json.dump({**scored.facts, "command": command(), "environment": describe()}, out, indent=1,
                      ensure_ascii=False)
        write_report(folder, title=f"{Path(scored.facts['run']).name} on {folder.name}", remote=manifest.remote)
    return replaced


def _source(on: str | None) -> str | None:
    """A corpus by one name, however it was given."""
    return str(Path(on).resolve()) if on and Path(on).exists() else on


def _another(path: Path, facts: dict[str, Any]) -> str:
    """The command and the rate of the result that is there, if it's not of the same checkpoint, corpus and search."""
    try:
        there = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if all(there.get(key) == facts.get(key) for key in _SCORED):
        return ""
    return f"{there.get('command')} (WER {there.get('WER', float('nan')):.2f} %)"


@contextlib.contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise SbkitError(f"cannot write into {folder}: {error.strerror}",
                         hint="choose another place with --out") from error


def _tell(results: Sequence[Scored], max_wer: float | None) -> int:
    print(table(
        ["checkpoint", "utterances", "hours", "WER %", "95 % interval", "CER %", "95 % interval", "real-time factor"],
        [[facts["checkpoint"], facts["utterances"], facts["hours"], facts["WER"], _range(facts["WER_interval"]),
          facts["CER"], _range(facts["CER_interval"]), f"{facts['real_time_factor']:.4f}"]
         for facts in (scored.facts for scored in results)]))
    for scored in results:
        print(scored.facts["folder"])
        if scored.replaced:
            print(f"  replaced the result of {scored.replaced}; another --name keeps both")
        for what, ids in (("could not be read", list(scored.facts["damaged"])),
                          ("have no reference", scored.facts["without_reference"])):
            if ids:
                print(f"  not scored: {len(ids)} utterances that {what}: {', '.join(ids[:5])}")
    over = [scored.facts for scored in results if max_wer is not None and scored.facts["WER"] > max_wer]
    for facts in over:
        print(f"{facts['checkpoint']}: a WER of {facts['WER']:.2f} % is more than --max-wer {max_wer:g}",
              file=sys.stderr)
    return OVER_LIMIT if over else 0


def _range(bounds: Sequence[float]) -> str:
    return f"{bounds[0]:.2f} to {bounds[1]:.2f}"
