"""``sbkit evaluate``: score any checkpoint of a run on any corpus."""

from __future__ import annotations

import argparse
import contextlib
import operator
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.commands.options import (
    RUNS_SCRIPT,
    add_average,
    add_json,
    add_search,
    chunk_sizes,
    print_json,
    request_of,
    require_language_model,
    require_run,
)
from sbkit.errors import SbkitError, printable
from sbkit.score.weights import BEST, ChosenWeights
from sbkit.system.console import counted, table
from sbkit.system.environment import check_torch

if TYPE_CHECKING:
    from sbkit.data.manifest import Manifest
    from sbkit.recipe.load import Recipe
    from sbkit.runs.evaluation import CheckpointResult
    from sbkit.runs.evaluation_request import EvaluateRequest
    from sbkit.runs.scored_corpus import ScoredCorpus
    from sbkit.tasks.task import Task

OVER_LIMIT = 1  # exit code


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = RUNS_SCRIPT
    parser.add_argument("run", metavar="RUN", type=Path, help="the output folder of a run")
    parser.add_argument("--data_folder", "--data", dest="on", metavar="CORPUS",
                        help="a folder, list or name that data_folder takes (default: the run's own corpus)")
    parser.add_argument("--data_root", "--corpus.data_root", dest="data_root", metavar="FOLDER",
                        help="where relative paths of its lists begin, and what $data_root in them means")
    parser.add_argument("--split", help="split of the corpus (default: test)")
    parser.add_argument("--checkpoint", nargs="+", default=[BEST], metavar="CKPT", dest="checkpoints",
                        help="best, last, or names of checkpoints; each is a row of the table")
    add_average(parser, "score the mean of the weights of the N best (or last) checkpoints")
    parser.add_argument("--max-wer", type=float, metavar="PERCENT", help="exit with 1 if a WER is higher")
    for option, field, what in (("--max", "max_values", "above"), ("--min", "min_values", "below")):
        parser.add_argument(option, dest=field, action="append", default=[], type=_bound, metavar="NAME=VALUE",
                            help=f"exit with 1 if this figure of the results is {what} VALUE (repeatable)")
    parser.add_argument("--name", help="prefix of the results folder's name (default: the corpus)")
    parser.add_argument("--to", dest="out", type=Path, metavar="FOLDER",
                        help="folder for the results (default: RUN/evaluations)")
    add_search(parser)
    parser.add_argument("--tune-lm", action="store_true",
                        help="first tune --lm-weight and --word-score on the dev split")
    parser.add_argument("--nbest", type=int, metavar="N", help="hypotheses per utterance to write to nbest.jsonl")
    parser.add_argument("--joint", action="store_true", help="search with the attention decoder and CTC together")
    parser.add_argument("--ctc-weight", type=float, metavar="W", help="weight of CTC in the joint search (0.4)")
    parser.add_argument("--chunk", type=chunk_sizes, default=(), metavar="MS,...",
                        help="score a streaming model on chunks of these milliseconds, or on whole recordings: "
                             "320,640,1280,whole")
    parser.add_argument("--behaviour", action="store_true",
                        help="also try a recogniser on what a test set doesn't have: silence of all kinds, noise, "
                             "telephones, cut and joined speech; --max behaviour.silence=1 limits hallucinated words "
                             "per minute")
    parser.add_argument("--recogniser", metavar="BUNDLE",
                        help="a recogniser's bundle, which transcribes the output of a codec or a voice")
    parser.add_argument("--device", help="cpu, cuda or cuda:N (default: a GPU, if there is one)")
    parser.add_argument("--precision", choices=["fp32", "bf16", "fp16"])
    parser.add_argument("--max-batch-seconds", type=float, metavar="S", help="audio in one batch on a device")
    parser.add_argument("--workers", type=int, help="number of processes that read audio")
    add_json(parser)


def _bound(text: str) -> tuple[str, float]:
    name, _, value = text.rpartition("=")
    with contextlib.suppress(ValueError):
        if name:
            return name, float(value)
    raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE: write EER=5")


