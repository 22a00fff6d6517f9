"""SpeechBrain's feature layers without tables that are rebuilt, or copied to the device, in each call."""

from __future__ import annotations

from typing import Any

import torch
from speechbrain.lobes import features as lobes
from speechbrain.processing import features
from speechbrain.utils.autocast import fwd_default_precision
from speechbrain.utils.distributed import ddp_all_reduce
from torch import Tensor
from torch.distributed import ReduceOp

from sbkit.errors import SbkitError


class Fbank(lobes.Fbank):
    """``Fbank``: [B, S] to [B, T, features]; computes the power spectrum in two passes instead of four."""

    @fwd_default_precision(cast_inputs=torch.float32)
    def forward(self, wav: Tensor) -> Tensor:
        squares = self.compute_STFT(wav).square()
        fbanks = self.compute_fbanks(squares.select(-1, 0) + squares.select(-1, 1))
        if self.deltas:
            first = self.compute_deltas(fbanks)
            fbanks = torch.cat([fbanks, first, self.compute_deltas(first)], dim=2)
        return self.context_window(fbanks) if self.context else fbanks


class STFT(features.STFT):
    """``STFT``: [B, S] to [B, T, F, 2]; keeps its window on the device of the signals."""

    window: Tensor

    def forward(self, x: Tensor) -> Tensor:
        if self.window.device != x.device:
            self.window = self.window.to(x.device)
        return super().forward(x)


class Filterbank(features.Filterbank):
    """``Filterbank``: [B, T, F] to [B, T, mels]; computes fixed filters only once."""

    def forward(self, spectrogram: Tensor) -> Tensor:
        changing = not self.freeze or (self.param_rand_factor != 0 and self.training)
        if changing or spectrogram.ndim != 3:
            return super().forward(spectrogram)
        made = self.__dict__.get("_filters")
        if made is None or made.device != spectrogram.device:
            shape = self.all_freqs_mat.shape
            made = self._create_fbank_matrix(self.f_central[:, None].expand(shape), self.band[:, None].expand(shape))
            made = self.__dict__["_filters"] = made.to(spectrogram.device)
        fbanks = torch.matmul(spectrogram, made)
        return self._amplitude_to_DB(fbanks) if self.log_mel else fbanks


class InputNormalization(features.InputNormalization):
    """``InputNormalization``: [B, T, F] to the same; updates its statistics without the original's two host syncs."""

    glob_mean: Tensor
    glob_std: Tensor
    count: int | Tensor
    _counting = True

    def forward(self, x: Tensor, lengths: Tensor | None = None, epoch: int | None = None) -> Tensor:
        if self.norm_type == "global":
            # Not buffers: after loading a checkpoint they may be on another device.
            self.glob_mean, self.glob_std = self.glob_mean.to(x.device), self.glob_std.to(x.device)
            if not self.glob_mean.numel() and not self._should_update(epoch):
                raise SbkitError("InputNormalization with norm_type global has no statistics: it has seen no training, "
                                 "and the checkpoint holds none",
                                 hint="add it to the checkpointer's recoverables and train, or use norm_type: sentence")
        return super().forward(x, lengths, epoch)

    def uncounted(self, x: Tensor, lengths: Tensor | None = None) -> Tensor:
        """Normalise ``x`` without adding it to the statistics; takes part in the ranks' exchange of theirs."""
        self._counting = False
        try:
            return self(x, lengths)
        finally:
            self._counting = True

    def _update_global_stats(self, x: Tensor, mask: Tensor) -> None:
        dims, wide, mask = (0, self.length_dim), x.float(), mask & self._counting
        number = _over_ranks(mask.sum().float())
        divisor = number.clamp(min=1)  # no rank may have anything to count
        mean = _over_ranks((wide * mask).sum(dims)) / divisor
        apart = (wide - mean.unsqueeze(0).unsqueeze(self.length_dim)) * mask
        variance = _over_ranks(apart.square().sum(dims)) / divisor
        if not self.glob_mean.numel():
            self.glob_mean, self.glob_std = torch.zeros_like(mean), torch.ones_like(mean)
        before, spread = self.glob_mean, self.glob_std
        count = self.count + number.double()
        share = (number / count.clamp(min=1)).float()
        self.glob_mean = torch.lerp(before, mean, share)
        between = share * (1 - share) * (mean - before).square()
        self.glob_std = (torch.lerp(spread.square(), variance, share) + between).sqrt()
        self.count = count

    def _statistics_dict(self) -> dict[str, Any]:
        return {**super()._statistics_dict(), "count": int(self.count)}


def _over_ranks(value: Tensor) -> Tensor:
    return ddp_all_reduce(value, ReduceOp.SUM)
