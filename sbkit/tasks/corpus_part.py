"""What a task computes from its corpus, or limits in it, before there is a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from sbkit.data.manifest import Manifest

OwnKeys = Any  # an object of the task's Keys: a derived task writes its own class


class CorpusPart:
    """One such thing; a task lists its own in ``Task.corpus_parts``, and they are prepared in that order."""

    def prepare(self, keys: OwnKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Compute it, on one rank; returns the keys whose values follow from the corpus.

        given : the keys that were set on the command line
        """
        return {}

    def is_prepared(self, keys: OwnKeys) -> bool:
        """Whether the results of ``prepare`` exist already."""
        return True

    def check_manifest(self, keys: OwnKeys, split: str, manifest: Manifest) -> None:
        """Warn about utterances to score that the model can't handle well; raise if it can't handle them at all."""

    def load(self, keys: OwnKeys) -> Iterable[tuple[str, object]]:
        """Load the results of ``prepare`` into the recipe's objects; returns those that checkpoints have to hold."""
        return ()

    def allow_missing(self, keys: OwnKeys) -> None:
        """Let the model run on a dummy batch although nothing was prepared."""
