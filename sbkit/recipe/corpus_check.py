"""Checks a recipe's corpus: that its source is there and suits the task, and its labels once it is prepared."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch

from sbkit.data import leaks, mixture
from sbkit.data.augment import planned_seconds
from sbkit.data.columns import BatchColumns
from sbkit.data.corpus import Corpus
from sbkit.data.manifest import Manifest
from sbkit.data.mixture import Mixture
from sbkit.data.plan import Plan
from sbkit.data.sources.base import MissingRecordings
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.recipe import cost
from sbkit.recipe.build import Built
from sbkit.recipe.check_request import CheckRequest
from sbkit.recipe.keys import TaskClass
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.trace import Trace
from sbkit.system.console import stored_json

#: Keys with which a recipe describes the source of a corpus, to be blamed for errors about what they describe.
_DESCRIBE_SOURCE = ("columns", "splits", "only")
#: The key that describes what an error with this code is about.
_KEY_OF_CODE = {"missing-column": "columns", "missing-split": "splits"}


def check_corpus(built: Built, task: TaskClass, findings: Findings, request: CheckRequest) -> None:
    """Check that the longest utterances fit into a batch, and that the source exists and has the task's columns and the
    splits that are needed."""
    batching = built.hparams.get("batching")
    if batching is not None and getattr(batching, "auto", False):
        batching.max_batch_seconds = batching.most_seconds(cost.longest_utterance(built.hparams))

    whole = built.hparams.get("corpus")
    needed_of_each = () if isinstance(whole, Mixture) else request.needed
    can_be_read = True
    for corpus, node in _corpora(built):
        _check_longest(built, corpus, node, findings)
        is_there = _check_source_exists(corpus, node, findings, request)
        can_be_read &= is_there
        if task is not None and is_there and isinstance(corpus, Corpus):
            try:
                corpus.check_source(task.needs_text(), task.columns, needed_of_each)
            except MissingRecordings as error:
                source = node.value.get("source", node)
                request.report_missing(source.source or source, error, findings)
            except SbkitError as error:
                can_be_read = False
                findings.report(error, *node.origin_of(_key_to_blame(corpus, node, error)))

    if isinstance(whole, Mixture) and can_be_read:
        _check_splits_of_mixture(whole, built.nodes["corpus"], findings, request)


def _corpora(built: Built) -> Iterator[tuple[Any, Node]]:
    """The corpus of a recipe, or each part of its mixture, of any class with check_exists, and where it is written."""
    corpus = built.hparams.get("corpus")
    node = built.nodes.get("corpus")
    if node is None or not hasattr(corpus, "check_exists") or not isinstance(node.value, dict):
        return
    if not isinstance(corpus, Mixture):
        yield corpus, node
        return
    nodes_of_parts = node.value["parts"].value
    for name, part in corpus.parts.items():
        if isinstance(nodes_of_parts[name].value, dict):
            yield part, nodes_of_parts[name]


def _check_longest(built: Built, corpus: Any,  # of any class with check_exists
                   node: Node, findings: Findings) -> None:
    """Warn if the corpus keeps utterances that are longer than a batch: training would stop at one."""
    longest = getattr(corpus, "max_duration", None)
    largest_batch = getattr(built.hparams.get("batching"), "max_batch_seconds", None)
    if longest is None or largest_batch is None:
        return
    planned = float(planned_seconds(built.hparams.get("augment"), longest))
    if planned <= largest_batch * (1 + 1e-6):
        return
    slowed = f", {planned:g} s when they are slowed down" if planned > longest else ""
    findings.warning("batch", node.place_of("max_duration"), node.key_of("max_duration"),
                     f"utterances of {longest:g} s are kept{slowed}, but a batch holds {largest_batch:g} s: "
                     "training would stop at one that doesn't fit", "lower it, or raise max_batch_seconds")


def _check_source_exists(corpus: Any,  # of any class with check_exists
                         node: Node, findings: Findings, request: CheckRequest) -> bool:
    """Check that the source, and a list of rows to leave out, exist; return whether they do."""
    left_out = getattr(corpus, "exclude", None)
    if left_out is not None and not left_out.is_file():
        argument = "exclude"
    elif getattr(corpus, "source", None) is not None:
        argument = "source"
    elif "language" in node.value:  # without a source it is the demo corpus, which may lack the language
        argument = "language"
    else:
        return True
    named = node.value.get(argument, node)
    named = named.source or named

    try:
        corpus.check_exists()
    except SbkitError as error:
        request.report_missing(named, error, findings)
        return False

    prepared_from = corpus.prepared_elsewhere() if isinstance(corpus, Corpus) else None
    if prepared_from is not None:
        findings.warning("other-corpus", named.place, named.key, f"{corpus.folder} was prepared from {prepared_from}: "
                         "labels, leaks, steps and hours in this report are of that corpus",
                         "sbkit prepare, with the same arguments, prepares this one")
    return True


def _key_to_blame(corpus: Corpus, node: Node, error: SbkitError) -> str:
    """The key of a corpus to blame for an error about its source: one that describes the source, if the recipe has it.

    An error about a line of a list is the list's.
    """
    if error.line is None:
        named = (error.key or "").removeprefix("corpus.").partition(".")[0]
        for key in (named, _KEY_OF_CODE.get(error.code)):
            if key in _DESCRIBE_SOURCE and key in node.value and getattr(corpus, key):
                return key
    return "source"


def _check_splits_of_mixture(whole: Mixture, node: Node, findings: Findings, request: CheckRequest) -> None:
    """Check that the parts together have the splits that are needed, if the splits of all are known."""
    try:
        splits = {name: part.known_splits() for name, part in whole.parts.items()}
        if None not in splits.values():
            whole.check_splits({name: names or () for name, names in splits.items()}, request.needed)
    except SbkitError as error:
        findings.report(error, *node.origin_of("parts"))


# ------------------------------------------------------------ once it is prepared


class PlannedTraining(NamedTuple):
    """The training set, and the plan of a new run on it."""

    train: Manifest
    plan: Plan


def plan_training(traced: Trace, device: torch.device) -> PlannedTraining | None:
    """Plan a new run; None if the corpus is not prepared, or can't be planned."""
    keys = traced.keys
    if not hasattr(keys.corpus, "manifest_path") or not keys.corpus.manifest_path("train").exists():
        return None
    try:
        train = keys.rows_of_training(keys.corpus.manifest("train"))
        rounding = keys.batching.rounding(device.type, traced.brain.compile)
        return PlannedTraining(train, Plan.of(train, keys.batching, keys.augment, keys.epoch_counter.limit, rounding))
    except SbkitError:
        return None


