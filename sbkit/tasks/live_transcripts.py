"""Results of a recogniser's test in chunks: beside the error rates, how soon words were shown and what changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from sbkit.score import chunk_size
from sbkit.score.latency import COLUMNS, LiveRates, rates
from sbkit.tasks.transcripts import Transcripts


@dataclass
class LiveTranscripts(Transcripts):
    """Rows of a test that was heard in chunks of several sizes; the transcripts are those of the first."""

    chunk: Sequence[int | None] = field(kw_only=True)
    """Milliseconds of each size in the rows' ``live``; None is the whole utterance."""

    @cached_property
    def live(self) -> list[LiveRates]:
        """The rates with chunks of each size."""
        scored = [row for row in self.rows if row.reference.split()]
        said = [(row.id, row.reference) for row in scored]
        return [rates(chunk, said, [row.live[number] for row in scored]) for number, chunk in enumerate(self.chunk)]

    def facts(self) -> dict[str, Any]:
        return {**super().facts(), "chunks": [each.facts() for each in self.live]}

    def lines_of_table(self) -> list[list[tuple[str, Any]]]:
        return [list(zip(COLUMNS, each.row(), strict=True)) for each in self.live]

    def word_error_rates(self) -> Mapping[str, float]:
        return {f"(chunk: {chunk_size.named(each.chunk)})": each.WER for each in self.live}
