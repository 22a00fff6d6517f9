"""``sbkit train RECIPE.yaml [--key value ...]``: train, test and report."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from sbkit.commands.options import print_json
from sbkit.runs import start
from sbkit.system import console

if TYPE_CHECKING:
    from sbkit.infer.bundles import BundleLoader

HELP = (
    "On several devices: torchrun --nproc_per_node=8 train.py RECIPE.yaml ...\n"
    "The same command resumes a run. Only one run at a time may use an output_folder.\n"
    "--json prints on stdout only what sbkit info RUN --json does, when the run ends."
)
OPTIONS = ("json",)


def run(argv: list[str]) -> int:
    if "--json" not in argv:
        return start.run(argv, _bundles)
    words = [word for word in argv if word != "--json"]
    console.outlast_terminal()
    with contextlib.redirect_stdout(sys.stderr):
        code = start.run(words, _bundles)
    if os.environ.get("RANK", "0") == "0":
        _print_facts(words)
    return code


def _print_facts(words: list[str]) -> None:
    """Print what is known of the run that these words of a command line name."""
    from sbkit.commands import info
    from sbkit.recipe import arguments, load

    command = arguments.parse(words)
    folder = load.resolved(command.path, command.overrides).at("output_folder")
    print_json(info.facts_of(Path(folder)))


def _bundles() -> BundleLoader:
    from sbkit.infer.bundles import BundleLoader

    return BundleLoader()
