"""Vocabulary and special ids: they fit the model's outputs and the tokenizer."""

from __future__ import annotations

from typing import Any

from torch import nn

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.trace import Trace
from sbkit.runs.initial.vocabulary import TokenTables, Vocabulary
from sbkit.tasks.ctc.keys import ENCODERS, CTCKeys


def token_tables(keys: CTCKeys) -> TokenTables:
    """The last layers of both heads and the decoder's table of tokens, and what their rows stand for."""
    encoder = getattr(keys, keys.encoder_key)
    ends = [[layer for layer in head.modules() if isinstance(layer, nn.Linear)][-1:]
            for head in (keys.ctc_lin, keys.seq_lin) if isinstance(head, nn.Module)]
    embedding = getattr(encoder, "custom_tgt_module", None)
    tables = [layer for layer in embedding.modules() if isinstance(layer, nn.Embedding)] \
        if isinstance(embedding, nn.Module) else []
    tensors = [tensor for layer in [*(layer for end in ends for layer in end), *tables] for tensor in layer.parameters()
               if len(tensor) == keys.output_neurons]
    roles = {"blank": keys.blank_index, "bos": keys.bos_index, "eos": keys.eos_index}
    return TokenTables(tensors, lambda: Vocabulary(keys.tokenizer.pieces(), {
        role: place for role, place in roles.items() if place is not None}))


_INDICES = ("blank_index", "bos_index", "eos_index")
_HEADS = ("ctc_lin", "seq_lin")


def check_sizes(traced: Trace, findings: Findings) -> None:
    """``output_neurons``, the special ids, the tokenizer and the model agree with each other."""
    built = traced.built
    size = built.hparams.get("output_neurons")
    if not isinstance(size, int) or isinstance(size, bool):
        return
    _check_special(built, size, findings)
    node = built.nodes["output_neurons"]
    for key in _HEADS:
        shape = traced.shape(key)
        if shape is not None and shape[-1] != size:
            where = built.nodes.get(key, node)
            findings.error("vocabulary", where.place, key,
                           f"it gives {shape[-1]} scores a frame, output_neurons is {size}",
                           "write `n_neurons: !ref <output_neurons>`")
    _check_embedding(built, size, findings)
    _check_tokenizer(built, size, findings)


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
            findings.error("vocabulary", node.place, name, f"{seen[index]} is {index} as well", "they should differ")
        elif isinstance(theirs := getattr(tokenizer, name.replace("_index", "_id"), None), int) and theirs != index:
            findings.error("vocabulary", node.place, name, f"it is {index}, but the tokenizer's is {theirs}",
                           f"set {name} to {theirs}")
        seen.setdefault(index, name)


def _check_embedding(built: Built, size: int, findings: Findings) -> None:
    """The decoder's table of tokens has a row for each of them."""
    for key in ENCODERS:
        target = getattr(built.hparams.get(key), "custom_tgt_module", None)
        if isinstance(target, nn.Module):
            _check_tables(target, built.nodes[key], size, findings)


def _check_tables(target: nn.Module, node: Node, size: int, findings: Findings) -> None:
    for table in target.modules():
        if isinstance(table, nn.Embedding) and table.num_embeddings != size:
            tell = findings.error if table.num_embeddings < size else findings.warning
            tell("vocabulary", node.place_of("tgt_vocab"), node.key_of("tgt_vocab"),
                 f"the decoder knows {table.num_embeddings} tokens, output_neurons is {size}",
                 "write `tgt_vocab: !ref <output_neurons>`")


def _check_tokenizer(built: Built, size: int, findings: Findings) -> None:
    """The tokenizer's size, from its file where there is one, from its arguments elsewhere."""
    tokenizer: Any = built.hparams.get("tokenizer")
    node = built.nodes.get("tokenizer")
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