def _refuse_missing_inputs(args: argparse.Namespace) -> None:
    """Refuse files and folders that aren't there, before torch is imported and the run is opened, which takes seconds.
    """
    from sbkit.data.sources import ONE_SPLIT, check_exists
    from sbkit.decode import search_options
    from sbkit.export import layout

    require_run(args.run)
    if args.on is not None and not args.on.startswith("{"):  # a mapping is refused later, by what it would need
        check_exists({"test": args.on} if args.on.endswith(ONE_SPLIT) else args.on)
    require_language_model(args.lm)
    search_options.hot_words(args.hot_words)
    if args.recogniser is not None:
        layout.read(args.recogniser)


def run(args: argparse.Namespace) -> int:
    _refuse_missing_inputs(args)
    check_torch()
    from sbkit.compat.script_record import is_of_script
    from sbkit.runs.evaluation_request import EvaluateRequest

    request = request_of(EvaluateRequest, args)
    if is_of_script(args.run):
        return evaluate_script(request, as_json=args.json)
    return evaluate(request, as_json=args.json)


def evaluate_script(request: EvaluateRequest, as_json: bool = False) -> int:
    """Score the run of a script on its own test set; the exit code is that of ``evaluate``."""
    from sbkit.tasks.ctc.script import evaluate_run

    results = evaluate_run(request)
    if not as_json:
        _print_results(results, request)
        print(f"references: {results[0].facts['references']}")
    return _judge(results, request, as_json)


def _judge(results: Sequence[CheckpointResult], request: EvaluateRequest, as_json: bool) -> int:
    """Say which bounds were missed, print JSON if asked, and return the exit code."""
    missed = _missed_bounds(results, request)
    for line in missed:
        print(line, file=sys.stderr)
    if as_json:
        print_json({"results": [scored.facts for scored in results], "missed": missed})
    return OVER_LIMIT if missed else 0


def evaluate(request: EvaluateRequest, as_json: bool = False) -> int:
    """Score, write the files and print a table, or JSON; the exit code says whether all bounds were met."""
    from sbkit.infer.bundles import BundleLoader
    from sbkit.runs import evaluation_options, restore, scored_corpus
    from sbkit.train import device as devices
    from sbkit.train.distributed import ranks

    ranks.init(devices.resolve(request.device))
    try:
        with ranks.failing_together():
            recipe = restore.read_run(request.run)
            corpus = ranks.run_on_main(scored_corpus.find, request, recipe)
            ranks.run_on_main(restore.warn_unfinished, recipe)
            transcribe = evaluation_options.open_recogniser(recipe, BundleLoader(), request.recogniser)
            brain = restore.build(recipe, request.device, transcribe=transcribe, eval_precision=request.precision)
            evaluation_options.use_options(brain, request)
            results = _score_all(request, recipe, brain, corpus)
            if not ranks.is_main():
                return 0
            if not as_json:
                _print_results(results, request)
            return _judge(results, request, as_json)
    finally:
        ranks.shutdown()


def _score_all(request: EvaluateRequest, recipe: Recipe, brain: Task, corpus: ScoredCorpus) -> list[CheckpointResult]:
    """Score all requested weights on a corpus, and write what each scores."""
    from sbkit.data.manifest import Manifest
    from sbkit.runs import restore

    manifest = Manifest.read(corpus.manifest, remote=corpus.remote)
    for weights in request.weights:
        if weights.by_name:
            restore.find_checkpoint(recipe.keys.checkpointer, weights.checkpoint)  # before another is scored for hours
    return [_score(request, recipe, brain, weights, manifest, corpus) for weights in request.weights]


