"""Trains the model of hparams/ctc.yaml with stock SpeechBrain, measures its time, and writes its transcripts.

    python -m tools.bench.peers.stock_ctc ANSWER.json --data_folder FOLDER --number_of_epochs 6 [--key value ...]

The Brain, the data pipeline, the loss, the decoder and the optimizer (AdamW) are SpeechBrain's, set up in
tools/bench/train.py. The model, the seconds of a step and the schedule are those of hparams/ctc.yaml, with the peak and
the dropout that are best for AdamW, and without SpecAugment and intermediate CTC. It validates after each epoch, as
SpeechBrain's recipes do.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from tools.bench import train
from tools.bench.harness import RECIPE

#: What of the recipe is set for its own optimizer and masks; keys on the command line win.
WITHOUT_THEM = {"lr": 0.002, "dropout": 0.1}


def loaded(keys: list[str]) -> tuple[Any, dict[str, Any]]:
    """Return what the command line asks for, and the recipe with it."""
    from sbkit.recipe import arguments, load

    request = arguments.parse([str(RECIPE), *keys])
    return request, load.load(request.path, {**WITHOUT_THEM, **request.overrides, **train.NOT_OF_STOCK})


def main(answer: Path, keys: list[str]) -> None:
    request, hparams = loaded(train.prepare(RECIPE, keys))
    side = train.stock(hparams, request)
    epochs = hparams["epoch_counter"].limit
    hparams["schedule"].total_steps = epochs * side.epoch_steps
    seconds = []
    for _ in range(epochs):
        began = time.perf_counter()
        side.epoch()
        seconds.append(round(time.perf_counter() - began, 3))
        side.validation()
    found = {"dev": transcripts(side.brain.words)}
    side.evaluation()
    found["test"] = transcripts(side.brain.words)
    answer.write_text(json.dumps({
        "epoch_seconds": seconds, "steps": side.brain.optimizer_step, "transcripts": found,
        "parameters": sum(p.numel() for p in hparams["modules"]["model"].parameters()),
        "precision": side.brain.precision, "versions": versions(),
    }, ensure_ascii=False), encoding="utf-8")


def transcripts(words: Any) -> dict[str, str]:
    """Return transcripts by id from SpeechBrain's ErrorRateStats."""
    return {row["key"]: " ".join(row["hyp_tokens"]) for row in words.scores}


def versions() -> dict[str, str]:
    from sbkit.system.environment import describe

    facts = describe()
    return {name: facts[name] for name in ("torch", "speechbrain")}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
