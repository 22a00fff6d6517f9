"""The task of a voice: text to speech, by predicting the codec's codes of the recording from its text."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch
from speechbrain.core import Stage
from torch import Tensor

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.data.symbols import Symbols
from sbkit.errors import SbkitError
from sbkit.nn.lengths import lengths_to_mask
from sbkit.nn.voice import voice
from sbkit.nn.voice.voice import VoiceModel
from sbkit.recipe.build import Built
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings
from sbkit.recipe.trace import Trace
from sbkit.runs.keys import Bundles
from sbkit.tasks.generation import Fit, SpeechTest, all_fit, drop_other_sounds, unpadded
from sbkit.tasks.keys import TaskKeys
from sbkit.tasks.task import Metric, Task
from sbkit.tasks.tts import labels
from sbkit.tasks.tts.keys import CODEC_PARTS, TTSKeys
from sbkit.tasks.tts.labels import Label, Targets, VoiceLabels
from sbkit.tasks.tts.results import SpokenRow, VoiceResults, measures
from sbkit.train.loss import Loss

if TYPE_CHECKING:
    from sbkit.tasks.tts.exported import ExportedVoice

logger = logging.getLogger(__name__)

_NAMED = 10  # characters that a warning names


#: The splits whose labels each stage uses; a test may be of any split.
_SPLITS = {Stage.TRAIN: ("train",), Stage.VALID: ("dev",), Stage.TEST: ("test", "dev", "train")}


class VoiceOutput(NamedTuple):
    """The voice's outputs for a batch, and their targets."""

    states: Tensor  # [B, T, D], of frames
    durations: Tensor  # [B, U + 2], as ``VoiceModel.teacher_forced`` predicts them
    targets: Targets
    sound: Tensor | None = None  # [B, S], in a test
    samples: Tensor | None = None  # [B]


