"""Recognises which of a few words a recording says."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

import sbkit
from sbkit.export.exported import Exported
from sbkit.recipe.keys import key
from sbkit.score.results import Results, Table
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.task import Metric, Task

HOP = 160  # samples between two frames


class WordEncoder(nn.Module):
    """Waveforms [B, S] and sample counts [B] to vectors [B, D]; the same alone and in a batch."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.first, self.second = nn.Conv1d(1, width, 2 * HOP, HOP), nn.Conv1d(width, width, 3)

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        padded = functional.pad(signals, (0, 4 * HOP))  # so that the shortest has frames
        states = self.second(self.first(padded[:, None]).relu()).relu()
        frames = lengths // HOP + 1
        valid = torch.arange(states.shape[2], device=states.device) < frames[:, None]
        return states.masked_fill(~valid[:, None], 0.0).sum(2) / frames[:, None]


class WordNumbers:
    """A word as its number; runs in the processes that read audio."""

    def __init__(self, words: list[str]):
        self.numbers = {word: number for number, word in enumerate(words)}

    def encode(self, text: str) -> list[int]:
        return [self.numbers[text]]


@dataclass(kw_only=True)
class MineKeys(TaskKeys):
    """The keys that the task reads, besides those of every task."""

    encoder: Any = key("waveforms [B, S] and sample counts [B] to vectors [B, D]")
    head: Any = key("vectors to a score for each word, [B, N]")
    words: list[str] = key("the words to recognise, as transcripts write them")


class Row(NamedTuple):
    id: str
    target: int
    predicted: int


class WordGraph(nn.Module):
    """Encoder and head as one graph."""

    def __init__(self, encoder: nn.Module, head: nn.Module):
        super().__init__()
        self.encoder, self.head = encoder, head

    def forward(self, signals: Tensor, lengths: Tensor) -> Tensor:
        return self.head(self.encoder(signals, lengths))


class Mine(Task):
    Keys = MineKeys
    parts = ("encoder", "head", "modules")
    metric = Metric("accuracy", lower_is_better=False)
    keys: MineKeys

    @classmethod
    def tokenizer(cls, keys: MineKeys) -> WordNumbers:
        return WordNumbers(keys.words)

    def compute_forward(self, batch: Any, stage: sbkit.Stage) -> Tensor:
        return self.keys.head(self.keys.encoder(batch.signals, batch.signal_lengths))

    def compute_objectives(self, scores: Tensor, batch: Any, stage: sbkit.Stage) -> sbkit.Loss:
        targets = batch.tokens[:, 0]
        if stage != sbkit.Stage.TRAIN and batch.weight:  # weight 0: a placeholder for an empty batch
            self.rows += map(Row, batch.ids, targets.tolist(), scores.argmax(-1).tolist())
        return sbkit.Loss(functional.cross_entropy(scores, targets, reduction="sum"), len(batch))

    def stats(self, rows: Sequence[Row]) -> dict[str, float]:
        return {"accuracy": sum(row.target == row.predicted for row in rows) / max(1, len(rows))}

    def results(self, rows: Sequence[Row], loss: float, unread: Mapping[str, str]) -> Results:
        words, pairs = self.keys.words, Counter((row.target, row.predicted) for row in rows)
        table = Table("Confusions", ["target", *words],
                      [[word, *(pairs[i, j] for j in range(len(words)))] for i, word in enumerate(words)])
        return Results({"loss": loss, **self.stats(rows)}, len(rows), dict(unread), [table])

    def exported(self, run: Path) -> Exported:
        return Exported(WordGraph(self.keys.encoder, self.keys.head), {"scores": ("batch",)}, self.keys.sample_rate,
                        labels=self.keys.words)
