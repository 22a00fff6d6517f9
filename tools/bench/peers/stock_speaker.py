"""Trains SpeechBrain's VoxCeleb recipe for some seconds on prepared manifests, and scores it.

    python -m tools.bench.peers.stock_speaker ANSWER.json MANIFESTS --seconds 200 [--channels 1024] [--seed 1]

Features, model, loss, optimizer and augmentation are those of the recipe (ECAPA-TDNN, AAM softmax, batches of 32, Adam
with a cyclic rate, each batch with copies in which frequency bands and chunks are dropped), in SpeechBrain's Brain. The
recipe is for two thousand hours, so some of it differs here: the rate rises and falls once in the run, crops are as
long as sbkit's, noise and reverberation, which need downloads, are left out, and there is no validation. All audio is
in memory before the clock starts.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import speechbrain as sb
import torch
from speechbrain.augment.augmenter import Augmenter
from speechbrain.augment.time_domain import DropChunk, DropFreq
from speechbrain.lobes.features import Fbank
from speechbrain.lobes.models.ECAPA_TDNN import ECAPA_TDNN, Classifier
from speechbrain.nnet.losses import AdditiveAngularMargin, LogSoftmaxWrapper
from speechbrain.nnet.schedulers import CyclicLRScheduler
from speechbrain.processing.features import InputNormalization

from sbkit.data.audio import read_utterance
from sbkit.data.manifest import Manifest
from sbkit.score import verification

BATCH, RATE, PEAK, SIZE = 32, 16_000, 0.001, 192
_TIMED = 3  # steps by whose speed the schedule is planned; the first is left out


class Stock(sb.Brain):
    """The recipe's Brain: features, vectors, classifier, loss."""

    def compute_forward(self, batch: Any, stage: sb.Stage) -> torch.Tensor:
        waves, lengths, _ = batch
        if stage == sb.Stage.TRAIN:
            waves, lengths = self.hparams.augment(waves, lengths)
        return self.modules.classifier(self.vectors(waves, lengths))

    def vectors(self, waves: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        """Waveforms [B, S] and relative lengths [B] to [B, 1, D]."""
        feats = self.modules.mean_var_norm(self.modules.compute_features(waves), lengths)
        return self.modules.embedding_model(feats, lengths)

    def compute_objectives(self, outputs: torch.Tensor, batch: Any, stage: sb.Stage) -> torch.Tensor:
        speakers = self.hparams.augment.replicate_labels(batch[2]) if stage == sb.Stage.TRAIN else batch[2]
        loss = self.hparams.compute_cost(outputs, speakers[:, None])
        if self.hparams.annealing is not None:
            self.hparams.annealing.on_batch_end(self.optimizer)
        return loss


def build(speakers: int, channels: int) -> Stock:
    """Put the recipe's parts together."""
    modules = {
        "compute_features": Fbank(n_mels=80), "mean_var_norm": InputNormalization(norm_type="sentence", std_norm=False),
        "embedding_model": ECAPA_TDNN(80, channels=[channels] * 4 + [3 * channels], lin_neurons=SIZE),
        "classifier": Classifier(SIZE, out_neurons=speakers)}
    drops = [DropFreq(drop_freq_count_low=1, drop_freq_count_high=3, drop_freq_width=0.05),
             DropChunk(drop_length_low=1000, drop_length_high=2000, drop_count_low=1, drop_count_high=5)]
    augment = Augmenter(parallel_augment=True, concat_original=True, min_augmentations=2, max_augmentations=2,
                        augment_prob=1.0, augmentations=drops)
    cost = LogSoftmaxWrapper(AdditiveAngularMargin(margin=0.2, scale=30))
    return Stock(modules, lambda weights: torch.optim.Adam(weights, lr=PEAK, weight_decay=2e-6),
                 {"augment": augment, "compute_cost": cost, "annealing": None}, {"device": "cpu"})


def drawn(signals: list[np.ndarray], speakers: list[int], crop: int, rng: np.random.Generator) -> tuple[Any, ...]:
    """Draw a batch: random stretches of random recordings."""
    waves, lengths, chosen = np.zeros((BATCH, crop), np.float32), [], rng.integers(len(signals), size=BATCH)
    for row, each in zip(waves, chosen, strict=True):
        start = rng.integers(max(1, len(signals[each]) - crop + 1))
        part = signals[each][start:start + crop]
        row[:len(part)] = part
        lengths.append(len(part) / crop)
    return torch.from_numpy(waves), torch.tensor(lengths), torch.tensor([speakers[each] for each in chosen])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("answer", type=Path)
    parser.add_argument("manifests", type=Path)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--channels", type=int, default=1024)
    parser.add_argument("--crop", type=float, default=2.0)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    torch.manual_seed(args.seed)
    rng, crop = np.random.default_rng(args.seed), round(args.crop * RATE)
    train, test = (Manifest.read(args.manifests / f"{split}.csv") for split in ("train", "test"))
    names = sorted(set(train.speakers))
    signals = [read_utterance(row.wav, row.start, row.duration, sample_rate=RATE) for row in train]
    speakers = [names.index(each) for each in train.speakers]
    brain = build(len(names), args.channels)
    brain.on_fit_start()
    brain.modules.train()
    began, steps, ends = time.perf_counter(), 0, []
    while time.perf_counter() - began < args.seconds:
        brain.fit_batch(drawn(signals, speakers, crop, rng))
        ends.append(time.perf_counter())
        steps += 1
        if steps == _TIMED:
            planned = args.seconds / ((ends[-1] - ends[0]) / (_TIMED - 1))
            brain.hparams.annealing = CyclicLRScheduler(base_lr=1e-8, max_lr=PEAK, step_size=max(1, planned / 2))
    seconds = time.perf_counter() - began
    brain.modules.eval()
    with torch.no_grad():
        found = torch.stack([brain.vectors(torch.from_numpy(signal)[None], torch.ones(1))[0, 0] for signal in (
            read_utterance(row.wav, row.start, row.duration, sample_rate=RATE) for row in test)])
    vectors = torch.nn.functional.normalize(found, dim=1).numpy()
    trials = verification.all_pairs(list(test.speakers))
    rates = verification.rates((vectors @ vectors.T)[trials.first, trials.second], trials.same)
    args.answer.write_text(json.dumps({
        "EER": rates.eer, "minDCF": rates.min_dcf, "seconds": seconds, "steps": steps, "trials": len(trials.same),
        "parameters": sum(each.numel() for each in brain.modules.parameters())}), encoding="utf-8")


if __name__ == "__main__":
    main()
