"""The export of a recogniser: its graphs, its configuration and its vocabulary."""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

import torch

from sbkit.data.corpus import Corpus
from sbkit.decode.spans import PAUSE_SECONDS, Spelling, TokenSpans
from sbkit.errors import SbkitError
from sbkit.export import graph, layout
from sbkit.export.clips import ComparisonClips, choose_clips
from sbkit.export.companion import Companion, OwnBundle
from sbkit.export.exported import Exported
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison, Reference
from sbkit.export.vocabulary import write_tokens
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.duration_limit import longest_seconds
from sbkit.tasks.recognise.graph import Graph, trace
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.spelling import spelling_of
from sbkit.tasks.recognise.streaming_graph import Streams

logger = logging.getLogger(__name__)

_MIN_CHUNK, _MAX_CHUNK = 10.0, 30.0  # seconds of audio per forward
#: Seconds of silence between joined clips: programs for which no pause ends a word may join words there.
_BETWEEN_CLIPS = PAUSE_SECONDS + 0.1


@dataclass
class ExportedRecogniser(Exported):
    """A recogniser to export, whose graph maps waveforms to its head's outputs for each frame."""

    graph: Graph
    acoustic_model: AcousticModel = field(kw_only=True)
    keys: EncoderKeys = field(kw_only=True)

    judges_words = True

    @cached_property
    def spelling(self) -> Spelling:
        """How the model's tokens are written in validation and tests, and so by the bundle."""
        return spelling_of(self.acoustic_model, self.keys)

    def tokenizer_text(self, spans: TokenSpans) -> str:
        """Write tokens by the checkpoint's own tokenizer, for which no pause ends a word."""
        return self.keys.tokenizer.decode(spans.ids.tolist())

    @abstractmethod
    def compared(self, clips: ComparisonClips, config: OwnBundle, folder: Path, reference: Reference) -> Comparison:
        """Compare the model in ``folder`` with ``reference`` on clips."""

    @property
    def companions(self) -> Sequence[Companion]:
        """The streaming graph, if the model was trained in chunks."""
        if self.acoustic_model.chunks is None:
            return ()
        try:
            return (Streams(self.acoustic_model, next(iter(self.outputs)), self.compared),)
        except SbkitError as error:
            logger.warning("The bundle is for whole recordings only: %s", error)
            return ()

    def clips(self, corpus: Corpus | None, count: int) -> ComparisonClips:
        clips = choose_clips(corpus, self.sample_rate, count, longest_seconds(self.acoustic_model.encoder),
                             pause_seconds=_BETWEEN_CLIPS)
        silent = {self.keys.blank_index, *self.keys.tokenizer.silent_ids()}
        characters = "".join(piece for place, piece in enumerate(self.spelling.symbols) if place not in silent)
        if characters == characters.upper() != characters.lower():  # an imported model that outputs capitals
            for clip in clips.alone:
                clip.text = clip.text and clip.text.upper()
        return clips

    def trace(self) -> torch.export.ExportedProgram:
        return trace(self.graph)

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> Config:
        keys, model, spelling = self.keys, self.acoustic_model, self.spelling
        longest = longest_seconds(model.encoder)
        return Config(
            sample_rate=keys.sample_rate, hop_samples=model.hop_samples, subsampling=model.subsampling,
            vocabulary=len(spelling.symbols), blank_id=keys.blank_index,
            silent_ids=sorted(set(spelling.silent) - {keys.blank_index}),
            word_separator=spelling.separator, min_samples=graph.min_samples(program),
            chunk_seconds=round(min(max(clips.longest, _MIN_CHUNK), longest or _MAX_CHUNK, _MAX_CHUNK), 2),
            longest_seconds=longest)

    def write_beside(self, folder: Path, config: OwnBundle) -> None:
        """Write tokens.txt."""
        write_tokens(folder / layout.TOKENS, self.keys.tokenizer.pieces(), config.blank_id)

    def metadata(self, config: Config) -> dict[str, str]:
        return {"sample_rate": str(config.sample_rate), "subsampling_factor": str(config.subsampling),
                "vocab_size": str(config.vocabulary), "blank_id": str(config.blank_id), "comment": "made by sbkit"}

    def comparison(self, clips: ComparisonClips, config: Config, folder: Path) -> Comparison:
        if self.original is None:
            return self.compared(clips, config, folder, Reference(self.reference(config)))
        # The reference is named after the library whose code it is, instead of a checkpoint.
        library, run = self.original
        reference = Reference(lambda signal: run([signal])[0], library, f"{library}'s own code")
        return self.compared(clips, config, folder, reference)
