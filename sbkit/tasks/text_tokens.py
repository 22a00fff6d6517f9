"""The tokens of a task's texts: the tokenizer that is trained on a corpus, and what follows from it."""

from __future__ import annotations

import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from sbkit.data.manifest import Manifest
from sbkit.data.mixture import Mixture
from sbkit.data.reader import SupportsEncode
from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.trace import Trace
from sbkit.runs import initial
from sbkit.system.console import atomic_write, counted
from sbkit.tasks.corpus_part import CorpusPart, OwnKeys
from sbkit.tasks.keys import RecogniserKeys

logger = logging.getLogger(__name__)

#: Tokens in a second of typical speech.
LETTERS_PER_SECOND, PIECES_PER_SECOND = 16, 6
#: The file name of a tokenizer that a run keeps from its initial model, in the folder of the recipe's tokenizer.
KEPT_TOKENIZER = "initial.model"
_NEW = "write init_tokenizer: new, which keeps the rows of tokens that both have"


class TextTokens(CorpusPart):
    """The labels of a task are the tokens of its texts, by the recipe's ``tokenizer``."""

    def prepare(self, keys: RecogniserKeys, manifests: Mapping[str, Manifest],
                given: Mapping[str, Any]) -> dict[str, Any]:
        """Train the tokenizer.

        The number of characters depends on the corpus, so it replaces the recipe's ``output_neurons``, but not one
        given on the command line.
        """
        tokenizer, declared = keys.tokenizer, keys.output_neurons
        follows: dict[str, Any] = {}
        if keys.init_tokenizer == "keep":
            tokenizer, follows = keep_tokenizer(keys, manifests["train"].texts, given)
        elif "output_neurons" not in given and declared == tokenizer.vocab_size:
            size = tokenizer.follow(manifests["train"].texts)
            if size is not None:
                print(f"output_neurons: {size}, the number of characters in this corpus (the recipe has {declared})",
                      file=sys.stderr)
                follows["output_neurons"] = size
        tokenizer.prepare(manifests["train"].texts, grows=isinstance(keys.corpus, Mixture))
        for split, manifest in manifests.items():
            uncovered = tokenizer.coverage(manifest.texts)
            if uncovered:
                logger.warning("The tokenizer has no tokens for %s of %s: %s",
                               counted(uncovered.total(), "character"), split, _most_common(uncovered))
        return follows

    def is_prepared(self, keys: RecogniserKeys) -> bool:
        return bool(keys.tokenizer.path.exists())

    def check_manifest(self, keys: RecogniserKeys, split: str, manifest: Manifest) -> None:
        uncovered = keys.tokenizer.coverage(manifest.texts)
        if uncovered:
            logger.warning("The model can't output %s of these texts, so each is an error: %s. Evaluate on texts "
                           "in the model's language, or train on texts that contain these characters (init_from "
                           "starts from this model's weights)",
                           counted(uncovered.total(), "character"), _most_common(uncovered))

    def tokenizer(self, keys: RecogniserKeys) -> SupportsEncode:
        """Return the tokenizer; raises unless it has as many tokens as the model has outputs."""
        tokenizer = keys.tokenizer.load()
        tokenizer.check(keys.output_neurons)
        return tokenizer

    def per_second(self, keys: OwnKeys) -> float:
        """Return the number of tokens in a second of typical speech."""
        tokenizer = keys.tokenizer if "tokenizer" in vars(keys) else None
        return LETTERS_PER_SECOND if getattr(tokenizer, "model_type", "") == "char" else PIECES_PER_SECOND

    def random(self, keys: OwnKeys, shape: tuple[int, int]) -> torch.Tensor:
        """Draw tokens [B, U] for a dummy batch."""
        return torch.randint(1, keys.output_neurons, shape)

    def check_outputs(self, trace: Trace, findings: Findings) -> None:
        """Check that vocabulary, special ids, tokenizer and the model's outputs agree."""

    def check_labels(self, keys: OwnKeys, manifests: Mapping[str, Manifest], findings: Findings,
                     nodes: Mapping[str, Node]) -> Section | None:
        """Check the labels of a prepared corpus; returns a table for the check's report, if there is one."""
        return None


def _most_common(characters: Counter[str]) -> str:
    return ", ".join(f"{char!r} x {times}" for char, times in characters.most_common(10))


def keep_tokenizer(keys: RecogniserKeys, texts: Sequence[str],
                   given: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Copy the source's tokenizer into the run's folder; returns it, and the keys whose values follow from it.

    texts : of the train split, whose characters it must have
    given : the keys that were set on the command line
    """
    path = keys.tokenizer.folder / KEPT_TOKENIZER
    if initial.fresh(keys) or not path.is_file():
        source = initial.source_of(keys)
        if source is None:
            raise SbkitError("missing-key", "init_tokenizer: keep needs a model to take the tokenizer from",
                             key="init_from", hint="set init_from to a run or a bundle")
        proto = source.piece_model()
        if proto is None:
            raise SbkitError("source-without-tokenizer", f"init_tokenizer: keep: {source.description} has no tokenizer",
                             hint=_NEW,
                             key="init_tokenizer")
        with atomic_write(path, "wb") as file:
            file.write(proto)
    tokenizer = Tokenizer(path.parent, model=path).load()
    uncovered = tokenizer.coverage(texts)
    if uncovered:
        raise SbkitError("uncovered-characters", "init_tokenizer: keep: that tokenizer has no piece for "
                         f"{counted(len(uncovered), 'character')} of the train split: {_most_common(uncovered)}",
                         hint=_NEW, key="init_tokenizer")
    plain = [piece for piece in tokenizer.pieces() if not piece.startswith("<")]
    kind = "char" if all(len(piece) == 1 for piece in plain) else "unigram"
    typed = given.get("tokenizer", {})
    arguments = dict(typed) if isinstance(typed, Mapping) else {}
    arguments |= {"model": str(path), "model_type": kind, "vocab_size": tokenizer.size}
    special = {"bos_index": tokenizer.bos_id, "eos_index": tokenizer.eos_id}  # -1: it has none
    follows = {"output_neurons": tokenizer.size, "token_type": kind, "tokenizer": arguments,
               **{key: index if index >= 0 else None for key, index in special.items()}}
    return tokenizer, follows
