"""``sbkit info``: say what a run or a bundle is: its model, corpus, results and age."""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import time
from pathlib import Path

from sbkit.errors import SbkitError, printable
from sbkit.system.console import table


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN|BUNDLE", type=Path,
                        help="the output folder of a run, or the folder that sbkit export made")


def run(args: argparse.Namespace) -> int:
    from sbkit.data.lock import Lock
    from sbkit.export import layout
    from sbkit.score.run_files import DEAD_AFTER, HELD, METRICS, RECIPE, TESTED
    from sbkit.system import processes, untrusted

    folder: Path = args.folder
    if not folder.is_dir():
        raise SbkitError(f"{folder} is a file" if folder.exists() else f"{folder} does not exist",
                         hint="name the output_folder of a run, or a bundle")
    if (folder / layout.CONFIG).exists():
        config = layout.read(folder)
        rows = [["what", f"a bundle: {config.what}"], ["sample rate", f"{config.sample_rate} Hz"],
                ["language", config.language or "not named"]]
        rows += [[f"model, {name}", f"{file}, {(folder / file).stat().st_size / 1e6:.1f} MB"]
                 for name, file in config.models.items() if (folder / file).is_file()]
        rows += [[f"left out: {name}", why] for name, why in config.left_out.items()]
        rows += [[f"made by {name}", version] for name, version in config.made_by.items()]
    elif (folder / RECIPE).exists():
        lines = (folder / METRICS).read_text(encoding="utf-8").splitlines() if (folder / METRICS).exists() else []
        checkpoints = sorted(path.name for path in folder.glob("save/CKPT+*"))
        script = not re.search("^brain:", (folder / RECIPE).read_text(encoding="utf-8"), re.MULTILINE)
        busy = False
        for path in folder.glob(HELD.format("*")):
            with contextlib.suppress(OSError, ValueError), Lock(path, os.O_RDONLY | os.O_NONBLOCK) as lock:
                busy |= lock.acquire(shared=True) is False
                facts = untrusted.read_json(path, 1 << 20)
                elsewhere = "ended" not in facts and facts["machine"] != processes.machine()
                busy |= elsewhere and time.time() - path.stat().st_mtime < DEAD_AFTER
        state = "a process is working in it" if busy else "known to its script" if script else \
            "finished" if (folder / TESTED).exists() else "not finished: the same command continues it"
        rows = [["what", "a run of a script" if script else "a run"], ["state", state],
                ["epochs", str(sum('"kind": "epoch", "epoch"' in line and (script or "valid_loss" in line)
                                   for line in lines))],
                ["checkpoints", ", ".join(checkpoints) or "none"]]
    else:
        raise SbkitError(f"{folder} is neither a run, which has {RECIPE}, nor a bundle, which has {layout.CONFIG}",
                         hint="name the output_folder of a run, or a bundle")
    print(table(["", str(folder)], rows))
    card = folder / layout.README
    if card.is_file():  # its head is for the Hugging Face Hub
        text = card.read_text(encoding="utf-8", errors="replace")
        print("\n" + printable(text.split("---\n", 2)[-1] if text.startswith("---\n") else text).strip())
    return 0
