"""Whether a run is complete: trained and tested as asked, so that the same command need do neither again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sbkit.recipe.arguments import Request
from sbkit.runs.keys import RunKeys
from sbkit.runs.layout import RECIPE, TESTED
from sbkit.score.results import Results
from sbkit.system.console import atomic_write

#: Run options that change neither what is trained nor what is tested.
_SHOW = {"param_file", "test_only", "noprogressbar", "tqdm_colored_bar", "log_config"}


def done(keys: RunKeys, request: Request) -> str:
    """The message for a run that was tested and has not changed since; empty if it has."""
    folder = keys.folder
    try:
        there = json.loads((folder / TESTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if there.get("of") != _of(keys, request) or not all((folder / name).exists() for name in there.get("files", ())):
        return ""
    said = there.get("said", "done")
    where = f" ({folder / there['files'][0]})" if there.get("files") else ""
    return (f"nothing left to do: {folder} is trained and tested, test {said}{where}; a larger number_of_epochs trains "
            "on, --test_only tests again")


def forget(keys: RunKeys) -> None:
    """Mark the run as incomplete until ``keep`` is called."""
    (keys.folder / TESTED).unlink(missing_ok=True)


def keep(keys: RunKeys, request: Request, results: Results) -> None:
    """Record that the run is complete: its results, and what they were computed from."""
    if not hasattr(keys.corpus, "manifest_path") or request.run_opts.debug:
        return  # the run can't be identified, or only part of it was run
    with atomic_write(keys.folder / TESTED) as out:
        json.dump({**results.stats, "said": results.headline(), "files": results.files("test"),
                   "of": _of(keys, request)}, out, indent=1)


def _of(keys: RunKeys, request: Request) -> dict[str, Any]:
    """Fingerprint of recipe, options, test set and checkpoints."""
    options, shelf = request.run_opts, keys.checkpointer
    written = (keys.folder / RECIPE).read_text(encoding="utf-8")
    recipe = "".join(line for line in written.splitlines(keepends=True) if not line.startswith("#"))
    manifest = keys.corpus.manifest_path("test").read_bytes()
    return {
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(), "manifest": hashlib.sha256(manifest).hexdigest(),
        "options": {name: getattr(options, name) for name in sorted(set(options.overridden_args) - _SHOW)},
        "checkpoints": {Path(ckpt.path).name: ckpt.meta.get("unixtime") for ckpt in shelf.list_checkpoints()},
    }
