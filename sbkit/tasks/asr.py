"""The base class of recognisers, tasks that transcribe, score words, and warn if they do not learn, and its results."""

from __future__ import annotations

import json
import logging
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
from speechbrain.core import Stage

from sbkit.data.manifest import Manifest
from sbkit.data.mixture import Mixture
from sbkit.data.reader import SupportsEncode
from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.recipe.parts import flattened
from sbkit.runs import from_nothing, initial
from sbkit.score import utterances
from sbkit.score.latency import LiveTranscript
from sbkit.score.rates import ErrorRates
from sbkit.score.results import Results
from sbkit.score.significance import interval
from sbkit.system.console import atomic_write, counted
from sbkit.tasks.keys import RecogniserKeys, TaskKeys
from sbkit.tasks.learning_notices import EVERY, LearningNotices, Setup
from sbkit.tasks.learning_progress import LearningProgress
from sbkit.tasks.task import Metric, OwnKeys, Task
from sbkit.train.distributed import ranks
from sbkit.train.step import StepResult

logger = logging.getLogger(__name__)

#: Labels in a second of typical speech.
LETTERS_PER_SECOND, PIECES_PER_SECOND = 16, 6
NBEST = "nbest.jsonl"


class NBestEntry(NamedTuple):
    """One hypothesis of a search, with its score and the acoustic part of it, both natural logarithms."""

    text: str
    score: float
    acoustic: float


def nbest_entries(hypotheses: Sequence[Any]) -> tuple[NBestEntry, ...]:
    """Convert a search's hypotheses of an utterance for its row."""
    return tuple(NBestEntry(one.text, one.score, one.acoustic) for one in hypotheses)


class TranscribedUtterance(NamedTuple):
    """One transcribed utterance of a validation or test."""

    id: str
    reference: str
    hypothesis: str
    confidence: float | None = None  # 0 to 1; None for an empty hypothesis, or if the task has none
    nbest: Sequence[NBestEntry] = ()  # best first; empty without a search
    live: Sequence[LiveTranscript] = ()  # its live transcripts, for each chunk size of an evaluation


def score(rows: Sequence[TranscribedUtterance]) -> tuple[ErrorRates, ErrorRates]:
    """Compute word and character error rates; utterances without a reference are left out with a warning."""
    empty = [row.id for row in rows if not row.reference.split()]
    if empty:
        logger.warning("%d utterances have no reference and are not scored: %s", len(empty), ", ".join(empty[:5]))
    scored = [(row.id, row.reference, row.hypothesis) for row in rows if row.reference.split()]
    words, characters = ErrorRates("word"), ErrorRates("character")
    if scored:
        words.add(*zip(*scored, strict=True))
        characters.add(*zip(*scored, strict=True))
    return words, characters


def write_nbest(path: Path, rows: Sequence[TranscribedUtterance]) -> None:
    """Write each utterance's hypotheses as a line of JSON."""
    with atomic_write(path) as out:
        for row in rows:
            line = {"id": row.id, "reference": row.reference, "hypotheses": [one._asdict() for one in row.nbest]}
            out.write(json.dumps(line, ensure_ascii=False) + "\n")


