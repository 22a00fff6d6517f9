"""Language models for a beam search: estimated, loaded from ARPA, checked against the tokens."""

from __future__ import annotations

import gzip
import logging
import math
import time
import zlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import IO, TYPE_CHECKING, NamedTuple

import numpy as np

from sbkit.decode import arpa, kneser_ney
from sbkit.decode.file_errors import unreadable
from sbkit.decode.ngram import BEGIN, END, LN10, SPECIAL, Level, NGram, Quality
from sbkit.decode.pieces import Pieces
from sbkit.decode.spans import WORD_START
from sbkit.decode.workspace import Workspace, add_by_row, chunks
from sbkit.errors import SbkitError, shown
from sbkit.system.console import table, time_span
from sbkit.system.disk import disk_errors_as_user_error, nearest_folder
from sbkit.system.untrusted import standard_input

if TYPE_CHECKING:
    from sbkit.data.tokens import Tokenizer

logger = logging.getLogger(__name__)

#: The share of a language model's words that the tokens may be unable to spell without a warning.
_UNSPELLABLE_SHARE = 0.05

UNITS = ("word", "piece")
_CHECKED_WORDS = 10_000  # words that are checked against the tokens


@dataclass(frozen=True)
class LMReport:
    """An estimated language model, and how well it predicts a text."""

    file: Path
    unit: str
    counts: list[int]  # n-grams of each order
    counted: list[int]  # before pruning
    discounts: list[kneser_ney.Discounts]
    sentences: int
    tokens: int
    vocabulary: int
    quality: Quality
    held_out: str  # name of the text that the quality was measured on; empty: the training text
    seconds: float

    def __str__(self) -> str:
        rows = []
        for order, (count, before) in enumerate(zip_longest(self.counts, self.counted, fillvalue=0), start=1):
            discounts = self.discounts[order - 1]
            values = " ".join(f"{value:.3f}" for value in discounts.values)
            rows.append([order, count, before, f"{values} (fallback)" if discounts.fallback else values])
        text = self.held_out or "the text it was estimated from"
        quality = self.quality
        unknown = 100 * quality.unknown / max(1, quality.words)
        return "\n".join([
            f"{self.tokens} {self.unit}s in {self.sentences} sentences, {self.vocabulary} different",
            table(["order", "n-grams", "before pruning", "discounts"], rows),
            f"perplexity {quality.perplexity:.2f} on {text} ({quality.perplexity_with_unknown:.2f} with unknown "
            f"{self.unit}s), {quality.unknown} of {quality.words} {self.unit}s unknown ({unknown:.2f} %)",
            f"written in {time_span(self.seconds)}: {self.file}",
        ])


def build(texts: Iterable[str], out: str | Path, order: int = 3, prune: Sequence[int] | float | None = None,
          unit: str = "word", tokenizer: Tokenizer | None = None, min_count: int = 1,
          evaluate: Iterable[str] | None = None, held_out: str = "the text given for it") -> LMReport:
    """Estimate a Kneser-Ney language model from text and write it.

    texts : sentences, with words separated by spaces
    out : an ARPA file, compressed if it ends in ``.gz``
    order : words in the longest n-gram
    prune : counts leave out n-grams that occur this often or less, one per order, such as [0, 0, 1] (the last
        holds for all higher orders, and a single number for all but words); a threshold such as 1e-7 leaves out n-grams
        without which the perplexity rises by less
    unit : ``word``, or ``piece`` for a model over the tokenizer's pieces
    tokenizer : a ``sbkit.data.tokens.Tokenizer``, for pieces
    min_count : words that occur less often become the unknown word
    evaluate : text to report perplexity and unknown words on; by default ``texts``
    held_out : the name of that text in the report
    """
    began = time.perf_counter()
    out = Path(out)
    cutoffs = _check(order, prune, unit, tokenizer, min_count)

    def spell(text: str) -> str:
        if unit == "word" or tokenizer is None:
            return text
        return " ".join(map(tokenizer.piece, tokenizer.encode(text)))

    with disk_errors_as_user_error(out):  # large arrays are in files beside it
        files = Workspace(nearest_folder(out.parent))
        corpus = kneser_ney.read(map(spell, texts), min_count, files)
        model, discounts, counted = kneser_ney.estimate(corpus, order, cutoffs)
        if isinstance(prune, float):
            model = prune_by_entropy(model, prune)
        if not model.counts[-1]:  # sentences too short, or an order fully pruned: other tools reject empty orders
            model = NGram(model.words, [level for level in model.levels if len(level.word)], files)
        fallback_orders = [str(order) for order, values in enumerate(discounts, start=1) if values.fallback]
        if fallback_orders:
            logger.info("The text is too small to estimate the discounts of order %s; using %s.",
                        ", ".join(fallback_orders), kneser_ney.FALLBACK)
        quality = model.quality(corpus.texts() if evaluate is None else map(spell, evaluate))
        arpa.write(model, out)
    return LMReport(out, unit, model.counts, counted, discounts, corpus.sentences, corpus.tokens,
                    len(corpus.words) - len(SPECIAL), quality, "" if evaluate is None else held_out,
                    time.perf_counter() - began)


