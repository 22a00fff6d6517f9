"""``sbkit improve``: train a run on with what people corrected, and publish the model if it got better."""

from __future__ import annotations

import argparse
import hashlib
import os
import shlex
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.commands.options import RUNS_CODE, require_run, share
from sbkit.data import publish
from sbkit.errors import SbkitError

if TYPE_CHECKING:
    from sbkit.recipe.arguments import CommandLine
    from sbkit.score.report.data import RunData

#: The exit code if the new model isn't published.
NOT_BETTER = 1
#: Hallucinated words per minute on non-speech that a model may write, unless it wrote as many before.
MAX_SILENCE = 1.0


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = RUNS_CODE
    parser.add_argument("run", metavar="RUN", type=Path, help="the output folder of a recogniser's run, or a bundle, "
                        "which names the run that it was exported from")
    parser.add_argument("--with", metavar="CORRECTIONS", dest="corrections", type=Path, required=True,
                        help="the folder of sbkit serve --corrections, or any list of recordings and texts: a tenth of "
                             "its sentences is the new test")
    parser.add_argument("--to", metavar="BUNDLE", type=Path,
                        help="the bundle to publish; one that is there is replaced in one step (needed unless RUN is "
                             "a bundle, which is then replaced)")
    parser.add_argument("--work", metavar="FOLDER", type=Path,
                        help="folder for the new run and its scores (RUN-improved-..., another for other corrections)")
    parser.add_argument("--replay", type=share, default=0.5, metavar="SHARE",
                        help="share of the run's own training data in each step (0.5)")
    parser.add_argument("--set", dest="values", action="append", default=[], metavar="KEY=VALUE",
                        help="a key of the run's hyperparams.yaml for the new run, such as schedule.peak=0.001 or "
                             "batching.min_steps=500 (repeatable)")


@dataclass(frozen=True)
class _Plan:
    """What is to be improved, with what, and where the work goes."""

    run: Path
    of_bundle: bool
    """Whether that run was found by its bundle."""
    bundle: Path
    """The bundle to publish."""
    source: Path
    is_corrections: bool
    """Whether the source is a file of ``sbkit serve --corrections``; otherwise it is a corpus of any kind."""
    mark: str
    """A hash of the source: other corrections, other work. The same command resumes, and a new row begins anew from the
    old model."""
    work: Path
    replay: float
    values: Sequence[str]
    """What ``--set`` gives, as ``KEY=VALUE``."""

    @classmethod
    def of(cls, args: argparse.Namespace) -> _Plan:
        """Plan what the command line asks for; refuses what can't be."""
        run: Path = args.run
        bundle: Path | None = args.to
        of_bundle = (run / "config.json").is_file()
        if of_bundle:
            bundle = args.to or run
            run = _run_of(args.run)
        if bundle is None:
            raise SbkitError("missing-option", "--to BUNDLE is missing, because RUN is not a bundle",
                             hint="name the bundle to publish", key="--to")

        file = args.corrections / "corrections.jsonl" if args.corrections.is_dir() else args.corrections
        is_corrections = file.name == "corrections.jsonl" and file.is_file()
        source = file if is_corrections else args.corrections
        _check_arguments(args, bundle, source, is_corrections)

        content = source.read_bytes() if source.is_file() else str(source.resolve()).encode()
        mark = hashlib.sha256(content).hexdigest()[:8]
        folder = Path(os.path.abspath(run))  # "." has no name
        work = args.work or folder.with_name(f"{folder.name}-improved-{mark}")
        return cls(run, of_bundle, bundle, source, is_corrections, mark, work, args.replay, args.values)

    @property
    def new_run(self) -> Path:
        return self.work / "run"

    @property
    def recipe(self) -> Path:
        """The recipe of the new run."""
        return self.work / "recipe.yaml"

    @property
    def head(self) -> str:
        """The first line of that recipe, which says to which corrections its run is due."""
        return f"# with the corrections {self.mark}\n"

    @property
    def is_learnt(self) -> bool:
        """Whether the bundle's run is the one that these corrections have led to."""
        recipe = Path(os.path.abspath(self.run)).parent / "recipe.yaml"
        return self.of_bundle and recipe.is_file() and recipe.read_text(encoding="utf-8").startswith(self.head)

    @property
    def new_test(self) -> Path:
        """The manifest of the corrections that are kept for the test."""
        from sbkit.score.run_files import MANIFESTS

        return (self.new_run / MANIFESTS / "new" / "test.csv").resolve()


