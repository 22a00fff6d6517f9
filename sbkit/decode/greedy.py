"""Greedy CTC decoding of a whole batch on the device, and forced alignment."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sbkit.decode.spans import TokenSpans, check_shapes, collapse, refuse_nan
from sbkit.errors import SbkitError


@torch.no_grad()
def greedy(log_probs: Tensor, lengths: Tensor, blank_id: int = 0) -> list[TokenSpans]:
    """Find the best path through each utterance, with one copy to the host for the whole batch.

    An utterance's result depends only on its own frames, not on its neighbours or the padding.

    log_probs : [B, T, V] log-probabilities (``log_softmax`` of the scores)
    lengths : [B] frames of each utterance, integers
    """
    check_shapes(log_probs, lengths)
    best, labels = log_probs.max(dim=-1)
    inside = torch.arange(log_probs.shape[1], device=log_probs.device) < lengths.to(log_probs.device)[:, None]
    frames = [labels.masked_fill(~inside, blank_id).float(), best.float().exp().where(inside, 1.0)]
    # Labels are exact in float32 up to 16 million, so one tensor and one copy are enough.
    path, confidence = torch.stack(frames).cpu().numpy()
    refuse_nan(confidence)
    return collapse(path.astype(np.int64), confidence, blank_id=blank_id)


@torch.no_grad()
def align(log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank_id: int = 0,
          ids: Sequence[str] | None = None) -> list[TokenSpans]:
    """Align a known transcript with the frames; confidence is each token's probability.

    log_probs, lengths : as for ``greedy``
    targets : [B, U] token ids, without blanks
    target_lengths : [B] tokens of each utterance, integers
    ids : the utterances' names in messages
    """
    from torchaudio.functional import forced_align

    check_shapes(log_probs, lengths)
    frames = lengths.tolist()
    tokens = target_lengths.tolist()
    targets = targets.cpu()
    names = ids or [f"number {i} of the batch" for i in range(len(frames))]
    wrong = []
    for name, size, count, row in zip(names, frames, tokens, targets, strict=True):
        known = row[:count].tolist()
        needed = count + sum(a == b for a, b in pairwise(known))  # a blank between two that are equal
        if blank_id in known or any(not 0 <= token < log_probs.shape[2] for token in known):
            wrong.append(f"{name} (a token is the blank, or not one of the model's {log_probs.shape[2]})")
        elif needed > size:
            wrong.append(f"{name} (its {count} tokens need {needed} frames, but it has {size})")
    if wrong:
        raise SbkitError("unalignable-transcript", "these utterances can't be aligned with their transcript: "
                         f"{', '.join(wrong)}",
                         hint="check these transcripts, and leave out recordings that are too short for them")
    labels = torch.full(log_probs.shape[:2], blank_id, dtype=torch.int64)
    confidence = torch.ones(log_probs.shape[:2])
    for i, (size, count) in enumerate(zip(frames, tokens, strict=True)):  # torchaudio aligns one utterance at a time
        if count:
            target = targets[i:i + 1, :count].to(log_probs.device, torch.int32)
            path, scores = forced_align(log_probs[i:i + 1, :size].float(), target, blank=blank_id)
            labels[i, :size] = path[0].cpu()
            confidence[i, :size] = scores[0].exp().cpu()
    return collapse(labels.numpy(), confidence.numpy(), blank_id=blank_id)