def _check(order: int, prune: Sequence[int] | float | None, unit: str, tokenizer: Tokenizer | None,
           min_count: int) -> Sequence[int]:
    """Check all options and return the cutoffs."""
    if not 1 <= order <= 10:
        raise SbkitError("bad-value", f"order is {order}, but a language model has order 1 to 10", hint="use 2 to 6",
                         key="order", value=order)
    if unit not in UNITS:
        raise SbkitError("bad-value", f"there is no unit {shown(unit)} of a language model", hint="use word or piece",
                         key="unit", value=unit)
    if unit == "piece" and tokenizer is None:
        raise SbkitError("no-tokenizer", "a language model over pieces needs a tokenizer",
                         hint="pass the tokenizer of the model that it is for")
    if min_count < 1:
        raise SbkitError("bad-value", f"min_count is {min_count}", hint="1 keeps every word", key="min_count",
                         value=min_count)
    if prune is None:
        return ()
    if isinstance(prune, float):
        if not 0 < prune < 1:
            raise SbkitError("bad-value", f"prune is {prune}",
                             hint="use a threshold such as 1e-7, or counts such as [0, 0, 1]", key="prune", value=prune)
        return ()
    cutoffs = [0, prune] if isinstance(prune, int) else list(prune)
    if any(not isinstance(cutoff, int) or cutoff < 0 for cutoff in cutoffs) or sorted(cutoffs) != cutoffs:
        raise SbkitError("bad-value", f"prune is {prune}",
                         hint="use counts that don't fall, one per order, such as [0, 0, 1]", key="prune", value=prune)
    if cutoffs and cutoffs[0]:
        raise SbkitError("bad-value", f"prune is {prune}, but words are never pruned",
                         hint="start with 0; min_count makes rare words unknown", key="prune", value=prune)
    return cutoffs


def read_texts(paths: Iterable[str | Path]) -> Iterator[str]:
    """Yield the lines of text files, ``.gz`` or plain; ``-`` is stdin."""
    for path in map(Path, paths):
        try:
            with _open_text(path) as lines:
                yield from (line.strip() for line in lines)
        except (UnicodeDecodeError, OSError, EOFError, zlib.error) as error:
            raise unreadable(path, error) from None


def _open_text(path: Path) -> IO[str]:
    if str(path) == "-":
        piped = standard_input("texts", "cat texts.txt | sbkit lm ... -")
        return open(piped.fileno(), encoding="utf-8", closefd=False)
    if path.suffix == ".gz":
        return gzip.open(path, "rt", encoding="utf-8")
    return open(path, encoding="utf-8")


def unit_of(model: NGram, pieces: Pieces, unit: str | None = None, name: str = "the language model") -> str:
    """Return whether a model is over words or over these pieces; raises if neither.

    unit : the required unit; None detects it
    """
    if unit not in (None, *UNITS):
        raise SbkitError("bad-value", f"there is no unit {shown(unit)} of a language model", hint="use word or piece",
                         key="unit", value=unit)
    words = [word for word in model.words if word not in SPECIAL]
    if not words:
        raise SbkitError("lm-mismatch", f"{name} has no words", hint="estimate it from text: sbkit lm")
    words = words[::math.ceil(len(words) / _CHECKED_WORDS)]
    not_pieces = [word for word in words if word not in pieces.spoken]
    if unit is None:
        looks_like_pieces = pieces.separator is None or any(WORD_START in word for word in words)
        unit = "piece" if looks_like_pieces and len(not_pieces) < len(words) / 2 else "word"
    if unit == "word":
        _check_words(words, pieces, name)
    elif len(not_pieces) > len(words) / 2:
        raise SbkitError("lm-mismatch", f"{name} is not over this model's {len(pieces)} pieces: it has "
                         f"{not_pieces[0]!r}, which isn't one of them",
                         hint="estimate it with this tokenizer: sbkit lm --unit piece")
    return unit