def _run_of(bundle: Path) -> Path:
    """The run that a bundle was exported from."""
    from sbkit.export import layout

    trained = layout.read(bundle).trained
    named = trained.get("run", "..")  # earlier bundles don't say it, and usually lie in their run's folder
    run = Path(os.path.normpath(bundle.resolve() / str(named)))
    if not (run / "hyperparams.yaml").is_file():
        what = f"{bundle} doesn't name the run that it was exported from"
        if "run" in trained:
            what = f"{bundle} was exported from {run}, which is not the folder of a run any more"
        raise SbkitError("run-not-found", what, file=bundle,
                         hint=f"name the run, whose training data is mixed in, and --to {shlex.quote(str(bundle))}; if "
                              "it is gone, train a new one")
    print(f"{bundle} was exported from {run}")
    return run


def _check_arguments(args: argparse.Namespace, bundle: Path, source: Path, is_corrections: bool) -> None:
    from sbkit.data.sources import check_exists
    from sbkit.export import layout

    if not source.exists():
        raise SbkitError("no-such-path", f"--with: {args.corrections} does not exist",
                         hint="sbkit serve --corrections FOLDER makes one", file=args.corrections, key="--with")
    for replaced in (bundle, publish.previous(bundle)):
        layout.FOLDER.check_replaceable(replaced)
    for value in args.values:
        if "=" not in value:
            raise SbkitError("bad-option", f"--set {value}: write KEY=VALUE", key="--set", value=value)
    if not is_corrections:
        try:
            check_exists(source)
        except SbkitError as error:
            raise SbkitError("no-corrections", f"--with: {source} has no corrections, and is not a corpus: "
                             f"{error.message}", file=source, key="--with",
                             hint="name the folder of sbkit serve --corrections, or a list of recordings and texts"
                             ) from error


def run(args: argparse.Namespace) -> int:
    from sbkit.export import layout

    # First, because a process that was killed may have left the bundle beside its place.
    publish.clean_up((args.to or args.run).resolve(), layout.FOLDER)
    require_run(args.run)
    plan = _Plan.of(args)
    if plan.is_learnt:
        print(f"{plan.bundle} has learnt these corrections already")
        return 0
    if plan.run.resolve() == plan.new_run.resolve():  # its recipe would begin from itself
        raise SbkitError("conflicting-options",
                         f"--work: {plan.work} has the run that is to be improved, {os.path.abspath(plan.run)}",
                         hint="leave --work out, or name another folder", key="--work")

    from sbkit.system.environment import check_torch

    check_torch()
    _train(plan)
    why_not = _judge(plan)
    if why_not:
        print(f"not published, so {plan.bundle} is unchanged:", *why_not, sep="\n  ", file=sys.stderr)
        return NOT_BETTER
    _publish(plan)
    return 0


# ------------------------------------------------------------ training, and what came of it


def _train(plan: _Plan) -> None:
    """Train the run on, in a process of its own; the same command resumes one that was killed."""
    import torch

    from sbkit.recipe import arguments, writing
    from sbkit.runs import restore
    from sbkit.runs.usable_corrections import write_usable
    from sbkit.score.run_files import MANIFESTS, RECIPE
    from sbkit.system import processes
    from sbkit.system.console import atomic_write
    from sbkit.system.environment import training_command

    task = restore.read_run(plan.run).task
    if not task.writes_words:
        raise SbkitError("wrong-task", f"{plan.run} is a run of {task.__name__}, which doesn't recognise words",
                         hint="corrections are of words, so name the run of a recogniser", file=plan.run)
    request = arguments.parse([str(plan.run / RECIPE), *(f"--{value}" for value in plan.values)])
    _check_values(request)

    source = plan.source
    if plan.is_corrections:
        source = plan.work / "corrections.jsonl"
        write_usable(plan.source, plan.run / MANIFESTS, source)
    tree = restore.moved_recipe(plan.run / RECIPE, plan.new_run.resolve(), request.overrides)
    with atomic_write(plan.recipe) as file:
        file.write(plan.head + writing.text(tree))

    devices = max(1, torch.cuda.device_count())
    with processes.child(training_command(_training_words(plan, source), devices)) as training:
        code = training.wait()
    if code:
        raise SbkitError("training-failed", f"the new run ended with exit code {code}: {plan.new_run}", exit_code=1,
                         hint="its messages above say why" + ("" if code == 2 else "; the same command resumes it"),
                         file=plan.new_run)


def _check_values(request: CommandLine) -> None:
    """Refuse values of ``--set`` that a check of the run's recipe complains of.

    What is wrong in the recipe itself the run has had as well.
    """
    from sbkit.recipe.check import check
    from sbkit.recipe.report import COMMAND_LINE

    report = check(request.path, request.overrides, run_opts=request.run_opts, run=False)
    for finding in [*report.errors, *report.warnings]:
        if finding.file == COMMAND_LINE:
            key = finding.key.removeprefix("--")
            raise SbkitError(finding.code, f"--set {key}: {finding.message}", key=key,
                             hint=finding.suggestion.replace("--", "--set ") or None)