@dataclass
class ASRResults(Results):
    """Rows of a test, and the error rates of those that have a reference."""

    rows: Sequence[TranscribedUtterance] = ()
    words: ErrorRates = field(kw_only=True)
    characters: ErrorRates = field(kw_only=True)
    remark: str | None = field(default=None, kw_only=True)
    """A line below the rates."""

    @classmethod
    def of(cls, rows: Sequence[TranscribedUtterance], loss: float, unread: Mapping[str, str]) -> ASRResults:
        """Compute the results of a test from its rows."""
        words, characters = score(rows)
        return cls({"loss": loss, "WER": words.rate, "CER": characters.rate}, len(rows), dict(unread), rows=rows,
                   words=words, characters=characters)

    def headline(self) -> str:
        low, high = interval(self.words)
        return (f"WER {self.words.rate:.2f} % (95 % interval {low:.2f} to {high:.2f}), "
                f"CER {self.characters.rate:.2f} %, {counted(len(self.words), 'utterance')}")

    def lines(self) -> list[str]:
        """Show one utterance as an example, and the remark."""
        words = self.words
        return [f"{words.ids[0]}\n  reference   {' '.join(words.references[0])}\n"
                f"  hypothesis  {' '.join(words.hypotheses[0])}", *([self.remark] if self.remark else [])]

    def check(self) -> None:
        """Raise if no utterance has a reference."""
        if not len(self.words):
            raise SbkitError(f"none of the {self.utterances} utterances has a reference, so there is nothing to score",
                             hint="a corpus to score on needs transcripts")

    def facts(self) -> dict[str, Any]:
        summary = self.words.summary()
        counts = {name: summary[name]
                  for name in ("SER", "insertions", "deletions", "substitutions", "num_scored_tokens")}
        return {"WER": self.words.rate, "WER_interval": interval(self.words), "CER": self.characters.rate,
                "CER_interval": interval(self.characters), **counts,
                "without_reference": [row.id for row in self.rows if not row.reference.split()]}

    def columns(self) -> list[tuple[str, Any]]:
        found: list[tuple[str, Any]] = []
        for name, rates in (("WER %", self.words), ("CER %", self.characters)):
            low, high = interval(rates)
            found += [(name, rates.rate), ("95 % interval", f"{low:.2f} to {high:.2f}")]
        return found

    def files(self, of: str = "") -> list[str]:
        line = "_" if of else ""
        return [f"wer{line}{of}.txt", f"cer{line}{of}.txt", f"{of}{line}utterances.jsonl"]

    def where(self, folder: Path, of: str = "") -> str:
        return f"every alignment: {folder / self.files(of)[0]}"

    def write(self, folder: Path, manifest: Manifest, of: str = "") -> None:
        """Write all alignments, all utterances with their transcripts, and a search's other hypotheses."""
        words, characters, transcripts = (folder / name for name in self.files(of))
        self.words.write(words)
        self.characters.write(characters)
        utterances.write(transcripts, utterances.join(self.rows, manifest))
        if not of and any(row.nbest for row in self.rows):
            write_nbest(folder / NBEST, self.rows)


