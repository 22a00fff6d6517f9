"""The tokens that a model scores frame by frame: that vocabulary, special ids, tokenizer and model agree, and that a
corpus's labels fit them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pyarrow.compute as pc
import torch
from torch import Tensor, nn

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.data.reader import SupportsEncode
from sbkit.errors import SbkitError
from sbkit.nn.guard import guard_indices
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section, listed
from sbkit.recipe.source import Findings, Node, Place
from sbkit.recipe.trace import Trace
from sbkit.runs.initial.source import TokenRows, TokenTables
from sbkit.tasks.corpus_part import OwnKeys
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.keys import ENCODERS, EncoderKeys
from sbkit.tasks.text_tokens import TextTokens

_INDICES = ("blank_index", "bos_index", "eos_index")
#: The most utterances of a split whose labels are checked: those with the most text per second.
MAX_CHECKED = 200_000
_CHECKED_AT_ONCE = 50_000
#: If the loss can't align a larger share of a split's utterances than this, the recipe is wrong and not the data.
TOO_MANY = 0.5


class FrameTokens(TextTokens):
    """Tokens of texts that a model scores frame by frame.

    heads : the keys of the heads whose outputs are scores of tokens
    """

    def __init__(self, *heads: str):
        self.heads = heads

    def check_outputs(self, trace: Trace, findings: Findings) -> None:
        check_sizes(trace, findings, self.heads)

    def check_labels(self, keys: OwnKeys, manifests: Mapping[str, Manifest], findings: Findings,
                     nodes: Mapping[str, Node], *, ctc: bool = True, alone: bool = True) -> Section:
        """Check the labels of each split; see :func:`check_labels`."""
        keys.tokenizer.load()
        return check_labels(keys, AcousticModel.of(keys), manifests, findings, nodes, ctc=ctc, alone=alone)


def safe_tokens(batch: Batch, keys: EncoderKeys) -> Tensor:
    """Return the tokens [B, U], safe to look up in an embedding; tokens outside the vocabulary are reported."""
    return guard_indices(batch.tokens, keys.output_neurons, name="tokens", ids=batch.ids,
                         lengths=batch.token_lengths, forbidden=(keys.blank_index,))


def token_tables(keys: EncoderKeys, heads: Iterable[object]) -> TokenTables:
    """Return the tensors of all heads' last layers and embeddings and of the decoder's embedding, and the tokens of
    their rows."""
    encoder = getattr(keys, keys.encoder_key)
    layers: list[nn.Module] = []
    for head in heads:
        if isinstance(head, nn.Module):
            layers += [layer for layer in head.modules() if isinstance(layer, nn.Linear)][-1:]
            layers += [layer for layer in head.modules() if isinstance(layer, nn.Embedding)]
    target = getattr(encoder, "custom_tgt_module", None)
    if isinstance(target, nn.Module):
        layers += [layer for layer in target.modules() if isinstance(layer, nn.Embedding)]
    tensors = [tensor for layer in layers for tensor in layer.parameters() if len(tensor) == keys.output_neurons]
    roles = {"blank": keys.blank_index, "bos": keys.bos_index, "eos": keys.eos_index}
    return TokenTables(tensors, lambda: TokenRows(keys.tokenizer.pieces(), {
        role: index for role, index in roles.items() if index is not None}))


def check_sizes(traced: Trace, findings: Findings, heads: Iterable[str]) -> None:
    """Check that ``output_neurons``, the special ids, the tokenizer and the model agree.

    heads : the keys of the heads whose outputs are scores of tokens
    """
    size = traced.built.hparams.get("output_neurons")
    if not isinstance(size, int) or isinstance(size, bool):
        return
    _check_indices(traced.built, size, findings)
    _check_heads(traced, size, findings, heads)
    _check_decoders(traced.built, size, findings)
    _check_tokenizer(traced.built, size, findings)


def _check_indices(built: Built, size: int, findings: Findings) -> None:
    """Check that the special ids lie in the vocabulary, differ, and are those of the tokenizer."""
    tokenizer: Any = built.hparams.get("tokenizer")  # of any class; only those with these attributes are checked
    name_of: dict[int, str] = {}
    for name in _INDICES:
        index = built.hparams.get(name)
        if not isinstance(index, int):
            continue
        place = built.nodes[name].place
        of_tokenizer = getattr(tokenizer, name.replace("_index", "_id"), None)
        if not 0 <= index < size:
            findings.error("vocabulary", place, name, f"{index} is outside the vocabulary of {size}",
                           f"use 0 to {size - 1}")
        elif index in name_of:
            findings.error("vocabulary", place, name, f"{name_of[index]} is {index} as well", "they should differ")
        elif isinstance(of_tokenizer, int) and of_tokenizer != index:
            findings.error("vocabulary", place, name, f"it is {index}, but the tokenizer's is {of_tokenizer}",
                           f"set {name} to {of_tokenizer}")
        name_of.setdefault(index, name)


def _check_heads(traced: Trace, size: int, findings: Findings, heads: Iterable[str]) -> None:
    """Check that each head gives a score for each token."""
    nodes = traced.built.nodes
    for key in heads:
        shape = traced.shape(key)
        if shape is not None and shape[-1] != size:
            where = nodes.get(key, nodes["output_neurons"])
            findings.error("vocabulary", where.place, key,
                           f"it gives {shape[-1]} scores a frame, but output_neurons is {size}",
                           "write `n_neurons: !ref <output_neurons>`")


def _check_decoders(built: Built, size: int, findings: Findings) -> None:
    """Check that a decoder's embedding has a row for each token."""
    for key in ENCODERS:
        target = getattr(built.hparams.get(key), "custom_tgt_module", None)
        for table in target.modules() if isinstance(target, nn.Module) else ():
            if not isinstance(table, nn.Embedding) or table.num_embeddings == size:
                continue
            node = built.nodes[key]
            report = findings.error if table.num_embeddings < size else findings.warning
            report("vocabulary", node.place_of("tgt_vocab"), node.key_of("tgt_vocab"),
                   f"the decoder knows {table.num_embeddings} tokens, but output_neurons is {size}",
                   "write `tgt_vocab: !ref <output_neurons>`")


