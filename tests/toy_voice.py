"""A tiny voice's recipe, and stand-ins for the bundles that label its corpus: codes from a signal's samples, and
characters that share the recording evenly.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import soundfile
import torch
from batches import noise
from speechbrain.core import Stage

from sbkit.codes import Books, InvalidCode
from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.decode.durations import Alignment
from sbkit.recipe import load
from sbkit.tasks.tts import TTS
from sbkit.train.loss import Loss

RECIPE = Path(__file__).parents[1] / "hparams" / "tts.yaml"
RATE, STRIDE = 16_000, 320
LEVELS, SIZES = [4, 3], (12, 12)
SMALL = {
    "size": 16, "hidden": 24, "frame_size": 20, "frame_hidden": 24, "text_encoder": {"layers": 1},
    "durations": {"size": 12, "hidden": 16, "layers": 1}, "frame_decoder": {"layers": 1},
    "quantiser": {"levels": LEVELS}, "head": {"input_size": 12},
    "decoder": {"input_size": 4, "size": 12, "hidden": 16, "slow_layers": 1, "fast_layers": 1},
}
TEXT = "one two"
#: What the stand-in for a recogniser never hears.
UNHEARD = "zz"


class Codec:
    """A codec's bundle: of each frame, codes that follow from its first sample."""

    def __init__(self, name: str = "a"):
        self.books = Books(SIZES, RATE / STRIDE, RATE, name.encode().hex().ljust(64, "0"))
        self.sample_rate, self.closed, self.signals = RATE, 0, 0

    def encode_each(self, signals):
        self.signals += len(signals)
        return [InvalidCode("its codes are in no book") if np.abs(signal).max() > 1 else codes_of(signal)
                for signal in signals]

    def close(self):
        self.closed += 1


def codes_of(signal: np.ndarray) -> np.ndarray:
    """The codes [T, 2] of a waveform [S]."""
    first = np.round(signal[::STRIDE] * 1000).astype(np.int64)
    return np.stack([first % SIZES[0], first // 7 % SIZES[1]], 1)


class Aligner:
    """A recogniser's bundle."""

    def __init__(self, fingerprint: str = "one"):
        self.fingerprint, self.closed = fingerprint, 0

    def align(self, signals, sample_rate, texts):
        return [self._one(len(signal) / sample_rate, text) for signal, text in zip(signals, texts, strict=True)]

    def _one(self, seconds, text):
        if UNHEARD in text:
            return "nobody said that"
        edges = np.linspace(0, seconds, len(text) + 1)
        return Alignment(list(text), edges[:-1], edges[1:], None)

    def close(self):
        self.closed += 1


class Bundles:
    """Opens them, and counts how often."""

    def __init__(self, codec: Codec | None = None, aligner: Aligner | None = None):
        self.made, self.hears = codec or Codec(), aligner or Aligner()
        self.opened: list[str] = []

    def codec(self, folder):
        self.opened.append(folder)
        return self.made

    def aligner(self, folder):
        self.opened.append(folder)
        return self.hears


def bundle(folder: Path) -> str:
    """A folder that looks like a bundle to whoever does not open it."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return str(folder)


def hparams(folder: Path, **given) -> dict:
    """The recipe's objects for a run in ``folder``."""
    named = {name: bundle(folder / name) for name in ("codec", "recogniser")}
    return load.load(RECIPE, {**SMALL, **named, "output_folder": str(folder / "out"), **given})


def brain(folder: Path, stage: Stage = Stage.TRAIN, **given) -> TTS:
    """The task, with the recipe's weights as they are drawn, ready for a stage."""
    torch.manual_seed(0)
    found = hparams(folder, **given)
    found["checkpointer"] = None
    found["init_from"] = found["codec"]
    made = TTS(modules=found["modules"], hparams=found, opt_class=found["opt_class"], run_opts={"device": "cpu"})
    made.modules.train(stage == Stage.TRAIN)
    return made


def recordings(folder: Path, texts: dict[str, str], speakers: dict[str, str] | None = None,
               per_character: float = 0.06) -> Manifest:
    """A manifest of noise, of which each has a length of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    names, seconds, wavs = list(texts), [], []
    for i, (name, text) in enumerate(texts.items()):
        samples = STRIDE * (10 + math.ceil(len(text) * per_character * RATE / STRIDE) + i % 3) - 7 * i
        noise = np.random.default_rng(sum(map(ord, name))).uniform(0.1, 0.9, samples)
        wavs.append(str(folder / f"{name}.wav"))
        soundfile.write(wavs[-1], noise, RATE, subtype="FLOAT")
        seconds.append(samples / RATE)
    return Manifest(ids=names, durations=seconds, wavs=wavs, texts=list(texts.values()),
                    speakers=[(speakers or {}).get(name, "") for name in names])


def corpus(folder: Path, **speakers: list[str]) -> dict[str, Manifest]:
    """Splits with recordings of ``TEXT``, one by each of these speakers."""
    return {split: recordings(folder / split, {f"{split}{i}": TEXT for i in range(len(names))},
                              {f"{split}{i}": name for i, name in enumerate(names)})
            for split, names in speakers.items()}


def labelled(folder: Path, manifests: dict[str, Manifest], **given) -> tuple[TTS, dict]:
    """The task of a run whose corpus is labelled, ready for a test, and the numbers that follow from the corpus."""
    keys = TTS.Keys.read(hparams(folder, **given))
    follows = TTS.prepare(keys, manifests, {})
    TTS.label(keys, manifests, Bundles())
    made = brain(folder, Stage.TEST, **given, **follows)
    TTS.tokenizer(made.keys)
    return made, follows


def batch(made: TTS, *names: str) -> Batch:
    """These utterances of ``TEXT``."""
    return noise(*[RATE] * len(names), tokens=[made.keys.symbols.encode(TEXT)] * len(names), ids=list(names),
                 texts=[TEXT] * len(names))


def spoken(made: TTS, *names: str) -> tuple[list, Loss]:
    """What the voice makes of the text, as each of these utterances' speakers, and the loss."""
    with torch.no_grad():
        said = made.compute_forward(batch(made, *names), Stage.TEST)
        loss = made.compute_objectives(said, batch(made, *names), Stage.TEST)
    return [sound[:size] for sound, size in zip(said.sound, said.samples.tolist(), strict=True)], loss