class ASR(Task):
    """A task that scores words; ``compute_objectives`` adds a ``TranscribedUtterance`` to ``self.rows`` for each"""

    Keys: ClassVar[type[TaskKeys]] = RecogniserKeys
    metric = Metric("WER")
    sized_by_corpus = ("output_neurons",)
    writes_words = True
    keys: RecogniserKeys
    loss_of_tokens: ClassVar[str | None] = None
    """The name in ``Loss.extras`` of a part that, per token, equals the tokens' entropy until something is learnt.

    A run warns if it stays there, and widens SpecAugment's masks as it falls (``ramp``). None if the loss has no such
    part: masks then have their full width from the first step on.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        self.progress = LearningProgress()
        self.notices = LearningNotices()
        if self.checkpointer is not None:
            # The name that it has in checkpoints of all versions.
            self.checkpointer.add_recoverable("hearing", self.progress, optional_load=True)

    # ------------------------------------------------------------ the vocabulary

    @classmethod
    def prepare(cls, keys: OwnKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Train the tokenizer.

        The number of characters depends on the corpus, so it replaces the recipe's ``output_neurons``, but not one
        given on the command line.
        """
        tokenizer, declared = keys.tokenizer, keys.output_neurons
        follows: dict[str, Any] = {}
        if keys.init_tokenizer == "keep":
            tokenizer, follows = keep_tokenizer(keys, manifests["train"].texts, given)
        elif "output_neurons" not in given and declared == tokenizer.vocab_size:
            size = tokenizer.follow(manifests["train"].texts)
            if size is not None:
                print(f"output_neurons: {size}, the number of characters in this corpus (the recipe has {declared})",
                      file=sys.stderr)
                follows["output_neurons"] = size
        tokenizer.prepare(manifests["train"].texts, grows=isinstance(keys.corpus, Mixture))
        for split, manifest in manifests.items():
            uncovered = tokenizer.coverage(manifest.texts)
            if uncovered:
                logger.warning("The tokenizer has no tokens for %s of %s: %s",
                               counted(uncovered.total(), "character"), split, _most_common(uncovered))
        return follows

    @classmethod
    def is_prepared(cls, keys: OwnKeys) -> bool:
        return bool(keys.tokenizer.path.exists())

    @classmethod
    def encoder(cls, keys: RecogniserKeys) -> SupportsEncode:
        """Return the tokenizer; raises unless it has as many tokens as the model has outputs."""
        tokenizer = keys.tokenizer.load()
        tokenizer.check(keys.output_neurons)
        return tokenizer

    @classmethod
    def check_manifest(cls, keys: OwnKeys, split: str, manifest: Manifest) -> None:
        uncovered = keys.tokenizer.coverage(manifest.texts)
        if uncovered:
            logger.warning("The model can't output %s of these texts, so each is an error: %s. Evaluate on texts "
                           "in the model's language, or train on texts that contain these characters (init_from "
                           "starts from this model's weights)",
                           counted(uncovered.total(), "character"), _most_common(uncovered))

    @property
    def labels_per_second(self) -> float:
        tokenizer = self.keys.tokenizer if "tokenizer" in vars(self.keys) else None
        return LETTERS_PER_SECOND if getattr(tokenizer, "model_type", "") == "char" else PIECES_PER_SECOND

    def stand_in_labels(self, shape: tuple[int, int], noise: bool) -> torch.Tensor:
        return torch.randint(1, self.keys.output_neurons, shape) if noise else super().stand_in_labels(shape, noise)

    # ------------------------------------------------------------ training

    def open_run(self, texts: Sequence[str], steps: int) -> None:
        """Compute the loss at chance from the training texts if the loss has a part to compare with it, and give the
        notices the settings that their advice depends on."""
        if self.loss_of_tokens is not None:
            self.progress.chance = self.keys.tokenizer.entropy(texts)
        super().open_run(texts, steps)
        keys, masks = self.keys, self.keys.spec_augment
        self.notices.setup = Setup(
            max_norm=self.max_grad_norm, planned=steps,
            masks=masks is not None and getattr(masks, "ramp", None) is None,
            schedule=self.schedule if self.opt_class is not None else None, anneals=self.annealing is not None,
            thaw=self.thaws_at, freezes=any(flattened(keys.freeze or {}).values()),
            trained=keys.pretrainer is not None or keys.init_from is not None,
            fastest=max([1.0, *flattened(keys.learning_rates or {}).values()]), keys=frozenset(vars(self.hparams)))

    def fit(self, *args: Any, **kwargs: Any) -> None:
        """Train, and warn at the end if the loss is still at chance."""
        super().fit(*args, **kwargs)
        if not self.test_only:
            self.progress.score_at(self.optimizer_step + 1)
            self._log_notices(self.optimizer_step + 1, ended=True)

    def close_stage(self, stage: Stage, loss: float, epoch: int | None = None) -> None:
        """After a validation, warn of a run that trained weights hold back, if a finished run tells."""
        super().close_stage(stage, loss, epoch)
        trained = self.keys.pretrainer is not None or self.keys.init_from is not None
        letters = Metric("CER")  # words stay at 100 % while letters are learnt
        if stage == Stage.VALID and trained and self.metrics_log is not None and ranks.is_main() and (
                behind := from_nothing.warning(self.keys.folder, letters)):
            logger.warning("%s", behind)

    def close_step(self, result: StepResult) -> None:
        """Record a step's loss, for masks, learning rate and warnings."""
        part = result.extras.get(self.loss_of_tokens or "")
        total, tokens = part or (result.total, result.count)
        self.progress.count(result.number, total, tokens, comparable=part is not None)
        super().close_step(result)

    @property
    def tracks_learning(self) -> bool:
        return self.loss_of_tokens is not None

    def open_step(self, number: int) -> None:
        """Set the learning rate and the strength of masks, which depend on the learning progress."""
        score = self.progress.score_at(number)  # full strength if it is unknown
        dependents: tuple[object, ...] = (self.keys.spec_augment, self.schedule)
        for each in dependents:
            if hasattr(each, "set_score"):
                each.set_score(score)
        super().open_step(number)
        if number % EVERY == 0:
            self._log_notices(number)

    def _log_notices(self, number: int, ended: bool = False) -> None:
        """Log notices on the main rank; they are the same on all ranks."""
        rate = self.trainer.learning_rate if self.learning_rate is None else self.learning_rate
        rate = None if isinstance(rate, torch.Tensor) else rate  # a recipe's own, on a device
        for notice in self.notices.look(number, self.progress, rate, ended):
            if ranks.is_main():
                logger.log(logging.WARNING if notice.holds else logging.INFO, "%s", notice.text())
            if self.metrics_log is not None:
                self.metrics_log.write("warning", **notice._asdict())

    # ------------------------------------------------------------ validation and test

    def stats(self, rows: Sequence[TranscribedUtterance]) -> dict[str, float]:
        words, characters = score(rows)
        return {"WER": words.rate, "CER": characters.rate}

    def estimate(self, rows: Sequence[Any]) -> None:
        """None: the intervals of its rates are bootstrapped over words."""

    def results(self, rows: Sequence[TranscribedUtterance], loss: float, unread: Mapping[str, str]) -> ASRResults:
        return ASRResults.of(rows, loss, unread)


