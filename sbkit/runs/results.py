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
    for part, part_results in results.parts.items():
        print(f"test {part}: {part_results.headline()}")
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
    tested = stored_json(folder / TESTED)
    if not tested:
        return ""
    to_raise = read_progress(keys.checkpointer, keys.epoch_counter).keys_to_raise
    before = tested.get("of") or {}
    now = _fingerprint(keys, request)
    files = tested.get("files") or []
    if before != now or not all((folder / name).exists() for name in files):
        changes = [*guard.changes(), *_options_changed(before.get("options") or {}, now["options"])]
        if changes and not request.run_opts.test_only and to_raise:
            raise SbkitError("finished-run",
                             f"{folder} is finished, so these changes would have no effect: {'; '.join(changes)}",
                             hint=f"choose another --output_folder; if the model stays the same, a larger {to_raise} "
                                  "continues the training, and --test_only tests with the changes", file=folder)
        return ""

    summary = tested.get("said", "done")
    where = f" ({folder / files[0]})" if files else ""
    how_to_go_on = f"a larger {to_raise} continues the training, " if to_raise else ""
    return (f"nothing left to do: {folder} is trained and tested, test {summary}{where}; {how_to_go_on}"
            "--test_only tests again")


def _options_changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    """Descriptions of changed run options, of those that change the training."""
    changes = []
    for name in sorted({*before, *now}):
        value_before = before.get(name, "not given")
        value_now = now.get(name, "not given")
        if value_before != value_now and name not in NOT_OF_TRAINING and not name.startswith("ckpt_interval"):
            changes.append(f"{name}: {value_before} -> {value_now}")
    return changes


def open_test(keys: TaskKeys, request: CommandLine, guard: StartGuard, finished: str) -> Path:
    """Return the folder for the test's results, and mark the run as incomplete until ``mark_finished`` is called.

    With ``--test_only`` it stays so, even if killed. With other values, too, the run is not changed: the results get
    another folder, with the files that the report reads.

    finished : the message of the function ``finished``
    """
    test_only = request.run_opts.test_only
    if test_only and not finished and (guard.changed() or _options_since_test(keys, request)):
        results_folder = keys.folder / EVALUATIONS / "test_only"
        for name in (RECIPE, PREPARED, f"{MANIFESTS}/test.csv"):
            if (keys.folder / name).is_file():
                (results_folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(keys.folder / name, results_folder / name)
        guard.restores = True
        return results_folder
    (keys.folder / TESTED).unlink(missing_ok=True)
    if test_only:  # a start that fails restores the backup, which must not say that the run is complete either
        (guard.backup / TESTED).unlink(missing_ok=True)
    return keys.folder


def _options_since_test(keys: TaskKeys, request: CommandLine) -> list[str]:
    """Descriptions of run options that differ from those of the run's test; empty if it wasn't tested."""
    before = stored_json(keys.folder / TESTED).get("of")
    if not before:
        return []
    return _options_changed(before.get("options") or {}, _fingerprint(keys, request)["options"])


def mark_finished(keys: TaskKeys, request: CommandLine, results: Results) -> None:
    """Record that the run is complete: its results, and what they were computed from."""
    if not hasattr(keys.corpus, "manifest_path") or request.run_opts.debug:
        return  # the run can't be identified, or it ran only in part
    with atomic_write(keys.folder / TESTED) as out:
        of_parts = [f"{part}: {part_results.headline()}" for part, part_results in results.parts.items()]
        summary = "; ".join(of_parts) or results.headline()
        json.dump({**results.stats, "said": summary, "files": results.files("test"),
                   "of": _fingerprint(keys, request)}, out, indent=1)


def _fingerprint(keys: TaskKeys, request: CommandLine) -> dict[str, Any]:
    """What a test's results depend on: recipe, options, test set and checkpoints."""
    lines = (keys.folder / RECIPE).read_text(encoding="utf-8").splitlines()
    recipe = "".join(f"{line}\n" for line in lines if not line.startswith("#"))  # its head has the date
    manifest = keys.corpus.manifest_path("test").read_bytes()
    options = request.run_opts
    checkpoints = keys.checkpointer.list_checkpoints()
    return {
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(),
        "manifest": hashlib.sha256(manifest).hexdigest(),
        "options": {name: getattr(options, name) for name in sorted(set(options.overridden_args) - _OF_OUTPUT)},
        "checkpoints": {Path(ckpt.path).name: ckpt.meta.get("unixtime") for ckpt in checkpoints},
    }
