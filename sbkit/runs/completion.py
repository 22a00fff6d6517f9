"""Whether a run is done: trained and tested as it is asked for, so that the same command need do neither again."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from sbkit.runs.layout import HEARD, RECIPE, TEST_CER, TEST_WER, TESTED
from sbkit.system.console import atomic_write

#: Run options that change neither what is trained nor what is tested.
_SHOW = {"param_file", "test_only", "noprogressbar", "tqdm_colored_bar", "log_config"}


def done(hparams: dict[str, Any], request: Any) -> str:
    """What to say of a run that was tested and of which nothing has changed since; empty where it has."""
    folder = Path(hparams["output_folder"])
    try:
        there = json.loads((folder / TESTED).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    results = (TEST_WER, TEST_CER, HEARD)
    if there.get("of") != _of(hparams, request) or not all((folder / name).is_file() for name in results):
        return ""
    return (f"nothing left to do: {folder} is trained and tested, test WER {there['WER']:.2f} %, "
            f"CER {there['CER']:.2f} % ({folder / TEST_WER}); a larger number_of_epochs trains on, "
            "--test_only tests again")


def forget(hparams: dict[str, Any]) -> None:
    """From here on the run trains or tests, and is not done until ``keep``."""
    (Path(hparams["output_folder"]) / TESTED).unlink(missing_ok=True)


def keep(hparams: dict[str, Any], request: Any, rates: dict[str, float]) -> None:
    """Write down, when all results are there, what they are of."""
    if hparams.get("checkpointer") is None or not hasattr(hparams["corpus"], "manifest_path") or request.run_opts.debug:
        return  # there is nothing to tell the run by, or only a part of it was run
    with atomic_write(Path(hparams["output_folder"]) / TESTED) as out:
        json.dump({**rates, "of": _of(hparams, request)}, out, indent=1)


def _of(hparams: dict[str, Any], request: Any) -> dict[str, Any]:
    """Recipe, options, test set and checkpoints."""
    options, shelf = request.run_opts, hparams["checkpointer"]
    written = (Path(hparams["output_folder"]) / RECIPE).read_text(encoding="utf-8")
    recipe = "".join(line for line in written.splitlines(keepends=True) if not line.startswith("#"))
    manifest = hparams["corpus"].manifest_path("test").read_bytes()
    return {
        "recipe": hashlib.sha256(recipe.encode()).hexdigest(), "manifest": hashlib.sha256(manifest).hexdigest(),
        "options": {name: getattr(options, name) for name in sorted(set(options.overridden_args) - _SHOW)},
        "checkpoints": {Path(ckpt.path).name: ckpt.meta.get("unixtime") for ckpt in shelf.list_checkpoints()},
    }