def _most_common(characters: Counter[str]) -> str:
    return ", ".join(f"{char!r} x {times}" for char, times in characters.most_common(10))


#: Its file name in the folder of the recipe's tokenizer.
KEPT_TOKENIZER = "initial.model"
_NEW = "write init_tokenizer: new, which keeps the rows of tokens that both have"


def keep_tokenizer(keys: RecogniserKeys, texts: Sequence[str],
                   given: Mapping[str, Any]) -> tuple[Tokenizer, dict[str, Any]]:
    """Copy the source's tokenizer into the run's folder; returns it, and the keys whose values follow from it.

    texts : of the train split, whose characters it must have
    given : the keys that were set on the command line
    """
    path = keys.tokenizer.folder / KEPT_TOKENIZER
    if initial.fresh(keys) or not path.is_file():
        source = initial.source_of(keys)
        if source is None:
            raise SbkitError("init_tokenizer: keep needs a model to take the tokenizer from",
                             hint="set init_from")
        proto = source.piece_model()
        if proto is None:
            raise SbkitError(f"init_tokenizer: keep: {source.description} has no tokenizer", hint=_NEW)
        with atomic_write(path, "wb") as file:
            file.write(proto)
    tokenizer = Tokenizer(path.parent, model=path).load()
    uncovered = tokenizer.coverage(texts)
    if uncovered:
        raise SbkitError("init_tokenizer: keep: that tokenizer has no piece for "
                         f"{counted(len(uncovered), 'character')} of the train split: {_most_common(uncovered)}",
                         hint=_NEW)
    plain = [piece for piece in tokenizer.pieces() if not piece.startswith("<")]
    kind = "char" if all(len(piece) == 1 for piece in plain) else "unigram"
    parts = given.get("tokenizer", {})
    own = {"model": str(path), "model_type": kind, "vocab_size": tokenizer.size}
    special = {"bos_index": tokenizer.bos_id, "eos_index": tokenizer.eos_id}  # -1: it has none
    return tokenizer, {"output_neurons": tokenizer.size, "token_type": kind,
                       **{key: index if index >= 0 else None for key, index in special.items()},
                       "tokenizer": {**(parts if isinstance(parts, Mapping) else {}), **own}}
