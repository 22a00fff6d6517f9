"""The log metrics.jsonl, with one JSON object per line, and TensorBoard's if requested."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from speechbrain.utils.distributed import if_main_process

from sbkit.errors import SbkitError
from sbkit.nn.peek import Peek
from sbkit.score.run_files import METRICS, TENSORBOARD
from sbkit.system import disk
from sbkit.train.keys import TrainKeys
from sbkit.train.resumable_file import ResumableFile

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger(__name__)

KINDS = ("step", "epoch", "warning", "test", "run")


@register_checkpoint_hooks
class MetricsLog:
    """Appends to ``folder/metrics.jsonl`` on rank 0; calls on other ranks do nothing.

    Values may be tensors on a device: lines are written in order, once their values have arrived; only ``flush()``
    waits for them. If it is a recoverable of the checkpointer, a resumed run continues the file from the checkpoint.
    nan and inf, which JSON does not have, become null.

    log = MetricsLog(output_folder)
    log.write("step", epoch=1, step=50, loss=loss, lr=1e-3, audio_s_per_s=812.0, data_wait_share=0.01,
              padding_share=0.04, grad_norm=norm, skipped_steps=0)
    """

    def __init__(self, folder: str | os.PathLike[str], tensorboard: bool = False, enabled: bool | None = None):
        self.path = Path(folder) / METRICS
        self.enabled = if_main_process() if enabled is None else enabled
        self._file = ResumableFile(self.path, _written_again)
        self._waiting: deque[dict[str, Any]] = deque()
        self._writer_class = _tensorboard() if tensorboard and self.enabled else None
        self._writer: SummaryWriter | None = None
        self._step: int | None = None  # of the last line with a step

    @classmethod
    def of(cls, keys: TrainKeys) -> MetricsLog | None:
        """Make the log in a recipe's ``output_folder``; None without one."""
        return None if keys.output_folder is None else cls(keys.output_folder, tensorboard=keys.tensorboard)

    def write(self, kind: str, **values: Any) -> None:
        """Add a line, with ``time`` (seconds since 1970) and ``kind``."""
        if not self.enabled:
            return
        if kind not in KINDS:
            raise ValueError(f"kind {kind!r} is not one of {', '.join(KINDS)}")
        line = {"time": round(time.time(), 3), "kind": kind}
        line.update((k, Peek(v) if isinstance(v, torch.Tensor) else v) for k, v in values.items())
        self._waiting.append(line)
        self._write_ready()

    def flush(self) -> None:
        """Wait for values that have not arrived, and write all lines."""
        self._write_ready(wait=True)
        with self.drawing():
            if self._writer is not None:
                self._writer.flush()

    def close(self) -> None:
        """Write all lines and close TensorBoard's file."""
        self.flush()
        with self.drawing():
            if self._writer is not None:
                self._writer.close()
                self._writer = None

    @contextlib.contextmanager
    def drawing(self) -> Iterator[None]:
        """Give up TensorBoard's writer if the disk is full; a new one is made once metrics.jsonl can be written."""
        try:
            yield
        except OSError as error:
            logger.warning("%s. Some points are missing in TensorBoard",
                           disk.explain(error, self.path.parent / TENSORBOARD))
            self._writer = None

    def _write_ready(self, wait: bool = False) -> None:
        while self._waiting and (wait or _arrived(self._waiting[0])):
            line = {k: _plain(v) for k, v in self._waiting.popleft().items()}
            self._file.append(json.dumps(line, ensure_ascii=False, allow_nan=False))
            if self._writer_class is not None and not self._file.waiting:
                with self.drawing():
                    self._to_tensorboard(line, self._writer_class)

    def _to_tensorboard(self, line: dict[str, Any], writer_class: type[SummaryWriter]) -> None:
        self._step = step = line.get("step", self._step)
        if self._writer is None:
            if step is None:  # no step yet
                return
            # purge_step hides points that a resumed run writes again.
            self._writer = writer_class(str(self.path.parent / TENSORBOARD), purge_step=step or None)
        for name, value in line.items():
            if name not in ("time", "step", "epoch") and type(value) in (int, float):
                self._writer.add_scalar(f"{line['kind']}/{name}", value, step, walltime=line["time"])

    def start_afresh(self) -> None:
        """Drop the lines of an earlier start of this run, which left no checkpoint."""
        self._file.start_afresh()

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        self.flush()
        self._file.save(path)

    @mark_as_loader
    def _load(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        del end_of_epoch
        self._file.load(path)


def _arrived(line: dict[str, Any]) -> bool:
    return all(value.ready for value in line.values() if isinstance(value, Peek))


def _written_again(line: str) -> bool:
    try:
        return json.loads(line).get("kind") in ("step", "epoch", "warning")
    except (ValueError, AttributeError):  # not a line of this class
        return True


def _plain(value: object) -> object:
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


def _tensorboard() -> type[SummaryWriter]:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as missing:
        raise SbkitError(
            f"tensorboard: true, but TensorBoard can't be imported ({missing})",
            hint="pip install 'sbkit[tensorboard]'",
        ) from missing
    return SummaryWriter
