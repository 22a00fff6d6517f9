"""Trains a CTC head on Whisper's encoder with stock SpeechBrain for some processor minutes, and writes its transcripts.

    python -m tools.bench.peers.stock_whisper ANSWER.json ENCODER MINUTES --data_folder FOLDER [--key value ...]

The encoder is SpeechBrain's wrapper, which pads each utterance to 30 seconds; layers, rates, optimizers and the 500
steps in which the head learns alone are those of SpeechBrain's Common Voice CTC recipes with a pretrained encoder;
batches hold ``step_seconds`` (theirs hold 12 clips). Data pipeline and Brain are those of tools/bench/train.py.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tools.bench import train
from tools.bench.harness import RECIPE
from tools.bench.peers.stock_ctc import loaded, transcripts, versions

WIDTH, HEAD_ALONE = 1024, 500


def main(answer: Path, source: str, minutes: float, keys: list[str]) -> None:
    import torch
    from speechbrain.integrations.huggingface.whisper import Whisper
    from torch import nn

    request, hparams = loaded(train.prepare(RECIPE, keys))
    encoder = Whisper(source, save_path=source, encoder_only=True)
    linears = nn.ModuleList(nn.Linear(width, WIDTH) for width in (encoder.model.config.d_model, WIDTH, WIDTH))
    norms = nn.ModuleList(nn.BatchNorm1d(WIDTH) for _ in linears)
    head = nn.Linear(WIDTH, hparams["output_neurons"])

    def hidden(states: torch.Tensor, _: Any) -> torch.Tensor:
        for linear, norm in zip(linears, norms, strict=True):
            states = nn.functional.leaky_relu(norm(linear(states).transpose(1, 2)).transpose(1, 2))
            states = nn.functional.dropout(states, 0.15, training=head.training)
        return states

    hparams |= {"compute_features": encoder, "normalize": lambda states, _: states, "CNN": nn.Identity(),
                "Transformer": SimpleNamespace(encode=hidden), "ctc_lin": head,
                "schedule": SimpleNamespace(apply=lambda *_: None),
                "modules": {"model": nn.ModuleList([encoder, linears, norms, head])}}
    side = train.stock(hparams, request)
    brain, new = side.brain, [p for part in (linears, norms, head) for p in part.parameters()]
    brain.optimizers_dict = {"head": torch.optim.Adadelta(new, lr=1.0, rho=0.95, eps=1e-8),
                             "encoder": torch.optim.Adam(encoder.parameters(), lr=1e-4)}
    brain.optimizer = brain.optimizers_dict["head"]
    brain.freeze_optimizers = lambda optimizers: {
        name: each for name, each in optimizers.items() if name == "head" or brain.optimizer_step >= HEAD_ALONE}
    brain.modules.train()
    began, clips = time.process_time(), 0
    for batch in itertools.chain.from_iterable(itertools.repeat(side.train)):
        if time.process_time() - began > 60 * minutes:
            break
        encoder.requires_grad_(brain.optimizer_step >= HEAD_ALONE)
        brain.step += 1
        clips += len(batch.id)
        brain.fit_batch(batch)
    seconds = round(time.process_time() - began, 1)
    side.evaluation()
    answer.write_text(json.dumps({
        "train_seconds": seconds, "steps": brain.optimizer_step, "epochs": round(clips / side.clips, 2),
        "transcripts": transcripts(brain.words), "precision": brain.precision, "versions": versions(),
    }, ensure_ascii=False), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2], float(sys.argv[3]), sys.argv[4:])
