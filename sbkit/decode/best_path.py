"""The best label of every frame with numpy only: greedy CTC without importing torch."""

from __future__ import annotations

import numpy as np

from sbkit.errors import SbkitError


def best_path(log_probs: np.ndarray, frames: np.ndarray, blank_id: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Find labels [B, T] (blank beyond an utterance's end) and their probabilities [B, T], for ``spans.collapse``.

    Arguments
    ---------
    log_probs : [B, T, V] float log-probabilities
    frames : [B] number of frames of each utterance
    """
    if log_probs.ndim != 3 or np.shape(frames) != log_probs.shape[:1]:
        raise ValueError(f"log_probs [B, T, V] and frames [B] have the shapes {log_probs.shape} and {np.shape(frames)}")
    batch, size, _ = log_probs.shape
    if not log_probs.size:
        return np.full((batch, size), blank_id, dtype=np.int64), np.ones((batch, size), dtype=np.float32)
    labels = log_probs.argmax(-1)
    best = np.take_along_axis(log_probs, labels[..., None], -1)[..., 0]
    inside = np.arange(size) < np.asarray(frames)[:, None]
    # numpy's maximum of a frame with a NaN is NaN, so checking the best checks all.
    wrong = np.flatnonzero((np.isnan(best) & inside).any(-1)).tolist()
    if wrong:
        raise SbkitError(f"the model's output for utterances {wrong} of the batch is not a number",
                         hint="its weights may be damaged, or the precision too low")
    confidence = np.where(inside, np.exp(best), 1.0).astype(np.float32)
    return np.where(inside, labels, blank_id).astype(np.int64), confidence