def _check_words(words: Sequence[str], pieces: Pieces, name: str) -> None:
    """Check that these pieces can spell the words of a language model, most of them at least."""
    marked = [word for word in words if WORD_START in word]
    if marked:
        raise SbkitError("lm-mismatch", f"{name} is over pieces of another tokenizer, not over words: it has "
                         f"{marked[0]!r}", hint="estimate it over words, or over the pieces of this model's tokenizer")
    if pieces.across:
        raise SbkitError("lm-mismatch", f"this model's pieces span words, such as {pieces.across[0]!r}, so that words "
                         "can't be scored", hint="estimate the language model over its pieces: sbkit lm --unit piece")
    if not pieces.opens.any():
        raise SbkitError("lm-mismatch", f"none of this model's {len(pieces)} tokens begins a word, so that words can't "
                         "be scored",
                         hint=f"is {pieces.separator!r} what separates words? null makes every token a word")
    unspellable = [word for word in words if not pieces.spells(word)]
    if len(unspellable) <= _UNSPELLABLE_SHARE * len(words):
        return

    hint = "estimate it from text written like the transcripts, or from the transcripts: sbkit lm"
    for change, case in ((str.lower, "lower"), (str.upper, "upper")):
        if sum(pieces.spells(change(word)) for word in words) * 2 > len(words):
            hint = f"the tokens are in {case} case and the language model isn't: " + hint
            break
    share = (f"{100 * len(unspellable) / len(words):.0f} % of its words can't be spelled with them, such as "
             f"{unspellable[0]!r}")
    if len(unspellable) * 2 > len(words):
        raise SbkitError("lm-mismatch", f"{name} doesn't fit this model's tokens: {share}", hint=hint)
    logger.warning("%s only partly fits this model's tokens: %s; %s", name, share, hint)


def prune_by_entropy(model: NGram, threshold: float) -> NGram:
    """Drop n-grams without which the perplexity rises by less than this share, such as 1e-7 (Stolcke 1998).

    Words stay, and so do n-grams that a remaining longer one begins or ends with.
    """
    backoffs = [level.backoff for level in model.levels]
    occurs = _occurrence_probabilities(model)
    all_words = model.files.full(len(model.levels[0].word), 1, np.bool_)
    kept_of_longer: list[np.ndarray] = []
    needed: np.ndarray | None = None
    for number in range(model.order - 1, 0, -1):
        pruned = _prune_level(model, number, occurs[number - 1], needed, threshold)
        kept_of_longer.insert(0, pruned.kept)
        backoffs[number - 1] = pruned.backoff_below
        needed = pruned.needed_below
    return _take_ngrams(model, [all_words, *kept_of_longer], backoffs)


def _occurrence_probabilities(model: NGram) -> list[np.ndarray]:
    """The probability that each n-gram occurs, for all orders but the highest."""
    first = np.exp(model.levels[0].log10.astype(np.float64) * LN10)
    if BEGIN in model.ids and END in model.ids:  # sentences start as often as they end
        first[model.ids[BEGIN]] = first[model.ids[END]]
    occurs = [first]
    for level in model.levels[1:-1]:
        longer = model.files.empty(len(level.word), np.float64)
        for part in chunks(len(level.word)):
            longer[part] = occurs[-1][level.context[part]] * np.exp(level.log10[part].astype(np.float64) * LN10)
        occurs.append(longer)
    return occurs


class _PrunedLevel(NamedTuple):
    """Which n-grams of one order stay, and what that means for the order below."""

    kept: np.ndarray
    backoff_below: np.ndarray
    needed_below: np.ndarray  # bool: those that a remaining n-gram begins or ends with


