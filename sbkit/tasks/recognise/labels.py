"""Checks that the labels of a prepared corpus are in the vocabulary, and that the audio is long enough for the loss."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch

from sbkit.data.manifest import Manifest
from sbkit.data.reader import SupportsEncode
from sbkit.recipe.report import Section, listed
from sbkit.recipe.source import Findings, Node, Place
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.recognizer import Recognizer

#: The most utterances of a split whose labels are checked: those with the most text per second.
MAX_CHECKED = 200_000
#: If the loss can't align a larger share of a split's utterances than this, the recipe is wrong and not the data.
TOO_MANY = 0.5


class LabelProblems(NamedTuple):
    """Problems in the labels of a split."""

    checked: int
    outside: list[str]
    """Ids of utterances with a label outside the vocabulary, or a blank."""
    short: list[str]
    """Ids of utterances with fewer frames than the loss needs."""
    empty: list[str]
    """Ids of utterances without a token."""


def count_problems(manifest: Manifest, tokenizer: SupportsEncode, recognizer: Recognizer, size: int, sample_rate: int,
                   blank: int = 0) -> LabelProblems:
    """Compare the labels of a split with the vocabulary and with the frames that CTC needs of its audio."""
    if len(manifest) > MAX_CHECKED:  # the fastest speech runs out of frames first
        density = pc.binary_length(manifest.texts.arrow).to_numpy(zero_copy_only=False) / manifest.durations
        manifest = manifest.select(np.sort(np.argpartition(-density, MAX_CHECKED)[:MAX_CHECKED]))
    outside: list[str] = []
    short: list[str] = []
    empty: list[str] = []
    for start in range(0, len(manifest), 50_000):
        ids = manifest.ids[start : start + 50_000]
        samples = np.round(manifest.durations[start : start + 50_000].astype(np.float64) * sample_rate).astype(int)
        encoded = [tokenizer.encode(text) for text in manifest.texts[start : start + 50_000]]
        counts = np.array([len(tokens) for tokens in encoded])
        flat = np.array([t for tokens in encoded for t in tokens], dtype=np.int64)
        owner = np.repeat(np.arange(len(encoded)), counts)
        same = np.zeros(len(flat), bool)
        same[1:] = (flat[1:] == flat[:-1]) & (owner[1:] == owner[:-1])
        needed = counts + np.bincount(owner[same], minlength=len(encoded))
        frames = recognizer.frames(torch.from_numpy(samples)).numpy()
        wrong = np.unique(owner[(flat < 0) | (flat >= size) | (flat == blank)])
        outside += [ids[int(i)] for i in wrong]
        short += [ids[int(i)] for i in np.flatnonzero(needed > frames)]
        empty += [ids[int(i)] for i in np.flatnonzero(counts == 0)]
    return LabelProblems(len(manifest), outside, short, empty)


def check_labels(keys: EncoderKeys, model: Recognizer, manifests: Mapping[str, Manifest], findings: Findings,
                 nodes: Mapping[str, Node], *, ctc: bool = True, alone: bool = True) -> Section:
    """Check the labels of each split with the loaded tokenizer; returns a table for the report.

    ctc : whether the loss is CTC or has it as a part, so that labels and repeats each need a frame
    alone : whether CTC is the only loss, so that an utterance that is too short for it has no effect
    """
    node = nodes.get("corpus") or nodes.get("tokenizer")
    place = node.place if node is not None else Place()
    rows = []
    for split, manifest in manifests.items():
        found = count_problems(manifest, keys.tokenizer, model, keys.output_neurons, keys.sample_rate, keys.blank_index)
        rows.append([split, len(manifest), found.checked, *([len(found.short)] if ctc else []), len(found.empty)])
        of = f"of {found.checked} utterances"
        if found.outside:
            last = keys.output_neurons - 1
            findings.error("labels", place, "corpus", f"{split}: {len(found.outside)} {of} have a label outside 1 to "
                           f"{last}: {_some(found.outside)}", "was the tokenizer made for this vocabulary?")
        if found.short and ctc:
            report = findings.error if alone and len(found.short) > TOO_MANY * found.checked else findings.warning
            report("too-short", place, "corpus",
                   f"{split}: {len(found.short)} {of} have fewer encoder frames than CTC needs for their tokens "
                   f"and repeats: {_some(found.short)}",
                   (f"{'nothing' if alone else 'by CTC nothing'} is learned from them" if split == "train" else
                    "CTC can't output all of their tokens")
                   + ": subsample less, take a larger vocabulary, or check their texts")
        if found.empty:
            findings.warning("no-labels", place, "corpus",
                             f"{split}: the tokenizer finds no token in {len(found.empty)} {of}: {_some(found.empty)}",
                             "check their texts and the tokenizer's characters")
    return Section("Labels", ["split", "utterances", "checked", *(["too short for CTC"] if ctc else []),
                              "without a token"], rows)


def _some(ids: Sequence[str]) -> str:
    return listed(ids, limit=5)
