"""Results of a run's test: the files, and the summary on the screen."""

from __future__ import annotations

import logging
from pathlib import Path

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.score.report import write_report
from sbkit.score.results import Results, tell_unread
from sbkit.train.monitor.metrics import MetricsLog

logger = logging.getLogger(__name__)


def show(results: Results, folder: Path, manifest: Manifest, left_out: str | None,
         metrics_log: MetricsLog | None) -> None:
    """Write the files, print the results and where the rest is, and write the report."""
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
    try:  # its inputs are already saved, so an error must not fail the run
        print(f"errors, to look at and listen to: {write_report(folder, remote=manifest.remote)}", flush=True)
    except (SbkitError, OSError) as error:
        logger.warning("The report could not be written: %s", error)
