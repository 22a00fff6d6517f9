"""The names of all files and folders in a run's output folder.

Names that a lower room reads or writes are defined there and imported here. The recipe says where checkpoints, the
tokenizer and the log of epochs go (``save`` and ``train_log.txt`` in all shipped recipes), and ``log-config.yaml``
says where the log goes: ``log.txt``.
"""

from sbkit.data.exclusions import NAME as LEFT_OUT
from sbkit.score.run_files import (
    CORPORA,
    CULPRITS,
    EVALUATED,
    EVALUATIONS,
    HEARD,
    MANIFESTS,
    METRICS,
    PREPARED,
    RECIPE,
    REPORT,
    RESULT,
    TENSORBOARD,
)

ENVIRONMENT = "env.log"
HELD = ".held-{}.json"
"""Records who holds the folder; numbered."""
BEFORE_START = ".before-this-start"
"""Backup of what a start overwrites, kept until training begins."""
TEST_WER, TEST_CER = "wer_test.txt", "cer_test.txt"
TESTED = "tested.json"
"""Records that the run is complete, and for which recipe, options and data."""

WER, CER, NBEST = "wer.txt", "cer.txt", "nbest.jsonl"
"""Files of an evaluation."""

__all__ = [
    "BEFORE_START", "CER", "CORPORA", "CULPRITS", "ENVIRONMENT", "EVALUATED", "EVALUATIONS", "HEARD", "HELD",
    "LEFT_OUT", "MANIFESTS", "METRICS", "NBEST", "PREPARED", "RECIPE", "REPORT", "RESULT", "TENSORBOARD", "TESTED",
    "TEST_CER", "TEST_WER", "WER",
]
