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
    parameters = sum(parameter.numel() for parameter in brain.modules.parameters())
    if parameters > MAX_PARAMETERS:
        return (f"a batch of one, padding and the metric: a model of {parameters / 1e6:,.0f} million parameters is too "
                "large to try")
    traced.built.initialise()
    with brain.restoring(), _accelerated(traced), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run repeats them
        if not _try_training(traced, findings):
            return ""
        brain.modules.eval()
        try:
            _compare_padded(brain, traced, findings)
            if brain.is_prepared(brain.keys):
                with logging_disabled(logging.WARNING):  # noise has no transcript
                    _validate(brain, traced, findings)
        except Exception as error:  # from the task's code, on noise that a corpus may not have
            logger.debug("not tried on noise", exc_info=True)
            return _report_validation(error, traced, findings)
    return ""


def _try_training(traced: Trace, findings: Findings) -> bool:
    """Train on a batch as small as the recipe's batches may be; return whether any batch of noise can be trained on."""
    brain = traced.brain
    place = traced.built.nodes["brain"].place
    least = getattr(traced.built.hparams.get("batching"), "min_batch_utterances", 1)
    error = _error_of_training(brain, max(least, 1), findings, place)
    if error is None:
        return True
    if least == 1 and _error_of_training(brain, 2, findings, place) is None:
        findings.error("one-utterance", traced.built.place("batching"), "batching",
                       f"a batch of one utterance fails, which this recipe may have: {summary(error)}",
                       "set min_batch_utterances: 2 there")
        return True
    findings.error("forward", place, "brain", f"a training batch of noise fails{own_line(error)}: {summary(error)}")
    return False


def _report_validation(error: Exception, traced: Trace, findings: Findings) -> str:
    """Report a failed validation, if the user's code is to blame; otherwise return why it couldn't be tried."""
    brain = traced.brain
    what = "a validation of one recording of noise"
    for column in brain.columns.values():
        names_classes = isinstance(column, LabelColumn) and column.classes
        if names_classes and vars(brain.keys).get(column.classes) is None:  # the run fills them before the first batch
            return (f"{what}: {column.classes} is null, so its labels are those of the corpus, which is not prepared "
                    "yet")
    line = own_line(error)
    if not line:
        return f"{what}: {summary(error)}"
    report = findings.error if isinstance(error, (AttributeError, NameError)) else findings.warning
    report("validation", traced.built.nodes["brain"].place, "brain", f"{what} fails{line}: {summary(error)}",
           "columns of texts are empty there, unless LabelColumn(dummy=...) says otherwise")
    return ""


@contextlib.contextmanager
def _accelerated(traced: Trace) -> Iterator[None]:
    """Replace SpeechBrain's layers by faster ones if the run will: only these ignore padding exactly."""
    parts: list[nn.Module] = []
    if traced.keys.accelerate:
        parts.append(traced.brain.modules)
        parts += [value for value in traced.built.hparams.values() if isinstance(value, nn.Module)]
    for part in parts:
        accelerate(part)
    try:
        yield
    finally:
        for part in parts:
            restore(part)


def _error_of_training(brain: Task, utterances: int, findings: Findings, place: Place) -> Exception | None:
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


def _compare_padded(brain: Task, traced: Trace, findings: Findings) -> None:
    """Warn if an utterance's outputs depend on its padding."""
    samples = round(SECONDS * brain.keys.sample_rate)
    signal = 0.1 * torch.randn(samples, generator=torch.Generator().manual_seed(0))
    padded_signal = torch.cat((signal, torch.zeros(samples)))
    alone = _outputs(brain, signal, samples, seed=0)
    again = _outputs(brain, signal, samples, seed=1)
    padded = _outputs(brain, padded_signal, samples, seed=2)
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


def _outputs(brain: Task, signal: Tensor, samples: int, seed: int) -> list[Tensor]:
    """The outputs of a forward that are sequences, of one recording [S] whose first ``samples`` aren't padding.

    seed : of what is random in the forward
    """
    torch.manual_seed(0)
    batch = brain.clip_batch(signal, samples)
    torch.manual_seed(seed)
    with torch.no_grad():
        leaves = tree_leaves(brain.compute_forward(batch, Stage.VALID))
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()
            and leaf.dim() > 1 and len(leaf) == 1]


def _difference(alone: Tensor, padded: Tensor) -> float:
    """The relative difference of their common part, as the median over frames, because edges may differ.

    It is 0 if ``padded`` is smaller than ``alone``.
    """
    if alone.dim() != padded.dim() or any(map(int.__gt__, alone.shape, padded.shape)):
        return 0.0
    common = padded[tuple(slice(size) for size in alone.shape)]
    errors = _frame_norms(common - alone)
    sizes = _frame_norms(alone)
    return float((errors / sizes.clamp(min=1e-9)).median())


def _frame_norms(outputs: Tensor) -> Tensor:
    """The norms of frames; outputs: [1, T, ...], or [1, F] of one frame."""
    return outputs.flatten(2).norm(dim=2) if outputs.dim() > 2 else outputs.norm(dim=1)


def _validate(brain: Task, traced: Trace, findings: Findings) -> None:
    """Validate on a recording of noise; report a metric that validations don't return."""
    samples = round(SECONDS * brain.keys.sample_rate)
    brain.rows = []
    with torch.no_grad():
        brain.evaluate_batch(brain.clip_batch(0.1 * torch.randn(samples), samples), Stage.VALID)
    try:
        stats = {"loss": 0.0, **brain.stats(brain.rows)}
    except SbkitError:  # noise has no transcript, so there may be nothing to score
        return
    if not brain.rows:
        return
    if brain.metric.name not in stats:
        node = traced.built.nodes["brain"]
        findings.error("metric", node.place, "brain",
                       f"{type(brain).__name__} chooses the best checkpoint by {brain.metric.name!r}, and its "
                       f"validations return {', '.join(stats)}", "return it from stats, or name one of these in metric")
        return
    with contextlib.suppress(SbkitError):  # noise has no transcript, so there may be nothing to score
        brain.results(brain.rows, 0.0, {})
