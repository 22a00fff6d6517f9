"""The export of a CTC recogniser: its graph, its vocabulary, and models for SpeechBrain and sherpa-onnx."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

from sbkit.decode.best_path import best_path
from sbkit.decode.spans import Spans, collapse
from sbkit.export import graph, layout
from sbkit.export.clips import Clips
from sbkit.export.exported import Exported
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison
from sbkit.export.runners import Runner
from sbkit.export.vocabulary import Vocabulary, write_tokens
from sbkit.tasks.ctc import readme, sherpa, speechbrain_folder
from sbkit.tasks.ctc.graph import OUTPUTS, Graph, trace
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.ctc.recognizer import Recognizer

_SPACED = 0.1  # the share of texts with a space above which spaces separate words


class Heard(Comparison):
    """Compares log-probabilities, and the words that they stand for."""

    what = "log-probabilities"


@dataclass
class Recogniser(Exported):
    """A CTC recogniser to export; ``run`` is the folder with its recipe."""

    graph: Graph
    recognizer: Recognizer = field(kw_only=True)
    keys: CTCKeys = field(kw_only=True)
    run: Path = field(kw_only=True)

    judges_words = True
    targets = (layout.SHERPA,)

    @classmethod
    def of(cls, recognizer: Recognizer, keys: CTCKeys, run: Path) -> Recogniser:
        """Export the recogniser of a run, which is in evaluation mode and stays as it is."""
        return cls(Graph(recognizer), OUTPUTS, keys.sample_rate, recognizer=recognizer, keys=keys, run=run)

    @property
    def formats(self) -> tuple[str, ...]:
        """All formats; not SpeechBrain's if features or encoder take lengths, which SpeechBrain doesn't give them."""
        model = self.recognizer
        given = not (model.takes_lengths or model.features_take_lengths)
        return (*super().formats, layout.SPEECHBRAIN) if given else super().formats

    def trace(self) -> torch.export.ExportedProgram:
        return trace(self.graph)

    def config(self, program: torch.export.ExportedProgram, clips: Clips) -> Config:
        keys, model, tokenizer = self.keys, self.recognizer, self.keys.tokenizer
        ends = keys.bos_index, keys.eos_index, getattr(tokenizer, "bos_id", None), getattr(tokenizer, "eos_id", None)
        texts = [clip.text for clip in clips.alone if clip.text]
        spaced = not texts or sum(" " in text for text in texts) > _SPACED * len(texts)
        return Config(
            sample_rate=keys.sample_rate, hop_samples=model.hop_samples, subsampling=model.subsampling,
            vocabulary=len(tokenizer.pieces()), blank_id=keys.blank_index,
            silent_ids=sorted({i for i in ends if i is not None and i > 0}), word_separator="▁" if spaced else None,
            min_samples=graph.least_samples(program),
            chunk_seconds=round(min(max(clips.longest, 10.0), 30.0), 2))

    def write_beside(self, folder: Path, config: Config) -> None:
        """Write tokens.txt."""
        write_tokens(folder / layout.TOKENS, self.keys.tokenizer.pieces(), config.blank_id)

    def metadata(self, config: Config) -> dict[str, str]:
        return {"sample_rate": str(config.sample_rate), "subsampling_factor": str(config.subsampling),
                "vocab_size": str(config.vocabulary), "blank_id": str(config.blank_id), "comment": "made by sbkit"}

    def write(self, name: str, folder: Path, config: Config, title: str) -> None:
        if name == layout.SHERPA:
            sherpa.write(self.graph, config, folder / layout.MODELS[name])
        else:
            speechbrain_folder.write(folder, self.run, self.recognizer, self.keys.tokenizer, config.sample_rate,
                                     config.blank_id, title)

    def runner(self, name: str, folder: Path, config: Config) -> Runner:
        if name == layout.SPEECHBRAIN:
            return speechbrain_folder.runner(folder, config.min_samples)
        return super().runner(name, folder, config)

    def reference(self, config: Config) -> Callable[[np.ndarray], np.ndarray]:
        return reference(self.recognizer, config.min_samples)

    def comparison(self, clips: Clips, config: Config, folder: Path) -> Heard:
        vocabulary, decode = Vocabulary.read(folder, config), self.keys.tokenizer.decode
        return compared(clips, vocabulary, self.reference(config), decode, config.sample_rate)

    def compare_own(self, name: str, folder: Path, config: Config, comparison: Comparison, size: int) -> None:
        """Compare the model in sherpa-onnx itself, which returns words only."""
        client = sherpa.client(folder / layout.MODELS[name], folder / layout.TOKENS)
        comparison.add_words(name, lambda signal: sherpa.transcribe(client, signal, config.sample_rate), size)

    def readme(self, name: str, config: Config, comparison: Comparison) -> str:
        return readme.text(name, config, comparison)


def compared(clips: Clips, vocabulary: Vocabulary, reference: Callable[[np.ndarray], np.ndarray],
             decode: Callable[[list[int]], str], sample_rate: int) -> Heard:
    """Build the comparison of clips with the checkpoint.

    decode : token ids to text, by the checkpoint's own tokenizer
    """
    blank = vocabulary.config.blank_id

    def text(log_probs: np.ndarray) -> str:
        spans = _spans(log_probs, blank)
        vocabulary.check(spans.ids)
        return vocabulary.text(vocabulary.words(spans))

    return Heard(clips, reference, sample_rate, text, lambda output: decode(_spans(output, blank).ids.tolist()))


def reference(recognizer: Recognizer, at_least: int = 1) -> Callable[[np.ndarray], np.ndarray]:
    """Return a function from a waveform [S] to the checkpoint's log-probabilities [T, V], one utterance at a time.

    at_least : shorter waveforms are padded with zeros to this many samples, as in every runtime
    """

    @torch.no_grad()
    def run(signal: np.ndarray) -> np.ndarray:
        signals = torch.from_numpy(signal)[None]
        signals = torch.nn.functional.pad(signals, (0, max(0, at_least - len(signal))))
        log_probs, frames = recognizer.log_probs(signals, torch.tensor([len(signal)]))
        return log_probs[0, : int(frames[0])].numpy()

    return run


def _spans(log_probs: np.ndarray, blank_id: int) -> Spans:
    labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]), blank_id)
    return collapse(labels, confidence, blank_id=blank_id)[0]
