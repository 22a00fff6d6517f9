"""Vocabulary, special ids and labels: they fit the model's outputs, and the audio is long enough for CTC."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from torch import nn

from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.nn.recognizer import Recognizer
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section, listed
from sbkit.recipe.shapes import Trace, encoder_key
from sbkit.recipe.source import Findings, Node, Place

SPLITS = ("train", "dev", "test")
#: Utterances of a split whose labels are looked at: all of them, or the ones with most text a second.
MOST = 200_000
#: Above this share of utterances that CTC can't align, the recipe is wrong and not the data.
TOO_MANY = 0.5
_INDICES = ("blank_index", "bos_index", "eos_index")


def check_sizes(built: Built, traced: Trace, findings: Findings) -> None:
    """``output_neurons``, the special ids, the tokenizer and the model agree with each other."""
    size = built.hparams.get("output_neurons")
    if not isinstance(size, int) or isinstance(size, bool):
        return
    _check_special(built, size, findings)
    node = built.nodes["output_neurons"]
    for stage in ("CTC head", "attention head"):
        shape = traced.shape(stage)
        key = next((k for what, k, _ in traced.stages if what == stage), "")
        if shape is not None and shape[-1] != size:
            where = built.nodes.get(key, node)
            findings.error("vocabulary", where.place, key,
                           f"it gives {shape[-1]} scores a frame, output_neurons is {size}",
                           "write `n_neurons: !ref <output_neurons>`")
    _check_embedding(built, size, findings)
    _check_tokenizer(built, size, findings)


def check_corpus(built: Built, findings: Findings) -> None:
    """What a corpus lets in fits into a batch, and one that was named on the command line is there.

    One that a recipe names may be on another machine.
    """
    corpus, node = built.hparams.get("corpus"), built.nodes.get("corpus")
    if not hasattr(corpus, "check_there") or not isinstance(node.value, dict):
        return
    _check_longest(built, findings)
    if "source" not in node.value:
        return
    given = node.value["source"].source or node.value["source"]
    if given.place.line:
        return
    try:
        corpus.check_there()
    except SbkitError as error:
        findings.error("no-corpus", given.place, f"--{given.key}", error.message, error.hint or "")


def _check_longest(built: Built, findings: Findings) -> None:
    """What the corpus lets in fits into a batch."""
    longest = getattr(built.hparams["corpus"], "max_duration", None)
    most = getattr(built.hparams.get("batching"), "max_batch_seconds", None)
    if longest is None or most is None:
        return
    stretch = getattr(built.hparams.get("augment"), "stretch", 1.0)
    if longest * stretch > most * (1 + 1e-6):
        node = built.nodes["corpus"]
        slowed = f", {longest * stretch:g} s when they are slowed down" if stretch > 1 else ""
        findings.warning("batch", node.place_of("max_duration"), node.key_of("max_duration"),
                         f"utterances of {longest:g} s are let in{slowed}, and a batch holds {most:g} s: training "
                         "would end at one that doesn't fit", "lower it, or raise max_batch_seconds")


def _check_special(built: Built, size: int, findings: Findings) -> None:
    """Blank, bos and eos are inside the vocabulary and distinct, and the tokenizer's own."""
    tokenizer = built.hparams.get("tokenizer")
    seen: dict[int, str] = {}
    for name in _INDICES:
        index = built.hparams.get(name)
        if not isinstance(index, int):
            continue
        node = built.nodes[name]
        if not 0 <= index < size:
            findings.error("vocabulary", node.place, name, f"{index} is outside the vocabulary of {size}",
                           f"use 0 to {size - 1}")
        elif index in seen:
            # a script of one's own may decode with one id for all of them, as SpeechBrain's seq2seq recipes do
            tell = findings.error if "brain" in built.nodes else findings.warning
            tell("vocabulary", node.place, name, f"{seen[index]} is {index} as well", "they should differ")
        elif isinstance(theirs := getattr(tokenizer, name.replace("_index", "_id"), None), int) and theirs != index:
            findings.error("vocabulary", node.place, name, f"it is {index}, but the tokenizer's is {theirs}",
                           f"set {name} to {theirs}")
        seen.setdefault(index, name)


def _check_embedding(built: Built, size: int, findings: Findings) -> None:
    """The decoder's table of tokens has a row for each of them."""
    key = encoder_key(built.hparams)
    model = built.hparams.get(key) if key else None
    target = getattr(model, "custom_tgt_module", None)
    if not isinstance(target, nn.Module):
        return
    node = built.nodes[key]
    for table in target.modules():
        if isinstance(table, nn.Embedding) and table.num_embeddings != size:
            tell = findings.error if table.num_embeddings < size else findings.warning
            tell("vocabulary", node.place_of("tgt_vocab"), node.key_of("tgt_vocab"),
                 f"the decoder knows {table.num_embeddings} tokens, output_neurons is {size}",
                 "write `tgt_vocab: !ref <output_neurons>`")


