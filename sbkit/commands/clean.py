"""``sbkit clean RECIPE.yaml [--key value ...]``: list training rows whose labels are probably wrong, using models not
trained on them."""

from __future__ import annotations

import sys

from sbkit.errors import SbkitError
from sbkit.system import memory
from sbkit.system.environment import check_torch

HELP = (
    "--folds N trains N models by the recipe, each without the rows that it judges (default: 2). They may be small\n"
    "and trained briefly, if they get 40 % of the words right: --number_of_epochs 4. Writes to OUTPUT_FOLDER/clean:\n"
    "suspects.csv, a list for corpus: exclude, and suspects.html, a page to listen to its rows. It finds most single\n"
    "wrong words if many labels have one, and hardly any single words that are missing or too many.\n"
    "The same command resumes."
)
OPTIONS: tuple[str, ...] = ("folds",)


def run(argv: list[str]) -> int:
    check_torch()
    memory.reserve_little()
    import torch

    from sbkit.data.mixture import Mixture
    from sbkit.data.suspects import write
    from sbkit.recipe import arguments
    from sbkit.runs import folds, training
    from sbkit.runs.lock import RunLock
    from sbkit.runs.run_config import RunConfig
    from sbkit.score import label_errors
    from sbkit.score.report import suspect_page
    from sbkit.tasks.ctc import CTC, label_scores
    from sbkit.train import device as devices

    options, argv = arguments.command_options(argv, "such as --folds 3", folds=int)
    count = 2 if options.folds is None else options.folds
    if count < 2:
        raise SbkitError("bad-option", f"--folds {count}: a row is judged by a model that wasn't trained on it, so "
                         "there must be two models", hint="write 2 or more", key="--folds", value=count)
    command = arguments.parse(argv)
    device = devices.resolve(command.run_opts.device)
    keys = RunConfig.of(command, device).keys()
    corpus = keys.corpus
    folder = keys.folder / "clean"
    if not issubclass(keys.brain, CTC):
        raise SbkitError("wrong-task", f"{command.path} trains {keys.brain.__name__}, and only CTC models score labels",
                         hint="clean the corpus with hparams/ctc.yaml: its list works with every recipe",
                         file=command.path)
    if isinstance(corpus, Mixture):
        raise SbkitError("needs-one-corpus", f"{command.path} trains on a mixture, and sbkit clean takes one corpus",
                         hint="clean each part by itself, and name its list under that part's exclude",
                         file=command.path)
    splits = ("train", "dev")
    if command.check:
        training.before_run(command, splits)
    with RunLock(folder, runs=False):
        manifests = corpus.prepare(needed=splits, columns=keys.brain.columns)
        train = manifests["train"]
        print(corpus.summary(), file=sys.stderr)
        gpus = torch.cuda.device_count() if str(device) == "cuda" else 1
        scores = []
        for fold in folds.write(train, manifests["dev"], count, folder):
            # The first run's lists have all rows, so its check of the labels is enough.
            arguments_of_fold = argv if fold.number == 1 else [*argv, "--no-check"]
            folds.train(fold, arguments_of_fold, corpus, gpus)
            scores += label_scores.score(fold.run, fold.held_out, device)
            label_errors.require_trained(scores)
        assert corpus.report is not None, "the corpus was just prepared"
        source = corpus.report["source"]
        suspects = label_errors.suspects(scores, train, source["where"])
        suspect_list = folder / "suspects.csv"
        page = folder / "suspects.html"
        write(suspect_list, suspects)
        suspect_page.write(page, suspects, train, source.get("folders", [source["where"]]))
    print(label_errors.summary(suspects, scores, len(train)))
    print(f"the list for corpus: exclude: {suspect_list}\na page to listen to its rows: {page}")
    return 0
