"""Checks that no utterance of the recipe's corpus is longer than its encoder takes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from sbkit.data.augment import planned_seconds
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.report import listed
from sbkit.recipe.source import Findings, Node
from sbkit.tasks.corpus_part import CorpusPart
from sbkit.tasks.recognise.keys import EncoderKeys


def longest_seconds(encoder: object) -> float | None:
    """Return the seconds of the longest utterance that an encoder takes; None: there is no limit.

    The class of one that has a limit has the attribute, too.
    """
    seconds: float | None = getattr(encoder, "longest_seconds", None)
    return seconds


def durations_fit(keys: EncoderKeys, built: Built, findings: Findings) -> bool:
    """Check that the corpus's max_duration doesn't allow longer utterances in training than the encoder takes."""
    max_seconds, corpus = longest_seconds(getattr(keys, keys.encoder_key)), keys.corpus
    if max_seconds is None or not hasattr(corpus, "max_duration"):
        return True
    node: Node = built.nodes["corpus"]
    place, key = (node.place_of("max_duration"), node.key_of("max_duration")) if isinstance(node.value, dict) \
        else (node.place, node.key)
    hint = f"write max_duration: {_max_duration(keys, max_seconds):g} under corpus"
    if corpus.max_duration is None:
        findings.warning("duration", place, key, "the corpus allows utterances of any length, but the encoder takes at "
                         f"most {max_seconds:g} s: a longer one is an error when the corpus is prepared", hint)
        return True
    longest = float(planned_seconds(keys.augment, corpus.max_duration))
    if longest <= max_seconds:
        return True
    slowed = f" ({longest:.1f} s when slowed down)" if longest > corpus.max_duration else ""
    findings.error("duration", place, key, f"the corpus allows utterances of {corpus.max_duration:g} s{slowed}, but "
                   f"the encoder takes at most {max_seconds:g} s", hint)
    return False


def refuse_longer(keys: EncoderKeys, manifests: Mapping[str, Manifest]) -> None:
    """Raise if a prepared corpus has utterances that are longer than the encoder takes."""
    if not hasattr(keys.class_of(keys.encoder_key), "longest_seconds"):
        return  # most encoders: while a corpus is prepared, none is built to be asked
    max_seconds, problems = longest_seconds(getattr(keys, keys.encoder_key)), []
    if max_seconds is None:
        return
    for split, manifest in manifests.items():
        seconds = planned_seconds(keys.augment, manifest.durations) if split == "train" else manifest.durations
        places = np.flatnonzero(np.round(seconds * keys.sample_rate) > max_seconds * keys.sample_rate)
        if len(places):
            ids = listed([f"{manifest.ids[int(i)]} ({seconds[i]:.1f} s)" for i in places], limit=3)
            problems.append(f"{split}: {len(places)} of {len(manifest)} utterances are longer than the "
                            f"{max_seconds:g} s that the encoder takes: {ids}")
    if problems:
        raise SbkitError("clip-too-long", "; ".join(problems), key="corpus.max_duration", hint="leave them out, with "
                         "max_duration: "
                         f"{_max_duration(keys, max_seconds):g} and limit_splits: [{', '.join(manifests)}] under "
                         "corpus, or cut them")


def _max_duration(keys: EncoderKeys, max_seconds: float) -> float:
    return max_seconds if keys.augment is None else int(10 * max_seconds / keys.augment.stretch) / 10


class DurationLimit(CorpusPart):
    """The longest utterance that the encoder takes."""

    def prepare(self, keys: EncoderKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        refuse_longer(keys, manifests)
        return {}

    def check_manifest(self, keys: EncoderKeys, split: str, manifest: Manifest) -> None:
        refuse_longer(keys, {split: manifest})
