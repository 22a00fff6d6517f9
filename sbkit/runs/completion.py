"""Whether a run is done: trained and tested as it is asked for, so that the same command need do neither again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sbkit.runs.layout import RECIPE, TESTED
from sbkit.score.results import Results
from sbkit.system.console import atomic_write

#: Run options that change neither what is trained nor what is tested.
_SHOW = {"param_file", "test_only", "noprogressbar", "tqdm_colored_bar", "log_config"}


def done(keys: Any, request: Any) -> str:
    """What to say of a run that was tested and of which nothing has changed since; empty where it has."""
    folder = keys.folder
    try:
        there = json.loads((folder / TESTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if there.get("of") != _of(keys, request) or not all((folder / name).is_file() for name in there.get("files", ())):
        return ""
    said = there.get("said", "done")
    where = f" ({folder / there['files'][0]})" if there.get("files") else ""
    return (f"nothing left to do: {folder} is trained and tested, test {said}{where}; a larger number_of_epochs trains "
            "on, --test_only tests again")


def forget(keys: Any) -> None:
    """From here on the run trains or tests, and is not done until ``keep``."""
    (keys.folder / TESTED).unlink(missing_ok=True)


def keep(keys: Any, request: Any, results: Results) -> None:
    """Write down, when all results are there, what they are of."""
    if keys.checkpointer is None or not hasattr(keys.corpus, "manifest_path") or request.run_opts.debug:
        return  # there is nothing to tell the run by, or only a part of it was run
    with atomic_write(keys.folder / TESTED) as out:
        json.dump({**results.stats, "said": results.headline(), "files": results.files("test"),
                   "of": _of(keys, request)}, out, indent=1)


def _of(keys: Any, request: Any) -> dict[str, Any]:
    """Recipe, options, test set and checkpoints."""
    options, shelf = request.run_opts, keys.checkpointer
    written = (keys.folder / RECIPE).read_text(encoding="utf-8")
    recipe = "".join(line for line in written.splitlines(keepends=True) if not line.startswith("#"))
    manifest = keys.corpus.manifest_path("test").read_bytes()
    return {
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(), "manifest": hashlib.sha256(manifest).hexdigest(),
        "options": {name: getattr(options, name) for name in sorted(set(options.overridden_args) - _SHOW)},
        "checkpoints": {Path(ckpt.path).name: ckpt.meta.get("unixtime") for ckpt in shelf.list_checkpoints()},
    }