class TTS(Task):
    """The Brain of ``hparams/tts.yaml``.

    - Before training, the corpus is labelled with the codec's codes, and with the duration of each character by the
      recogniser's alignment.
    - The loss is the cross entropy of codes, a mean over frames, and the squared error of the durations' logarithms.
    - A test speaks each text with predicted durations.
    """

    Keys: ClassVar[type[TaskKeys]] = TTSKeys
    parts = ("text_encoder", "durations", "frame_decoder", "code_head", "quantiser", "decoder", "head", "modules")
    metric = Metric("loss")
    sized_by_corpus = ("n_symbols", "n_speakers")
    generates_speech = True
    keys: TTSKeys
    speech_test: SpeechTest

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        keys = self.keys
        self.voice = VoiceModel(keys.text_encoder, keys.durations, keys.frame_decoder, keys.code_head, keys.quantiser,
                                keys.decoder, keys.head)
        self._warned = False
        for name in CODEC_PARTS:  # which the loss doesn't train
            if any(parameter.requires_grad for parameter in getattr(keys, name).parameters()):
                raise SbkitError("codec-not-frozen",
                                 f"{name} is a part of the codec, which the loss of a voice doesn't "
                                 "train, but it is not frozen", hint=f"write {name}: true under freeze", key=name)

    # ------------------------------------------------------------ before there is a model

    @classmethod
    def prepare(cls, keys: TTSKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Store the symbols and the speakers of the corpus."""
        train = manifests["train"]
        return {"n_symbols": len(keys.symbols.prepare(train.texts)),
                "n_speakers": len(keys.speakers.prepare(train.speakers))}

    @classmethod
    def is_prepared(cls, keys: TTSKeys) -> bool:
        return keys.symbols.file.exists() and keys.speakers.file.exists() and labels.label_facts(keys) is not None

    @classmethod
    def label(cls, keys: TTSKeys, manifests: Mapping[str, Manifest], bundles: Bundles) -> None:
        labels.make(keys, manifests, bundles)

    @classmethod
    def tokenizer(cls, keys: TTSKeys) -> Symbols:
        """Return the symbols; raises unless the text encoder has a row for each of them, and for each speaker."""
        symbols = keys.symbols.load()
        tables = keys.text_encoder
        for name, known, size in (("symbols", len(symbols), tables.symbols),
                                  ("speakers", len(keys.speakers.names), tables.speakers)):
            if known > size:
                raise SbkitError("vocabulary", f"text_encoder has {size} {name}, but the corpus has {known}",
                                 key="text_encoder", hint=f"write {name}: !ref <n_{name}> under text_encoder")
        return symbols

    @classmethod
    def check_parts(cls, keys: TTSKeys, built: Built, findings: Findings) -> bool:
        """Check that the sizes of the parts match."""
        text, frames, codec, head = keys.text_encoder, keys.frame_decoder, keys.decoder, keys.head
        states = "the text encoder's states have {} numbers"
        sizes = [
            Fit("durations", "input_size", keys.durations.input_size, text.size, states),
            Fit("frame_decoder", "input_size", frames.input_size, text.size, states),
            Fit("code_head", "input_size", keys.code_head.input_size, frames.size,
                "the frames' states have {} numbers"),
            Fit("decoder", "input_size", codec.input_size, keys.quantiser.size,
                "the quantiser gives {} numbers a frame"),
            Fit("head", "input_size", head.input_size, codec.size, "the decoder's states have {} numbers"),
        ]
        same = keys.code_head.choices == keys.quantiser.choices
        if not same:
            node = built.nodes["code_head"]
            findings.error("shape-mismatch", node.place_of("quantiser"), node.key_of("quantiser"),
                           "it is not the recipe's quantiser, so its codes differ",
                           "write quantiser: !ref <quantiser> under code_head")
        return all_fit(sizes, built, findings) and same

    @classmethod
    def check_start(cls, trace: Trace, findings: Findings) -> Section | None:
        if trace.keys is None:
            return None
        keys = trace.keys
        wrong = keys.wrong_bundles()
        for problem in wrong:
            key, message, hint, code = problem
            findings.error(code, trace.built.nodes[key].place, key, message, hint)
        return super().check_start(trace, findings) if not wrong else None

    @classmethod
    def check_manifest(cls, keys: TTSKeys, split: str, manifest: Manifest) -> None:
        if unknown := sorted(keys.symbols.unknown(manifest.texts)):
            logger.warning("The voice has not learnt %d characters of these texts, and leaves them out: %s",
                           len(unknown), ", ".join(map(repr, unknown[:_NAMED])))

    labels_per_second = 15.0

    # ------------------------------------------------------------ training

    @functools.cached_property
    def labels(self) -> VoiceLabels:
        """The labels of the run's corpus, read when they are first needed."""
        return labels.read(self.keys)

    def compute_forward(self, batch: Batch, stage: Stage) -> VoiceOutput:
        """Compute frame states from texts with the recordings' durations; in a test, also synthesise the texts."""
        text, lengths = batch.tokens, batch.token_lengths
        labels_of_rows = self._labels_of(batch, stage)
        speaker = self._speakers_of(batch, labels_of_rows)
        frames = batch.signals.shape[1] // self.voice.stride + 1
        targets = labels.targets(labels_of_rows, text.shape[1], frames, self.keys.quantiser, text.device)
        if not any(batch.texts):  # dummy batches get made-up labels
            targets = targets._replace(known=torch.ones_like(targets.known))

        states, durations = self.voice.teacher_forced(text, lengths, speaker, targets.frames, targets.chosen.shape[1])
        if stage != Stage.TEST:
            return VoiceOutput(states, durations, targets)
        with self.speech_test.timed(text.device):
            sound, samples, _ = self.voice(text, lengths, speaker, torch.ones(len(text), device=text.device))
        return VoiceOutput(states, durations, targets, sound, samples)

    def _labels_of(self, batch: Batch, stage: Stage) -> list[Label | None]:
        """Look up the labels of each utterance of a batch, in the splits that the stage may read; None if it has none.
        """
        found: list[Label | None] = []
        for name, words in zip(batch.ids, batch.texts, strict=True):
            in_splits = (self.labels.get(split, name, words) for split in _SPLITS[stage])
            found.append(next((label for label in in_splits if label is not None), None))
        return found

    def _speakers_of(self, batch: Batch, labels_of_rows: Sequence[Label | None]) -> Tensor:
        """Return the number [B] of each utterance's speaker; the first one's, with a warning, if it is unknown."""
        speakers = self.keys.speakers
        if not self._warned and speakers.several and len(speakers.names) > 1:
            nameless = [name for name, words, label in zip(batch.ids, batch.texts, labels_of_rows, strict=True)
                        if words and label is None]
            if nameless:
                self._warned = True
                logger.warning("%s has no labels, so its speaker is unknown: it and other such clips are spoken "
                               "with the first voice, %s", nameless[0], speakers.names[0])
        numbers = [0 if label is None else speakers.number(label.speaker) for label in labels_of_rows]
        return torch.tensor(numbers).to(batch.tokens.device, non_blocking=True)

    def compute_objectives(self, outputs: VoiceOutput, batch: Batch, stage: Stage) -> Loss:
        """Compute the loss, a sum over frames, and their number."""
        targets = outputs.targets
        cross_entropy, right_choices = self.keys.code_head.loss(outputs.states, targets.chosen)  # [B, T]
        known = targets.known[:, None] * lengths_to_mask(targets.frames.sum(1), cross_entropy.shape[1])
        codes = (cross_entropy * known).sum()
        count = known.sum()

        symbol_counts = (batch.token_lengths + 2) * targets.known  # with those at the begin and the end
        symbols = symbol_counts.sum()
        durations = voice.duration_loss(outputs.durations, targets.frames, symbol_counts).sum()
        total = codes + self.keys.duration_weight * durations
        if stage != Stage.TRAIN and batch.weight:
            self.rows += self._rows(outputs, batch, (right_choices * known).sum(1), symbol_counts, stage)
        return Loss(total, count, {"codes": (codes, count), "durations": (durations, symbols)})

    def _rows(self, outputs: VoiceOutput, batch: Batch, right: Tensor, symbol_counts: Tensor,
              stage: Stage) -> list[SpokenRow]:
        """Make the row of each utterance of a batch.

        right : [B] the share of right choices, a sum over frames
        symbol_counts : [B], 0 for an utterance without labels
        """
        rate = self.keys.sample_rate
        targets = outputs.targets
        predicted_frames = outputs.durations.clamp(0, voice.MAX_LOG_FRAMES).exp() - 1
        errors = (predicted_frames - targets.frames).abs()
        inside = lengths_to_mask(symbol_counts, errors.shape[1])
        mean_errors = (errors * inside).sum(1) / symbol_counts.clamp(min=1)
        error_seconds = mean_errors * self.voice.stride / rate
        frames = targets.frames.sum(1) * targets.known
        rows = [SpokenRow(*values) for values in zip(
            batch.ids, batch.texts, frames.tolist(), right.tolist(), error_seconds.tolist(), strict=True)]
        if stage != Stage.TEST:
            return rows

        assert outputs.sound is not None and outputs.samples is not None, "a test speaks"
        recordings = unpadded(batch.signals, batch.signal_lengths)
        spoken = unpadded(outputs.sound, outputs.samples)
        heard_rows = self.speech_test.complete(rows, recordings, spoken)
        return [row._replace(spoken=len(sound) / rate) for row, sound in zip(heard_rows, spoken, strict=True)]

    def stats(self, rows: Sequence[SpokenRow]) -> dict[str, float]:
        """Compute the share of right choices, and the error of durations."""
        return measures(rows)

    def results(self, rows: Sequence[SpokenRow], loss: float, unread: Mapping[str, str]) -> VoiceResults:
        return VoiceResults.of(drop_other_sounds(rows), loss, unread, self.keys.sample_rate)

    # ------------------------------------------------------------ export

    def exported(self, run: Path) -> ExportedVoice:
        from sbkit.tasks.tts.exported import ExportedVoice

        return ExportedVoice.of(self.voice, self.keys, self.speech_test.transcribe)
