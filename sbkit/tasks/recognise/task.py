"""The base class of recognisers with features, front end and encoder, such as CTC and transducers."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from speechbrain.core import Stage
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch import Tensor, nn
from torch._subclasses.fake_tensor import is_fake

from sbkit.data.batch import Batch
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.nn.guard import guard_indices
from sbkit.nn.streaming import requirements
from sbkit.recipe.report import Section
from sbkit.recipe.source import Findings, Node
from sbkit.recipe.trace import Trace
from sbkit.runs import initial
from sbkit.runs.initial.source import TokenTables
from sbkit.tasks import feature_statistics
from sbkit.tasks.asr import ASRResults, TranscribedUtterance
from sbkit.tasks.recognise.duration_limit import refuse_longer
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.recognise.labels import check_labels, check_sizes, token_tables
from sbkit.tasks.recognise.live import LiveResults, LiveTest
from sbkit.tasks.recognise.recognizer import GUARD_FRAMES, Recognizer
from sbkit.tasks.recognise.search import SearchingTask
from sbkit.tasks.recognise.spelling import frame_seconds
from sbkit.tasks.task import OwnKeys


class RecognitionTask(SearchingTask):
    """A task with features, front end and encoder; a derived one has the head and the loss.

    ``chunks``, a ``sbkit.nn.chunks.Chunks``, trains a model that can run live: in most steps a frame sees its chunk and
    a limited left context. Tests use whole utterances unless an evaluation asks for chunks.
    """

    heads: ClassVar[tuple[str, ...]]
    """The keys of the heads whose outputs are scores of tokens."""
    scores_tokens: ClassVar[bool] = True
    """Whether the outputs of ``head`` are scores of tokens, frame by frame."""
    keys: EncoderKeys

    def __init__(self, *args: Any, **kwargs: Any):
        super().__init__(*args, **kwargs)
        if feature_statistics.is_global(norm := self.keys.normalize):
            feature_statistics.load(norm, self.keys.output_folder)
            self.save_too("normalize", norm)
        # Built now, since it probes the layers, which must not happen while a failing step is diagnosed.
        self.recognizer = Recognizer.of(self.keys, self.head(), self.scores_tokens)
        if self.keys.chunks is not None and self.keys.chunks.ahead:
            requirements.check(requirements.for_step(self.recognizer))
        self.decoder = self.keys.decoder
        self.test_context: DynChunkTrainConfig | None = None
        """The context of frames in a test; None: the whole utterance."""
        self.live: LiveTest | None = None

    @abstractmethod
    def head(self) -> nn.Module:
        """Return the layer after the encoder, frame by frame."""

    # ------------------------------------------------------------ before there is a model

    @classmethod
    def prepare(cls, keys: EncoderKeys, manifests: Mapping[str, Manifest], given: Mapping[str, Any]) -> dict[str, Any]:
        """Train the tokenizer, and compute the statistics of a global normalisation unless checkpoints hold them."""
        refuse_longer(keys, manifests)
        follows = super().prepare(keys, manifests, given)
        norm, features = keys.normalize, keys.compute_features
        if feature_statistics.is_global(norm) and features is not None and initial.fresh(keys):
            settings = feature_statistics.FeatureSettings(features, keys.hop_samples, keys.sample_rate)
            feature_statistics.prepare(norm, settings, manifests["train"], keys.output_folder)
        return follows

    @classmethod
    def check_manifest(cls, keys: EncoderKeys, split: str, manifest: Manifest) -> None:
        refuse_longer(keys, {split: manifest})
        super().check_manifest(keys, split, manifest)

    @classmethod
    def is_prepared(cls, keys: EncoderKeys) -> bool:
        norm = keys.normalize
        known = not feature_statistics.is_global(norm) or feature_statistics.path_of(norm, keys.output_folder).exists()
        return known and super().is_prepared(keys)

    def stand_in(self, utterances: int, seconds: float, *, noise: bool = False) -> Batch:
        """Make a batch, for which a global normalisation needs no statistics."""
        if feature_statistics.is_global(self.keys.normalize):
            feature_statistics.allow_missing(self.keys.normalize)
        return super().stand_in(utterances, seconds, noise=noise)

    # ------------------------------------------------------------ the check

    @classmethod
    def check_outputs(cls, trace: Trace, findings: Findings) -> None:
        check_sizes(trace, findings, cls.heads)

    @classmethod
    def check_labels(cls, keys: OwnKeys, manifests: Mapping[str, Manifest], findings: Findings,
                     nodes: Mapping[str, Node]) -> Section:
        keys.tokenizer.load()
        return check_labels(keys, Recognizer.of(keys), manifests, findings, nodes)

    def describe(self) -> tuple[list[str], dict[str, Any]]:
        """Describe the lengths of a feature frame, of an encoder frame and of a chunk."""
        model = self.recognizer
        hop = 1000 * model.hop_samples / self.keys.sample_rate
        frame = hop * model.subsampling
        features = "" if model.compute_features is None else f"features every {hop:g} ms, subsampled by " \
            f"{model.subsampling}: "
        lines = [f"{features}an encoder frame every {frame:g} ms, {1000 / frame:g} a second"]
        if model.frontend is not None:
            lines.append(f"the front end gets {GUARD_FRAMES} more feature frames of zeros, whose output is cut off")
        if model.chunks is not None:
            sizes, left = (", ".join(f"{frame * each:g}" for each in several)
                           for several in (model.chunks.sizes, model.chunks.left))
            again = f"; its last {frame * model.chunks.ahead:g} ms are lookahead, and computed again with the next" \
                if model.chunks.ahead else ""
            lines.append(f"trained to run live in chunks of {sizes} ms, each with {left} ms of left context{again}")
        return lines, {"subsampling": model.subsampling, "frames_per_second": 1000 / frame}

    def token_tables(self) -> TokenTables | None:
        return token_tables(self.keys, [getattr(self.keys, head) for head in self.heads])

    def safe_tokens(self, batch: Batch) -> Tensor:
        """Return the tokens [B, U], safe to look up in an embedding; tokens outside the vocabulary are reported."""
        return guard_indices(batch.tokens, self.keys.output_neurons, name="tokens", ids=batch.ids,
                             lengths=batch.token_lengths, forbidden=(self.keys.blank_index,))

    # ------------------------------------------------------------ chunks

    def visible_context(self, stage: Stage, batch: Batch) -> DynChunkTrainConfig | None:
        """Return the context of frames in a stage: the same for all micro-batches and ranks of an optimizer step.

        On fake tensors it is the one that takes the most memory.
        """
        if self.keys.chunks is None:
            return None
        if stage == Stage.TRAIN and is_fake(batch.signals):
            return self.keys.chunks.costliest()
        if stage == Stage.TRAIN:
            return self.keys.chunks.at(int(self.keys.seed or 0), self.optimizer_step)
        return self.keys.chunks.validation() if stage == Stage.VALID else self.test_context

    def graph_key(self) -> tuple[int, int] | None:
        """Return the context of frames in the next step."""
        if self.keys.chunks is None:
            return None
        context = self.keys.chunks.at(int(self.keys.seed or 0), self.optimizer_step)
        return None if context is None else (context.chunk_size, context.left_context_size)

    def take_chunks(self, chunk: Sequence[int | None]) -> None:
        if self.decoder is not None and self.decoder.nbest > 1 and chunk[0] is not None:
            raise SbkitError("--nbest lists the transcripts of the first size of --chunk, but a stream has only one",
                             hint="name whole first, as in --chunk whole,320, or leave out --nbest")
        self.live = LiveTest(self, chunk)
        self.test_context = self.live.configs[chunk[0]]

    def results(self, rows: Sequence[TranscribedUtterance], loss: float, unread: Mapping[str, str]) -> ASRResults:
        found = super().results(rows, loss, unread)
        if self.live is not None:
            return LiveResults(**vars(found), chunk=self.live.chunk)
        if (chunks := self.keys.chunks) is not None and chunks.validate is not None:
            size = 1000 * frame_seconds(self.recognizer, self.keys) * chunks.validate
            found.remark = (f"the test used whole utterances, but validations chunks of {size:.0f} ms; "
                            f"sbkit evaluate {self.keys.folder} --chunk {size:.0f},whole compares both")
        return found
