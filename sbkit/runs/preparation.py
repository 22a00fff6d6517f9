"""What a run needs before it trains: its folder, manifests and the tokenizer."""

from __future__ import annotations

import logging
import os
import sys
from datetime import date
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.runs.layout import ENVIRONMENT, RECIPE
from sbkit.system import disk
from sbkit.system.environment import inventory

logger = logging.getLogger(__name__)

LOG_CONFIG = Path(__file__).with_name("log-config.yaml")


def open_folder(hparams: dict[str, Any], request: Any) -> None:
    """The run's folder with the resolved recipe, the log and what it runs on."""
    from speechbrain.core import create_experiment_directory

    folder = hparams["output_folder"]
    try:
        with disk.told(folder):
            _save_recipe(Path(folder), request)
            create_experiment_directory(
                folder, log_config=request.run_opts.log_config or str(LOG_CONFIG), save_env_desc=False)
            Path(folder, ENVIRONMENT).write_text(inventory(), encoding="utf-8")
    except OSError as error:
        raise SbkitError(f"cannot write into {folder}: {error.strerror}",
                         hint="choose another place with --output_folder") from error


def _save_recipe(folder: Path, request: Any) -> None:
    """The resolved recipe, with the head and under the name that SpeechBrain gives it."""
    from sbkit.recipe import load

    folder.mkdir(parents=True, exist_ok=True)
    head = f"# Generated {date.today()} from:\n# {os.path.abspath(request.path)}\n# yamllint disable\n"
    (folder / RECIPE).write_text(head + load.merged(request.path, request.overrides), encoding="utf-8")


def prepare_data(hparams: dict[str, Any], overrides: dict[str, Any]) -> dict[str, Any]:
    """Manifests and the tokenizer, once, by one rank; the others read what it wrote.

    Gives the overrides that follow from the text: how many characters there are is nothing that a recipe, whose
    number is right for one corpus only, can know. A number given on the command line is meant.
    """
    corpus, tokenizer = hparams["corpus"], hparams["tokenizer"]
    manifests = corpus.prepare(needed=("train", "dev", "test"))
    print(corpus.summary(), file=sys.stderr)
    said, follows = hparams.get("output_neurons"), {}
    if "output_neurons" not in overrides and said is not None and said == tokenizer.vocab_size:
        size = tokenizer.follow(manifests["train"].texts)
        if size is not None:
            print(f"output_neurons: {size}, what the characters of this corpus need (the recipe says {said})",
                  file=sys.stderr)
            follows["output_neurons"] = size
    tokenizer.prepare(manifests["train"].texts)
    for split in ("train", "dev", "test"):
        alien = tokenizer.coverage(manifests[split].texts)
        if alien:
            listed = ", ".join(f"{char!r} x {times}" for char, times in alien.most_common(10))
            logger.warning("The tokenizer cannot express %d characters of %s: %s", alien.total(), split, listed)
    return follows
