"""``sbkit improve``: train a run on with what people corrected, and publish the model if it got better."""

from __future__ import annotations

import argparse
import hashlib
import json
import math
import os
import shlex
import sys
import unicodedata
from pathlib import Path

from sbkit.commands.options import RUNS_CODE, require_run, share
from sbkit.data import publish
from sbkit.errors import SbkitError

NOT_BETTER = 1  # exit code
#: Hallucinated words per minute on non-speech that a model may write, unless it wrote as many before.
MAX_SILENCE = 1.0
SAME_LENGTH = 0.06  # seconds


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


def _usable(kept: Path, manifests: Path, out: Path) -> Path:
    """Write the corrections that the run can be trained and judged with, and warn of the others, by reason."""
    from sbkit.data.manifest import Manifest
    from sbkit.data.splits import SPLITS
    from sbkit.recipe.report import listed
    from sbkit.system.console import atomic_write

    def letters(text: str) -> str:
        return "".join(each for each in unicodedata.normalize("NFC", text.casefold()) if each.isalnum())

    known, held_out = set[str](), dict[str, list[float]]()
    for file in filter(Path.is_file, (manifests / f"{split}.csv" for split in SPLITS)):
        manifest = Manifest.read(file)
        for text, seconds in zip(manifest.texts, manifest.durations, strict=True):
            if file.stem == "train":
                known.update(letters(text))
            else:
                held_out.setdefault(letters(text), []).append(float(seconds))
    usable, left_out = [], dict[str, list[str]]()
    lines = kept.read_bytes().split(b"\n")
    for number, line in enumerate(lines, 1):
        if not line:
            continue
        try:
            row = json.loads(line)
            text, path = letters(row["text"]), kept.parent / row["audio_filepath"]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if number == len(lines):  # without its end: a server is writing it, or was killed meanwhile
                continue
            raise SbkitError(f"{kept}, line {number} is no correction: {error!r}", hint=(
                'write {"audio_filepath": ..., "text": ...}, as sbkit serve --corrections does')) from None
        # A recording that the server wrote anew has another name and other bytes, but its words and, but for the
        # coding's padding, its length.
        lengths = held_out.get(text, [])
        if not text:
            why = "without words"
        elif sum(each in known for each in text) < len(text) / 2:
            why = "in another script than the run's texts"
        elif foreign := set(text) - known:
            why = f"with letters that the run's texts lack ({listed(sorted(foreign)[:5])}): write what is spoken"
        elif any(abs(row.get("duration", math.inf) - each) < SAME_LENGTH for each in lengths):
            why = "recordings of the run's own dev or test, which has to stay unseen"
        else:
            usable.append(row | {"audio_filepath": str(path.resolve())})
            continue
        left_out.setdefault(why, []).append(str(row.get("id", row["audio_filepath"])))
    reasons = [f"{len(names)} {why}: {', '.join(names[:3])}" for why, names in left_out.items()]
    sentences = len({letters(row["text"]) for row in usable})
    if sentences < 3:
        raise SbkitError(f"{kept} has {len(usable)} usable corrections of {sentences} "
                         f"sentence{'s' * (sentences != 1)}" + "".join(f"; {each}" for each in reasons),
                         hint="correct recordings of more sentences: a tenth of them is the test, and a tenth the dev")
    if reasons:
        print("corrections left out:", *reasons, sep="\n  ", file=sys.stderr)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in usable)
    if not out.is_file() or out.read_text(encoding="utf-8") != text:  # as it was, a run that is resumed knows it
        with atomic_write(out) as written:
            written.write(text)
    return out


def _run_of(bundle: Path) -> Path:
    """The run that a bundle was exported from."""
    from sbkit.export import layout

    trained = layout.read(bundle).trained
    named = trained.get("run", "..")  # earlier bundles don't say it, and usually lie in their run's folder
    run = Path(os.path.normpath(bundle.resolve() / str(named)))
    if not (run / "hyperparams.yaml").is_file():
        raise SbkitError(f"{bundle} was exported from {run}, which is no run's folder now" if "run" in trained else
                         f"{bundle} doesn't name the run that it was exported from",
                         hint=f"name that run, whose data is mixed in, and --to {shlex.quote(str(bundle))}; if it is "
                              "gone, train a new one")
    print(f"{bundle} was exported from {run}")
    return run


