"""The export of a CTC recogniser: its graph, its vocabulary, and models for SpeechBrain and sherpa-onnx."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from sbkit.decode.spans import Spelling, TokenSpans, best_path, collapse
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.export.clips import ComparisonClips
from sbkit.export.companion import Target
from sbkit.export.layout import Config
from sbkit.export.measures import OutputMeasure
from sbkit.export.parity import Comparison, Reference, WordRules
from sbkit.export.runners import Runner
from sbkit.export.vocabulary import Vocabulary
from sbkit.tasks.ctc import readme, sherpa, speechbrain_folder
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.recognise import sherpa_stream
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.exported import ExportedRecogniser
from sbkit.tasks.recognise.graph import OUTPUTS, Graph


def compared(clips: ComparisonClips, vocabulary: Vocabulary, reference: Reference, spelling: Spelling,
             tokenizer_text: Callable[[TokenSpans], str], sample_rate: int) -> Comparison:
    """Compare log-probabilities and words of clips with the reference's.

    spelling : how the checkpoint's tokens are written in tests
    tokenizer_text : writes tokens by the checkpoint's own tokenizer
    """
    blank = vocabulary.config.blank_id

    def text(log_probs: np.ndarray) -> str:
        spans = _spans(log_probs, blank)
        vocabulary.check(spans.ids)
        return vocabulary.spelling.text(spans)

    return Comparison(clips, reference, sample_rate, OutputMeasure("log-probabilities"), WordRules(
        text=text,
        reference_text=lambda output: spelling.text(_spans(output, blank)),
        joined_text=lambda output: tokenizer_text(_spans(output, blank)),
        spaced=spelling.separator is not None))


def _spans(log_probs: np.ndarray, blank_id: int) -> TokenSpans:
    labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]), blank_id)
    return collapse(labels, confidence, blank_id=blank_id)[0]


@dataclass
class ExportedCTC(ExportedRecogniser):
    """A CTC recogniser to export; ``run`` is the folder with its recipe."""

    keys: CTCKeys = field(kw_only=True)
    run: Path = field(kw_only=True)

    targets = (layout.SHERPA,)

    @classmethod
    def of(cls, acoustic_model: AcousticModel, keys: CTCKeys, run: Path) -> ExportedCTC:
        """Export the recogniser of a run in evaluation mode, which isn't changed."""
        made = cls(Graph(acoustic_model), OUTPUTS, keys.sample_rate, acoustic_model=acoustic_model, keys=keys, run=run,
                   from_forward=lambda scores: (scores.ctc.float().log_softmax(-1), scores.frames))
        if acoustic_model.takes_lengths or acoustic_model.features_take_lengths:
            made.left_out[layout.SPEECHBRAIN] = "its encoder or features take lengths, which EncoderASR doesn't pass on"
        return made

    @property
    def formats(self) -> tuple[str, ...]:
        return super().formats if layout.SPEECHBRAIN in self.left_out else (*super().formats, layout.SPEECHBRAIN)

    def write(self, name: str, folder: Path, config: Config, title: str) -> None:
        assert name == layout.SPEECHBRAIN, "the only one"
        speechbrain_folder.write(folder, self.run, self.acoustic_model, self.keys.tokenizer, config.sample_rate,
                                 config.blank_id, title)

    def runner(self, name: str, folder: Path, config: Config) -> Runner:
        if name == layout.SPEECHBRAIN:
            return speechbrain_folder.EncoderASRRunner(folder, config.min_samples)
        return super().runner(name, folder, config)

    def compared(self, clips: ComparisonClips, config: Config, folder: Path, reference: Reference) -> Comparison:
        return compared(clips, Vocabulary.read(folder, config), reference, self.spelling, self.tokenizer_text,
                        config.sample_rate)

    def target(self, name: str, chunk: int | None = None) -> Sequence[Target]:
        """Return the models for sherpa-onnx: for whole recordings, for streams if trained in chunks, or both."""
        sherpa_stream.imported()
        model, rate = self.acoustic_model, self.keys.sample_rate

        def whole() -> Target:
            return sherpa.SherpaWhole(self.graph, model, self.compared, rate)

        if model.chunks is None:
            if chunk is not None:
                raise SbkitError("no-chunks", "--chunk needs a model that was trained in chunks, but the recipe has no "
                                 "chunks", key="chunk",
                                 hint="train one with hparams/streaming.yaml, or leave out --chunk")
            return [whole()]
        frame_seconds = model.subsampling * model.hop_samples / rate
        milliseconds = sherpa_stream.chunk_milliseconds(model.chunks, frame_seconds, chunk)
        kinds: dict[str, Callable[[], Target]] = {
            "whole recordings": whole,
            "streams": lambda: sherpa.CTCStream(model, milliseconds, self.compared)}
        targets: list[Target] = []
        errors: dict[str, SbkitError] = {}
        for what, build in kinds.items():
            try:
                targets.append(build())
            except SbkitError as error:
                errors[what] = error
        if not targets:
            raise errors["streams"]
        if "streams" not in errors:
            sherpa_stream.check_version()
        for what, reason in errors.items():
            self.left_out[f"{layout.SHERPA} for {what}"] = reason.message
        return targets

    def readme(self, name: str, config: Config, comparison: Comparison, of_targets: Sequence[str] = ()) -> str:
        return readme.text(name, config, comparison, self.spelling.symbols, of_targets)
