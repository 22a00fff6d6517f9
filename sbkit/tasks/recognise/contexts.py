"""How far each frame sees in a model that was trained in chunks."""

from __future__ import annotations

from speechbrain.core import Stage
from speechbrain.utils.dynamic_chunk_training import DynChunkTrainConfig
from torch._subclasses.fake_tensor import is_fake

from sbkit.data.batch import Batch
from sbkit.nn.streaming import requirements
from sbkit.tasks.recognise.acoustic_model import AcousticModel
from sbkit.tasks.recognise.keys import EncoderKeys


class FrameContexts:
    """The context of frames in each training step, in validations and in tests, by the recipe's ``chunks``.

    ``chunks``, a ``sbkit.nn.chunks.Chunks``, trains a model that can run live: in most steps a frame sees its chunk and
    a limited left context. Tests use whole utterances unless an evaluation asks for chunks.
    """

    def __init__(self, keys: EncoderKeys, acoustic_model: AcousticModel):
        self._chunks = keys.chunks
        self._seed = int(keys.seed or 0)
        if self._chunks is not None and self._chunks.ahead:
            requirements.check(requirements.for_step(acoustic_model))

    def at_step(self, step: int) -> DynChunkTrainConfig | None:
        """Return the context in a training step: the same for all its micro-batches, on all ranks."""
        return None if self._chunks is None else self._chunks.at(self._seed, step)

    def visible(self, batch: Batch, stage: Stage, step: int,
                in_test: DynChunkTrainConfig | None) -> DynChunkTrainConfig | None:
        """Return the context of a batch's frames; None: each sees its whole utterance.

        step : the updates so far
        in_test : the context that an evaluation asks for
        """
        if self._chunks is None:
            return None
        if stage == Stage.TRAIN and is_fake(batch.signals):
            return self._chunks.costliest()  # what takes the most memory
        if stage == Stage.TRAIN:
            return self.at_step(step)
        return self._chunks.validation() if stage == Stage.VALID else in_test

    def graph_key(self, step: int) -> tuple[int, int] | None:
        """Return the sizes of the context after so many updates, by which kernels differ."""
        context = self.at_step(step)
        return None if context is None else (context.chunk_size, context.left_context_size)
