"""Results of a run's test: files, a summary on the screen, and the record that the run is finished."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.recipe.arguments import CommandLine
from sbkit.recipe.run_options import NOT_OF_TRAINING
from sbkit.runs.keys import TaskKeys
from sbkit.runs.progress import read_progress
from sbkit.runs.start_guard import StartGuard
from sbkit.score.report import write_report
from sbkit.score.report.data import read
from sbkit.score.report.sections import loss_in_text
from sbkit.score.results import Results, describe_unread
from sbkit.score.run_files import EVALUATIONS, MANIFESTS, PREPARED, RECIPE, TESTED
from sbkit.system.console import atomic_write, stored_json
from sbkit.train.monitor.metrics import MetricsLog

logger = logging.getLogger(__name__)


def show(results: Results, folder: Path, manifest: Manifest, left_out: str | None,
         metrics_log: MetricsLog | None) -> None:
    """Write the files and the report, and print the results and the paths, on a terminal also the curve of the loss."""
    results.write(folder, manifest, "test")
    for line in results.lines():
        print(f"\n{line}")
    print(f"\ntest{' of all parts:' if results.parts else ''} {results.headline()}")
    for part, each in results.parts.items():
        print(f"test {part}: {each.headline()}")
    if left_out is not None:
        print(left_out)
    if results.unread:
        print(describe_unread("test", results.unread, results.utterances))
    print(results.where(folder, "test"))
    if metrics_log is not None:
        metrics_log.close()
    try:  # its inputs are already saved, so an error must not fail the run
        if metrics_log is not None and sys.stdout.isatty():
            print(f"\n{loss_in_text(read(folder))}\n")
        print(f"report: {write_report(folder, remote=manifest.remote)}", flush=True)
    except (SbkitError, OSError) as error:
        logger.warning("The report could not be written: %s", error)


#: Run options that change neither the training nor the test.
_OF_OUTPUT = NOT_OF_TRAINING - {"device", "local_rank"}


def finished(keys: TaskKeys, request: CommandLine, guard: StartGuard) -> str:
    """The message for a run that was tested and has not changed since; empty otherwise.

    Raises an error if all epochs are trained and tested with other values, which would be recorded as the run's.
    """
    folder = keys.folder
    if not (tested := stored_json(folder / TESTED)):
        return ""
    larger = read_progress(keys.checkpointer, keys.epoch_counter).larger
    was, now = tested.get("of") or {}, _of(keys, request)
    if was != now or not all((folder / name).exists() for name in tested.get("files", ())):
        changes = [*guard.changes(), *_options_changed(was.get("options") or {}, now["options"])]
        if changes and not request.run_opts.test_only and larger:
            raise SbkitError(f"{folder} is finished, so these changes would have no effect: {'; '.join(changes)}",
                             hint=f"choose another --output_folder; if the model stays the same, a larger {larger} "
                                  "trains on, and --test_only tests with the changes")
        return ""
    said = tested.get("said", "done")
    where = f" ({folder / tested['files'][0]})" if tested.get("files") else ""
    return (f"nothing left to do: {folder} is trained and tested, test {said}{where}; "
            f"{f'a larger {larger} trains on, ' * bool(larger)}--test_only tests again")


def _options_changed(was: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of changed run options, of those that change the training."""
    values = {name: (was.get(name, "not given"), now.get(name, "not given")) for name in sorted({*was, *now})}
    return [f"{name}: {before} -> {after}" for name, (before, after) in values.items()
            if before != after and name not in NOT_OF_TRAINING and not name.startswith("ckpt_interval")]


def open_test(keys: TaskKeys, request: CommandLine, guard: StartGuard, done: str) -> Path:
    """Return the folder for the test's results, and mark the run as incomplete until ``mark_finished`` is called.

    With ``--test_only`` it stays so, even if killed. With other values, too, the run is not changed: the results get
    another folder, with the files that the report reads.
    """
    test_only, was = request.run_opts.test_only, stored_json(keys.folder / TESTED).get("of")
    if test_only and not done and (
            guard.changed() or (was and _options_changed(was.get("options") or {}, _of(keys, request)["options"]))):
        results_folder = keys.folder / EVALUATIONS / "test_only"
        for name in (RECIPE, PREPARED, f"{MANIFESTS}/test.csv"):
            if (keys.folder / name).is_file():
                (results_folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(keys.folder / name, results_folder / name)
        guard.restores = True
        return results_folder
    for folder in (keys.folder, *[guard.backup] * test_only):
        (folder / TESTED).unlink(missing_ok=True)
    return keys.folder


def mark_finished(keys: TaskKeys, request: CommandLine, results: Results) -> None:
    """Record that the run is complete: its results, and what they were computed from."""
    if not hasattr(keys.corpus, "manifest_path") or request.run_opts.debug:
        return  # the run can't be identified, or it ran only in part
    with atomic_write(keys.folder / TESTED) as out:
        said = "; ".join(f"{part}: {each.headline()}" for part, each in results.parts.items()) or results.headline()
        json.dump({**results.stats, "said": said, "files": results.files("test"),
                   "of": _of(keys, request)}, out, indent=1)


def _of(keys: TaskKeys, request: CommandLine) -> dict[str, Any]:
    """Fingerprint of recipe, options, test set and checkpoints."""
    options, checkpointer = request.run_opts, keys.checkpointer
    lines = (keys.folder / RECIPE).read_text(encoding="utf-8").splitlines()
    recipe = "".join(f"{line}\n" for line in lines if not line.startswith("#"))  # its head has the date
    manifest = keys.corpus.manifest_path("test").read_bytes()
    return {
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(), "manifest": hashlib.sha256(manifest).hexdigest(),
        "options": {name: getattr(options, name) for name in sorted(set(options.overridden_args) - _OF_OUTPUT)},
        "checkpoints": {Path(ckpt.path).name: ckpt.meta.get("unixtime") for ckpt in checkpointer.list_checkpoints()},
    }
