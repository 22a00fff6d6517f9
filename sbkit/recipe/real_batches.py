"""Sends small batches of noise through the recipe's Brain, for checks that need values, which fake tensors lack.

These are a batch of one utterance, an utterance with padding, and the statistics of a validation.
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

from sbkit.data.columns import LabelColumn
from sbkit.errors import SbkitError, summary
from sbkit.nn.accelerate import accelerate, restore
from sbkit.recipe.keys import Task
from sbkit.recipe.source import Findings, Place
from sbkit.recipe.trace import Trace, own_line
from sbkit.system.console import logging_disabled

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""Duration of the utterance, and of its padding."""
MAX_PARAMETERS = 300_000_000
"""Larger models are not tried: they take too long and too much memory."""
TOLERANCE = 0.1
"""Allowed relative difference between outputs with padding and without, by their norms."""


def try_batches(traced: Trace, findings: Findings) -> str:
    """Run the batches and add findings; returns what couldn't be tried and why, if anything."""
    brain = traced.brain
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        return ""  # one rank checks, and the task's code may wait for the others
    numbers = sum(each.numel() for each in brain.modules.parameters())
    if numbers > MAX_PARAMETERS:
        return (f"a batch of one, padding and the metric: a model of {numbers / 1e6:,.0f} million parameters is too "
                "large to try")
    traced.built.initialise()
    with brain.restoring(), _accelerated(traced), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run repeats them
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
        except Exception as error:  # from the task's code, on noise that a corpus may not have
            logger.debug("not tried on noise", exc_info=True)
            what, line = "a validation of one recording of noise", own_line(error)
            columns = brain.columns.values()
            unknown = [column.classes for column in columns if isinstance(column, LabelColumn) and column.classes
                       and vars(brain.keys).get(column.classes) is None]
            if unknown:  # the run fills them before the first batch
                return f"{what}: {unknown[0]} is null, so its labels are those of the corpus, which is not prepared yet"
            if not line:
                return f"{what}: {summary(error)}"
            told = findings.error if isinstance(error, (AttributeError, NameError)) else findings.warning
            told("validation", place, "brain", f"{what} fails{line}: {summary(error)}",
                 "columns of texts are empty there, unless LabelColumn(dummy=...) says otherwise")
    return ""


@contextlib.contextmanager
def _accelerated(traced: Trace) -> Iterator[None]:
    """Replace SpeechBrain's layers by faster ones if the run will: only these ignore padding exactly."""
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
    """Compute a training batch; returns its error, if any."""
    brain.modules.train()
    try:
        with torch.no_grad():
            batch = brain.dummy_batch(utterances, SECONDS, noise=True)
            batch.token_lengths = (batch.token_lengths // 4).clamp(min=1)  # enough frames even at 80 ms each
            loss = brain.trainer.parallel.loss_of(batch).loss
    except Exception as error:  # each layer raises its own
        return error
    if float(loss.count) == 0:
        findings.error("loss", place, "brain", "the loss of a training batch has a count of 0, so nothing is learnt "
                       "from it", "return sbkit.Loss(sum, count), of utterances, tokens or frames")
    return None


def _padding(brain: Task, traced: Trace, findings: Findings) -> None:
    samples = round(SECONDS * brain.keys.sample_rate)
    signal = 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(0))
    longer = torch.cat((signal, torch.zeros(samples)))
    outputs: list[list[Tensor]] = []
    for seed, each in enumerate((signal, signal, longer)):  # of compute_forward, with different random seeds
        torch.manual_seed(0)
        batch = brain.clip_batch(each, samples)
        torch.manual_seed(seed)
        with torch.no_grad():
            leaves = tree_leaves(brain.compute_forward(batch, Stage.VALID))
        outputs.append([leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
                        and leaf.dim() > 1 and len(leaf) == 1])
    alone, again, padded = outputs
    if not len(alone) == len(again) == len(padded) or any(map(_difference, alone, again)):
        return  # outputs are random, so they can't be compared
    difference = max(map(_difference, alone, padded), default=0.0)
    if difference > TOLERANCE:
        node = traced.built.nodes["brain"]
        findings.warning("padding", node.place, "brain",
                         f"an utterance's outputs depend on its padding, and so on other utterances of a batch: padded "
                         f"to twice its length, they are {100 * difference:.0f} % off",
                         "leave padding out of means, normalisation and attention: an encoder whose forward has a "
                         "second argument gets the lengths [B], and a task has batch.signal_lengths")


def _difference(alone: Tensor, padded: Tensor) -> float:
    """The relative difference of their common part, as the median over frames, because edges may differ.

    It is 0 if ``padded`` is smaller than ``alone``.
    """
    if alone.dim() != padded.dim() or any(map(int.__gt__, alone.shape, padded.shape)):
        return 0.0
    part = padded[tuple(slice(size) for size in alone.shape)]
    error, size = ((each.flatten(2).norm(dim=2) if each.dim() > 2 else each.norm(dim=1)) for each in
                   (part - alone, alone))
    return float((error / size.clamp(min=1e-9)).median())


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
