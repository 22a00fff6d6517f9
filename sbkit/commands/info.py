"""``sbkit info``: say what a run or a bundle is: its model, corpus, results and age."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from pathlib import Path

from sbkit.errors import SbkitError
from sbkit.system.console import table

_WHICH = "name the output_folder of a run, or a bundle"


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN|BUNDLE", type=Path,
                        help="the output folder of a run, or the folder that sbkit export made")


def run(args: argparse.Namespace) -> int:
    from sbkit.export import layout
    from sbkit.score.run_files import RECIPE

    folder: Path = args.folder
    if not folder.exists():
        raise SbkitError("no-such-path", f"{folder} does not exist", hint=_WHICH, file=folder)
    if not folder.is_dir():
        raise SbkitError("neither-run-nor-bundle", f"{folder} is a file", hint=_WHICH, file=folder)
    if (folder / layout.CONFIG).exists():
        rows = _bundle_rows(folder)
    elif (folder / RECIPE).exists():
        rows = _run_rows(folder)
    else:
        raise SbkitError("neither-run-nor-bundle",
                         f"{folder} is neither a run, which has {RECIPE}, nor a bundle, which has {layout.CONFIG}",
                         hint=_WHICH, file=folder)
    print(table(["", str(folder)], rows))
    readme = folder / layout.README
    if readme.is_file():
        print(f"\nhow to use it, its figures and its training: {readme}")
    return 0


def _bundle_rows(folder: Path) -> list[list[str]]:
    from sbkit.export import layout

    config = layout.read(folder)
    rows = [["what", f"a bundle: {config.what}"], ["sample rate", f"{config.sample_rate} Hz"],
            ["language", config.language or "not named"]]
    for name, file in config.models.items():
        if (folder / file).is_file():
            rows.append([f"model, {name}", f"{file}, {(folder / file).stat().st_size / 1e6:.1f} MB"])
    rows += [[f"left out: {name}", why] for name, why in config.left_out.items()]
    rows += [[f"made by {name}", version] for name, version in config.made_by.items()]
    return rows


def _run_rows(folder: Path) -> list[list[str]]:
    from sbkit.score.run_files import METRICS, RECIPE, TESTED

    # A script's own recipe has no task.
    is_script = not re.search("^brain:", (folder / RECIPE).read_text(encoding="utf-8"), re.MULTILINE)
    if _is_in_use(folder):
        state = "a process is working in it"
    elif is_script:
        state = "known to its script"
    elif (folder / TESTED).exists():
        state = "finished"
    else:
        state = "not finished: the same command continues it"

    metrics = folder / METRICS
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    epochs = [line for line in lines if '"kind": "epoch", "epoch"' in line and (is_script or "valid_loss" in line)]
    checkpoints = sorted(path.name for path in folder.glob("save/CKPT+*"))
    return [["what", "a run of a script" if is_script else "a run"], ["state", state], ["epochs", str(len(epochs))],
            ["checkpoints", ", ".join(checkpoints) or "none"]]


def _is_in_use(folder: Path) -> bool:
    """Whether a process works in a run: it holds a lock here, or wrote its lock's file recently from elsewhere."""
    from sbkit.data.lock import Lock
    from sbkit.score.run_files import DEAD_AFTER, HELD
    from sbkit.system import processes, untrusted

    in_use = False
    for path in folder.glob(HELD.format("*")):
        with contextlib.suppress(OSError, ValueError), Lock(path, os.O_RDONLY | os.O_NONBLOCK) as lock:
            in_use |= lock.acquire(shared=True) is False
            holder = untrusted.read_json(path, 1 << 20)
            is_elsewhere = "ended" not in holder and holder["machine"] != processes.machine()
            in_use |= is_elsewhere and time.time() - path.stat().st_mtime < DEAD_AFTER
    return in_use