def run(args: argparse.Namespace) -> int:
    from sbkit.export import layout

    # First, because a process that was killed may have left the bundle beside its place.
    publish.clean_up((args.to or args.run).resolve(), layout.FOLDER)
    require_run(args.run)
    if named := (args.run / "config.json").is_file():
        args.to, args.run = args.to or args.run, _run_of(args.run)
    if args.to is None:
        raise SbkitError("--to BUNDLE is missing", hint="name the bundle to publish")
    kept = args.corrections / "corrections.jsonl" if args.corrections.is_dir() else args.corrections
    corrected = kept.name == "corrections.jsonl" and kept.is_file()  # otherwise any corpus
    source = kept if corrected else args.corrections
    if not source.exists():
        raise SbkitError(f"--with: there is no {args.corrections}", hint="sbkit serve --corrections FOLDER makes one")
    for replaced in (args.to, publish.previous(args.to)):
        layout.FOLDER.check_replaceable(replaced)
    for value in args.values:
        if "=" not in value:
            raise SbkitError(f"--set {value}: write KEY=VALUE")
    if not corrected:
        from sbkit.data.sources import check_exists

        try:
            check_exists(source)
        except SbkitError as error:
            raise SbkitError(f"--with: {source} has no corrections, and is no corpus: {error.message}", hint=(
                "name the folder of sbkit serve --corrections, or a list of recordings and texts")) from error
    # Other corrections, other work: the same command resumes, and a new row begins anew from the old model.
    mark = hashlib.sha256(source.read_bytes() if source.is_file() else str(source.resolve()).encode()).hexdigest()[:8]
    folder = Path(os.path.abspath(args.run))  # "." has no name
    first = f"# with the corrections {mark}\n"  # of the recipe beside the run that they have led to
    led_to = folder.parent / "recipe.yaml"
    if named and led_to.is_file() and led_to.read_text(encoding="utf-8").startswith(first):
        print(f"{args.to} has learnt these corrections already")
        return 0
    work = args.work or folder.with_name(f"{folder.name}-improved-{mark}")
    new, recipe = work / "run", work / "recipe.yaml"
    if folder.resolve() == new.resolve():  # its recipe would begin from itself
        raise SbkitError(f"--work: {work} has the run that is to be improved, {folder}",
                         hint="leave --work out, or name another folder")

    from sbkit.system.environment import check_torch, training_command

    check_torch()
    import torch

    from sbkit.commands.evaluate import evaluate
    from sbkit.export.bundle import ExportRequest, export
    from sbkit.infer.bundles import BundleLoader
    from sbkit.recipe import arguments, writing
    from sbkit.recipe.check import check
    from sbkit.recipe.report import COMMAND_LINE
    from sbkit.runs import restore
    from sbkit.runs.evaluation_request import EvaluateRequest
    from sbkit.score.behaviour import SILENCE
    from sbkit.score.report import data
    from sbkit.score.report.page import write_report
    from sbkit.score.run_files import MANIFESTS, RECIPE
    from sbkit.score.significance import compare
    from sbkit.system import processes
    from sbkit.system.console import atomic_write, counted, table

    if not (task := restore.read_run(args.run).task).writes_words:
        raise SbkitError(f"{args.run} is no recogniser's run: it trained {task.__name__}",
                         hint="words are corrected, so name a run that writes some")
    given = [f"--{value}" for value in args.values]
    request = arguments.parse([str(args.run / RECIPE), *given])
    report = check(request.path, request.overrides, run_opts=request.run_opts, run=False)
    for found in [*report.errors, *report.warnings]:
        if found.file == COMMAND_LINE:  # what is wrong in the recipe, the run has had as well
            raise SbkitError(f"--set {found.key.removeprefix('--')}: {found.message}",
                             hint=found.suggestion.replace("--", "--set ") or None)
    if corrected:
        source = _usable(kept, args.run / MANIFESTS, work / "corrections.jsonl")
    text = writing.text(restore.moved_recipe(args.run / RECIPE, new.resolve(), request.overrides))
    with atomic_write(recipe) as file:
        file.write(first + text)
    # A recipe as it ran has no references left: its corpus is named where it is read.
    keys = {"init_from": args.run.resolve(), "init_tokenizer": "keep", "replay": f"{args.replay:g}",
            "corpus.source": source.resolve(),
            **dict.fromkeys(("corpus.splits", "corpus.columns", "corpus.data_root", "corpus.exclude"), "null")}
    own = arguments.without([f"--{key}={value}" for key, value in keys.items()],
                            {value.partition("=")[0] for value in args.values})
    words = [str(recipe), "--no-check", *own, *given]
    with processes.child(training_command(words, max(1, torch.cuda.device_count()))) as training:
        code = training.wait()
    if code:
        raise SbkitError(f"the new run ended with code {code}: {new}", exit_code=1,
                         hint="its messages above say why" + ("" if code == 2 else "; the same command resumes it"))

    scores = {}
    for name, scored in ("before", args.run), ("after", new):
        out = work / name
        evaluate(EvaluateRequest(scored, on=str((new / MANIFESTS / "new" / "test.csv").resolve()), name="new", out=out,
                                 behaviour=True))
        scores[name] = data.read(out / "new-best")
    before, after = scores["before"].results, scores["after"].results
    assert before is not None and after is not None, "they were just written"
    of_new = compare(before.words, after.words)
    silence = [each.scored["behaviour"][SILENCE] for each in scores.values()]
    old_test = data.read(new).old_test
    assert old_test is not None, "training with replay wrote it"
    old, now = old_test
    page = write_report(scores["after"].folder, against=scores["before"].folder)

    why_not = []
    if not (of_new.better and of_new.significant):
        # The permutation test decides. The bounds of the bootstrap may exclude 0 all the same, so they are left out.
        cause = of_new.too_few or f"p = {of_new.p_value:.2g}, and below 0.05 is significant"
        why_not.append(f"the new test is not significantly better ({of_new.difference:+.2f} points of WER on "
                       f"{counted(len(after.words.ids), 'utterance')}): {cause}; correct more recordings")
    if old.is_worse(now):
        why_not.append(f"{old.describe(now)}: a larger --replay keeps more of it")
    if silence[1] > max(MAX_SILENCE, silence[0]):
        why_not.append(f"it writes {silence[1]:.1f} hallucinated words per minute on non-speech: train with nonspeech")
    low, high = old.interval
    print(table(["", "before", "after", ""], [
        ["new test, WER %", f"{of_new.rate_a:.2f}", f"{of_new.rate_b:.2f}", str(of_new)],
        [f"old test, {old.metric} %", f"{old.before:.2f} ({low:.2f} to {high:.2f})", f"{now:.2f}",
         "worse" if old.is_worse(now) else "not worse"],
        ["non-speech, words per minute", *(f"{each:.1f}" for each in silence), ""]]))
    print(f"what changed, to hear: {page}")
    if why_not:
        print(f"not published, {args.to} is as it was:", *why_not, sep="\n  ", file=sys.stderr)
        return NOT_BETTER
    replaces, config, published = args.to.exists(), args.to / "config.json", work / "published.json"
    if replaces and published.is_file() and published.read_bytes() == config.read_bytes():
        print(f"{args.to} is that model already")  # once more, it would be the bundle to go back to, too
        return 0
    export(ExportRequest(new, args.to, force=True, keep_previous=True, mark=published), BundleLoader())
    if replaces:
        print(f"a server of {args.to} takes it by itself, within seconds and without losing a request; back: "
              f"sbkit rollback {shlex.quote(str(args.to))}")
    return 0
