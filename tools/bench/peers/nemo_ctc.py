#!/usr/bin/env python3
"""Trains NVIDIA NeMo's small Conformer-CTC, measures its time, and writes its transcripts of dev and test.

    ENVIRONMENT/bin/python tools/bench/peers/nemo_ctc.py MANIFESTS ANSWER.json --epochs 6 [--seed 1]

Runs in a separate environment (``python -m tools.bench.learning --make-nemo``) and imports nothing of sbkit.
MANIFESTS holds train.json, dev.json and test.json in NeMo's format. The model is that of conformer_ctc_char.yaml with 6
layers of 144.
These settings let it converge within minutes: AdamW, a cosine from 2e-3 after 100 steps, clipping at 1.0, 12 clips a
batch, partly sorted by length, no SpecAugment. It validates after each epoch, as NeMo's examples do.
"""

from __future__ import annotations

import argparse
import json
import logging
import math
import time
from pathlib import Path
from typing import Any

import lightning.pytorch as lightning
import nemo
import torch
from nemo.collections.asr.models import EncDecCTCModel
from nemo.utils import logging as nemo_log
from omegaconf import OmegaConf

MODULES = "nemo.collections.asr.modules"
D_MODEL, LAYERS, HEADS = 144, 6, 4
BATCH, EVAL_BATCH = 12, 16
PEAK, FINAL, WARMUP, CLIP = 2e-3, 1e-5, 100, 1.0
PRECISIONS = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("manifests", type=Path)
    parser.add_argument("answer", type=Path)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", choices=PRECISIONS, default="fp32")
    parser.add_argument("--warmup", type=int, default=WARMUP, help="steps")
    parser.add_argument("--workers", type=int, default=0, help="number of data workers")
    args = parser.parse_args()
    nemo_log.setLevel(logging.WARNING)
    lightning.seed_everything(args.seed)
    rows = {split: read(args.manifests / f"{split}.json") for split in ("train", "dev", "test")}
    steps = args.epochs * math.ceil(len(rows["train"]) / BATCH)
    schedule = {"name": "CosineAnnealing", "warmup_steps": args.warmup, "min_lr": FINAL, "max_steps": steps}
    config = settings(args.manifests, rows["train"], workers=args.workers, batch=BATCH, eval_batch=EVAL_BATCH,
                      masks={"freq_masks": 0, "time_masks": 0},
                      optimizer={"name": "adamw", "lr": PEAK, "betas": [0.9, 0.98], "weight_decay": 1e-3,
                                 "sched": schedule})
    clock = Clock()
    trainer = lightning.Trainer(
        accelerator="gpu" if args.device.startswith("cuda") else "cpu", devices=1, max_epochs=args.epochs,
        precision=PRECISIONS[args.precision], gradient_clip_val=CLIP, callbacks=[clock], logger=False,
        enable_checkpointing=False, enable_progress_bar=False, num_sanity_val_steps=0)
    model = EncDecCTCModel(cfg=OmegaConf.create(config), trainer=trainer)
    trainer.fit(model)
    model.eval()
    began = time.perf_counter()
    transcripts = {"dev": transcribe(model, rows["dev"])}
    extra = time.perf_counter() - began  # not counted: the last validation has transcribed dev already
    transcripts["test"] = transcribe(model, rows["test"])
    args.answer.write_text(json.dumps({
        "epoch_seconds": clock.training, "validation_seconds": clock.validation, "extra_seconds": extra,
        "steps": trainer.global_step, "steps_planned": steps, "last_lr": trainer.optimizers[0].param_groups[0]["lr"],
        "parameters": sum(each.numel() for each in model.parameters()), "precision": args.precision,
        "versions": {"nemo": nemo.__version__, "torch": torch.__version__}, "transcripts": transcripts,
    }, ensure_ascii=False), encoding="utf-8")


class Clock(lightning.Callback):
    """Measures training and validation in each epoch; Lightning validates after the last training batch."""

    def __init__(self) -> None:
        self.training: list[float] = []
        self.validation: list[float] = []

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        self.began = time.perf_counter()

    def on_validation_start(self, trainer: Any, module: Any) -> None:
        self.training.append(self.lap())

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        self.validation.append(self.lap())
        print(f"epoch {len(self.training)}: {self.training[-1]} s, NeMo's own WER of dev "
              f"{100 * float(trainer.callback_metrics.get('val_wer', math.nan)):.2f} %", flush=True)

    def lap(self) -> float:
        took, self.began = time.perf_counter() - self.began, time.perf_counter()
        return round(took, 3)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def transcribe(model: Any, rows: list[dict[str, Any]]) -> dict[str, str]:
    """Transcribe greedily; returns texts by id."""
    found = model.transcribe([row["audio_filepath"] for row in rows], batch_size=EVAL_BATCH, verbose=False)
    return {row["id"]: getattr(one, "text", one) for row, one in zip(rows, found, strict=True)}


def settings(manifests: Path, train: list[dict[str, Any]], *, batch: int, eval_batch: int, masks: dict[str, Any],
             optimizer: dict[str, Any], workers: int = 0) -> dict[str, Any]:
    """Return the model's configuration, with the letters of the training texts.

    train : the rows of the training manifest
    batch, eval_batch : clips in a batch
    masks : of SpecAugment
    """
    letters = sorted({letter for row in train for letter in row["text"]})

    def data(split: str, **more: Any) -> dict[str, Any]:
        return {"manifest_filepath": str(manifests / f"{split}.json"), "labels": letters, "sample_rate": 16000,
                "normalize_transcripts": False, "num_workers": workers, "pin_memory": False, **more}

    return {
        "sample_rate": 16000, "labels": letters, "log_prediction": False, "skip_nan_grad": False,
        "ctc_reduction": "mean_batch",
        "train_ds": data("train", batch_size=batch, shuffle=True, is_tarred=False, min_duration=0.1, max_duration=20.0,
                         drop_last=False, use_semi_sorted_batching=True, randomization_factor=0.1),
        "validation_ds": data("dev", batch_size=eval_batch, shuffle=False),
        "preprocessor": {
            "_target_": f"{MODULES}.AudioToMelSpectrogramPreprocessor", "sample_rate": 16000, "features": 80,
            "n_fft": 512, "window": "hann", "window_size": 0.025, "window_stride": 0.01, "normalize": "per_feature",
            "log": True, "frame_splicing": 1, "dither": 1e-5, "pad_to": 0, "pad_value": 0.0},
        "spec_augment": {"_target_": f"{MODULES}.SpectrogramAugmentation", **masks},
        "encoder": {
            "_target_": f"{MODULES}.ConformerEncoder", "feat_in": 80, "feat_out": -1, "n_layers": LAYERS,
            "d_model": D_MODEL, "n_heads": HEADS, "ff_expansion_factor": 4, "conv_kernel_size": 31,
            "conv_norm_type": "batch_norm", "subsampling": "striding", "subsampling_factor": 4,
            "subsampling_conv_channels": -1, "self_attention_model": "rel_pos", "att_context_size": [-1, -1],
            "xscaling": True, "untie_biases": True, "pos_emb_max_len": 5000, "dropout": 0.1,
            "dropout_pre_encoder": 0.1, "dropout_emb": 0.0, "dropout_att": 0.1},
        "decoder": {"_target_": f"{MODULES}.ConvASRDecoder", "feat_in": D_MODEL, "num_classes": len(letters),
                    "vocabulary": letters},
        "optim": optimizer,
    }


if __name__ == "__main__":
    main()