def _check_tokenizer(built: Built, size: int, findings: Findings) -> None:
    """Check the size of the tokenizer: that of its argument, or else of its file if it exists."""
    tokenizer: Any = built.hparams.get("tokenizer")  # as above
    if "tokenizer" not in built.nodes or not hasattr(tokenizer, "vocab_size") or not hasattr(tokenizer, "path"):
        return
    declared = tokenizer.vocab_size
    if declared is not None and declared != size:
        node = built.nodes["tokenizer"]
        findings.error("vocabulary", node.place_of("vocab_size"), node.key_of("vocab_size"),
                       f"the tokenizer has {declared} entries, but output_neurons is {size}",
                       "write `vocab_size: !ref <output_neurons>`")
    elif tokenizer.path.exists():
        try:
            tokenizer.load().check(size)
        except SbkitError as error:
            findings.error("vocabulary", built.nodes["output_neurons"].place, "output_neurons", error.message,
                           error.hint or "")


# ------------------------------------------------------------ labels of a corpus


class LabelProblems(NamedTuple):
    """The utterances of a split whose labels a model can't learn, by their ids."""

    checked: int
    """How many utterances were looked at."""
    outside: list[str]
    """With a label outside the vocabulary, or a blank."""
    short: list[str]
    """With fewer frames than CTC needs."""
    empty: list[str]
    """With a text, but no token."""


