"""A tiny voice whose corpus is labelled by stand-ins of a codec and a recogniser, its parameters as they are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
import torch
from speechbrain.core import Stage
from toy_voice import RATE, RECIPE, SMALL, STRIDE, Bundles, bundle

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.recipe import load
from sbkit.tasks.tts import TTS, labels

TEXT = "one two"


def manifests(folder: Path, **speakers: list[str]) -> dict[str, Manifest]:
    """Noise that counts as the text, by each of these speakers."""
    made = {}
    for split, names in speakers.items():
        wavs = [str(folder / f"{split}{i}.wav") for i in range(len(names))]
        for i, wav in enumerate(wavs):
            soundfile.write(wav, np.random.default_rng(i).normal(0, 0.1, RATE + STRIDE * i), RATE)
        made[split] = Manifest(ids=[f"{split}{i}" for i in range(len(names))], wavs=wavs, texts=[TEXT] * len(names),
                               durations=np.array([1 + 0.02 * i for i in range(len(names))]), speakers=names)
    return made


def trained(folder: Path, manifests: dict[str, Manifest], **given):
    """The task with its corpus labelled, and the numbers that follow from that."""
    named = bundle(folder.parent / "bundle")
    given = {**SMALL, "codec": named, "recogniser": named, "output_folder": str(folder), **given}
    keys = load.open_recipe(load.load(RECIPE, given), RECIPE).keys
    follows = TTS.prepare(keys, manifests, {})
    labels.make(keys, manifests, Bundles())
    hparams = load.load(RECIPE, given | follows)
    hparams["checkpointer"] = None
    made = TTS(modules=hparams["modules"], hparams=hparams, opt_class=hparams["opt_class"],
               run_opts={"device": "cpu"})
    TTS.encoder(made.keys)
    made.modules.eval()
    return made, follows


def batch(made, *names):
    ids = made.keys.symbols.encode(TEXT)
    signals = torch.zeros(len(names), RATE + 2 * STRIDE)
    return Batch(ids=list(names), signals=signals, signal_lengths=torch.full((len(names),), RATE + 2 * STRIDE),
                 tokens=torch.tensor([ids] * len(names)), token_lengths=torch.full((len(names),), len(ids)),
                 texts=[TEXT] * len(names), samples=signals.numel())


def spoken(made, *names):
    """What the voice makes of the text, as each of these utterances' speakers, and the loss."""
    with torch.no_grad():
        given = batch(made, *names)
        said = made.compute_forward(given, Stage.TEST)
        loss = made.compute_objectives(said, given, Stage.TEST)
    return [sound[:size] for sound, size in zip(said.sound, said.samples.tolist(), strict=True)], loss
