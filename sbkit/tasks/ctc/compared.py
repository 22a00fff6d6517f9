"""Compares what exported recognisers say with what the checkpoint does: log-probabilities, and the words in them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig

from sbkit.decode.spans import TokenSpans, best_path, collapse
from sbkit.export.clips import ComparisonClips
from sbkit.export.parity import Comparison
from sbkit.export.vocabulary import Vocabulary
from sbkit.tasks.recognise.recognizer import Recognizer


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


def reference(recognizer: Recognizer, at_least: int = 1,
              chunks: DynChunkTrainConfig | None = None) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from a waveform [S] to the checkpoint's log-probabilities [T, V], one utterance at a time.

    at_least : shorter waveforms are padded with zeros to this many samples, as in every runtime
    chunks : what a frame sees; None: the whole utterance
    """

    @torch.no_grad()
    def run(signal: np.ndarray) -> np.ndarray:
        signals = torch.from_numpy(signal)[None]
        signals = torch.nn.functional.pad(signals, (0, max(0, at_least - len(signal))))
        log_probs, frames = recognizer.log_probs(signals, torch.tensor([len(signal)]), chunks)
        return log_probs[0, : int(frames[0])].numpy()

    return run


def _spans(log_probs: np.ndarray, blank_id: int) -> TokenSpans:
    labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]), blank_id)
    return collapse(labels, confidence, blank_id=blank_id)[0]