def _check_tokenizer(built: Built, size: int, findings: Findings) -> None:
    """The tokenizer's size, from its file where there is one, from its arguments elsewhere."""
    tokenizer, node = built.hparams.get("tokenizer"), built.nodes.get("tokenizer")
    if node is None or not hasattr(tokenizer, "vocab_size") or not hasattr(tokenizer, "path"):
        return
    declared = tokenizer.vocab_size
    if declared is not None and declared != size:
        findings.error("vocabulary", node.place_of("vocab_size"), node.key_of("vocab_size"),
                       f"the tokenizer has {declared} entries, output_neurons is {size}",
                       "write `vocab_size: !ref <output_neurons>`")
        return
    if tokenizer.path.exists():
        try:
            tokenizer.load().check(size)
        except SbkitError as error:
            findings.error("vocabulary", built.nodes["output_neurons"].place, "output_neurons", error.message,
                           error.hint or "")


# ---------------------------------------------------------------------------------------------- labels


class Labels(NamedTuple):
    """What the labels of a split look like."""

    looked_at: int
    outside: list[str]
    """Ids of utterances with a label outside the vocabulary, or a blank."""
    short: list[str]
    """Ids of utterances with fewer frames than CTC needs."""
    empty: list[str]
    """Ids of utterances without a token."""


def look(manifest: Manifest, tokenizer: Any, recognizer: Recognizer, size: int, blank: int = 0,
         sample_rate: int = 16000) -> Labels:
    """Encode a split's texts and compare their labels with the vocabulary and the frames of their audio."""
    if len(manifest) > MOST:  # who speaks fastest is short of frames first
        density = pc.binary_length(manifest.texts.arrow).to_numpy(zero_copy_only=False) / manifest.durations
        manifest = manifest.select(np.sort(np.argpartition(-density, MOST)[:MOST]))
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
    return Labels(len(manifest), outside, short, empty)


def check_labels(hparams: Mapping[str, Any], manifests: Mapping[str, Manifest], recognizer: Recognizer,
                 findings: Findings, nodes: Mapping[str, Node] | None = None) -> Section:
    """Look at every split's labels; ``hparams`` holds a loaded tokenizer."""
    nodes = nodes or {}
    node = nodes.get("corpus") or nodes.get("tokenizer")
    place = node.place if node is not None else Place()
    rows = []
    for split, manifest in manifests.items():
        found = look(manifest, hparams["tokenizer"], recognizer, hparams["output_neurons"],
                     hparams.get("blank_index", 0), hparams.get("sample_rate", 16000))
        rows.append([split, len(manifest), found.looked_at, len(found.short), len(found.empty)])
        of = f"of {found.looked_at} utterances"
        if found.outside:
            last = hparams["output_neurons"] - 1
            findings.error("labels", place, "corpus", f"{split}: {len(found.outside)} {of} have a label outside 1 to "
                           f"{last}: {_some(found.outside)}", "was the tokenizer made for this vocabulary?")
        if found.short:
            tell = findings.error if len(found.short) > TOO_MANY * found.looked_at else findings.warning
            tell("too-short", place, "corpus",
                 f"{split}: {len(found.short)} {of} have fewer encoder frames than CTC needs for their tokens and "
                 f"repeats: {_some(found.short)}",
                 "nothing is learned from them: subsample less, take a larger vocabulary, or look at their texts")
        if found.empty:
            findings.warning("no-labels", place, "corpus",
                             f"{split}: the tokenizer finds no token in {len(found.empty)} {of}: {_some(found.empty)}",
                             "look at their texts and at the tokenizer's characters")
    return Section("Labels", ["split", "utterances", "looked at", "too short for CTC", "without a token"], rows)


def _some(ids: Sequence[str]) -> str:
    return listed(ids, most=5)


def check_prepared(built: Built, recognizer: Recognizer | None, findings: Findings) -> tuple[Section | None, str]:
    """The labels of what an earlier run prepared; or why they weren't looked at."""
    corpus, tokenizer = built.hparams.get("corpus"), built.hparams.get("tokenizer")
    if not hasattr(corpus, "manifest_path") or not hasattr(tokenizer, "path"):
        return None, ""
    if recognizer is None or not isinstance(built.hparams.get("output_neurons"), int):
        return None, "labels: the model or the vocabulary could not be looked at"
    paths = {split: corpus.manifest_path(split) for split in SPLITS}
    if not tokenizer.path.exists() or not any(path.exists() for path in paths.values()):
        return None, "labels: the corpus is prepared and the tokenizer made when the run starts; they are compared then"
    if any(f.code == "vocabulary" for f in findings):
        return None, "labels: the vocabulary is wrong"
    try:
        tokenizer.load()
        manifests = {split: Manifest.read(path) for split, path in paths.items() if path.exists()}
    except SbkitError as error:
        node = built.nodes["corpus"]
        findings.error("labels", node.place, "corpus", error.message, error.hint or "")
        return None, ""
    return check_labels(built.hparams, manifests, recognizer, findings, built.nodes), ""