def _training_words(plan: _Plan, source: Path) -> list[str]:
    """The words of ``sbkit train`` for the new run; what ``--set`` gives comes instead of what is given here."""
    from sbkit.recipe import arguments

    # A recipe as it ran has no references left: its corpus is named where it is read.
    keys = {"init_from": plan.run.resolve(), "init_tokenizer": "keep", "replay": f"{plan.replay:g}",
            "corpus.source": source.resolve(),
            **dict.fromkeys(("corpus.splits", "corpus.columns", "corpus.data_root", "corpus.exclude"), "null")}
    set_keys = {value.partition("=")[0] for value in plan.values}
    ours = arguments.without([f"--{key}={value}" for key, value in keys.items()], set_keys)
    return [str(plan.recipe), "--no-check", *ours, *(f"--{value}" for value in plan.values)]


def _judge(plan: _Plan) -> list[str]:
    """Score the old and the new model, print a table of both, and return the reasons not to publish the new one."""
    from sbkit.score.behaviour import SILENCE
    from sbkit.score.report import data
    from sbkit.score.report.page import write_report
    from sbkit.score.significance import compare
    from sbkit.system.console import counted, table

    before = _evaluated(plan, plan.run, "before")
    after = _evaluated(plan, plan.new_run, "after")
    assert before.results is not None and after.results is not None, "they were just written"
    new_test = compare(before.results.words, after.results.words)
    old_test = data.read(plan.new_run).old_test
    assert old_test is not None, "training with replay wrote it"
    old, now = old_test
    silence_before, silence_after = (model.scored["behaviour"][SILENCE] for model in (before, after))
    page = write_report(after.folder, against=before.folder)

    why_not = []
    if not (new_test.better and new_test.significant):
        # The permutation test decides. The bounds of the bootstrap may exclude 0 all the same, so they are left out.
        cause = new_test.too_few or f"p = {new_test.p_value:.2g}, and below 0.05 is significant"
        why_not.append(f"the new test is not significantly better ({new_test.difference:+.2f} points of WER on "
                       f"{counted(len(after.results.words.ids), 'utterance')}): {cause}; correct more recordings")
    if old.is_worse(now):
        why_not.append(f"{old.describe(now)}: a larger --replay keeps more of it")
    if silence_after > max(MAX_SILENCE, silence_before):
        why_not.append(f"it writes {silence_after:.1f} hallucinated words per minute on non-speech: "
                       "train with nonspeech")

    low, high = old.interval
    print(table(["", "before", "after", ""], [
        ["new test, WER %", f"{new_test.rate_a:.2f}", f"{new_test.rate_b:.2f}", str(new_test)],
        [f"old test, {old.metric} %", f"{old.before:.2f} ({low:.2f} to {high:.2f})", f"{now:.2f}",
         "worse" if old.is_worse(now) else "not worse"],
        ["non-speech, words per minute", f"{silence_before:.1f}", f"{silence_after:.1f}", ""]]))
    print(f"what changed, to hear: {page}")
    return why_not


def _evaluated(plan: _Plan, run: Path, name: str) -> RunData:
    """Score a run on the corrections that are kept for the test, and on non-speech, in a folder of this name."""
    from sbkit.commands.evaluate import evaluate
    from sbkit.runs.evaluation_request import EvaluateRequest
    from sbkit.score.report import data

    out = plan.work / name
    evaluate(EvaluateRequest(run, on=str(plan.new_test), name="new", out=out, behaviour=True))
    return data.read(out / "new-best")


def _publish(plan: _Plan) -> None:
    """Export the new run as the bundle, unless it is that model already."""
    from sbkit.export.bundle import ExportRequest, export
    from sbkit.infer.bundles import BundleLoader

    replaces = plan.bundle.exists()
    published = plan.work / "published.json"  # a copy of the config.json of the bundle that was published
    if replaces and published.is_file() and published.read_bytes() == (plan.bundle / "config.json").read_bytes():
        print(f"{plan.bundle} is that model already")  # once more, it would be the bundle to go back to, too
        return
    export(ExportRequest(plan.new_run, plan.bundle, force=True, keep_previous=True, mark=published), BundleLoader())
    if replaces:
        print(f"a running server of {plan.bundle} switches to it within seconds, without losing a request; to go back: "
              f"sbkit rollback {shlex.quote(str(plan.bundle))}")
