#!/usr/bin/env python3
"""The side of NVIDIA NeMo in ``python -m tools.bench.train --shipped``: a piece of training for each line of stdin.

    ENVIRONMENT/bin/python -m tools.bench.peers.nemo_side MANIFESTS STEPS.json [--precision bf16]

Runs in a separate environment (``python -m tools.bench.learning --make-nemo``) and imports nothing of sbkit. MANIFESTS
holds train.json and dev.json in NeMo's format; STEPS.json lists the ids of the utterances of each measured step.

The model is NeMo's Conformer-CTC of 6 layers of 144 (3.65 M parameters, as in nemo_ctc.py) with the letters of the
training texts, in Lightning's Trainer, as NeMo's examples train it. Settings are those of its conformer_ctc_char.yaml:

- features with dither, normalised per band; SpecAugment of 2 frequency masks of 27 bands and 5 time masks of 5 % of the
  utterance (its file says that small models may have fewer than the 10 of the large one); dropout 0.1
- AdamW with a rate of 2.0 times Noam's schedule, weight decay 1e-3, no clipping
- 16 clips in a batch, of training and of validation; clips that are shorter than 0.1 s or longer than 20 s are left out
- the greedy WER of one training batch in ten, whose first transcript is logged

It differs in what makes NeMo faster here: batches are partly sorted by length (``use_semi_sorted_batching``), which
leaves less padding than drawing clips at random, and audio is read without data workers: on a few cores, reading WAVs
takes less time than the workers' messages. Its logger and its checkpoints are left out. fp32 is Lightning's 32-true,
bf16 its bf16-mixed.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
from nemo.collections.asr.models import EncDecCTCModel
from nemo.utils import logging as nemo_log
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from tools.bench.peers import nemo_ctc

BATCH = 16
MASKS = {"freq_masks": 2, "time_masks": 5, "freq_width": 27, "time_width": 0.05}
OPTIMIZER = {"name": "adamw", "lr": 2.0, "betas": [0.9, 0.98], "weight_decay": 1e-3,
             "sched": {"name": "NoamAnnealing", "d_model": nemo_ctc.D_MODEL, "warmup_steps": 10_000, "min_lr": 1e-6}}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], allow_abbrev=False)
    parser.add_argument("manifests", type=Path)
    parser.add_argument("steps", type=Path)
    parser.add_argument("--precision", choices=nemo_ctc.PRECISIONS, default="fp32")
    args = parser.parse_args()
    answer, sys.stdout = sys.stdout, sys.stderr  # so that what libraries print is not taken for an answer
    nemo_log.setLevel(logging.WARNING)
    logging.getLogger("lightning.pytorch").setLevel(logging.WARNING)
    lightning.seed_everything(1)
    side = NemoSide(args.manifests, json.loads(args.steps.read_text(encoding="utf-8")), args.precision)
    for line in sys.stdin:
        found = side.step() if line.strip() == "step" else side.epoch_and_validation()
        print(json.dumps(found), file=answer, flush=True)


class NemoSide:
    """The model with its data, and what is measured of them."""

    def __init__(self, manifests: Path, steps: Sequence[Sequence[str]], precision: str):
        rows = {split: nemo_ctc.read(manifests / f"{split}.json") for split in ("train", "dev")}
        self.audio = {"epoch": _seconds(rows["train"]), "validation": _seconds(rows["dev"])}
        self.precision = precision
        config = nemo_ctc.settings(manifests, rows["train"], batch=BATCH, eval_batch=BATCH, masks=MASKS,
                                   optimizer=OPTIMIZER)
        config["log_prediction"] = True
        self.model = EncDecCTCModel(cfg=OmegaConf.create(config), trainer=self._trainer())
        parameters = sum(parameter.numel() for parameter in self.model.parameters())
        print(f"NeMo's model has {parameters / 1e6:.2f} M parameters", file=sys.stderr)

        self.loader = self.model.train_dataloader()
        row_of = {row["id"]: row for row in rows["train"]}
        self.step_seconds = _seconds([row_of[name] for names in steps for name in names])
        self.batches = [self._batch([row_of[name]["audio_filepath"] for name in names]) for names in steps]

    def _batch(self, paths: Sequence[str]) -> Any:  # a tuple of tensors, by NeMo's own collation
        dataset = self.loader.dataset
        index_of = {entry.audio_file: index for index, entry in enumerate(dataset.manifest_processor.collection)}
        return dataset.collate_fn([dataset[index_of[path]] for path in paths])

    def _trainer(self, **options: Any) -> Any:
        return lightning.Trainer(
            accelerator="cpu", devices=1, max_epochs=1, precision=nemo_ctc.PRECISIONS[self.precision],
            log_every_n_steps=10, logger=False, enable_checkpointing=False, enable_progress_bar=False,
            enable_model_summary=False, num_sanity_val_steps=0, **options)

    def _fit(self, loader: Any, clock: lightning.Callback, **options: Any) -> None:
        trainer = self._trainer(callbacks=[clock], **options)
        self.model.set_trainer(trainer)
        trainer.fit(self.model, train_dataloaders=loader)

    def step(self) -> dict[str, dict[str, float]]:
        """Train on the batches in memory, twice; only the second time is measured."""
        clock = StepClock(len(self.batches))
        batches: Any = self.batches * 2  # torch takes any sequence, and names only a Dataset
        twice: DataLoader[Any] = DataLoader(batches, batch_size=None)
        self._fit(twice, clock, limit_val_batches=0)
        return {"step": {"seconds": clock.seconds, "audio": self.step_seconds}}

    def epoch_and_validation(self) -> dict[str, dict[str, float]]:
        """Train on the corpus once, after steps that warm up, and validate."""
        self.step()
        clock = nemo_ctc.Clock()
        self._fit(self.loader, clock)
        seconds = {"epoch": clock.training[-1], "validation": clock.validation[-1]}
        return {part: {"seconds": seconds[part], "audio": self.audio[part]} for part in seconds}


class StepClock(lightning.Callback):
    """Measures the batches from the ``first`` on until the epoch's end."""

    def __init__(self, first: int):
        self.first = first
        self.seconds = 0.0

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, index: int) -> None:
        if index == self.first:
            self.began = time.perf_counter()

    def on_train_epoch_end(self, trainer: Any, module: Any) -> None:
        self.seconds = time.perf_counter() - self.began


def _seconds(rows: Sequence[dict[str, Any]]) -> float:
    return float(sum(row["duration"] for row in rows))


if __name__ == "__main__":
    main()
