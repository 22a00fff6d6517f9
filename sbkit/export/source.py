"""What is exported: a run's recogniser with the weights of the checkpoint that was asked for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from sbkit.errors import SbkitError
from sbkit.nn.recognizer import Recognizer
from sbkit.runs import restore
from sbkit.train.averaging import EMA


@dataclass
class Trained:
    """A recogniser in evaluation mode on the CPU in fp32, and what is known about it."""

    run: Path
    keys: Any
    recognizer: Recognizer
    tokenizer: Any
    facts: dict[str, Any]
    """Recipe, checkpoint and scores, for config.json."""

    @property
    def sample_rate(self) -> int:
        return self.keys.sample_rate


def open_run(run: str | Path, checkpoint: str = restore.BEST, mean_of: int = 1) -> Trained:
    """The model of a run.

    Arguments
    ---------
    checkpoint : ``best`` (by WER), ``last`` or the name of one
    mean_of : take the mean of the weights of this many instead
    """
    run = Path(run)
    recipe = restore.read_run(run)
    brain = restore.build(recipe, "cpu")
    used = restore.take_weights(brain, checkpoint, mean_of)
    recognizer = getattr(brain, "recognizer", None)
    if not isinstance(recognizer, Recognizer):
        raise SbkitError(f"{type(brain).__name__} has no CTC recogniser to export",
                         hint="sbkit exports runs whose brain is sbkit.tasks.ctc.CTC or derived from it")
    tokenizer = getattr(recipe.keys, "tokenizer", None)
    if not hasattr(tokenizer, "pieces"):
        raise SbkitError("the recipe has no tokenizer of sbkit.data.tokens", hint="its pieces go into tokens.txt")
    for module in _parts(recognizer):
        module.float().eval()
    averaged = any(isinstance(each, EMA) for each in brain.checkpointer.recoverables.values())
    return Trained(run, recipe.keys, recognizer, tokenizer, _facts(recipe.keys, brain, used, averaged))


def _parts(recognizer: Recognizer) -> list[nn.Module]:
    parts = (recognizer.compute_features, recognizer.normalize, recognizer.frontend, recognizer.encoder,
             recognizer.ctc_lin)
    return [part for part in parts if isinstance(part, nn.Module)]


def _facts(keys: Any, brain: Any, used: Sequence[Any], averaged: bool) -> dict[str, Any]:
    best = used[0]
    meta = {key: value for key, value in best.meta.items() if key in ("epoch", brain.metric.name, "loss")}
    return {
        "experiment": keys.experiment or "", "checkpoint": Path(best.path).name,
        "mean_of": len(used), "moving_average": averaged, **({} if len(used) > 1 else {"valid": meta}),
        "parameters": sum(each.numel() for each in brain.checkpointer.recoverables["model"].parameters())
        if "model" in brain.checkpointer.recoverables else None,
    }


def reference(recognizer: Recognizer, at_least: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Waveform [S] to log-probabilities [T, V] as the checkpoint gives them, one utterance at a time.

    Shorter ones than ``at_least`` get zeros behind them, as every runtime gives them.
    """

    @torch.no_grad()
    def run(signal: np.ndarray) -> np.ndarray:
        signals = torch.from_numpy(signal)[None]
        signals = torch.nn.functional.pad(signals, (0, max(0, at_least - len(signal))))
        log_probs, frames = recognizer.log_probs(signals, torch.tensor([len(signal)]))
        return log_probs[0, : int(frames[0])].numpy()

    return run
