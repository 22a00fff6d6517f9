"""Prunes a language model: drops n-grams that shorter ones predict almost as well."""

from __future__ import annotations

import numpy as np

from sbkit.decode.language_model import BEGIN, END, LN10
from sbkit.decode.ngram import Level, NGram


def prune(model: NGram, threshold: float) -> NGram:
    """Drop n-grams that each raise the perplexity by less than this share, such as 1e-7 (Stolcke 1998).

    Words stay, and so do n-grams that a remaining longer one begins or ends with.
    """
    kept = [np.ones(len(level.word), bool) for level in model.levels]
    backoffs = [level.backoff for level in model.levels]
    needed = np.zeros(0, bool)  # which n-grams of this level longer ones need
    history = _histories(model)
    for number in range(model.order - 1, 0, -1):
        level = model.levels[number]
        contexts = len(model.levels[number - 1].word)
        own = np.exp(level.log10.astype(np.float64) * LN10)
        shorter = np.exp(model.after_shorter(number).astype(np.float64))
        left = _left(level.context, own, contexts)
        left_shorter = _left(level.context, shorter, contexts)
        at = level.context
        backoff = np.log(left[at] / left_shorter[at])
        without = np.log((left[at] + own) / (left_shorter[at] + shorter))
        moved = own * (np.log(shorter) + without - np.log(own)) + left[at] * (without - backoff)
        keep = np.expm1(-history[number - 1][at] * moved) >= threshold
        if len(needed):
            keep |= needed
        kept[number] = keep
        needed = np.zeros(contexts, bool)
        needed[at[keep]] = True
        suffix = model.suffixes(number)[keep]
        needed[suffix[suffix >= 0]] = True
        ratio = _left(at[keep], own[keep], contexts) / _left(at[keep], shorter[keep], contexts)
        has = np.bincount(at, minlength=contexts) > 0
        backoffs[number - 1] = np.where(has, np.log10(ratio), model.levels[number - 1].backoff).astype(np.float32)
    levels, rows = [], np.zeros(1, np.int32)
    for level, keep, backoff in zip(model.levels, kept, backoffs, strict=True):
        levels.append(Level(rows[level.context[keep]], level.word[keep], level.log10[keep], backoff[keep]))
        rows = (np.cumsum(keep) - 1).astype(np.int32)
    return NGram(model.words, levels)


def _left(contexts: np.ndarray, probabilities: np.ndarray, size: int) -> np.ndarray:
    """The probability mass that each context leaves to words it has no n-gram for; never quite zero."""
    return np.maximum(1 - np.bincount(contexts, weights=probabilities, minlength=size), 1e-9)


def _histories(model: NGram) -> list[np.ndarray]:
    """The probability of each n-gram to occur; sentences start as often as they end."""
    first = np.exp(model.levels[0].log10.astype(np.float64) * LN10)
    if BEGIN in model.ids and END in model.ids:
        first[model.ids[BEGIN]] = first[model.ids[END]]
    joint = [first]
    for level in model.levels[1:]:
        joint.append(joint[-1][level.context] * np.exp(level.log10.astype(np.float64) * LN10))
    return joint
