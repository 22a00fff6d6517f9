"""An epoch counter that begins an epoch of a real ``sbkit train`` when a benchmark says that it is the run's turn."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.score.run_files import METRICS
from sbkit.train.distributed import ranks
from tools.bench.harness import read_lines

#: The part of an answer that counts all audio of an epoch, also what a recipe adds to the corpus.
ALL_AUDIO = "epoch, all audio"


class Turns(EpochCounter):
    """Waits for a line on stdin before each epoch, and answers with what the epoch and its validation took.

    Rank 0 waits; the other ranks wait for rank 0 in the first step.

    folder : the run's
    audio : seconds of it in an ``epoch`` and in a ``validation``
    """

    def __init__(self, limit: int, folder: str, audio: Mapping[str, float]):
        super().__init__(limit)
        self.folder = Path(folder)
        self.audio = audio

    def __next__(self) -> int:
        if ranks.is_main():
            if self.current:
                print(json.dumps(self._last_epoch()), flush=True)
            if not sys.stdin.readline():  # no turns are left, so the run ends as if somebody had stopped it
                signal.raise_signal(signal.SIGTERM)
        epoch: int = super().__next__()
        return epoch

    def _last_epoch(self) -> dict[str, dict[str, float]]:
        """The seconds and the audio of the last epoch, and of the validation that followed it."""
        lines = [line for line in read_lines(self.folder / METRICS)
                 if line["kind"] == "epoch" and line["epoch"] == self.current]
        trained = next(line for line in lines if "train_seconds" in line)
        validated = next(line for line in lines if "valid_loss" in line)
        seconds = trained["train_seconds"]
        return {"epoch": {"seconds": seconds, "audio": self.audio["epoch"]},
                ALL_AUDIO: {"seconds": seconds, "audio": seconds * trained["audio_s_per_s"]},
                "validation": {"seconds": validated["time"] - trained["time"], "audio": self.audio["validation"]}}
