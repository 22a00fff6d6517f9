"""The log metrics.jsonl, with one JSON object per line, whose numbers also go to the tools that a recipe names."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from speechbrain.utils.distributed import if_main_process

from sbkit.nn.peek import Peek
from sbkit.score.run_files import METRICS
from sbkit.train.keys import TrainKeys
from sbkit.train.monitor.loggers import Logger, Run, make
from sbkit.train.resumable_file import ResumableFile, ResumableLog

logger = logging.getLogger(__name__)


class MetricsLog(ResumableLog):
    """Appends to ``folder/metrics.jsonl`` on rank 0; calls on other ranks do nothing.

    Values may be tensors on a device: lines are written in order, once their values have arrived; only ``flush()``
    waits for them. If it is a recoverable of the checkpointer, a resumed run continues the file from the checkpoint.
    nan and inf, which JSON does not have, become null.

    log = MetricsLog(output_folder)
    log.write("step", epoch=1, step=50, loss=loss, lr=1e-3, audio_s_per_s=812.0, data_wait_share=0.01,
              padding_share=0.04, grad_norm=norm, skipped_steps=0)
    """

    def __init__(self, folder: str | os.PathLike[str], loggers: Sequence[Logger] = ()):
        self.path = Path(folder) / METRICS
        self.enabled = if_main_process()
        self._file = ResumableFile(self.path, _written_again)
        self._waiting: deque[dict[str, Any]] = deque()
        self._loggers = loggers if self.enabled else ()
        self._step: int | None = None  # of the last line with a step

    @classmethod
    def of(cls, keys: TrainKeys, values: Mapping[str, Any]) -> MetricsLog | None:
        """Make the log in a recipe's ``output_folder``; None without one.

        values : the recipe's values by key; loggers get the plain ones
        """
        if keys.output_folder is None:
            if keys.loggers:
                logger.warning("loggers: nothing is sent to them, as the recipe has no output_folder")
            return None
        names = keys.loggers if if_main_process() else []
        plain = {key: value for key, value in values.items() if isinstance(value, (bool, int, float, str))}
        return cls(keys.output_folder, make(names, Run(Path(keys.output_folder), plain)))

    def write(self, kind: str, **values: Any) -> None:
        """Add a line, with ``time`` (seconds since 1970) and ``kind``: step, epoch, warning, test or run."""
        if not self.enabled:
            return
        line = {"time": round(time.time(), 3), "kind": kind}
        line.update((k, Peek(v) if isinstance(v, torch.Tensor) else v) for k, v in values.items())
        self._waiting.append(line)
        self._write_ready()

    def flush(self) -> None:
        """Wait for values that have not arrived, and write all lines."""
        self._write_ready(wait=True)
        for tool in self._loggers:
            tool.flush()

    def close(self) -> None:
        """Write all lines and close the loggers."""
        self.flush()
        for tool in self._loggers:
            tool.close()

    def _write_ready(self, wait: bool = False) -> None:
        while self._waiting:
            peeks = [value for value in self._waiting[0].values() if isinstance(value, Peek)]
            if not wait and not all(peek.ready for peek in peeks):
                return
            line = {k: _plain(v) for k, v in self._waiting.popleft().items()}
            self._file.append(json.dumps(line, ensure_ascii=False, allow_nan=False))
            self._step = line.get("step", self._step)
            if self._step is None or self._file.waiting:
                continue  # nothing is sent before there is a step
            numbers = {f"{line['kind']}/{name}": value for name, value in line.items()
                       if name not in ("time", "step", "epoch") and type(value) in (int, float)}
            for tool in self._loggers:
                tool.log(numbers, self._step, line["time"])


def _written_again(line: str) -> bool:
    try:
        # Runs of earlier versions have lines of kind loss, too.
        return json.loads(line).get("kind") in ("step", "loss", "epoch", "warning")
    except (ValueError, AttributeError):  # not a line of this class
        return True


def _plain(value: object) -> Any:  # a type of JSON
    """Convert a value to types of JSON."""
    if isinstance(value, Peek):
        array = value.numpy()
        value = array.reshape(-1)[0].item() if array.size == 1 else array.tolist()
    if isinstance(value, dict):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()  # a numpy scalar
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
