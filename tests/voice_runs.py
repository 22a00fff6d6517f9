"""A tiny voice whose corpus is labelled by stand-ins of a codec and a recogniser, its parameters as they are drawn."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import soundfile
import torch
from speechbrain.core import Stage

from sbkit.codes import Books
from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.decode.durations import Alignment
from sbkit.recipe import load
from sbkit.tasks.tts import TTS, labels

RECIPE = Path(__file__).parents[1] / "hparams" / "tts.yaml"
SMALL = {"size": 16, "hidden": 24, "frame_size": 16, "frame_hidden": 24, "text_encoder": {"layers": 1},
         "frame_decoder": {"layers": 1}, "durations": {"size": 8, "hidden": 12, "layers": 1},
         "decoder": {"size": 16, "hidden": 24, "slow_layers": 1, "fast_layers": 1}, "head": {"input_size": 16}}
RATE, TEXT = 16_000, "one two"


class Coding:
    """A codec of random codes."""

    books, sample_rate = Books((1000, 1000), 50.0, RATE, "c0dec" + "0" * 59), RATE

    def encode_each(self, signals):
        return [np.random.default_rng(len(signal)).integers(0, 1000, (-(-len(signal) // 320), 2))
                for signal in signals]

    def close(self):
        pass


class Aligning(Coding):
    """A recogniser that hears characters of one length."""

    fingerprint = "even"

    def align(self, signals, sample_rate, texts):
        edges = [np.linspace(0, len(signal) / sample_rate, len(text) + 2) for signal, text in zip(signals, texts,
                                                                                                   strict=True)]
        return [Alignment(list("▁" + text.replace(" ", "▁")), each[:-1], each[1:])
                for each, text in zip(edges, texts, strict=True)]


class StandIns:
    def codec(self, folder):
        return Coding()

    def aligner(self, folder):
        return Aligning()


def manifests(folder: Path, **speakers: list[str]) -> dict[str, Manifest]:
    """Noise that counts as the text, by each of these speakers."""
    made = {}
    for split, names in speakers.items():
        wavs = [str(folder / f"{split}{i}.wav") for i in range(len(names))]
        for i, wav in enumerate(wavs):
            soundfile.write(wav, np.random.default_rng(i).normal(0, 0.1, RATE + 320 * i), RATE)
        made[split] = Manifest(ids=[f"{split}{i}" for i in range(len(names))], wavs=wavs, texts=[TEXT] * len(names),
                               durations=np.array([1 + 0.02 * i for i in range(len(names))]), speakers=names)
    return made


def trained(folder: Path, manifests: dict[str, Manifest], **given):
    """The task with its corpus labelled, and the numbers that follow from that."""
    bundle = folder.parent / "bundle"
    bundle.mkdir(exist_ok=True)
    (bundle / "config.json").write_text("{}")
    given = {**SMALL, "codec": str(bundle), "recogniser": str(bundle), "output_folder": str(folder), **given}
    keys = load.open_recipe(load.load(RECIPE, given), RECIPE).keys
    follows = TTS.prepare(keys, manifests, {})
    labels.make(keys, manifests, StandIns())
    hparams = load.load(RECIPE, given | follows)
    hparams["checkpointer"] = None
    made = TTS(modules=hparams["modules"], hparams=hparams, opt_class=hparams["opt_class"],
               run_opts={"device": "cpu"})
    TTS.encoder(made.keys)
    made.modules.eval()
    return made, follows


def batch(made, *names):
    ids = made.keys.symbols.encode(TEXT)
    signals = torch.zeros(len(names), RATE + 640)
    return Batch(ids=list(names), signals=signals, signal_lengths=torch.full((len(names),), RATE + 640),
                 tokens=torch.tensor([ids] * len(names)), token_lengths=torch.full((len(names),), len(ids)),
                 texts=[TEXT] * len(names), samples=signals.numel())


def spoken(made, *names):
    """What the voice makes of the text, as each of these utterances' speakers, and the loss."""
    with torch.no_grad():
        given = batch(made, *names)
        said = made.compute_forward(given, Stage.TEST)
        loss = made.compute_objectives(said, given, Stage.TEST)
    return [sound[:size] for sound, size in zip(said.sound, said.samples.tolist(), strict=True)], loss
