"""SpeechBrain's FileTrainLogger, made to write no line twice after a resume."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

from speechbrain.utils.distributed import main_process_only
from speechbrain.utils.logger import get_logger

from sbkit.train import script_start
from sbkit.train.resumable_file import ResumableFile, ResumableLog

script_start.hide_figure_warning()
from speechbrain.utils.train_logger import FileTrainLogger  # noqa: E402

logger = get_logger(__name__)


class TrainLog(ResumableLog, FileTrainLogger):
    """A drop-in for ``FileTrainLogger`` that can be resumed if it is among a checkpointer's recoverables.

    train_logger: !new:sbkit.train.train_log.TrainLog
        save_file: !ref <output_folder>/train_log.txt

    save_file : str
        The file to append to; its folder is created with the first line.
    precision : int
        Decimal places of numbers.
    """

    def __init__(self, save_file: str | os.PathLike[str], precision: int = 2):
        super().__init__(save_file, precision)
        # A resumed run writes lines of epochs again, but not of a test in between.
        self._file = ResumableFile(save_file, lambda line: " - test " not in line or " - train " in line
                                   or " - valid " in line)

    @main_process_only
    def log_stats(
        self,
        stats_meta: Mapping[str, Any],
        train_stats: Mapping[str, Any] | None = None,
        valid_stats: Mapping[str, Any] | None = None,
        test_stats: Mapping[str, Any] | None = None,
        verbose: bool = True,
    ) -> None:
        """Append one line with the meta information and the statistics of each given stage.

        What is shown has no exponents where numbers have a usual size: a WER is 100.00 there, 1.00e+02 in the file.
        """
        stages = {None: stats_meta, "train": train_stats, "valid": valid_stats, "test": test_stats}
        stats_of = {stage: stats for stage, stats in stages.items() if stats is not None}
        self._file.append(" - ".join(self._stats_to_string(stats, stage) for stage, stats in stats_of.items()))
        if verbose:
            shown = {stage: {key: self._shown(value) for key, value in stats.items()}
                     for stage, stats in stats_of.items()}
            logger.info(" - ".join(self._stats_to_string(stats, stage) for stage, stats in shown.items()))

    def _shown(self, value: object) -> object:
        """Format a float without an exponent where its size is usual."""
        if not isinstance(value, float):
            return value
        if 1 <= abs(value) < 1e5:
            return f"{value:.{self.precision}f}"
        return f"{value:.{self.precision + 1}g}"
