"""Trains a toy model on noise, and is killed where it is told to; the end of a run is printed as digests.

Arguments: the output folder, then the place to be killed at as ``where:epoch:step:micro`` (or nothing), with ``@rank``
if it isn't the last one. After each of torchrun's restarts, it is the next one of a list with commas.
"""

import hashlib
import json
import logging
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import soundfile
import torch
from speechbrain import Stage
from speechbrain.nnet.schedulers import NoamScheduler
from speechbrain.processing.features import InputNormalization
from speechbrain.utils import checkpoints as stock
from speechbrain.utils.epoch_loop import EpochCounter
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from sbkit.compat.brain import Brain
from sbkit.data.loader import EvalLoader, TrainLoader
from sbkit.data.manifest import Manifest
from sbkit.data.plan import Batching, Plan
from sbkit.train.averaging import EMA
from sbkit.train.distributed import ranks
from sbkit.train.loss import Loss
from sbkit.train.signals import Stopped
from sbkit.train.train_log import TrainLog

EPOCHS, UTTERANCES = 3, 48


class Letters:
    """A tokenizer: a is 1, b is 2."""

    def encode(self, text):
        return [1 + "ab".index(char) for char in text]


def corpus(folder):
    """Noise of 0.3 to 0.8 s with random texts, made once."""
    path = folder / "train.csv"
    if not path.exists():
        rng = np.random.default_rng(0)
        (folder / "wavs").mkdir(parents=True, exist_ok=True)
        lengths = rng.integers(4800, 12800, UTTERANCES)
        wavs = [folder / "wavs" / f"{i}.wav" for i in range(UTTERANCES)]
        for wav, length in zip(wavs, lengths, strict=True):
            soundfile.write(wav, rng.normal(0, 0.1, length).astype("float32"), 16000)
        texts = ["".join(rng.choice(["a", "b"], 4)) for _ in wavs]
        Manifest(ids=[str(i) for i in range(UTTERANCES)], durations=lengths / 16000, wavs=list(map(str, wavs)),
                 texts=texts).write(path)
    return Manifest.read(path)


class Net(torch.nn.Module):
    """Frames of 25 ms, dropout and batch norm, scores of three tokens: [B, T, 400] to [B, T, 3]."""

    def __init__(self):
        super().__init__()
        self.inner = torch.nn.Linear(400, 16)
        self.norm = torch.nn.BatchNorm1d(16)
        self.dropout = torch.nn.Dropout(0.3)
        self.out = torch.nn.Linear(16, 3)

    def forward(self, frames):
        hidden = self.norm(self.inner(frames).transpose(1, 2)).transpose(1, 2)
        return self.out(self.dropout(hidden.relu()))


