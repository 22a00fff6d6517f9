"""Reuses the tokenizer of the model that a run starts from: ``init_tokenizer: keep``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.runs import initial
from sbkit.system.console import atomic_write
from sbkit.tasks.keys import RecogniserKeys

#: Its file name in the folder of the recipe's tokenizer.
NAME = "initial.model"
_NEW = "write init_tokenizer: new, which keeps the rows of tokens that both have"


def kept(keys: RecogniserKeys, texts: Sequence[str], given: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Copy the source's tokenizer into the run's folder; returns it, and the keys whose values follow from it.

    texts : of the train split, which it must be able to write
    given : the keys that were set on the command line
    """
    path = keys.tokenizer.folder / NAME
    if initial.fresh(keys) or not path.is_file():
        source = initial.source_of(keys)
        if source is None:
            raise SbkitError("init_tokenizer: keep needs a model to take the tokenizer from",
                             hint="name one: init_from")
        if source.tokenizer is None:
            raise SbkitError(f"init_tokenizer: keep: {source.told} has no tokenizer", hint=_NEW)
        proto = source.tokenizer.read_bytes()
        Tokenizer(path.parent, model=source.tokenizer).load()  # an error before anything is written
        with atomic_write(path, "wb") as file:
            file.write(proto)
    tokenizer = Tokenizer(path.parent, model=path).load()
    uncovered = tokenizer.coverage(texts)
    if uncovered:
        shown = ", ".join(f"{char!r} x {times}" for char, times in uncovered.most_common(10))
        raise SbkitError(f"init_tokenizer: keep: that tokenizer has no piece for {len(uncovered)} characters of the "
                         f"train split: {shown}", hint=_NEW)
    plain = [piece for piece in tokenizer.pieces() if not piece.startswith("<")]
    kind = "char" if all(len(piece) == 1 for piece in plain) else "unigram"
    parts = given.get("tokenizer", {})
    own = {"model": str(path), "model_type": kind, "vocab_size": tokenizer.size}
    return tokenizer, {"output_neurons": tokenizer.size, "token_type": kind,
                       "tokenizer": {**(parts if isinstance(parts, Mapping) else {}), **own}}
