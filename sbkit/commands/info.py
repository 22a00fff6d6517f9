"""``sbkit info``: say what a run or a bundle is: its model, corpus, results and age."""

from __future__ import annotations

import argparse
import contextlib
import os
import time
from pathlib import Path
from typing import Any

from sbkit.commands.options import add_json, print_json
from sbkit.errors import SbkitError
from sbkit.system.console import stored_json, table

_WHICH = "name the output_folder of a run, or a bundle"


#: The states of a run, as the table says them.
_STATES = {
    "in use": "a process is working in it",
    "script": "known to its script",
    "finished": "finished",
    "unfinished": "not finished: the same command continues it",
}


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", metavar="RUN|BUNDLE", type=Path,
                        help="the output folder of a run, or the folder that sbkit export made")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    from sbkit.export import layout

    folder: Path = args.folder
    facts = facts_of(folder)
    if args.json:
        print_json(facts)
        return 0
    rows = _bundle_rows(facts) if facts["what"] == "bundle" else _run_rows(facts)
    print(table(["", str(folder)], rows))
    readme = folder / layout.README
    if readme.is_file():
        print(f"\nhow to use it, its figures and its training: {readme}")
    return 0


def facts_of(folder: Path) -> dict[str, Any]:
    """Return what is known of a run or a bundle, for JSON; anything else is refused."""
    from sbkit.export import layout
    from sbkit.score.run_files import RECIPE, SCRIPT

    if not folder.exists():
        raise SbkitError("no-such-path", f"{folder} does not exist", hint=_WHICH, file=folder)
    if not folder.is_dir():
        raise SbkitError("neither-run-nor-bundle", f"{folder} is a file", hint=_WHICH, file=folder)
    if (folder / layout.CONFIG).exists():
        return {"what": "bundle", "folder": str(folder), **_bundle_facts(folder)}
    if (folder / RECIPE).exists() or (folder / SCRIPT).exists():
        return {"what": "run", "folder": str(folder), **_run_facts(folder)}
    raise SbkitError("neither-run-nor-bundle",
                     f"{folder} is neither a run, which has {RECIPE}, nor a bundle, which has {layout.CONFIG}",
                     hint=_WHICH, file=folder)


def _bundle_facts(folder: Path) -> dict[str, Any]:
    from sbkit.export import layout

    config = layout.read(folder)
    models = {name: {"file": file, "bytes": (folder / file).stat().st_size}
              for name, file in config.models.items() if (folder / file).is_file()}
    return {"kind": config.kind, "has": config.what, "use": config.use.format(folder),
            "sample_rate": config.sample_rate, "language": config.language, "models": models,
            "left_out": config.left_out, "made_by": config.made_by, "trained": config.trained}


def _bundle_rows(facts: dict[str, Any]) -> list[list[str]]:
    rows = [["what", f"a bundle: {facts['has']}"], ["sample rate", f"{facts['sample_rate']} Hz"],
            ["language", facts["language"] or "not named"]]
    rows += [[f"model, {name}", f"{model['file']}, {model['bytes'] / 1e6:.1f} MB"]
             for name, model in facts["models"].items()]
    rows += [[f"left out: {name}", why] for name, why in facts["left_out"].items()]
    rows += [[f"made by {name}", version] for name, version in facts["made_by"].items()]
    return rows


def _run_facts(folder: Path) -> dict[str, Any]:
    from sbkit.compat.script_record import ScriptRecord, is_of_script
    from sbkit.score.run_files import METRICS, REPORT, SCRIPT, TESTED

    is_script = is_of_script(folder)
    if _is_in_use(folder):
        state = "in use"
    elif is_script:
        state = "script"
    elif (folder / TESTED).exists():
        state = "finished"
    else:
        state = "unfinished"

    metrics = folder / METRICS
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    epochs = [line for line in lines if '"kind": "epoch", "epoch"' in line and (is_script or "valid_loss" in line)]
    tested = stored_json(folder / TESTED)
    results = {name: value for name, value in tested.items() if name not in ("said", "files", "of")}
    report = folder / REPORT
    facts = {"by_script": is_script, "state": state, "epochs": len(epochs),
             "checkpoints": sorted(path.name for path in folder.glob("save/CKPT+*")),
             "results": results, "report": str(report) if report.is_file() else None}
    if is_script and (folder / SCRIPT).is_file():
        record = ScriptRecord.read(folder)
        facts["script"] = {"command": record.command, "folder": record.folder}
    return facts


def _run_rows(facts: dict[str, Any]) -> list[list[str]]:
    rows = [["what", "a run of a script" if facts["by_script"] else "a run"],
            ["state", _STATES[facts["state"]]],
            ["epochs", str(facts["epochs"])],
            ["checkpoints", ", ".join(facts["checkpoints"]) or "none"]]
    if "script" in facts:
        script = facts["script"]
        rows += [["trained by", script["command"]],
                 ["in the folder", script["folder"]],
                 ["exported by", f"sbkit export {facts['folder']} --to BUNDLE, if it is a CTC recogniser: it runs the "
                                 "script again, without training, and says what it found"]]
    return rows


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
