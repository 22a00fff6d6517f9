"""Compares what exported recognisers say with what the checkpoint does: log-probabilities, and the words in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sbkit.decode.spans import TokenSpans, best_path, collapse
from sbkit.export.clips import ComparisonClips
from sbkit.export.parity import Comparison
from sbkit.export.vocabulary import Vocabulary


class LogProbComparison(Comparison):
    """Compares log-probabilities, and the words that they stand for."""

    what = "log-probabilities"


def compared(clips: ComparisonClips, vocabulary: Vocabulary, reference: Callable[[np.ndarray], np.ndarray],
             decode: Callable[[list[int]], str], sample_rate: int) -> LogProbComparison:
    """Build the comparison of clips with the checkpoint.

    decode : token ids to text, by the checkpoint's own tokenizer
    """
    blank = vocabulary.config.blank_id

    def text(log_probs: np.ndarray) -> str:
        spans = _spans(log_probs, blank)
        vocabulary.check(spans.ids)
        return vocabulary.text(vocabulary.words(spans))

    return LogProbComparison(clips, reference, sample_rate, text,
                             lambda output: decode(_spans(output, blank).ids.tolist()))


def _spans(log_probs: np.ndarray, blank_id: int) -> TokenSpans:
    labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]), blank_id)
    return collapse(labels, confidence, blank_id=blank_id)[0]
