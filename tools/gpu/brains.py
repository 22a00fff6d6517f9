"""A CTC Brain that fails or gets SIGTERM at a chosen step, and records each rank's weights."""

from __future__ import annotations

import hashlib
import os
import signal
import time
from pathlib import Path

from speechbrain.core import Stage

from sbkit.data.batch import Batch
from sbkit.tasks.ctc import CTC
from sbkit.tasks.ctc.task import Scores
from sbkit.train.distributed import ranks
from sbkit.train.loss import Loss

#: Environment variables: the optimizer step at which rank 1 fails, that at which all get SIGTERM, the notes folder.
FAIL_AT, STOP_AT, NOTES = "SBKIT_GPU_FAIL_AT", "SBKIT_GPU_STOP_AT", "SBKIT_GPU_NOTES"


class Watched(CTC):
    """A CTC Brain controlled by environment variables."""

    def compute_objectives(self, scores: Scores, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss; rank 1 fails before the gradients at the chosen step."""
        if str(self.optimizer_step) == os.environ.get(FAIL_AT) and ranks.rank() == 1:
            Path(os.environ[NOTES], "failed").write_text(str(time.time()))
            raise RuntimeError("rank 1 was asked to fail here")
        return super().compute_objectives(scores, batch, stage)

    def on_fit_batch_end(self, batch: Batch, outputs: Scores, loss: Loss, should_step: bool) -> None:
        """Send SIGTERM at the chosen step, as a scheduler would."""
        if should_step and str(self.optimizer_step) == os.environ.get(STOP_AT):
            os.kill(os.getpid(), signal.SIGTERM)

    def on_stage_end(self, stage: Stage, stage_loss: float, epoch: int | None = None) -> None:
        """Record a digest of this rank's weights."""
        if NOTES in os.environ:
            digest = hashlib.sha256()
            for parameter in self.modules.parameters():
                digest.update(parameter.detach().float().cpu().numpy().tobytes())
            Path(os.environ[NOTES], f"weights-{ranks.rank()}").write_text(digest.hexdigest())
