"""Bundles as tasks need them while a corpus is prepared: a codec that encodes, a recogniser that aligns."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence

import numpy as np

from sbkit.data.audio import resample
from sbkit.decode.durations import Alignment, spell
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.codec import CodecModel
from sbkit.infer.model import Model, load


class Aligner:
    """A recogniser that tells when it heard what is known to have been said.

    model : is closed with it
    """

    def __init__(self, model: Model):
        self._model, self._config = model, model.engine.config
        used = (self._config.models[model.running.model], layout.TOKENS)  # README.md and others differ each time
        hashes = [self._config.files.get(name, {}).get("sha256") for name in used]
        self.fingerprint = hashlib.sha256(json.dumps(hashes).encode()).hexdigest()

    def align(self, signals: Sequence[np.ndarray], sample_rate: int, texts: Sequence[str]) -> list[Alignment | str]:
        """Return for waveforms [S] and their texts what was heard when, or why that can't be told."""
        rate = self._config.sample_rate
        scores = self._model.engine.run([signal if rate == sample_rate else resample(signal, sample_rate, rate)
                                         for signal in signals])
        return [self._one(found, text) for found, text in zip(scores, texts, strict=True)]

    def _one(self, scores: np.ndarray, text: str) -> Alignment | str:
        import torch

        from sbkit.decode.greedy import align

        symbols, config = self._model.engine.vocabulary.symbols, self._config
        if np.isnan(scores).any():
            return "the recogniser's output is not a number"
        try:
            ids = spell(text, symbols, config.word_separator)
            [spans] = align(torch.from_numpy(scores)[None], torch.tensor([len(scores)]), torch.tensor([ids]),
                            torch.tensor([len(ids)]), config.blank_id, ids=["this one"])
        except SbkitError as error:
            return str(error)
        frame = config.frame_seconds
        return Alignment([symbols[number] for number in spans.ids], spans.starts * frame, spans.ends * frame,
                     config.word_separator)

    def close(self) -> None:
        self._model.close()


class BundleLoader:
    """Opens bundles on the CPU."""

    def codec(self, folder: str) -> CodecModel:
        found = load(folder, device="cpu")
        if not isinstance(found, CodecModel):
            found.close()
            raise SbkitError(f"{folder} is not a codec", hint="name a bundle that was exported from hparams/codec.yaml")
        return found

    def aligner(self, folder: str) -> Aligner:
        """Open a recogniser that aligns."""
        model = self._model(folder)
        if isinstance(model.engine.config, layout.TransducerConfig):
            model.close()
            raise SbkitError(f"{folder} has a transducer, which can't align a known text",
                             hint="name the bundle of a CTC recogniser")
        return Aligner(model)

    def recogniser(self, folder: str, sample_rate: int) -> Callable[[Sequence[np.ndarray]], list[str]]:
        """Open a recogniser; returns what transcribes waveforms [S] at this rate."""
        model = self._model(folder)
        rate = model.engine.config.sample_rate

        def heard(signals: Sequence[np.ndarray]) -> list[str]:
            audio = [signal if rate == sample_rate else resample(signal, sample_rate, rate) for signal in signals]
            return [transcript.text for transcript in model.transcribe(list(audio))]

        return heard

    @staticmethod
    def _model(folder: str) -> Model:
        found = load(folder, device="cpu")
        if not isinstance(found, Model):
            found.close()
            raise SbkitError(f"{folder} is not a recogniser", hint="name a bundle that was exported from one")
        return found
