"""The names of all files and folders in a run's output folder.

Those that a room below reads or writes stand there, and are taken from it. Where checkpoints, the tokenizer and the
lines of epochs go is said by the recipe: ``save`` and ``train_log.txt`` in all that are shipped.
"""

from sbkit.data.exclusions import NAME as LEFT_OUT
from sbkit.score.run_files import (
    CULPRITS,
    EVALUATED,
    HEARD,
    MANIFESTS,
    METRICS,
    PREPARED,
    RECIPE,
    REPORT,
    RESULT,
)

ENVIRONMENT = "env.log"
TEST_WER, TEST_CER = "wer_test.txt", "cer_test.txt"
TESTED = "tested.json"
"""Says that the run is done, and what of."""

EVALUATIONS = "evaluations"
"""Has a folder for each result of ``sbkit evaluate``, with the files below."""
WER, CER, NBEST = "wer.txt", "cer.txt", "nbest.jsonl"

__all__ = [
    "CER", "CULPRITS", "ENVIRONMENT", "EVALUATED", "EVALUATIONS", "HEARD", "LEFT_OUT", "MANIFESTS", "METRICS", "NBEST",
    "PREPARED", "RECIPE", "REPORT", "RESULT", "TESTED", "TEST_CER", "TEST_WER", "WER",
]
