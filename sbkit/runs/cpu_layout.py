"""How a training uses the cores of a CPU: in how many processes, of how many threads each.

No number is right for all models. Threads of one process wait for each other after each operation, which costs a small
model more than a second core gives; ranks exchange gradients once in a step, but each needs memory of its own. So the
layouts that are possible are tried before the first step, on batches of noise (``cpu_trial``), and the fastest is kept
in the run's folder, as a run that is resumed must go on in the same way, to the bit; and for the next run of the same
model on this machine, which then tries nothing.

Nothing is tried if ``OMP_NUM_THREADS`` or torchrun decides, and where one core is all there is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import logging
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

import sbkit
from sbkit.recipe import writing
from sbkit.runs import cpu_trial, initial
from sbkit.runs.cpu_trial import Timing
from sbkit.runs.keys import TaskKeys
from sbkit.runs.run_config import RunConfig
from sbkit.score.run_files import CPU_LAYOUT
from sbkit.system.console import atomic_write, counted, stored_json
from sbkit.system.cores import Layout, layouts_on, usable_cores
from sbkit.system.disk import cache_folder
from sbkit.system.environment import describe
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

#: A thread that had a core in at least this share of the time was not disturbed.
_UNDISTURBED = 0.9
#: Keys whose values don't change what a step computes.
_NOT_OF_A_STEP = ("output_folder", "data_folder", "seed", "number_of_epochs", "experiment", "epoch_counter", "loggers",
                  "train_logger", "checkpointer", "pretrainer", "init_from", "cpu_ranks", "cpu_threads")


def choose(config: RunConfig) -> Layout | None:
    """Return the layout of a run whose corpus is prepared: what decides it already, or the fastest that is tried.

    None: nothing is to be decided.
    """
    if config.device.type != "cpu" or ranks.launched() or os.environ.get("OMP_NUM_THREADS"):
        return None
    keys = config.keys()
    layouts = layouts_on(usable_cores(), keys.cpu_ranks, keys.cpu_threads)
    if len(layouts) == 1:
        return layouts[0]
    if config.run_opts.debug or config.run_opts.test_only:
        return None

    in_folder = config.folder / CPU_LAYOUT
    if not initial.fresh(keys):
        before = _read(in_folder)
        if before is None or before in layouts:  # None: nothing was tried when it began, and it goes on likewise
            return before
    on_machine = _file_of_machine(config, keys)
    remembered = _read(on_machine)
    if remembered in layouts:
        logger.info("Training with %s, the fastest for this model on this machine (measured before, see %s)",
                    remembered, on_machine)
        _write(in_folder, remembered)
        return remembered
    return _try(config, layouts, on_machine)


def _try(config: RunConfig, layouts: Sequence[Layout], on_machine: Path) -> Layout | None:
    """Return the fastest layout, and keep it; None if none could be tried."""
    logger.info("Measuring which numbers of ranks and threads train fastest on %s ...",
                counted(usable_cores(), "core"))
    timings = cpu_trial.measure(config.whole_command, layouts)
    if not timings:  # what fails there fails in the run itself, which says why
        return None
    fastest = min(timings, key=lambda timing: timing.seconds)
    slower = ", ".join(f"{timing.layout} {1000 * timing.seconds:.0f} ms" for timing in timings if timing != fastest)
    logger.info("Training with %s, the fastest on this machine: %.0f ms a step, %.1f GiB%s (slower: %s). Set "
                "--cpu_ranks, --cpu_threads or OMP_NUM_THREADS to choose yourself", fastest.layout,
                1000 * fastest.seconds, fastest.memory / 2**30, " each" if fastest.layout.ranks > 1 else "", slower)
    _write(config.folder / CPU_LAYOUT, fastest.layout, timings)
    if _was_undisturbed(timings):
        with contextlib.suppress(OSError):  # a cache that can't be written costs the next run a trial
            _write(on_machine, fastest.layout, timings)
    return fastest.layout


def _was_undisturbed(timings: Sequence[Timing]) -> bool:
    """Whether no other program needed the cores meanwhile: what is fastest beside it is not remembered."""
    return all(timing.computing > _UNDISTURBED for timing in timings if timing.layout == Layout(1, 1))


def _file_of_machine(config: RunConfig, keys: TaskKeys) -> Path:
    """The file that remembers the layout for this model and size of a step on this machine."""
    of_a_step = {name: node for name, node in config.tree.value.items() if name not in _NOT_OF_A_STEP}
    text = writing.text(dataclasses.replace(config.tree, value=of_a_step)).replace(str(keys.folder), "")
    facts = [describe()["cpu"], torch.__version__, sbkit.__version__, str(config.run_opts.precision), text]
    digest = hashlib.sha256(json.dumps(facts).encode()).hexdigest()[:16]
    return cache_folder() / "cpu" / f"{digest}.json"


def _read(path: Path) -> Layout | None:
    stored = stored_json(path)
    world, threads = stored.get("ranks"), stored.get("threads")
    if not isinstance(world, int) or not isinstance(threads, int) or min(world, threads) < 1:
        return None  # there is none, or it is damaged
    return Layout(world, threads)


def _write(path: Path, layout: Layout, timings: Sequence[Timing] = ()) -> None:
    content: dict[str, Any] = asdict(layout)
    if timings:
        content["tried"] = [asdict(timing) for timing in timings]
    path.parent.mkdir(parents=True, exist_ok=True)
    with atomic_write(path) as out:
        json.dump(content, out, indent=1)