def _prune_level(model: NGram, number: int, history_occurs: np.ndarray, needed: np.ndarray | None, threshold: float
                 ) -> _PrunedLevel:
    """Decide which n-grams of a level stay.

    history_occurs : the probability of each n-gram of the level below
    needed : the n-grams of this level that longer ones need; None for the highest order
    """
    files = model.files
    level = model.levels[number]
    below = model.levels[number - 1]
    histories = len(below.word)
    shorter_ln = files.empty(len(level.word), np.float32)  # of each last word after a history one word shorter

    def probabilities(part: slice) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Histories of n-grams, and the probabilities of their last words after these and after shorter ones."""
        probability = np.exp(level.log10[part].astype(np.float64) * LN10)
        return level.context[part], probability, np.exp(shorter_ln[part].astype(np.float64))

    # The mass of each history, and of the one that is a word shorter, for words without an n-gram.
    left = files.full(histories, 0, np.float64)
    left_shorter = files.full(histories, 0, np.float64)
    for part in chunks(len(level.word)):
        shorter_ln[part] = model.after_shorter(number, part)
        history, probability, shorter = probabilities(part)
        add_by_row(left, history, probability)
        add_by_row(left_shorter, history, shorter)
    _turn_into_mass(left)
    _turn_into_mass(left_shorter)

    kept = files.full(len(level.word), 1, np.bool_)
    kept_mass = files.full(histories, 0, np.float64)
    kept_mass_shorter = files.full(histories, 0, np.float64)
    needed_below = files.full(histories, 0, np.bool_)
    has_ngrams = files.full(histories, 0, np.bool_)
    for part in chunks(len(level.word)):
        history, probability, shorter = probabilities(part)
        has_ngrams[history] = True
        # The logarithm of the back-off with all n-grams of a history, and without this one.
        backoff = np.log(left[history] / left_shorter[history])
        without = np.log((left[history] + probability) / (left_shorter[history] + shorter))
        change = probability * (np.log(shorter) + without - np.log(probability)) + left[history] * (without - backoff)
        stays = np.expm1(-history_occurs[history] * change) >= threshold
        if needed is not None:
            stays |= needed[part]
        kept[part] = stays
        needed_below[history[stays]] = True
        suffix = model.suffixes(number, part)[stays]
        needed_below[suffix[suffix >= 0]] = True
        add_by_row(kept_mass, history[stays], probability[stays])
        add_by_row(kept_mass_shorter, history[stays], shorter[stays])

    _turn_into_mass(kept_mass)
    _turn_into_mass(kept_mass_shorter)
    backoff_below = files.empty(histories, np.float32)
    for part in chunks(histories):
        ratio = kept_mass[part] / kept_mass_shorter[part]
        backoff_below[part] = np.where(has_ngrams[part], np.log10(ratio), below.backoff[part])
    return _PrunedLevel(kept, backoff_below, needed_below)


def _take_ngrams(model: NGram, kept: Sequence[np.ndarray], backoffs: Sequence[np.ndarray]) -> NGram:
    """Return the model with those n-grams of each order that are kept, and with these backoffs."""
    files = model.files
    levels = []
    context_rows = np.zeros(1, np.int32)  # the new row of each n-gram of the order below
    for level, kept_of_level, backoff in zip(model.levels, kept, backoffs, strict=True):
        count = sum(int(kept_of_level[part].sum()) for part in chunks(len(kept_of_level)))
        columns = Level(*(files.empty(count, values.dtype) for values in level))
        new_rows = files.empty(len(kept_of_level), np.int32)
        filled = 0
        for part in chunks(len(kept_of_level)):
            stays = kept_of_level[part]
            here = slice(filled, filled + int(stays.sum()))
            columns.context[here] = context_rows[level.context[part][stays]]
            columns.word[here] = level.word[part][stays]
            columns.log10[here] = level.log10[part][stays]
            columns.backoff[here] = backoff[part][stays]
            new_rows[part] = filled + np.cumsum(stays) - 1
            filled = here.stop
        levels.append(columns)
        context_rows = new_rows
    return NGram(model.words, levels, files)


def _turn_into_mass(sums: np.ndarray) -> None:
    """Turn sums of probabilities into what is left for words without an n-gram; never exactly zero."""
    for part in chunks(len(sums)):
        sums[part] = np.maximum(1 - sums[part], 1e-9)
