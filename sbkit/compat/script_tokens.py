"""The tokens that a script's model writes: its tokenizer, how tokens become text, and where the test's texts are."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import sentencepiece
import torch
from speechbrain.dataio.encoder import CategoricalEncoder, CTCTextEncoder
from speechbrain.tokenizers.SentencePiece import SentencePiece

from sbkit.compat.script_test_set import Row, TestSet
from sbkit.decode.spans import WORD_START
from sbkit.errors import SbkitError, shown

Brain = Any  # an sbkit.Brain
Tokenizer = Any  # sentencepiece's processor, or an encoder of SpeechBrain's
Spelling = tuple[str, ...]  # each token as it is written
Writer = Callable[[Sequence[int]], str]  # token ids to text
#: Attributes of SpeechBrain's encoders with a label that is not text.
_SPECIAL = ("blank_label", "unk_label", "bos_label", "eos_label")
#: Labels that may stand for the space between words where labels are characters.
_SPACES = (" ", WORD_START, "_", "|")
_UNKNOWN = "⁇"  # SentencePiece writes it for an unknown piece
#: Rows of the test set to find its texts with.
_TRIED_ROWS = 12


@dataclass(frozen=True)
class ScriptTokens:
    """A script's tokenizer, as a bundle needs it.

    symbols : the tokens in order of their ids, with ``▁`` for the space before a word
    silent : ids that aren't text
    blank : the id that the tokenizer itself says is the blank; None if it doesn't
    decode : writes ids as the script does
    """

    symbols: Sequence[str]
    silent: frozenset[int]
    blank: int | None
    decode: Writer


@dataclass(frozen=True)
class ScriptTexts:
    """Where the texts of the test set are.

    column : of the script's list; None: there is none that its tokens are made from
    tokens : the output key with the ids of a text; None: unknown

    Without both, no text is known.
    """

    column: str | None
    tokens: str | None

    @property
    def known(self) -> bool:
        return self.column is not None or self.tokens is not None

    def describe(self) -> str:
        """Say where the references come from."""
        if self.column is not None:
            return f"the column {self.column}"
        return f"{self.tokens}, decoded" if self.tokens is not None else "unknown"


# ------------------------------------------------------------------ the tokenizer


def tokenizers_of(brain: Brain) -> dict[str, Tokenizer]:
    """Return all tokenizers that a script's Brain holds, or that its methods use as globals, by name; each once."""
    found: dict[int, tuple[str, Tokenizer]] = {}
    for name, value in _named_objects(brain):
        if isinstance(value, (SentencePiece, sentencepiece.SentencePieceProcessor, CategoricalEncoder)):
            # A wrapper and its processor are one tokenizer.
            inner = value.sp if isinstance(value, SentencePiece) else value
            found.setdefault(id(inner), (name, inner))
    return dict(found.values())


def _named_objects(brain: Brain) -> Iterator[tuple[str, Any]]:
    yield from vars(brain).items()
    yield from vars(brain.hparams).items()
    for kind in type(brain).__mro__:
        if kind.__module__.startswith(("sbkit.", "speechbrain.")):
            break
        for method in vars(kind).values():
            if inspect.isfunction(method):
                scope = method.__globals__
                yield from ((name, scope[name]) for name in method.__code__.co_names if name in scope)


def size_of(tokenizer: Tokenizer) -> int:
    """Return the number of entries of a tokenizer."""
    if isinstance(tokenizer, sentencepiece.SentencePieceProcessor):
        return int(tokenizer.vocab_size())
    return len(tokenizer.ind2lab)


def open_tokens(tokenizer: Tokenizer, test_set: TestSet, declared: str | None) -> tuple[ScriptTokens, ScriptTexts]:
    """Read a tokenizer, and find the test's texts with it: those that its tokens are made from.

    declared : where a script says that the texts are: a column of its list, or an output key with token ids
    """
    size = size_of(tokenizer)
    if isinstance(tokenizer, sentencepiece.SentencePieceProcessor):
        tokens = _of_sentencepiece(tokenizer)
        return tokens, _find_texts(test_set, declared, size, {(): tokens.decode})[0]
    labels = _labels(tokenizer)
    silent = frozenset(place for place, label in enumerate(labels)
                       if label in {getattr(tokenizer, name, None) for name in _SPECIAL})
    writers = {symbols: partial(_write, symbols, silent) for symbols in _spellings(labels, silent)}
    texts, symbols = _find_texts(test_set, declared, size, writers)
    if symbols is None:  # no text tells: single characters are joined, longer labels are words
        characters = all(len(label) == 1 for place, label in enumerate(labels) if place not in silent)
        symbols = list(writers)[0 if characters else -1]
    blank = None
    if isinstance(tokenizer, CTCTextEncoder) and hasattr(tokenizer, "blank_label"):
        blank = int(tokenizer.get_blank_index())
    return ScriptTokens(symbols, silent, blank, writers[symbols]), texts


def _of_sentencepiece(processor: Tokenizer) -> ScriptTokens:
    pieces = [processor.id_to_piece(place) for place in range(processor.vocab_size())]
    silent = frozenset(place for place in range(len(pieces))
                       if processor.is_control(place) or processor.is_unknown(place))

    def decode(ids: Sequence[int]) -> str:
        return str(processor.decode_ids([int(place) for place in ids])).replace(_UNKNOWN, " ")

    return ScriptTokens(pieces, silent, None, decode)


