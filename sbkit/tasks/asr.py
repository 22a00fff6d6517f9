"""What every recogniser is: a task that hears words, scores them, and notices whether it learns to."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, ClassVar, NamedTuple

import torch

from sbkit.data.manifest import Manifest
from sbkit.data.reader import Encoder
from sbkit.tasks.hearing import Hearing
from sbkit.tasks.kept_tokenizer import kept
from sbkit.tasks.keys import RecogniserKeys, TaskKeys
from sbkit.tasks.learning_alarm import LearningAlarm
from sbkit.tasks.learning_notice import Notice, Setup
from sbkit.tasks.task import Metric, Task
from sbkit.tasks.transcripts import Transcripts, score
from sbkit.train.distributed import ranks
from sbkit.train.step import Facts

logger = logging.getLogger(__name__)

#: Labels of a second of usual speech.
LETTERS_PER_SECOND, PIECES_PER_SECOND = 16, 6


class Choice(NamedTuple):
    """One transcript that a search found, with natural logarithms: what it sorts by, and the sound's part of it."""

    text: str
    score: float
    acoustic: float


def choices(found: Sequence[Any]) -> tuple[Choice, ...]:
    """Of the hypotheses of an utterance what a row keeps."""
    return tuple(Choice(one.text, one.score, one.acoustic) for one in found)


class Row(NamedTuple):
    """One utterance of validation or test, as it was heard."""

    id: str
    reference: str
    hypothesis: str
    confidence: float | None = None  # 0 to 1; None where nothing was heard, or the task does not say
    nbest: Sequence[Choice] = ()  # of a search, the hypothesis first


class ASR(Task):
    """A task that scores words: ``self.rows`` are to be filled with ``Row`` in validation and test."""

    Keys: ClassVar[type[TaskKeys]] = RecogniserKeys
    metric = Metric("WER")
    keys: RecogniserKeys
    loss_of_tokens: ClassVar[str | None] = None
    """The name in ``Loss.extras`` of the part that is, per token, the tokens' entropy while nothing is heard yet.

    With it a run warns of a model that hears nothing; None: no part of this loss is.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.hearing = Hearing()
        self.alarm = LearningAlarm(self.loss_of_tokens)
        if self.checkpointer is not None:
            self.checkpointer.add_recoverable("hearing", self.hearing, optional_load=True)
            self.checkpointer.add_recoverable("alarm", self.alarm, optional_load=True)

    # ------------------------------------------------------------ the vocabulary

    @classmethod
    def prepare(cls, keys: RecogniserKeys, manifests: Mapping[str, Manifest],
                given: Mapping[str, Any]) -> dict[str, Any]:
        """Make the tokenizer. How many characters there are is nothing that a recipe, whose number is right for one
        corpus only, can know; a number given on the command line is meant."""
        tokenizer, said = keys.tokenizer, keys.output_neurons
        follows: dict[str, Any] = {}
        if keys.init_tokenizer == "keep":
            tokenizer, follows = kept(keys, manifests["train"].texts, given)
        elif "output_neurons" not in given and said == tokenizer.vocab_size:
            size = tokenizer.follow(manifests["train"].texts)
            if size is not None:
                print(f"output_neurons: {size}, what the characters of this corpus need (the recipe says {said})",
                      file=sys.stderr)
                follows["output_neurons"] = size
        tokenizer.prepare(manifests["train"].texts)
        for split, manifest in manifests.items():
            alien = tokenizer.coverage(manifest.texts)
            if alien:
                listed = ", ".join(f"{char!r} x {times}" for char, times in alien.most_common(10))
                logger.warning("The tokenizer cannot express %d characters of %s: %s", alien.total(), split, listed)
        return follows

    @classmethod
    def is_prepared(cls, keys: RecogniserKeys) -> bool:
        return keys.tokenizer.path.exists()

    @classmethod
    def encoder(cls, keys: RecogniserKeys) -> Encoder:
        """The tokenizer, which must be as large as the model's outputs are many."""
        tokenizer = keys.tokenizer.load()
        tokenizer.check(keys.output_neurons)
        return tokenizer

    @classmethod
    def look_at_texts(cls, keys: RecogniserKeys, texts: Sequence[str]) -> None:
        strange = keys.tokenizer.coverage(texts)
        if strange:
            listed = ", ".join(f"{char!r} x {times}" for char, times in strange.most_common(10))
            logger.warning("The model cannot write %d characters of these texts, so each is an error: %s",
                           strange.total(), listed)

    @property
    def labels_per_second(self) -> float:
        tokenizer = self.keys.tokenizer if "tokenizer" in vars(self.keys) else None
        return LETTERS_PER_SECOND if getattr(tokenizer, "model_type", "") == "char" else PIECES_PER_SECOND

    def stand_in_labels(self, shape: tuple[int, int], noise: bool) -> torch.Tensor:
        return torch.randint(1, self.keys.output_neurons, shape) if noise else super().stand_in_labels(shape, noise)

    # ------------------------------------------------------------ training

    def open_run(self, texts: Sequence[str], steps: int) -> None:
        """Take in how often each token comes, by which it is known what chance is."""
        self.hearing.chance, self.alarm.planned = self.keys.tokenizer.entropy(texts), steps
        super().open_run(texts, steps)

    def fit(self, *args: Any, **kwargs: Any) -> None:
        masks = self.keys.spec_augment
        self.alarm.setup = Setup(self.averages_weights, self.max_grad_norm,
                                 masks is not None and getattr(masks, "ramp", None) is None)
        super().fit(*args, **kwargs)
        if not self.test_only:
            self._tell(self.alarm.end(self.optimizer_step))

    def close_step(self, facts: Facts) -> None:
        """Take in the step's loss."""
        self.alarm.count(facts.extras)
        total, tokens = facts.extras.get(self.loss_of_tokens or "", (facts.total, facts.count))
        self.hearing.count(facts.number, total, tokens)
        super().close_step(facts)

    def open_step(self, number: int) -> None:
        """Set the learning rate, and the strength of what makes the task harder."""
        harder, heard = self.keys.spec_augment, self.hearing.at(number)
        if self.hearing.known and hasattr(harder, "follow"):
            harder.follow(heard)
        super().open_step(number)
        self._tell(self.alarm.look(number, self.hearing, self.learning_rate))

    def _tell(self, notices: Iterable[Notice]) -> None:
        """What all ranks know, on one."""
        for notice in notices:
            if ranks.is_main():
                logger.log(logging.WARNING if notice.holds else logging.INFO, "%s", notice.text())
            if self.metrics_log is not None:
                self.metrics_log.write("warning", **notice._asdict())

    # ------------------------------------------------------------ what came out

    def stats(self, rows: Sequence[Row]) -> dict[str, float]:
        words, characters = score(rows)
        return {"WER": words.rate, "CER": characters.rate}

    def close_validation(self, rows: Sequence[Row], stats: Mapping[str, float]) -> None:
        """Notice a validation in which nothing was heard."""
        empty = sum(not row.hypothesis.strip() for row in rows)
        self._tell(self.alarm.validated(self.optimizer_step, empty, len(rows), stats["CER"]))
        super().close_validation(rows, stats)

    def results(self, rows: Sequence[Row], loss: float, unread: Mapping[str, str]) -> Transcripts:
        return Transcripts.of(rows, loss, unread)
