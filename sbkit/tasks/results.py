"""What came out of a run: its files of results, and what is said of them on the screen."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.runs.layout import HEARD, TEST_CER, TEST_WER

logger = logging.getLogger(__name__)


def show(brain: Any, folder: Path, manifest: Any, left_out: str | None) -> None:
    """What came out: the rates with their interval, one utterance to look at, and where the rest is."""
    from sbkit.score import utterances
    from sbkit.score.significance import interval
    from sbkit.tasks.asr import tell_unread

    words, characters = brain.test_words, brain.test_characters
    words.write(folder / TEST_WER)
    characters.write(folder / TEST_CER)
    utterances.write(folder / HEARD, utterances.join(brain.test_rows, manifest))
    low, high = interval(words)
    example = next(iter(words))
    print(f"\n{example.id}\n  reference   {' '.join(example.reference)}\n  hypothesis  {' '.join(example.hypothesis)}")
    print(f"\ntest WER {words.rate:.2f} % (95 % interval {low:.2f} to {high:.2f}), CER {characters.rate:.2f} %, "
          f"{len(words)} utterances")
    if left_out is not None:
        print(left_out)
    if brain.test_unread:
        print(tell_unread("test", brain.test_unread, len(brain.test_rows)))
    print(f"every alignment: {folder / TEST_WER}")
    _report(brain, folder, manifest)


def _report(brain: Any, folder: Path, manifest: Any) -> None:
    """The page about the run. What it is made from is safe by now, so that it cannot fail the run."""
    from sbkit.score.report import write_report

    if brain.metrics_log is not None:
        brain.metrics_log.flush()
    try:
        print(f"what it gets wrong, to look at and to hear: {write_report(folder, remote=manifest.remote)}", flush=True)
    except (SbkitError, OSError) as error:
        logger.warning("The report could not be made: %s", error)
