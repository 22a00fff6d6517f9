"""Bundles that tasks use to prepare a corpus: a codec that encodes, a recogniser that aligns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np

from sbkit.data.audio import resample
from sbkit.decode.durations import Alignment, spell
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.codec import CodecModel
from sbkit.infer.kinds import load
from sbkit.infer.model import Model
from sbkit.infer.transcript import Transcript

M = TypeVar("M", CodecModel, Model)


class Aligner:
    """Aligns recordings with their known texts.

    model : a recogniser, closed together with this
    """

    def __init__(self, model: Model):
        self._model = model
        self._config = model.engine.config
        used = (self._config.models[model.running.model], layout.TOKENS)  # other files differ with each export
        hashes = [self._config.files.get(name, {}).get("sha256") for name in used]
        self.fingerprint = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def align(self, signals: Sequence[np.ndarray], sample_rate: int, texts: Sequence[str]) -> list[Alignment | str]:
        """Align waveforms [S] with their texts; a text that can't be aligned gives the reason."""
        import torch

        from sbkit.decode.greedy import align

        config = self._config
        symbols = self._model.engine.vocabulary.symbols
        alignments: list[Alignment | str] = []
        outputs = self._model.engine.run(_at_rate(signals, sample_rate, config.sample_rate))
        for scores, text in zip(outputs, texts, strict=True):
            if np.isnan(scores).any():
                alignments.append("the recogniser's output is not a number")
                continue
            try:
                ids = spell(text, symbols, config.word_separator)
                [spans] = align(torch.from_numpy(scores)[None], torch.tensor([len(scores)]), torch.tensor([ids]),
                                torch.tensor([len(ids)]), config.blank_id, ids=["this one"])
            except SbkitError as error:
                alignments.append(str(error))
                continue
            frame = config.frame_seconds
            alignments.append(Alignment([symbols[number] for number in spans.ids], spans.starts * frame,
                                        spans.ends * frame, config.word_separator))
        return alignments

    def close(self) -> None:
        self._model.close()


def _at_rate(signals: Sequence[np.ndarray], rate: int, to_rate: int) -> list[np.ndarray]:
    return [signal if rate == to_rate else resample(signal, rate, to_rate) for signal in signals]


class BundleLoader:
    """Opens bundles on the CPU."""

    def codec(self, folder: str) -> CodecModel:
        return _open(folder, CodecModel, "a codec", "name a bundle that was exported from hparams/codec.yaml")

    def aligner(self, folder: str) -> Aligner:
        model = _open_recogniser(folder)
        if isinstance(model.engine.config, layout.TransducerConfig):
            model.close()
            raise SbkitError("wrong-bundle-kind", f"{folder} has a transducer, which can't align a known text",
                             hint="name the bundle of a CTC recogniser", file=folder)
        return Aligner(model)

    def text_transcriber(self, folder: str, sample_rate: int) -> Callable[[Sequence[np.ndarray]], list[str]]:
        """Open a recogniser; returns a function that maps waveforms [S] at this rate to their texts."""
        transcribe = self.transcriber(folder, sample_rate)
        return lambda signals: [transcript.text for transcript in transcribe(signals)]

    def transcriber(self, folder: str, sample_rate: int) -> Callable[[Sequence[np.ndarray]], list[Transcript]]:
        """Open a recogniser; returns a function that maps waveforms [S] at this rate to transcripts: text, times and
        confidences."""
        model = _open_recogniser(folder)
        return lambda signals: model.transcribe([*_at_rate(signals, sample_rate, model.sample_rate)])


def _open_recogniser(folder: str) -> Model:
    return _open(folder, Model, "a recogniser", "name a bundle that was exported from one")


def _open(folder: str, kind: type[M], what: str, hint: str) -> M:
    model = load(folder, device="cpu")
    if not isinstance(model, kind):
        model.close()
        raise SbkitError("wrong-bundle-kind", f"{folder} is not {what}", hint=hint, file=folder)
    return model
