"""Normalisation with the mean and standard deviation of a whole training split, computed before training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sbkit.errors import SbkitError


class GlobalNorm(nn.Module):
    """Subtracts the mean of features [B, T, F] and divides by their standard deviation over all frames of training.

    A run computes both once, when it prepares its corpus; checkpoints hold them. No frame depends on another one, so a
    model with it can run live.

    n_features : F
    folder : where a run writes them, to ``feature_statistics.json``
    """

    mean: Tensor
    deviation: Tensor

    def __init__(self, n_features: int, folder: str | Path):
        super().__init__()
        self.folder = Path(folder)
        self.register_buffer("mean", torch.zeros(n_features))
        self.register_buffer("deviation", torch.full((n_features,), torch.nan))
        self.known = self._missing_allowed = False

    def set_statistics(self, mean: Tensor, deviation: Tensor) -> None:
        """Use these statistics, [F] each."""
        with torch.no_grad():
            self.mean.copy_(mean)
            self.deviation.copy_(deviation)
        self.known = True

    def has_statistics(self) -> bool:
        """Whether there are statistics; this syncs with the host."""
        return not self.deviation.isnan().any()

    def allow_missing(self) -> None:
        """Return features unchanged until there are statistics, for dummy batches."""
        self._missing_allowed = True

    def forward(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """[B, T, F] -> [B, T, F]; ``lengths``, which other normalisations need, is ignored."""
        if not self.known:
            if self._missing_allowed:
                return x
            if not self.has_statistics():
                raise SbkitError("no-statistics", "GlobalNorm has no mean and deviation of the features yet",
                                 hint="`sbkit train` computes them when it prepares a corpus; the checkpoints of a run "
                                      "have them if normalize is among the checkpointer's recoverables")
            self.known = True  # asked only once
        return (x - self.mean) / self.deviation

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:  # torch's hook, which says no more of them
        super()._load_from_state_dict(*args, **kwargs)
        self._missing_allowed = False
        self.known = self.has_statistics()
