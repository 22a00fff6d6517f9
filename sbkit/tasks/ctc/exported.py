"""The export of a CTC recogniser: its graph, its vocabulary, and models for SpeechBrain and sherpa-onnx."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from sbkit.errors import SbkitError
from sbkit.export import graph, layout
from sbkit.export.clips import ComparisonClips, choose
from sbkit.export.companion import Companion, Target
from sbkit.export.exported import Exported
from sbkit.export.layout import Config
from sbkit.export.parity import Comparison
from sbkit.export.runners import Runner
from sbkit.export.vocabulary import Vocabulary, write_tokens
from sbkit.tasks.ctc import readme, sherpa, sherpa_stream, speechbrain_folder
from sbkit.tasks.ctc.compared import LogProbComparison, compared
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.ctc.streams import Streams
from sbkit.tasks.recognise.graph import OUTPUTS, Graph, trace
from sbkit.tasks.recognise.recognizer import Recognizer
from sbkit.tasks.recognise.window import longest_seconds

if TYPE_CHECKING:
    from sbkit.data.corpus import Corpus

logger = logging.getLogger(__name__)

_MIN_CHUNK, _MAX_CHUNK = 10.0, 30.0  # seconds of audio to give a model at once
_SPACED = 0.1  # the share of texts with a space above which spaces separate words


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
        return cls(Graph(recognizer), OUTPUTS, keys.sample_rate, recognizer=recognizer, keys=keys, run=run,
                   from_forward=lambda scores: (scores.ctc.float().log_softmax(-1), scores.frames))

    @property
    def formats(self) -> tuple[str, ...]:
        """All formats; not SpeechBrain's if features or encoder take lengths, which SpeechBrain doesn't give them."""
        model = self.recognizer
        given = not (model.takes_lengths or model.features_take_lengths)
        return (*super().formats, layout.SPEECHBRAIN) if given else super().formats

    @property
    def companions(self) -> Sequence[Companion]:
        """The graph for streams, if the model learnt in chunks."""
        if self.recognizer.chunks is None:
            return ()
        try:
            return (Streams(self.recognizer, self.keys.tokenizer.decode),)
        except SbkitError as error:
            logger.warning("The bundle is for whole recordings alone: %s", error)
            return ()

    def clips(self, corpus: Corpus | None, count: int) -> ComparisonClips:
        return choose(corpus, self.sample_rate, count, longest_seconds(self.recognizer.encoder))

    def trace(self) -> torch.export.ExportedProgram:
        return trace(self.graph)

    def config(self, program: torch.export.ExportedProgram, clips: ComparisonClips) -> Config:
        keys, model, tokenizer = self.keys, self.recognizer, self.keys.tokenizer
        ends = keys.bos_index, keys.eos_index, getattr(tokenizer, "bos_id", None), getattr(tokenizer, "eos_id", None)
        most = longest_seconds(model.encoder)
        texts = [clip.text for clip in clips.alone if clip.text]
        spaced = not texts or sum(" " in text for text in texts) > _SPACED * len(texts)
        return Config(
            sample_rate=keys.sample_rate, hop_samples=model.hop_samples, subsampling=model.subsampling,
            vocabulary=len(tokenizer.pieces()), blank_id=keys.blank_index,
            silent_ids=sorted({i for i in ends if i is not None and i > 0}), word_separator="▁" if spaced else None,
            min_samples=graph.least_samples(program),
            chunk_seconds=round(min(max(clips.longest, _MIN_CHUNK), most or _MAX_CHUNK, _MAX_CHUNK), 2),
            longest_seconds=most)

    def write_beside(self, folder: Path, config: Config) -> None:
        """Write tokens.txt."""
        write_tokens(folder / layout.TOKENS, self.keys.tokenizer.pieces(), config.blank_id)

    def metadata(self, config: Config) -> dict[str, str]:
        return {"sample_rate": str(config.sample_rate), "subsampling_factor": str(config.subsampling),
                "vocab_size": str(config.vocabulary), "blank_id": str(config.blank_id), "comment": "made by sbkit"}

    def write(self, name: str, folder: Path, config: Config, title: str) -> None:
        assert name == layout.SPEECHBRAIN, "the only one"
        speechbrain_folder.write(folder, self.run, self.recognizer, self.keys.tokenizer, config.sample_rate,
                                 config.blank_id, title)

    def runner(self, name: str, folder: Path, config: Config) -> Runner:
        if name == layout.SPEECHBRAIN:
            return speechbrain_folder.runner(folder, config.min_samples)
        return super().runner(name, folder, config)

    def comparison(self, clips: ComparisonClips, config: Config, folder: Path) -> LogProbComparison:
        vocabulary, decode = Vocabulary.read(folder, config), self.keys.tokenizer.decode
        return compared(clips, vocabulary, self.reference(config), decode, config.sample_rate)

    def target(self, name: str, chunk: int | None = None) -> Sequence[Target]:
        """The models that sherpa-onnx runs: for whole recordings, for streams if it learnt in chunks, or both."""
        sherpa.imported()
        model, rate = self.recognizer, self.keys.sample_rate

        def whole() -> Target:
            return sherpa.SherpaWhole(self.graph, model, self.keys.tokenizer.decode, rate)

        if model.chunks is None:
            if chunk is not None:
                raise SbkitError("--chunk is for a model that learnt to hear in chunks, and the recipe has no chunks",
                                 hint="train one with hparams/streaming.yaml, or leave out --chunk")
            return [whole()]
        milliseconds = sherpa_stream.chosen(model.chunks, model.subsampling * model.hop_samples / rate, chunk)
        kinds: dict[str, Callable[[], Target]] = {
            "whole recordings": whole,
            "streams": lambda: sherpa_stream.SherpaStream(model, self.keys.tokenizer.decode, milliseconds)}
        made: list[Target] = []
        refused: dict[str, SbkitError] = {}
        for what, make in kinds.items():
            try:
                made.append(make())
            except SbkitError as error:
                refused[what] = error
        if not made:
            raise refused["streams"]
        if "streams" not in refused:
            sherpa_stream.check_version()
        for what, why in refused.items():
            logger.warning("sherpa-onnx gets no model for %s: %s", what, why.message)
        return made

    def readme(self, name: str, config: Config, comparison: Comparison, of_targets: Sequence[str] = ()) -> str:
        return readme.text(name, config, comparison, of_targets)