def find_problems(manifest: Manifest, tokenizer: SupportsEncode, acoustic_model: AcousticModel, size: int,
                  sample_rate: int, blank: int = 0) -> LabelProblems:
    """Compare the labels of a split with the vocabulary and with the frames that CTC needs of its audio."""
    if len(manifest) > MAX_CHECKED:  # the fastest speech runs out of frames first
        density = pc.binary_length(manifest.texts.arrow).to_numpy(zero_copy_only=False) / manifest.durations
        manifest = manifest.select(np.sort(np.argpartition(-density, MAX_CHECKED)[:MAX_CHECKED]))
    problems = LabelProblems(len(manifest), [], [], [])
    for start in range(0, len(manifest), _CHECKED_AT_ONCE):
        rows = slice(start, start + _CHECKED_AT_ONCE)
        ids = manifest.ids[rows]
        texts = manifest.texts[rows]
        samples = np.round(manifest.durations[rows].astype(np.float64) * sample_rate).astype(int)
        encoded = [tokenizer.encode(text) for text in texts]

        # The tokens of all these utterances one after another, and the utterance of each.
        counts = np.array([len(tokens) for tokens in encoded])
        flat = np.array([token for tokens in encoded for token in tokens], dtype=np.int64)
        owner = np.repeat(np.arange(len(encoded)), counts)
        # CTC needs a frame for each token, and one for a blank between two equal ones.
        repeats = np.zeros(len(flat), bool)
        repeats[1:] = (flat[1:] == flat[:-1]) & (owner[1:] == owner[:-1])
        needed = counts + np.bincount(owner[repeats], minlength=len(encoded))
        frames = acoustic_model.frames(torch.from_numpy(samples)).numpy()

        is_outside = (flat < 0) | (flat >= size) | (flat == blank)
        problems.outside.extend(ids[int(i)] for i in np.unique(owner[is_outside]))
        problems.short.extend(ids[int(i)] for i in np.flatnonzero(needed > frames))
        problems.empty.extend(ids[int(i)] for i in np.flatnonzero(counts == 0) if texts[int(i)])
    return problems


def check_labels(keys: EncoderKeys, model: AcousticModel, manifests: Mapping[str, Manifest], findings: Findings,
                 nodes: Mapping[str, Node], *, ctc: bool = True, alone: bool = True) -> Section:
    """Check the labels of each split with the loaded tokenizer; returns a table for the report.

    ctc : whether the loss is CTC or has it as a part, so that labels and repeats each need a frame
    alone : whether CTC is the only loss, so that an utterance that is too short for it has no effect
    """
    node = nodes.get("corpus") or nodes.get("tokenizer")
    place = node.place if node is not None else Place()
    rows = []
    for split, manifest in manifests.items():
        problems = find_problems(manifest, keys.tokenizer, model, keys.output_neurons, keys.sample_rate,
                                 keys.blank_index)
        too_short = [len(problems.short)] if ctc else []
        rows.append([split, len(manifest), problems.checked, *too_short, len(problems.empty)])
        of = f"of {problems.checked} utterances"
        if problems.outside:
            last = keys.output_neurons - 1
            findings.error("labels", place, "corpus", f"{split}: {len(problems.outside)} {of} have a label outside 1 "
                           f"to {last}: {_some(problems.outside)}", "was the tokenizer made for this vocabulary?")
        if problems.short and ctc:
            _report_too_short(split, problems, alone, place, findings)
        if problems.empty:
            findings.warning("no-labels", place, "corpus", f"{split}: the tokenizer finds no token in "
                             f"{len(problems.empty)} {of}: {_some(problems.empty)}",
                             "check their texts and the tokenizer's characters")
    too_short_column = ["too short for CTC"] if ctc else []
    return Section("Labels", ["split", "utterances", "checked", *too_short_column, "without a token"], rows)


def _report_too_short(split: str, problems: LabelProblems, alone: bool, place: Place, findings: Findings) -> None:
    """Report utterances that CTC can't align: as an error if they are so many that the recipe is wrong."""
    report = findings.warning
    if alone and len(problems.short) > TOO_MANY * problems.checked:
        report = findings.error
    if split != "train":
        effect = "CTC can't output all of their tokens"
    elif alone:
        effect = "nothing is learned from them"
    else:
        effect = "by CTC nothing is learned from them"
    report("too-short", place, "corpus",
           f"{split}: {len(problems.short)} of {problems.checked} utterances have fewer encoder frames than CTC needs "
           f"for their tokens and repeats: {_some(problems.short)}",
           f"{effect}: subsample less, take a larger vocabulary, or check their texts")


def _some(ids: Sequence[str]) -> str:
    return listed(ids, limit=5)