def _score(request: EvaluateRequest, recipe: Recipe, brain: Task, weights: ChosenWeights, manifest: Manifest,
           corpus: ScoredCorpus) -> CheckpointResult:
    """Score some of the run's weights, and write the results.

    manifest : of the corpus
    """
    from sbkit.runs import behaviour, evaluation, evaluation_options, restore, scored_corpus
    from sbkit.train.distributed import ranks

    checkpoints = [Path(checkpoint.path).name for checkpoint in restore.take_weights(brain, weights)]
    tuned: dict[str, Any] = {}
    if request.tune_lm:
        tuned = evaluation_options.tune_search(
            brain, recipe.keys.corpus.manifest("dev"),
            lambda dev: evaluation.transcribe(request, recipe, brain, dev, "dev"))
    label = weights.label(checkpoints[0], len(checkpoints)) + request.label()
    scored = evaluation.score(request, recipe, brain, manifest, label)
    if request.behaviour:
        found = behaviour.try_behaviour(request, recipe, brain, manifest, recipe.keys.sample_rate)
        scored.results.tables += found.tables
        scored.results.stats.update(found.figures)
        scored.facts.update(behaviour=found.figures, tables=[vars(one) for one in found.tables])
    search = {**evaluation_options.search_facts(brain), **tuned}
    if search:
        scored.facts["decoder"] = search
    scored.facts.update(
        run=str(request.run.resolve()), corpus=request.on, source=scored_corpus.named(request.on),
        manifest=str(corpus.manifest.resolve()), checkpoint=label, checkpoints=checkpoints,
        folder=str(request.folder / f"{corpus.name}-{label}"))
    return scored._replace(replaced=ranks.run_on_main(evaluation.write, scored, manifest))


def _print_results(results: Sequence[CheckpointResult], request: EvaluateRequest) -> None:
    """Print a table of all results, and below it where each is and what was left out of it."""
    from sbkit.score.run_files import REPORT

    _print_table(results, request)
    for scored in results:
        facts = scored.facts
        if request.behaviour:
            print(f"\n{facts['checkpoint']}\n{scored.results.text()}\n")
        print(f"{facts['folder']}  (its page: {REPORT})")
        for part, of_part in scored.results.parts.items():
            print(f"  {part}: {of_part.headline()}")
        if scored.replaced:
            print(f"  replaced the result of {scored.replaced}; another --name keeps both")
        _print_left_out("that could not be read", list(facts["damaged"]))
        _print_left_out("without a reference", facts.get("without_reference") or [])


def _print_table(results: Sequence[CheckpointResult], request: EvaluateRequest) -> None:
    columns = [name for name, _ in results[0].results.table_rows()[0]]
    rows = []
    for scored in results:
        facts = scored.facts
        # Values that the lines of a checkpoint share are only in the first of them.
        weights = facts["checkpoint"].removesuffix(request.label())
        shared = [weights + request.search_label(), facts["utterances"], facts["hours"]]
        factor = f"{facts['real_time_factor']:.4f}"
        for line in scored.results.table_rows():
            rows.append([*shared, *(value for _, value in line), factor])
            shared = [""] * len(shared)
            factor = ""
    print(table(["checkpoint", "utterances", "hours", *columns, "real-time factor"], rows))


def _print_left_out(what: str, ids: Sequence[str]) -> None:
    if ids:
        print(f"  not scored: {counted(len(ids), 'utterance')} {what}: {printable(', '.join(ids[:5]))}")


def _missed_bounds(results: Sequence[CheckpointResult], request: EvaluateRequest) -> list[str]:
    """Return a line for each figure that is not within the bounds of the command line."""
    bounds = [(name, bound, "more", operator.le) for name, bound in request.max_values]
    bounds += [(name, bound, "less", operator.ge) for name, bound in request.min_values]
    if request.max_wer is not None:
        bounds.append(("WER", request.max_wer, "more", operator.le))

    missed = []
    for name, bound, beyond, is_within in bounds:
        if not results[0].results.figures(name):
            raise SbkitError("no-such-figure", f"there is no {name} to compare with {bound:g}",
                             hint=f"the results have {', '.join(results[0].results.stats)}", value=name)
        for scored in results:
            for part, value in scored.results.figures(name).items():
                if not is_within(value, bound):  # NaN is within none
                    of_part = f" {part}" if part else ""
                    missed.append(f"{scored.facts['checkpoint']}: {name} is {value:.4g}{of_part}, {beyond} than "
                                  f"{bound:g}")
    return missed
