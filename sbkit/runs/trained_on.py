"""The manifests that a run was trained on, and whether they are still the ones in its folder."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from pathlib import Path

from sbkit.data.corpus import Corpus
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.score.run_files import METRICS, TESTED
from sbkit.system import disk
from sbkit.system.console import stored_json

#: The value of a line of kind ``run`` in the metrics: the sha256 of each split's manifest.
MANIFESTS = "manifests"


def checksums(corpus: Corpus) -> dict[str, str]:
    """Return the sha256 of each split's manifest, as its preparation recorded it; none of a recipe's own class."""
    if not isinstance(corpus, Corpus):
        return {}
    return {split: entry["sha256"] for split, entry in corpus.prepared["splits"].items()}


def replaced(folder: Path, corpus: Corpus, splits: Sequence[str] = SPLITS) -> list[str]:
    """Return the splits whose manifests are not those that the run in ``folder`` was last trained on.

    Splits of which an earlier version made no record are left out.
    """
    recorded = _recorded(folder)
    paths = {split: corpus.manifest_path(split) for split in splits if split in recorded}
    return [split for split, path in paths.items() if path.is_file() and disk.sha256(path) != recorded[split]]


def check(folder: Path, corpus: Corpus, split: str) -> None:
    """Raise if a split's manifest is not of the corpus that the run in ``folder`` was trained on."""
    other = _prepared_from_another(corpus)
    if not other and not replaced(folder, corpus, [split]):
        return
    where = f", but was prepared from {other} since" if other else ""
    path = corpus.manifest_path(split)
    raise SbkitError("changed-manifest",
                     f"{path} is not the manifest that the run in {folder} was trained on{where}",
                     hint=(
        "name the corpus to score with --data_folder; sbkit prepare with the run's own recipe and keys makes its "
        "manifests again"), file=path)


def _prepared_from_another(corpus: Corpus) -> Path | None:
    return corpus.prepared_elsewhere() if isinstance(corpus, Corpus) else None


def _recorded(folder: Path) -> dict[str, str]:
    checksums_by_split: dict[str, str] = {}
    # The fallback for runs that were tested before starts recorded their manifests.
    of_test = (stored_json(folder / TESTED).get("of") or {}).get("manifest")
    if isinstance(of_test, str):
        checksums_by_split["test"] = of_test
    path = folder / METRICS
    if path.is_file():
        with path.open(encoding="utf-8", errors="replace") as lines:
            for line in lines:
                if '"kind": "run"' not in line:
                    continue
                with contextlib.suppress(ValueError, AttributeError):  # a line that a kill cut
                    checksums_by_split |= json.loads(line).get(MANIFESTS) or {}
    return checksums_by_split
