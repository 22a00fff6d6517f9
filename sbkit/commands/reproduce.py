"""``sbkit reproduce RUN/reproduce.json``: train a finished run again from its reproduce.json, and compare rows, losses
and figures."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sbkit.commands.options import RUNS_CODE, count
from sbkit.errors import SbkitError

FORMER = {"source": "data-folder", "to": "output-folder"}


def add(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Prepare the same corpus, report each row whose text or audio differs, train the first steps and compare "
        "their losses: to the bit on the same device and versions, otherwise within rounding.")
    parser.epilog = RUNS_CODE
    parser.add_argument("file", metavar="FILE", type=Path, help="the reproduce.json in a finished run's folder")
    parser.add_argument("--output_folder", dest="to", metavar="FOLDER", type=Path, default=Path("reproduced"),
                        help="where to train (default: reproduced)")
    parser.add_argument("--data_folder", "--data", dest="source", metavar="PLACE",
                        help="the path of the corpus on this machine, if it differs")
    parser.add_argument("--set", dest="values", metavar="KEY=VALUE", action="append", default=[],
                        help="another path of the recipe, such as init_from=/models/demo")
    parser.add_argument("--steps", type=count, default=100,
                        help="compare the recorded losses up to this step: 1, 10 and each hundredth (100)")
    parser.add_argument("--trust-code", action="store_true", help="run the recipe in FILE, which is code")
    parser.add_argument("--full", action="store_true", help="train to the end, and compare the test's figures too")


def run(args: argparse.Namespace) -> int:
    if not args.file.exists():  # before torch is imported
        raise SbkitError(f"{args.file}: No such file or directory", hint="a finished run has a reproduce.json")
    from sbkit.runs import reproduction
    from sbkit.runs.lock import RunLock
    from sbkit.score.run_files import RECIPE

    recorded = reproduction.read(args.file)
    wanted = {step: loss for step, loss in recorded["losses"].items() if args.full or step <= args.steps}
    if not wanted:
        raise SbkitError(f"{args.file} has no loss of the first {args.steps} steps",
                         hint=f"--steps {min(recorded['losses'])} compares its first loss")
    if (args.to / RECIPE).exists():
        raise SbkitError(f"--output_folder: {args.to} is the folder of a run",
                         hint="name a folder that doesn't exist yet")
    if not args.trust_code:
        raise SbkitError(f"{args.file} has a recipe, which is code that would run here",
                         hint='read its lines under "recipe"; if you trust it, add --trust-code')
    with RunLock(args.to, option="--output_folder"):
        return _reproduce(args, recorded, wanted)


def _reproduce(args: argparse.Namespace, recorded: dict[str, Any], wanted: dict[int, float]) -> int:
    from sbkit.commands import prepare
    from sbkit.recipe import arguments, load, writing
    from sbkit.recipe.report import listed
    from sbkit.runs import initial, reproduction, restore
    from sbkit.score.run_files import TESTED
    from sbkit.system.console import atomic_write, table
    from sbkit.system.environment import describe

    cause = reproduction.RESUMED if recorded.get("commands", 1) != 1 else None
    if cause:
        print("the run was resumed with another command, and this is the recipe of the last one: earlier losses may "
              "differ", flush=True)
    recipe, folder = args.to / "recipe.yaml", args.to / "run"
    steps = f"step{'s' if len(wanted) > 1 else ''} {listed(map(str, wanted))}"
    print(f"comparing the recorded losses of {steps}", flush=True)
    before = recipe.read_text(encoding="utf-8") if folder.exists() and recipe.is_file() else None
    with atomic_write(recipe) as out:
        out.write("\n".join(recorded["recipe"]) + "\n")
    text = writing.text(restore.moved_recipe(recipe, folder.resolve()))
    with atomic_write(recipe) as out:
        out.write(text if before is None else before)
    if before not in (None, text):
        raise SbkitError(f"{args.to} holds the run of another {args.file.name}", hint="choose another --to")
    texts = load.resolved(recipe, {}).texts()
    source = "corpus.source" if "corpus.source" in texts else "data_folder"  # of a mixture
    words = reproduction.path_options(texts, ([] if args.source is None else [f"{source}={args.source}"]) + args.values)

    request = arguments.parse([str(recipe), *words])
    keys = load.open_recipe(recipe, request.overrides).keys
    try:
        initial.open_source(keys, {})
        keys.corpus.check_exists()
    except SbkitError as error:
        raise SbkitError(error.message, exit_code=error.exit_code, hint=f"{error.hint or 'check that it is there'}; "
                         "--data_folder PLACE and --set KEY=PLACE give its path on this machine") from error
    prepare.run([str(recipe), *words])
    unread = reproduction.compare_corpus(recorded, keys.corpus.load())
    rows = sum(split["rows"] for split in recorded["corpus"].values())
    print(f"the corpus is the same: texts and audio of {rows:,} rows"
          + "".join(f"; not compared: {each}" for each in unread), flush=True)

    launch = reproduction.TrainingLaunch.here(recorded)
    other = reproduction.not_to_the_bit(recorded, describe(), launch)
    if recorded.get("machines", 1) != 1:
        other.append(reproduction.RESUMED_ELSEWHERE)
    print(f"not compared to the bit: {'; '.join(other)}" if other else "same device and versions: compared to the bit",
          flush=True)
    command = launch.command(recorded, [str(recipe), *words])
    found = reproduction.train(command, launch.threads, folder, wanted, recorded.get("weights"),
                               exact=not other, cause=cause, to_the_end=args.full)
    print(table(["step", "recorded", "found"], [[step, f"{loss:.6f}", f"{found[step]:.6f}"]
                                                for step, loss in list(wanted.items())[-10:]]))
    if args.full:
        try:
            figures = json.loads((folder / TESTED).read_text(encoding="utf-8"))
        except OSError:
            raise SbkitError(f"{folder} was not tested", hint="its log.txt says why", exit_code=1) from None
        for name, figure in recorded["figures"].items():
            reproduction.require_same(f"test {name}", figure, figures.get(name, float("nan")), not other, cause)
        print(table(["figure", "recorded", "found"],
                    [[name, f"{figure:.6g}", f"{figures[name]:.6g}"] for name, figure in recorded["figures"].items()]))
    print(f"reproduced {'within rounding' if other else 'to the bit'}: the recorded loss of {steps}"
          + (", and the test" if args.full else ""))
    return 0
