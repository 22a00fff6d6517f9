"""Word and character error rates over a test set: SpeechBrain's numbers and wer_test.txt, faster."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from sbkit.errors import SbkitError
from sbkit.score.edits import DELETION, EQUAL, INSERTION, SUBSTITUTION, EditCounts, Tokens, align, count
from sbkit.system.console import atomic_write

_SPACE = "_"
_NAMED = 5  # utterances in a message
GAP = "<eps>"  # placeholder for a missing token in an alignment, as in SpeechBrain's file


class ErrorRates:
    """Collects references and hypotheses, and scores them all at once when a rate is read.

    >>> rates = ErrorRates()
    >>> rates.add(["a", "b"], ["the cat sat", "on a mat"], ["the cat", "on the mat"])
    >>> rates.summary()["WER"]
    33.333333333333336

    unit : ``word`` for WER, or ``character`` for CER, which counts the space between words too, as in SpeechBrain.
    """

    def __init__(self, unit: str = "word"):
        if unit not in ("word", "character"):
            raise SbkitError("bad-value", f"error rates are counted by 'word' or by 'character', not by '{unit}'",
                             key="unit", value=unit)
        self.unit = unit
        self.ids: list[str] = []
        self._known: set[str] = set()
        self.references: list[Tokens] = []
        self.hypotheses: list[Tokens] = []
        """The tokens of each, in the order in which they were added."""
        self._size = 0  # tokens of all references
        self._counts: EditCounts | None = None

    def __len__(self) -> int:
        return len(self.ids)

    def add(self, ids: Sequence[str], references: Sequence[str | Tokens],
            hypotheses: Sequence[str | Tokens | None]) -> None:
        """Add a batch of texts or lists of words. If any of it can't be scored, nothing is added."""
        if not len(ids) == len(references) == len(hypotheses):
            raise SbkitError("bad-value", f"there are {len(ids)} ids, {len(references)} references and "
                             f"{len(hypotheses)} hypotheses, but there must be one of each for an utterance")
        refs = self._tokens(references)
        hyps = self._tokens(hypotheses)
        # SpeechBrain treats an empty first word, which "".split(" ") gives, as a reference of length zero.
        _refuse("empty-reference", [name for name, ref in zip(ids, refs, strict=True) if not ref or ref[0] == ""],
                "an empty reference", "correct the transcript or leave the utterance out")
        _refuse("missing-hypothesis", [name for name, hyp in zip(ids, hyps, strict=True) if hyp is None],
                "no hypothesis", "an empty hypothesis is '', and is scored")
        self._known.update(ids)
        if len(self._known) < len(self.ids) + len(ids):
            self._known = set(self.ids)
            seen = Counter([*ids, *self.ids])
            _refuse("repeated-id", [name for name in dict.fromkeys(ids) if seen[name] > 1],
                    "an id that occurs more than once", "each utterance is scored once")
        self.ids += ids
        self._counts = None
        self.references += refs
        self.hypotheses += hyps
        self._size += sum(map(len, refs))

    def _tokens(self, side: Sequence[str | Tokens | None]) -> list[Any]:
        words = [text.split() if isinstance(text, str) else text for text in side]
        if self.unit == "word":
            return words
        return [None if text is None else _SPACE.join(text) for text in words]

    @property
    def counts(self) -> EditCounts:
        """The edits of each utterance, in the order in which they were added."""
        if self._counts is None:
            if not self.ids:
                raise SbkitError("no-utterances", "there is nothing to score: no utterance was added")
            self._counts = count(self.references, self.hypotheses)
        return self._counts

    @property
    def edits(self) -> np.ndarray:
        """[N] int64"""
        return self.counts.edits

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each reference, [N] int64."""
        return np.fromiter(map(len, self.references), np.int64, len(self))

    @property
    def rate(self) -> float:
        """The error rate in per cent."""
        return 100.0 * int(self.edits.sum()) / self._size

    def summary(self) -> dict[str, float | int]:
        """SpeechBrain's ``ErrorRateStats.summarize()``: the same keys, the same numbers."""
        insertions, deletions, substitutions = (int(kind.sum()) for kind in self.counts)
        edits = insertions + deletions + substitutions
        tokens = self._size
        wrong = int(np.count_nonzero(self.edits))
        return {
            "WER": 100.0 * edits / tokens, "SER": 100.0 * wrong / len(self), "num_edits": edits,
            "num_scored_tokens": tokens, "num_erroneous_sents": wrong, "num_scored_sents": len(self),
            "num_absent_sents": 0, "num_ref_sents": len(self), "insertions": insertions,
            "deletions": deletions, "substitutions": substitutions, "error_rate": 100.0 * edits / tokens,
        }

    def alignments(self) -> list[str]:
        """Each utterance's alignment as steps ``=``, ``S``, ``D``, ``I`` (see ``edits.align``)."""
        alignments = [EQUAL * len(reference) for reference in self.references]
        wrong = np.flatnonzero(self.edits).tolist()
        differing = align([self.references[i] for i in wrong], [self.hypotheses[i] for i in wrong])
        for i, alignment in zip(wrong, differing, strict=True):
            alignments[i] = alignment
        return alignments

    def confusions(self, limit: int = 50) -> list[tuple[str, str, int]]:
        """Return the most frequent edits: reference and hypothesis, of which one may be empty, and their count."""
        counts: Counter[tuple[str, str]] = Counter()
        for reference, hypothesis, alignment in zip(self.references, self.hypotheses, self.alignments(), strict=True):
            if set(alignment) != {EQUAL}:
                counts.update((ref, hyp) for step, ref, hyp in aligned(reference, hypothesis, alignment)
                              if step != EQUAL)
        ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
        return [(ref, hyp, times) for (ref, hyp), times in ranked[:limit]]

    def write(self, path: str | os.PathLike[str]) -> None:
        """Write wer_test.txt: the summary and every alignment in SpeechBrain's own format."""
        with atomic_write(path) as out:
            out.write(_HEAD.format(**self.summary()))
            rows = zip(self.ids, self.references, self.hypotheses, np.stack(self.counts, axis=1).tolist(),
                       self.alignments(), strict=True)
            for id_, reference, hypothesis, counts, alignment in rows:
                out.write(_RULE + _UTTERANCE.format(
                    id_, 100 * sum(counts) / len(reference), sum(counts), len(reference), *counts))
                out.write(_picture(reference, hypothesis, alignment))


