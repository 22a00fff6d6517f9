"""Whether a recogniser learns: its progress, which masks and learning rate follow, and warnings if there is none."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from sbkit.recipe.patterns import flattened
from sbkit.runs import from_nothing
from sbkit.score.metric import Metric
from sbkit.tasks.advice import Setup
from sbkit.tasks.keys import RecogniserKeys
from sbkit.tasks.learning_notices import EVERY, LearningNotices, Notice
from sbkit.tasks.learning_progress import LearningProgress
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.results import StepResult

logger = logging.getLogger(__name__)


class LearningMonitor:
    """Compares a recogniser's training loss with chance, and with where it began.

    loss_of_tokens : the name in ``Loss.extras`` of a part that, per token, equals the tokens' entropy until something
        is learnt. A run warns if it stays there, and widens SpecAugment's masks as it falls (``ramp``). None if the
        loss has no such part: masks then have their full width from the first step on
    """

    def __init__(self, loss_of_tokens: str | None, keys: RecogniserKeys, checkpointer: Checkpointer | None):
        self.loss_of_tokens = loss_of_tokens
        self.keys = keys
        self.progress = LearningProgress()
        self.notices = LearningNotices()
        if checkpointer is not None:
            # The name that it has in checkpoints of all versions.
            checkpointer.add_recoverable("hearing", self.progress, optional_load=True)

    @property
    def knows_chance(self) -> bool:
        """Whether the loss can be compared with chance."""
        return self.loss_of_tokens is not None

    @property
    def starts_trained(self) -> bool:
        """Whether the initial weights are those of a trained model."""
        return self.keys.pretrainer is not None or self.keys.init_from is not None

    def begin_run(self, texts: Sequence[str], planned_steps: int, *, step_limit: int | None, max_norm: float | None,
                  anneals: bool, thaws_at: int, recipe_keys: Iterable[str],
                  schedule: Any) -> None:  # a Schedule, or a recipe's own that is like one
        """Compute the loss at chance from the training texts, and what the advice of warnings depends on.

        schedule : of the learning rate; None: there is none, or nothing is trained
        anneals : whether a scheduler of SpeechBrain sets the learning rate instead
        thaws_at : the step until which something is frozen
        """
        if self.loss_of_tokens is not None:
            self.progress.chance = self.keys.tokenizer.entropy(texts)
        keys, masks = self.keys, self.keys.spec_augment
        self.notices.setup = Setup(
            max_norm=max_norm,
            planned=planned_steps,
            step_limit=step_limit,
            masks=masks is not None and getattr(masks, "ramp", None) is None,
            schedule=schedule,
            anneals=anneals,
            thaw=thaws_at,
            freezes=any(flattened(keys.freeze or {}).values()),
            trained=self.starts_trained,
            fastest=max([1.0, *flattened(keys.learning_rates or {}).values()]),
            keys=frozenset(recipe_keys))

    def apply(self, number: int, *followers: object) -> None:
        """Set what depends on the progress before a step: the strength of masks, and limits of the learning rate."""
        progress = self.progress.score_at(number)  # 1, full strength, if it is unknown
        for follower in followers:
            if hasattr(follower, "set_score"):
                follower.set_score(progress)

    def is_due(self, number: int) -> bool:
        """Whether to look for problems when this step begins."""
        return number % EVERY == 0

    def look(self, number: int, rate: float | None, ended: bool = False) -> list[Notice]:
        """Return warnings that begin or end when this step begins; the same on all ranks.

        rate : the learning rate; None: it is unknown
        ended : whether training has ended
        """
        return self.notices.look(number, self.progress, rate, ended)

    def log_notices(self, number: int, rate: float | torch.Tensor | None, metrics_log: MetricsLog | None,
                    ended: bool = False) -> None:
        """Log warnings that begin or end when this step begins, on the main rank; all ranks may call it.

        rate : the learning rate; a recipe's own may be on a device, where reading it would wait
        """
        known_rate = None if isinstance(rate, torch.Tensor) else rate
        for notice in self.look(number, known_rate, ended):
            if ranks.is_main():
                logger.log(logging.WARNING if notice.holds else logging.INFO, "%s", notice.text())
            if metrics_log is not None:
                metrics_log.write("warning", **notice._asdict())

    def count(self, result: StepResult) -> None:
        """Record a step's loss."""
        part = result.extras.get(self.loss_of_tokens or "")
        total, tokens = part or (result.total, result.count)
        self.progress.count(result.number, total, tokens, comparable=part is not None)

    def end(self, number: int) -> None:
        """Record all losses that are known when training ends before this step."""
        self.progress.score_at(number)

    def held_back_by(self) -> str | None:
        """Return a warning if trained initial weights hold the run back; None if they don't, or nothing shows it."""
        if not self.starts_trained:
            return None
        letters = Metric("CER")  # words stay at 100 % while letters are learnt
        return from_nothing.warning(self.keys.folder, letters) or None


