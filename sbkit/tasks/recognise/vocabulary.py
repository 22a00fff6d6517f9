"""Checks that vocabulary, special ids, tokenizer and model agree, and finds the tensors with a row per token."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from sbkit.errors import SbkitError
from sbkit.recipe.build import Built
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace
from sbkit.runs.initial.source import TokenRows, TokenTables
from sbkit.tasks.recognise.keys import ENCODERS, EncoderKeys

_INDICES = ("blank_index", "bos_index", "eos_index")


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
    built = traced.built
    size = built.hparams.get("output_neurons")
    if not isinstance(size, int) or isinstance(size, bool):
        return
    _check_special(built, size, findings)
    node = built.nodes["output_neurons"]
    for key in heads:
        shape = traced.shape(key)
        if shape is not None and shape[-1] != size:
            where = built.nodes.get(key, node)
            findings.error("vocabulary", where.place, key,
                           f"it gives {shape[-1]} scores a frame, but output_neurons is {size}",
                           "write `n_neurons: !ref <output_neurons>`")
    _check_embedding(built, size, findings)
    _check_tokenizer(built, size, findings)


def _check_special(built: Built, size: int, findings: Findings) -> None:
    """Check that blank, bos and eos are in the vocabulary, distinct, and the same as the tokenizer's."""
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
    """Check that the decoder's embedding has a row for each token."""
    for key in ENCODERS:
        target = getattr(built.hparams.get(key), "custom_tgt_module", None)
        for table in target.modules() if isinstance(target, nn.Module) else ():
            if isinstance(table, nn.Embedding) and table.num_embeddings != size:
                node, report = built.nodes[key], findings.error if table.num_embeddings < size else findings.warning
                report("vocabulary", node.place_of("tgt_vocab"), node.key_of("tgt_vocab"),
                       f"the decoder knows {table.num_embeddings} tokens, but output_neurons is {size}",
                       "write `tgt_vocab: !ref <output_neurons>`")


def _check_tokenizer(built: Built, size: int, findings: Findings) -> None:
    """Check the tokenizer's size: that of its file if it exists, else its argument."""
    tokenizer: Any = built.hparams.get("tokenizer")  # of any class; only those with these attributes are checked
    node = built.nodes.get("tokenizer")
    if node is None or not hasattr(tokenizer, "vocab_size") or not hasattr(tokenizer, "path"):
        return
    declared = tokenizer.vocab_size
    if declared is not None and declared != size:
        findings.error("vocabulary", node.place_of("vocab_size"), node.key_of("vocab_size"),
                       f"the tokenizer has {declared} entries, but output_neurons is {size}",
                       "write `vocab_size: !ref <output_neurons>`")
        return
    if tokenizer.path.exists():
        try:
            tokenizer.load().check(size)
        except SbkitError as error:
            findings.error("vocabulary", built.nodes["output_neurons"].place, "output_neurons", error.message,
                           error.hint or "")
