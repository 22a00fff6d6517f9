"""Checks of a recipe's corpus: its source exists, its utterances fit into a batch, and its labels suit the model."""

from __future__ import annotations

from sbkit.data.augment import planned_seconds
from sbkit.data.manifest import Manifest
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace


def check_corpus(built: Built, findings: Findings, starting: bool = False) -> None:
    """Check that the longest utterances fit into a batch, and that the source exists.

    The path of a recipe's file may be meant for another machine, so it is an error only if a run is ``starting`` here.
    """
    corpus: object = built.hparams.get("corpus")
    node = built.nodes.get("corpus")
    if node is None or not hasattr(corpus, "check_there") or not isinstance(node.value, dict):
        return
    _check_longest(built, findings)
    # Of the demo corpus, only the language can be none that there is.
    argument = "source" if getattr(corpus, "source", None) is not None else "language"
    if argument not in node.value:
        return
    given = node.value[argument].source or node.value[argument]
    try:
        corpus.check_there()
    except SbkitError as error:
        if starting or not given.place.line:
            name = given.key if given.place.line else f"--{given.key}"
            findings.error("no-corpus", given.place, name, error.message, error.hint or "")
        else:
            findings.warning("no-corpus", given.place, given.key, f"{error.message} on this machine",
                             "a run here couldn't start; " + (error.hint or ""))


def _check_longest(built: Built, findings: Findings) -> None:
    """Warn of a limit for the duration of utterances that is larger than a batch."""
    longest = getattr(built.hparams["corpus"], "max_duration", None)
    most = getattr(built.hparams.get("batching"), "max_batch_seconds", None)
    if longest is None or most is None:
        return
    planned = float(planned_seconds(built.hparams.get("augment"), longest))
    if planned > most * (1 + 1e-6):
        node = built.nodes["corpus"]
        slowed = f", {planned:g} s when they are slowed down" if planned > longest else ""
        findings.warning("batch", node.place_of("max_duration"), node.key_of("max_duration"),
                         f"utterances of {longest:g} s are kept{slowed}, but a batch holds {most:g} s: training "
                         "would end at one that doesn't fit", "lower it, or raise max_batch_seconds")


def check_prepared(traced: Trace, findings: Findings) -> tuple[Section | None, str]:
    """The task's check of labels in a corpus that an earlier run has prepared, or why they weren't checked."""
    corpus: object = traced.built.hparams.get("corpus")
    if not hasattr(corpus, "manifest_path"):
        return None, ""
    if not traced.complete:
        return None, "labels: the model or the vocabulary could not be looked at"
    paths = {split: corpus.manifest_path(split) for split in SPLITS}
    if not any(path.exists() for path in paths.values()) or not traced.task.is_prepared(traced.keys):
        return None, "labels: they are looked at when the run starts, which prepares the corpus"
    if any(f.code == "vocabulary" for f in findings):
        return None, "labels: the vocabulary is wrong"
    try:
        manifests = {split: Manifest.read(path) for split, path in paths.items() if path.exists()}
        return traced.task.check_labels(traced.keys, manifests, findings, traced.built.nodes), ""
    except SbkitError as error:
        node = traced.built.nodes["corpus"]
        findings.error("labels", node.place, "corpus", error.message, error.hint or "")
        return None, ""