def _labels(encoder: CategoricalEncoder) -> list[str]:
    indices = sorted(encoder.ind2lab)
    if indices != list(range(len(indices))):
        raise SbkitError("script-tokenizer", f"the indices of the script's {type(encoder).__name__} have gaps: "
                         f"{shown(indices)}", hint="let it begin with 0, and count up")
    labels = [encoder.ind2lab[place] for place in indices]
    wrong = [label for label in labels if not isinstance(label, str) or (len(label) > 1 and len(label.split()) > 1)]
    if wrong:
        raise SbkitError("script-tokenizer", f"a label of the script's {type(encoder).__name__} is no token: "
                         f"{shown(wrong[0])}", hint="labels are texts without spaces, or single characters")
    return labels


def _spellings(labels: Sequence[str], silent: frozenset[int]) -> list[Spelling]:
    """Return the ways in which labels may be written, each as symbols: characters with a space among them, and words.
    """
    spellings = []
    for space in _SPACES:
        if space in labels:
            spellings.append(tuple(WORD_START if label == space else label for label in labels))
    if not spellings:
        spellings.append(tuple(labels))
    spellings.append(tuple(label if place in silent else WORD_START + label for place, label in enumerate(labels)))
    return spellings


def _write(symbols: Spelling, silent: frozenset[int], ids: Sequence[int]) -> str:
    return "".join(symbols[int(place)] for place in ids if int(place) not in silent).replace(WORD_START, " ").strip()


# ------------------------------------------------------------------ the texts of the test


def _find_texts(test_set: TestSet, declared: str | None, size: int,
                writers: Mapping[Spelling, Writer]) -> tuple[ScriptTexts, Spelling | None]:
    """Find the column of texts whose tokens the dataset gives, and which of the writers writes these.

    Returns that writer's key too; None if no text tells.
    """
    examples = [(test_set.listed(row), test_set.row(row)) for row in test_set.evenly_by_length(_TRIED_ROWS)]
    columns = [column for column, value in examples[0][0].items() if isinstance(value, str)]
    token_keys = _token_keys([values for _, values in examples], size)
    if declared is not None:
        if declared not in (*columns, *token_keys):
            raise SbkitError("script-texts", f"sbkit_export: text is {declared!r}, and the test set has the columns "
                             f"{', '.join(columns)} and token ids under {', '.join(token_keys) or 'no key'}",
                             key="text", value=declared, hint="name one of them")
        if declared in token_keys:
            columns, token_keys = [], [declared]
        else:
            columns = [declared]

    most = 0
    found = ScriptTexts(declared if columns == [declared] else None, token_keys[0] if len(token_keys) == 1 else None)
    writer = None
    for token_key in token_keys:
        for symbols, write in writers.items():
            for column in columns:
                same = sum(_same(write, _ids(values[token_key]), listed[column]) for listed, values in examples)
                if 2 * same > len(examples) and same > most:
                    most, found, writer = same, ScriptTexts(column, token_key), symbols
    return found, writer


def _token_keys(rows: Sequence[Row], size: int) -> list[str]:
    """Return the output keys with token ids of texts, without those that only add marks to another's."""
    ids_of: dict[str, list[list[int]]] = {}
    for key in rows[0]:
        ids = [_ids(values.get(key)) for values in rows]
        whole = [of_row for of_row in ids if of_row is not None]
        if len(whole) == len(rows) and max(map(len, whole)) > 1 and all(
                0 <= place < size for of_row in whole for place in of_row):
            ids_of[key] = whole
    kept: list[str] = []
    for key in sorted(ids_of, key=lambda key: sum(map(len, ids_of[key]))):
        if not any(all(map(_adds_marks, ids_of[key], ids_of[other])) for other in kept):
            kept.append(key)
    return kept


def _adds_marks(ids: Sequence[int], plain: Sequence[int]) -> bool:
    """Whether ids are those of ``plain``, with at most one more at each end."""
    return list(plain) in (list(ids), list(ids[1:]), list(ids[:-1]), list(ids[1:-1]))


def _same(write: Writer, ids: Sequence[int] | None, text: str) -> bool:
    """Whether these tokens are of this text."""
    return bool(ids) and bool(text.split()) and write(ids or ()).split() == text.split()


def _ids(value: object) -> list[int] | None:
    """Return a value as token ids; None if it is none."""
    if isinstance(value, torch.Tensor) and value.ndim == 1 and not value.is_floating_point():
        return [int(number) for number in value.tolist()]
    if isinstance(value, (list, tuple)) and value and all(isinstance(number, int) for number in value):
        return list(value)
    return None


def reference(test_set: TestSet, texts: ScriptTexts, tokens: ScriptTokens, row: int) -> str:
    """Return the text of a row; empty if there is none."""
    if texts.column is not None:
        return " ".join(str(test_set.listed(row).get(texts.column) or "").split())
    if texts.tokens is None:
        return ""
    with test_set.dataset.output_keys_as([texts.tokens]):  # without reading the recording
        ids = _ids(test_set.row(row)[texts.tokens]) or []
    return " ".join(tokens.decode([place for place in ids if place not in tokens.silent]).split())