class Toy(Brain):
    """CTC with every source of randomness there is."""

    kill, victim = None, ""

    def at(self, where, *place):
        """Here one rank is killed, if that is what is wanted."""
        if self.kill == (where, *place) and ranks.rank() == int(self.victim or ranks.world_size() - 1):
            print("ends at", *map(str, self.kill), "rank", ranks.rank(), file=sys.stderr, flush=True)
            os.kill(os.getpid(), getattr(signal, os.environ.get("SIGNAL", "SIGKILL")))

    def on_stage_start(self, stage, epoch=None):
        random.random(), np.random.rand(), torch.rand(1)  # as hooks may; a resumed epoch starts with them too

    def compute_forward(self, batch, stage):
        if stage == Stage.TRAIN:
            self.at("train", self.train_state.epoch, batch.step, batch.micro)
            with open(self.hparams.seen, "a") as out:
                print(json.dumps([self.train_state.epoch, batch.step, batch.ids]), file=out)
        else:
            self.at("evaluating", self.train_state.epoch, self.step, 0)
        frames = batch.signals.unfold(1, 400, 320)
        lengths = torch.clamp((batch.signal_lengths - 400) // 320 + 1, min=1)
        frames = self.modules.normalize(frames, lengths / frames.shape[1])
        if stage == Stage.TRAIN:
            frames = frames * (1 + 0.1 * random.random()) + 0.1 * float(np.random.rand())
        return self.modules.net(frames).log_softmax(-1), lengths

    def compute_objectives(self, predictions, batch, stage):
        scores, lengths = predictions
        total = torch.nn.functional.ctc_loss(
            scores.transpose(0, 1), batch.tokens, lengths, batch.token_lengths, reduction="sum", zero_infinity=True)
        return Loss(total, batch.token_lengths.sum())

    def on_fit_batch_end(self, batch, outputs, loss, should_step):
        if should_step:
            self.hparams.noam(self.optimizer)

    def on_stage_end(self, stage, stage_loss, epoch):
        random.random(), np.random.rand(), torch.rand(1)
        if stage == Stage.TRAIN:
            self.train_loss = stage_loss
        if stage == Stage.VALID:
            self.at("valid", epoch, 0, 0)
            self.hparams.log.log_stats({"epoch": epoch}, {"loss": self.train_loss}, {"loss": stage_loss})
            self.at("logged", epoch, 0, 0)
            self.checkpointer.save_and_keep_only(meta={"loss": stage_loss}, min_keys=["loss"])
            self.at("saving", epoch, 0, 0)


def digest(state):
    """Of every bit in a state."""
    out = hashlib.sha256()

    def walk(value):
        if isinstance(value, dict):
            for key in value:
                out.update(str(key).encode())
                walk(value[key])
        elif isinstance(value, (list, tuple)):
            for item in value:
                walk(item)
        elif isinstance(value, torch.Tensor):
            out.update(value.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() if value.dim()
                       else str(value.item()).encode())
        else:
            out.update(str(value).encode())

    walk(state)
    return out.hexdigest()


def main(folder, place=None):
    """Train; print digests of all that a run ends with."""
    logging.basicConfig(level=logging.INFO)
    torch.set_num_threads(1)
    torch.manual_seed(5), random.seed(5), np.random.seed(5)
    folder = Path(folder)
    manifest = corpus(folder.parent)
    if os.environ.get("MIXTURE"):  # a quarter of it has half of each step
        part = ["large" if row % 4 else "small" for row in range(UTTERANCES)]
        manifest = manifest.replace(meta={"corpus": part}, shares={"large": 1.0, "small": 1.0})
    # A micro-batch for each utterance: steps have several on two ranks, too, and with an odd number a dummy batch.
    batching = Batching(max_batch_seconds=2.0, max_batch_utterances=1, step_seconds=4.0, seed=3)
    plan = Plan.of(manifest, batching, None, EPOCHS)
    if os.environ.get("PADDED"):
        plan.pad_to_shapes(np.array([len(Letters().encode(text)) for text in manifest.texts]))
    net, normalize, counter = Net(), InputNormalization(), EpochCounter(EPOCHS)
    noam, log, ema = NoamScheduler(0.05, 4), TrainLog(folder / "train_log.txt"), EMA(net, 0.9)
    checkpointer = stock.Checkpointer(folder / "save", {
        "net": net, "normalize": normalize, "counter": counter, "noam": noam, "log": log})
    brain = Toy(
        modules={"net": net, "normalize": normalize}, opt_class=lambda params: torch.optim.AdamW(params, lr=0.05),
        hparams={"noam": noam, "log": log, "ema": ema, "seed": 5, "output_folder": str(folder), "log_interval": 0,
                 "seen": str(folder / "seen.jsonl")},
        run_opts={"device": "cpu", "noprogressbar": True, "ckpt_interval_steps": int(os.environ.get("EVERY", 6)),
                  "grad_accumulation_factor": 3},
        checkpointer=checkpointer,
    )
    places = (place or "").split(",")[int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0)):]
    if places and places[0]:
        place, _, brain.victim = places[0].partition("@")
        where, *numbers = place.split(":")
        brain.kill = (where, *map(int, numbers))
    with TrainLoader(manifest, Letters(), plan, workers=2, rank=ranks.rank(), world=ranks.world_size()) as train_set, \
            EvalLoader(manifest.select(range(12)), Letters(), max_batch_seconds=2.0, workers=0,
                       rank=ranks.rank(), world=ranks.world_size()) as valid_set:
        brain.fit(counter, train_set, valid_set)
    if not ranks.is_main():
        return
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    print(json.dumps({
        "net": digest(net.state_dict()), "ema": digest(ema.state_dict()), "noam": noam.n_steps,
        "optimizer": digest(brain.optimizer.state_dict()), "steps": brain.optimizer_step,
        "normalize": digest(normalize._statistics_dict()),
        "log": (folder / "train_log.txt").read_text(),
        "metrics": [{key: line[key] for key in sorted(line) if key in ("kind", "epoch", "step")} for line in lines],
        "random": [random.random(), float(np.random.rand()), float(torch.rand(1))],
    }))


def script(*args):
    """A script that tells why it was stopped."""
    try:
        main(*args)
    except Stopped as stopped:
        print(stopped, file=sys.stderr)
        raise


def restarting(folder, places):
    """Two of the same under torchrun's agent, which starts them again; their imports are done."""
    config = LaunchConfig(min_nodes=1, max_nodes=1, nproc_per_node=2, run_id="restarting", rdzv_backend="c10d",
                          rdzv_endpoint="localhost:0", max_restarts=3, monitor_interval=0.2, start_method="fork")
    elastic_launch(config, script)(folder, places)
