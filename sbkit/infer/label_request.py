"""What ``sbkit label`` is asked for."""

from __future__ import annotations

import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from sbkit.decode.search_options import SearchRequest
from sbkit.infer.inputs import FilesRequest

#: The folder of a corpus with everything but its rows.
FOLDER = "labelling"


class RecordingShard(NamedTuple):
    """One of ``shards`` parts of the recordings, counted from 1."""

    number: int = 1
    shards: int = 1

    @property
    def name(self) -> str:
        """The name of its files and split."""
        return "train" if self.shards == 1 else f"train-{self.number}-of-{self.shards}"

    def has(self, key: str) -> bool:
        """Whether a recording belongs to it, independent of the other recordings."""
        return zlib.crc32(key.encode()) % self.shards == self.number - 1


EVERYTHING = RecordingShard()


@dataclass(frozen=True)
class LabelRequest(SearchRequest, FilesRequest):
    """What to label, and which labels to keep.

    to : the folder of the corpus
    calibrate : a list with transcripts that the recogniser was not trained on
    keep : the minimum expected word accuracy of a row
    """

    to: Path
    calibrate: str
    keep: float = 0.9
    shard: RecordingShard = EVERYTHING
    batch_seconds: float | None = None
    readers: int = 2
