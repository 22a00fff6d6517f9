"""Greedy CTC: the best label of every frame, for a whole batch on the device; and forced alignment."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from sbkit.decode.spans import Spans, collapse
from sbkit.errors import SbkitError

_AT_ONCE = 1 << 26  # scores whose entropy is computed at a time: 256 MB
TSALLIS_ALPHA = 1 / 3


@dataclass(frozen=True)
class Hypotheses:
    """The greedy transcripts of a batch, one ``Spans`` per utterance."""

    spans: list[Spans]

    @property
    def ids(self) -> list[list[int]]:
        """Token ids of each utterance."""
        return [spans.ids.tolist() for spans in self.spans]

    def __len__(self) -> int:
        return len(self.spans)

    def __getitem__(self, index: int) -> Spans:
        return self.spans[index]

    def __iter__(self) -> Iterator[Spans]:
        return iter(self.spans)


@torch.no_grad()
def greedy(log_probs: Tensor, lengths: Tensor, blank_id: int = 0, certainty: str | None = None) -> Hypotheses:
    """Find the best path through each utterance, with one copy to the host for the whole batch.

    An utterance's result depends only on its own frames, not on its neighbours or the padding.

    Arguments
    ---------
    log_probs : [B, T, V] log-probabilities (``log_softmax`` of the scores)
    lengths : [B] frames of each utterance, integers
    certainty : measure of certainty per frame: ``tsallis`` or ``gibbs`` (see ``frame_certainty``)
    """
    check_shapes(log_probs, lengths)
    best, labels = log_probs.max(dim=-1)
    inside = torch.arange(log_probs.shape[1], device=log_probs.device) < lengths.to(log_probs.device)[:, None]
    frames = [labels.masked_fill(~inside, blank_id).float(), best.float().exp().where(inside, 1.0)]
    if certainty is not None:
        frames.append(frame_certainty(log_probs, certainty).where(inside, 1.0))
    # Labels are exact in float32 up to 16 million, so everything fits in one tensor and one copy.
    path, confidence, *sure = torch.stack(frames).cpu().numpy()
    refuse_nan(confidence)
    return Hypotheses(collapse(path.astype(np.int64), confidence, sure[0] if sure else None, blank_id=blank_id))


def check_shapes(log_probs: Tensor, lengths: Tensor) -> None:
    """Raise if log_probs aren't [B, T, V] or lengths aren't integers [B]."""
    if log_probs.dim() != 3 or lengths.shape != log_probs.shape[:1]:
        shapes = f"{[*log_probs.shape]} and {[*lengths.shape]}"
        raise ValueError(f"log_probs [B, T, V] and lengths [B] have the shapes {shapes}")
    if lengths.is_floating_point():
        raise ValueError("lengths must be numbers of frames (integers), not fractions of the longest")


def refuse_nan(confidence: np.ndarray) -> None:
    """Raise with the names of utterances that have a NaN among their frames [B, T]."""
    rows = np.flatnonzero(np.isnan(confidence).any(axis=1)).tolist()
    if rows:
        raise SbkitError(f"the model's output for utterances {rows} of the batch is not a number",
                         hint="its weights may be damaged, or the precision too low")


def frame_certainty(log_probs: Tensor, measure: str = "tsallis") -> Tensor:
    """Measure each frame's certainty by its entropy: [B, T, V] -> [B, T], 1 for a sure frame, 0 for a uniform one.

    With the entropy H, and H_max that of the uniform distribution, it is (e^-H - e^-H_max) / (1 - e^-H_max).
    ``gibbs`` uses Shannon's entropy; ``tsallis`` the one with alpha 1/3, which gives more weight to unlikely labels
    and detects errors better where probabilities are peaked, as CTC's are.
    """
    if measure not in ("tsallis", "gibbs"):
        raise ValueError(f"the entropy must be 'tsallis' or 'gibbs', not {measure!r}")
    batch, frames, labels = log_probs.shape
    parts = []
    for part in log_probs.split(max(1, _AT_ONCE // max(1, frames * labels))):
        part = part.float()
        if measure == "gibbs":
            # 0 log 0 is 0 here; torch would give NaN.
            parts.append(-(part.exp() * part.clamp_min(torch.finfo(part.dtype).min)).sum(-1))
        else:
            parts.append(((TSALLIS_ALPHA * part).exp().sum(-1) - 1) / (1 - TSALLIS_ALPHA))
    entropy = torch.cat(parts) if parts else log_probs.new_zeros(batch, frames)
    if measure == "gibbs":
        least = 1 / labels
    else:
        least = math.exp((1 - labels ** (1 - TSALLIS_ALPHA)) / (1 - TSALLIS_ALPHA))
    return (((-entropy).exp() - least) / max(1 - least, 1e-9)).clamp(0, 1)


@torch.no_grad()
def align(log_probs: Tensor, lengths: Tensor, targets: Tensor, target_lengths: Tensor, blank_id: int = 0,
          ids: Sequence[str] | None = None) -> Hypotheses:
    """Align a known transcript with the frames; confidence is the probability given to each token.

    Arguments
    ---------
    log_probs, lengths : as for ``greedy``
    targets : [B, U] token ids, without blanks
    target_lengths : [B] tokens of each utterance, integers
    ids : names of the utterances for messages
    """
    from torchaudio.functional import forced_align

    check_shapes(log_probs, lengths)
    frames, tokens = lengths.tolist(), target_lengths.tolist()
    targets = targets.cpu()
    names = ids or [f"number {i} of the batch" for i in range(len(frames))]
    _refuse_unfit(frames, [row[:size].tolist() for row, size in zip(targets, tokens, strict=True)], blank_id,
                  log_probs.shape[2], names)
    labels = torch.full(log_probs.shape[:2], blank_id, dtype=torch.int64)
    confidence = torch.ones(log_probs.shape[:2])
    for i, (size, count) in enumerate(zip(frames, tokens, strict=True)):  # torchaudio aligns one utterance at a time
        if count:
            target = targets[i:i + 1, :count].to(log_probs.device, torch.int32)
            path, scores = forced_align(log_probs[i:i + 1, :size].float(), target, blank=blank_id)
            labels[i, :size] = path[0].cpu()
            confidence[i, :size] = scores[0].exp().cpu()
    return Hypotheses(collapse(labels.numpy(), confidence.numpy(), blank_id=blank_id))


def _refuse_unfit(frames: list[int], targets: list[list[int]], blank_id: int, labels: int,
                  names: Sequence[str]) -> None:
    wrong = []
    for name, size, target in zip(names, frames, targets, strict=True):
        needed = len(target) + sum(a == b for a, b in pairwise(target))
        if blank_id in target or any(not 0 <= token < labels for token in target):
            wrong.append(f"{name} (a token that is blank or outside the model's {labels})")
        elif needed > size:
            wrong.append(f"{name} (its {len(target)} tokens need {needed} frames and there are {size})")
    if wrong:
        raise SbkitError(f"these utterances can't be aligned with their transcript: {', '.join(wrong)}")