def aligned(reference: Tokens, hypothesis: Tokens, alignment: str) -> Iterator[tuple[str, str, str]]:
    """Yield an alignment as (step, reference token, hypothesis token), with an empty string for a missing token."""
    i = j = 0
    for step in alignment:
        ref = "" if step == INSERTION else reference[i]
        hyp = "" if step == DELETION else hypothesis[j]
        i += step != INSERTION
        j += step != DELETION
        yield step, ref, hyp


def first_few(ids: Sequence[str], separator: str = ", ") -> str:
    """Format the first few ids for a message."""
    return separator.join(ids[:_NAMED]) + (f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else "")


def _refuse(code: str, ids: Sequence[str], what: str, hint: str) -> None:
    if ids:
        have = "utterances have" if len(ids) > 1 else "utterance has"
        raise SbkitError(code, f"{len(ids)} {have} {what}: {first_few(ids)}", hint=hint, value=ids[0])


def _picture(reference: Tokens, hypothesis: Tokens, alignment: str) -> str:
    """Reference, steps and hypothesis under each other."""
    if alignment.count(EQUAL) == len(alignment):
        steps = [EQUAL.center(len(token)) for token in reference]
        refs = hyps = reference
    else:
        columns = [
            (ref or GAP, step, hyp or GAP) for step, ref, hyp in aligned(reference, hypothesis, alignment)]
        widths = [max(map(len, column)) for column in columns]
        refs, steps, hyps = (
            [cell.center(width) for cell, width in zip(line, widths, strict=True)]
            for line in zip(*columns, strict=True))
    return "".join(" ; ".join(line) + "\n" for line in (refs, steps, hyps))


_RULE = "=" * 80 + "\n"
_UTTERANCE = "{}, %WER {:.2f} [ {} / {}, {} ins, {} del, {} sub ]\n"
_HEAD = (
    "%WER {WER:.2f} [ {num_edits} / {num_scored_tokens}, {insertions} ins, {deletions} del, "
    "{substitutions} sub ]\n"
    "%SER {SER:.2f} [ {num_erroneous_sents} / {num_scored_sents} ]\n"
    "Scored {num_scored_sents} sentences, {num_absent_sents} not present in hyp.\n"
    + _RULE + "ALIGNMENTS\n\nFormat:\n<utterance-id>, WER DETAILS\n"
    + _picture(["reference", "on", "the", "first", "line"], ["and", "hypothesis", "on", "the", "third"],
               INSERTION + SUBSTITUTION + EQUAL + EQUAL + SUBSTITUTION + DELETION)
)
