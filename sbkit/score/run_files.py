"""The names of the files and folders in a run's output folder that several rooms use.

The recipe says where checkpoints, the tokenizer and the log of epochs go (``save`` and ``train_log.txt`` in all shipped
recipes), and ``log-config.yaml`` says where the log goes: ``log.txt``.
"""

RECIPE = "hyperparams.yaml"
"""SpeechBrain's name for the resolved recipe."""
METRICS = "metrics.jsonl"
HEARD = "test_utterances.jsonl"
MANIFESTS = "manifests"
PREPARED = f"{MANIFESTS}/prepare_report.json"
EVALUATIONS, CORPORA = "evaluations", "corpora"
"""Contains a folder per result of ``sbkit evaluate``, and one for the corpora prepared for it."""
RESULT, EVALUATED = "result.json", "utterances.jsonl"
"""File in the folder of an evaluation."""
NUMBERS = "test_results.json"
"""Results of a task that has only numbers and tables; in an evaluation's folder without ``test_``."""
REPORT = "report.html"
CULPRITS, TENSORBOARD = "culprits", "tensorboard"
LOGGERS = "loggers.txt"
"""Holds the name of this run in the tools of ``loggers``."""
ENVIRONMENT, REPRODUCE = "env.log", "reproduce.json"
HELD = ".held-{}.json"
"""Records who holds the folder; numbered."""
BEFORE_START = ".before-this-start"
"""Backup of what a start overwrites, kept until training begins."""
TESTED = "tested.json"
"""Records that the run is complete, and for which recipe, options and data."""
