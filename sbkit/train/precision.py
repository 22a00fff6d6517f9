"""fp32, bf16 and fp16: what runs in which, on any device, and the loss scale that fp16 needs."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from speechbrain.utils.autocast import AMPConfig, TorchAutocast
from speechbrain.utils.run_opts import RunOptions
from torch.amp.grad_scaler import GradScaler

from sbkit.errors import SbkitError
from sbkit.train.options import pick

_HALF = (torch.float16, torch.bfloat16)


class Scaler(GradScaler):
    """torch's loss scaler; ``adjust`` is its ``update`` for a step that found its infinities itself.

    The scale is meant for a mean. ``sum_scale`` is what sums are multiplied by besides, 1 / their count or a little
    less: else the first scale is hundreds of times too high, and falls by half with each step that it spoils. It is
    a power of two, so that dividing by it takes nothing away, and a tensor on the device: nothing waits for it.
    """

    sum_scale: torch.Tensor | None = None

    def follow(self, count: torch.Tensor) -> None:
        """Sums from now on are of about so many, a scalar on the device; 0 and what is not finite say nothing."""
        mean = 1 / count
        scale = mean / (2 * torch.frexp(mean).mantissa)  # the power of two below
        before = torch.ones_like(scale) if self.sum_scale is None else self.sum_scale
        self.sum_scale = torch.where((count > 0) & torch.isfinite(count), scale, before)

    def state_dict(self) -> dict[str, Any]:
        """torch's, and the one of sums."""
        own = {} if self.sum_scale is None else {"sum_scale": float(self.sum_scale)}
        return {**super().state_dict(), **own}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with both; a state of torch's own has but one."""
        super().load_state_dict(dict(state))
        if "sum_scale" in state:
            self.sum_scale = torch.full((), state["sum_scale"], device=self._device)

    def adjust(self, found_inf: torch.Tensor) -> None:
        assert self._scale is not None and self._growth_tracker is not None, "a loss was scaled"
        torch._amp_update_scale_(
            self._scale, self._growth_tracker, found_inf,
            self._growth_factor, self._backoff_factor, self._growth_interval,
        )

    def factor(self) -> torch.Tensor | None:
        """What a mean is multiplied by, on the device; None when nothing is scaled."""
        return self._get_scale_async() if self.is_enabled() else None


def chosen(run_opts: RunOptions, hparams: Mapping[str, Any] | None) -> tuple[str, str]:
    """Of training and of evaluation; SpeechBrain's two old switches still work."""
    training = pick(run_opts, hparams, "precision")
    for switch, name in (("auto_mix_prec", "fp16"), ("bfloat16_mix_prec", "bf16")):
        training = name if pick(run_opts, hparams, switch) else training
    return training, pick(run_opts, hparams, "eval_precision")


def hide_fp16(run_opts: RunOptions, hparams: Mapping[str, Any] | None, device_type: str) -> RunOptions:
    """SpeechBrain refuses fp16 on a CPU before we can say that today's torch has it there."""
    if device_type != "cpu" or "fp16" not in chosen(run_opts, hparams):
        return run_opts
    hidden = {"precision": "fp32", "eval_precision": "fp32", "auto_mix_prec": False}
    return dataclasses.replace(run_opts, overridden_args=run_opts.overridden_args | set(hidden), **hidden)


def autocast(device_type: str, precision: str) -> TorchAutocast:
    """The context that compute runs in; nothing at all for fp32."""
    if precision == "fp16" and device_type == "cpu" and not _cpu_has_fp16():
        raise SbkitError(f"precision is fp16, but torch {torch.__version__} has no fp16 autocast on the CPU",
                         hint="use bf16")
    return TorchAutocast(device_type=device_type, dtype=AMPConfig.from_name(precision).dtype)


def _cpu_has_fp16() -> bool:
    with torch.autocast("cpu", dtype=torch.float16):
        probe = torch.ones(2, 2) @ torch.ones(2, 2)
    return probe.dtype is torch.float16


def losses_in_fp32(outputs: Any, context: TorchAutocast) -> Any:
    """What ``compute_forward`` returned, its half-precision tensors as fp32 where autocast made them so.

    Looks into lists, tuples and dicts. Layers that are called in ``compute_objectives`` still run in half
    precision, since that runs under autocast too.
    """
    return _upcast(outputs) if isinstance(context.context, torch.autocast) else outputs


def _upcast(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _HALF else value
    if type(value) is dict:
        return {key: _upcast(item) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_upcast(item) for item in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_upcast(item) for item in value))
    return value
