"""What a check of a recipe is asked for besides the recipe, and what follows from that for what it reports."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from speechbrain.utils.run_opts import RunOptions

from sbkit.errors import SbkitError
from sbkit.recipe.cost import StepMeasurement
from sbkit.recipe.price import PriceRequest
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.speed import native_precision


@dataclass(frozen=True)
class CheckRequest:
    """The options of a check; ``sbkit.recipe.check.check`` says what each means."""

    run_opts: RunOptions | None
    starting: bool
    measure: Callable[[], StepMeasurement] | None
    pricing: PriceRequest | None
    needed: Sequence[str]

    def option(self, name: str) -> Any:  # of any type
        """The value of a run option; None if the command line doesn't have it."""
        on_command_line = getattr(self.run_opts, "overridden_args", ())
        return getattr(self.run_opts, name) if name in on_command_line else None

    @property
    def device(self) -> torch.device:
        """The device on which the recipe would run."""
        name = self.option("device")
        try:
            return torch.device(name or ("cuda:0" if torch.cuda.is_available() else "cpu"))
        except RuntimeError as error:
            raise SbkitError("device-unavailable", f"--device: torch has no device {name!r}", key="device", value=name,
                             hint="write cpu, cuda or cuda:1") from error

    def precision(self, hparams: Mapping[str, Any]) -> str:
        """The precision in which the recipe with these objects would run on the device."""
        precision: str = self.option("precision") or hparams.get("precision") or RunOptions.precision
        if precision != "auto":
            return precision
        device = self.device
        if device.type == "cuda" and not torch.cuda.is_available():  # GPUs that are planned for have units for bf16
            return "bf16"
        return native_precision(device)

    def report_missing(self, node: Node, error: SbkitError, findings: Findings) -> None:
        """Report a path, or a package, that doesn't exist here, with the code of the error.

        A recipe's path may be meant for another machine, so it is an error only if a run starts on this one. A path on
        the command line is always an error.

        node : where it is named
        """
        on_command_line = not node.place.line
        if self.starting or on_command_line:
            findings.report(error, node.place, f"--{node.key}" if on_command_line else node.key)
        else:
            findings.warning(error.code, node.place, node.key, f"{error.message} on this machine",
                             "a run here couldn't start; " + (error.hint or ""))
