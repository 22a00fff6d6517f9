"""Preparation of a run: its folder, its manifests, and the task's files made from them."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from datetime import date
from pathlib import Path
from typing import Any

from speechbrain.core import create_experiment_directory

from sbkit.data.columns import BatchColumns
from sbkit.data.splits import SPLITS
from sbkit.recipe import writing
from sbkit.recipe.keys import TaskKeys
from sbkit.runs import initial, pretrained
from sbkit.runs.keys import Bundles
from sbkit.runs.run_config import RunConfig
from sbkit.runs.start_guard import StartGuard
from sbkit.score.run_files import ENVIRONMENT, RECIPE
from sbkit.system import disk
from sbkit.system.environment import inventory

LOG_CONFIG = Path(__file__).with_name("log-config.yaml")


def open_folder(config: RunConfig) -> None:
    """Create the run's folder with the resolved recipe, the log and a record of the environment."""
    folder = config.folder
    with disk.writing_into(folder, "--output_folder"):
        save_recipe(config)
        create_experiment_directory(
            folder, log_config=config.run_opts.log_config or str(LOG_CONFIG), save_env_desc=False)
        Path(folder, ENVIRONMENT).write_text(inventory(), encoding="utf-8")


def save_recipe(config: RunConfig) -> None:
    """Write the resolved recipe with SpeechBrain's header and file name."""
    folder = config.folder
    folder.mkdir(parents=True, exist_ok=True)
    head = f"# Generated {date.today()} from:\n# {os.path.abspath(config.path)}\n# yamllint disable\n"
    (folder / RECIPE).write_text(head + writing.text(config.tree), encoding="utf-8")


def prepare(config: RunConfig, guard: StartGuard, bundles: Bundles) -> dict[str, Any]:
    """Prepare all that a run needs before its model is built; one rank calls it.

    bundles : opens the models that the task labels its corpus with

    Returns the values of the recipe's keys that follow from the corpus.
    """
    keys = config.keys()
    initial.open_source(keys, guard.changed())
    if initial.fresh(keys) and keys.init_from is None:
        # Before the corpus is prepared, so that missing files are reported at once. A run that is resumed, or starts
        # from other weights, may not need them.
        pretrained.fetch(keys.pretrainer)
    from_corpus = prepare_data(keys, config.overrides, bundles)
    return {key: value for key, value in from_corpus.items() if key in config.tree.value}


def prepare_data(keys: TaskKeys, overrides: Mapping[str, Any], bundles: Bundles) -> dict[str, Any]:
    """Prepare manifests and the task's files on one rank; the others read them.

    bundles : opens the models that the task labels its corpus with

    Returns the overrides that follow from the corpus.
    """
    corpus, task = keys.corpus, keys.brain
    by_split = corpus.prepare(needed=SPLITS, needs_text=task.needs_text(), columns=task.columns)
    print(corpus.summary(), file=sys.stderr)
    manifests = {split: by_split[split] for split in SPLITS}
    follows: dict[str, Any] = dict(BatchColumns(task.columns, keys).list_classes(manifests["train"]))
    follows |= task.prepare(keys, manifests, overrides)
    task.label(keys, manifests, bundles)
    return follows
