"""What came out of a run's test: its files of results, and what is said of them on the screen."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.score.report import write_report
from sbkit.score.results import Results, tell_unread

logger = logging.getLogger(__name__)


def show(results: Results, folder: Path, manifest: Manifest, left_out: str | None, metrics_log: Any) -> None:
    """Write the files, say what came out and where the rest is, and make the page about it."""
    results.write(folder, manifest, "test")
    for line in results.lines():
        print(f"\n{line}")
    print(f"\ntest {results.headline()}")
    if left_out is not None:
        print(left_out)
    if results.unread:
        print(tell_unread("test", results.unread, results.utterances))
    print(results.where(folder, "test"))
    if metrics_log is not None:
        metrics_log.flush()
    try:  # what it is made from is safe by now, so that it cannot fail the run
        print(f"what it gets wrong, to look at and to hear: {write_report(folder, remote=manifest.remote)}", flush=True)
    except (SbkitError, OSError) as error:
        logger.warning("The report could not be made: %s", error)