def leaks_section(built: Built) -> Section | None:
    """The table of what splits share; None before the corpus is prepared."""
    corpus = built.hparams.get("corpus")
    if not isinstance(corpus, Corpus):
        return None
    shared = stored_json(corpus.report_path).get("leaks")
    if shared is None:
        return None
    return Section("Shared by splits", leaks.COLUMNS, leaks.rows(shared), leaks.remarks(shared), {"shared": shared})


def mixture_section(traced: Trace, device: torch.device) -> Section | None:
    """The shares of the parts of a mixture in training; None if the mixture is not prepared."""
    if not traced.complete or not isinstance(traced.keys.corpus, Mixture):
        return None
    planned = plan_training(traced, device)
    if planned is None:
        return None
    passes = planned.plan.passes * traced.keys.epoch_counter.limit
    rows = traced.keys.corpus.rows(traced.keys.corpus.manifest("train"))
    for row in rows:
        row.append(round(row[-1] * passes, 1))
    columns = [*mixture.COLUMNS, "in the whole run"]
    values = {row[0]: dict(zip(columns[1:], row[1:], strict=True)) for row in rows}
    return Section("Mixture", columns, rows, values=values)


def check_labels(traced: Trace, findings: Findings) -> tuple[Section | None, str]:
    """The task's table of the labels of a prepared corpus, or why they weren't checked."""
    corpus: object = traced.built.hparams.get("corpus")
    if not hasattr(corpus, "manifest_path"):
        return None, ""
    if not traced.complete:
        return None, "labels: the model or the vocabulary could not be checked"
    paths = {split: corpus.manifest_path(split) for split in SPLITS}
    if not any(path.exists() for path in paths.values()):
        return None, (f"labels and recordings: the corpus is not prepared in {paths['train'].parent}; prepare it with "
                      "sbkit prepare, the same recipe and keys")
    if not traced.task.is_prepared(traced.keys):
        return None, ("labels: the corpus is prepared, but its tokenizer (or symbols, or statistics) doesn't match "
                      "these keys; sbkit prepare, with the same recipe and keys, creates it, and a run checks the "
                      "labels when it starts")
    if any(finding.code == "vocabulary" for finding in findings):
        return None, "labels: the vocabulary is wrong"
    try:
        manifests = {split: Manifest.open_prepared(path) for split, path in paths.items() if path.exists()}
        if "train" in manifests:
            BatchColumns(traced.task.columns, traced.keys).check_classes(manifests["train"])
        return traced.task.check_labels(traced.keys, manifests, findings, traced.built.nodes), ""
    except SbkitError as error:
        findings.report(error, traced.built.nodes["corpus"].place, "corpus")
        return None, ""
