"""Sends two small batches of noise through the recipe's Brain, for what stand-ins without values can't show.

A batch of one utterance, an utterance beside padding, and the statistics of a validation.
"""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterator

import torch
from speechbrain.core import Stage
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from sbkit.errors import SbkitError, summary
from sbkit.nn.accelerate import accelerate, restore
from sbkit.recipe.keys import Task
from sbkit.recipe.source import Findings, Place
from sbkit.recipe.trace import Trace, own_line
from sbkit.system.console import logging_disabled

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""Of the utterance; as much padding is added."""
MOST_NUMBERS = 300_000_000
"""Of a model that is computed, in less than some seconds and GiB."""
APART = 0.1
"""Outputs with padding may be this far from those without, by their norms."""


def try_them(traced: Trace, findings: Findings) -> str:
    """Add what they show to the findings; returns why something couldn't be tried, if so."""
    brain = traced.brain
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return ""  # one rank checks, and the task's code may wait for all
    numbers = sum(each.numel() for each in brain.modules.parameters())
    if numbers > MOST_NUMBERS:
        return (f"a batch of one, padding and the metric: a model of {numbers / 1e6:,.0f} million parameters is too "
                "large to try")
    traced.built.initialise()
    with brain.restoring(), _as_it_runs(traced), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run gives them again
        batching, place = traced.built.hparams.get("batching"), traced.built.nodes["brain"].place
        least = getattr(batching, "min_batch_utterances", 1)
        error = _training(brain, max(least, 1), findings, place)
        if error is not None and least == 1 and _training(brain, 2, findings, place) is None:
            findings.error("one-utterance", traced.built.place("batching"), "batching",
                           f"a batch of one utterance fails, which this recipe may have: {summary(error)}",
                           "set min_batch_utterances: 2 there")
        elif error is not None:
            findings.error("forward", place, "brain", f"a training batch of noise fails{own_line(error)}: "
                           f"{summary(error)}")
            return ""
        brain.modules.eval()
        try:
            _padding(brain, traced, findings)
            if brain.is_prepared(brain.keys):
                with logging_disabled(logging.WARNING):  # noise has no transcript
                    _validation(brain, traced, findings)
        except Exception as error:  # the task's own code on noise, which a corpus may never have
            logger.debug("not tried on noise", exc_info=True)
            what, line = "a validation of one recording of noise", own_line(error)
            if not line:
                return f"{what}: {summary(error)}"
            findings.warning("validation", place, "brain", f"{what} fails{line}: {summary(error)}",
                             "columns of texts are empty there, unless LabelColumn(stand_in=...) says otherwise")
    return ""


@contextlib.contextmanager
def _as_it_runs(traced: Trace) -> Iterator[None]:
    """Swap SpeechBrain's layers for faster equivalents if the run will: these give the same with padding, and those
    don't quite."""
    parts = [traced.brain.modules, *(each for each in traced.built.hparams.values() if isinstance(each, nn.Module))]
    if not traced.keys.accelerate:
        parts = []
    for part in parts:
        accelerate(part)
    try:
        yield
    finally:
        for part in parts:
            restore(part)


def _training(brain: Task, utterances: int, findings: Findings, place: Place) -> Exception | None:
    """Compute a training batch; returns the error with which it ended."""
    brain.modules.train()
    try:
        with torch.no_grad():
            batch = brain.stand_in(utterances, SECONDS, noise=True)
            batch.token_lengths = (batch.token_lengths // 4).clamp(min=1)  # so few that frames of 80 ms do
            loss = brain.compute_objectives(brain.compute_forward(batch, Stage.TRAIN), batch, Stage.TRAIN)
    except Exception as error:  # each layer has its own
        return error
    if float(getattr(loss, "count", 1)) == 0:
        findings.error("loss", place, "brain", "the loss of a training batch has a count of 0, so nothing is learnt "
                       "from it", "return sbkit.Loss(sum, count), of utterances, tokens or frames")
    return None


def _padding(brain: Task, traced: Trace, findings: Findings) -> None:
    samples = round(SECONDS * brain.keys.sample_rate)
    signal = 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(0))
    longer = torch.cat((signal, torch.zeros(samples)))
    alone, again, padded = (_outputs(brain, each, samples, i) for i, each in enumerate((signal, signal, longer)))
    if not len(alone) == len(again) == len(padded) or any(map(_apart, alone, again)):
        return  # it draws numbers, so nothing can be compared
    apart = max(map(_apart, alone, padded), default=0.0)
    if apart > APART:
        node = traced.built.nodes["brain"]
        findings.warning("padding", node.place, "brain",
                         f"an utterance's outputs depend on its padding, and so on other utterances of a batch: padded "
                         f"to twice its length, they are {100 * apart:.0f} % off",
                         "leave padding out of means and normalisation, by batch.signal_lengths")


def _outputs(brain: Task, signal: Tensor, samples: int, seed: int) -> list[Tensor]:
    """The numbers that ``compute_forward`` gives for one utterance; those that it draws follow from the seed."""
    torch.manual_seed(0)
    batch = brain.clip_batch(signal, samples)
    torch.manual_seed(seed)
    with torch.no_grad():
        leaves = tree_leaves(brain.compute_forward(batch, Stage.VALID))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point() and leaf.dim() > 1
            and len(leaf) == 1]


def _apart(alone: Tensor, padded: Tensor) -> float:
    """How far the part that both have is apart; of frames, in the middle one, since edges may differ.

    0 if one isn't part of the other.
    """
    if alone.dim() != padded.dim() or any(map(int.__gt__, alone.shape, padded.shape)):
        return 0.0
    part = padded[tuple(slice(size) for size in alone.shape)]
    apart, size = ((each.flatten(2).norm(dim=2) if each.dim() > 2 else each.norm(dim=1)) for each in
                   (part - alone, alone))
    return float((apart / size.clamp(min=1e-9)).median())


def _validation(brain: Task, traced: Trace, findings: Findings) -> None:
    samples = round(SECONDS * brain.keys.sample_rate)
    brain.rows = []
    with torch.no_grad():
        brain.evaluate_batch(brain.clip_batch(0.1 * torch.randn(samples), samples), Stage.VALID)
    try:
        known = {"loss": 0.0, **brain.stats(brain.rows)}
    except SbkitError:  # noise has no transcript, so there may be nothing to score
        return
    if brain.rows and brain.metric.name not in known:
        node = traced.built.nodes["brain"]
        findings.error("metric", node.place, "brain",
                       f"{type(brain).__name__} chooses the best checkpoint by {brain.metric.name!r}, and its "
                       f"validations return {', '.join(known)}", "return it from stats, or name one of these in metric")
        return
    if brain.rows:
        with contextlib.suppress(SbkitError):  # noise has no transcript, so there may be nothing to score
            brain.results(brain.rows, 0.0, {})
