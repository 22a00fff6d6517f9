"""The names of the files and folders in a run's output folder that several packages use.

The recipe sets the places of checkpoints, the tokenizer and the log of epochs (``save`` and ``train_log.txt`` in all
shipped recipes), and ``log-config.yaml`` that of the log: ``log.txt``.
"""

RECIPE = "hyperparams.yaml"
"""SpeechBrain's name for the resolved recipe."""
METRICS = "metrics.jsonl"
TEST_UTTERANCES = "test_utterances.jsonl"
MANIFESTS = "manifests"
PREPARED = f"{MANIFESTS}/prepare_report.json"
EVALUATIONS, CORPORA = "evaluations", "corpora"
"""Contains a folder per result of ``sbkit evaluate``, and one for the corpora prepared for it."""
RESULT, UTTERANCES = "result.json", "utterances.jsonl"
"""Files in the folder of an evaluation."""
TEST_RESULTS = "test_results.json"
"""Results of a task that has only numbers and tables; in an evaluation's folder without ``test_``."""
REPORT = "report.html"
OLD_SET = "old_set.json"
"""For a run that replays: the initial model's score on its own test, and a mean of weights that restores it."""
CULPRITS, TENSORBOARD = "culprits", "tensorboard"
LOGGERS = "loggers.txt"
"""Holds the name of this run in the tools of ``loggers``."""
ENVIRONMENT, REPRODUCE = "env.log", "reproduce.json"
MEASURED = "max_batch_seconds.json"
"""The micro-batch that a run with ``max_batch_seconds: auto`` has measured."""
HELD = ".held-{}.json"
DEAD_AFTER = 120.0  # seconds without a heartbeat until its holder counts as dead
"""Records who holds the folder; numbered."""
BEFORE_START = ".before-this-start"
"""Backup of what a start overwrites, kept until training begins."""
TESTED = "tested.json"
"""Records that the run is complete, and for which recipe, options and data."""
