"""The names of all files and folders in a run's output folder.

Those that a room below reads or writes stand there, and are taken from it. Where checkpoints, the tokenizer and the
lines of epochs go is said by the recipe (``save`` and ``train_log.txt`` in all that are shipped), and where the log
goes by ``log-config.yaml``: ``log.txt``.
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
    TENSORBOARD,
)

ENVIRONMENT = "env.log"
HELD = ".held-{}.json"
"""Who holds the folder, numbered."""
BEFORE_START = ".before-this-start"
"""What a start writes over, until it has begun to train."""
TEST_WER, TEST_CER = "wer_test.txt", "cer_test.txt"
TESTED = "tested.json"
"""Says that the run is done, and what of."""

EVALUATIONS = "evaluations"
"""Has a folder for each result of ``sbkit evaluate``, with these files, and one for corpora prepared for that."""
WER, CER, NBEST, CORPORA = "wer.txt", "cer.txt", "nbest.jsonl", "corpora"

__all__ = [
    "BEFORE_START", "CER", "CORPORA", "CULPRITS", "ENVIRONMENT", "EVALUATED", "EVALUATIONS", "HEARD", "HELD",
    "LEFT_OUT", "MANIFESTS", "METRICS", "NBEST", "PREPARED", "RECIPE", "REPORT", "RESULT", "TENSORBOARD", "TESTED",
    "TEST_CER", "TEST_WER", "WER",
]
