"""Keys of every recipe that ``sbkit train`` runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sbkit.errors import SbkitError
from sbkit.recipe.keys import Problem, key
from sbkit.score.weights import AVERAGE_VALUES, BEST, ChosenWeights, average_of
from sbkit.system.schema import COUNT, HERTZ, NAMES, SIZE
from sbkit.train.keys import TrainKeys

if TYPE_CHECKING:
    from speechbrain.utils.epoch_loop import EpochCounter
    from speechbrain.utils.parameter_transfer import Pretrainer
    from speechbrain.utils.train_logger import TrainLogger
    from torch.optim import Optimizer

    from sbkit.compat.brain import Brain
    from sbkit.data.augment import Augment
    from sbkit.data.corpus import Corpus
    from sbkit.data.manifest import Manifest
    from sbkit.data.plan import Batching
    from sbkit.train.checkpoint.checkpointer import Checkpointer
    from sbkit.train.schedule import Schedule
    from sbkit.train.speechbrain_schedules import SpeechBrainScheduler

#: Types of sbkit.infer, which this package can't import.
Bundles = Any  # BundleLoader, which opens bundles of other models to label a corpus and to transcribe tests
CodecBundle = Any  # CodecModel
AlignerBundle = Any  # Aligner


@dataclass(kw_only=True)
class TaskKeys(TrainKeys):
    """Keys of every recipe that ``sbkit train`` runs."""

    brain: type[Brain] = key("the task: the class that trains, `!name:sbkit.tasks.ctc.CTC` or one of your own")
    modules: object = key("all modules to train, move to the device and save, by name")
    corpus: Corpus = key("a sbkit.data.corpus.Corpus: where recordings are, and which are kept")
    batching: Batching = key("a sbkit.data.plan.Batching: the sizes of batches and of updates")
    epoch_counter: EpochCounter = key("SpeechBrain's EpochCounter, whose limit is the number of epochs")
    checkpointer: Checkpointer = key("a sbkit.train.checkpoint.Checkpointer: saves what is needed to resume and export")
    opt_class: Callable[..., Optimizer] | None = key("the optimizer, `!name:` with its options", None)
    schedule: Schedule | SpeechBrainScheduler | None = key(
        "a sbkit.train.schedule.Schedule of the learning rate, or one of speechbrain.nnet.schedulers, which is called "
        "after each step, or with the loss after each validation", None)
    pretrainer: Pretrainer | None = key("SpeechBrain's Pretrainer, which fetches and loads existing weights", None)
    init_from: str | None = key("weights to start from, matched by the recipe's names: a run, a checkpoint, a bundle, "
                                "a folder for EncoderASR, a CTC model of transformers, or a .safetensors file", None)
    init_checkpoint: str = key("which checkpoint of that run: best, last, or the name of one", "best")
    init_average: int | str = key("the average of this many of its best checkpoints instead (with last: of the "
                                  "newest)", 1, AVERAGE_VALUES)
    init_leave: Sequence[str] | None = key("parts to reinitialise instead of taking them", None, NAMES)
    train_logger: TrainLogger | None = key("a TrainLog of sbkit or a SpeechBrain logger: a line per epoch", None)
    augment: Augment | None = key("a sbkit.data.augment.Augment of waveforms, in the data workers", None)
    valid_augment: Augment | None = key("the same for validations, such as noise; fixed for each utterance",
                                        None)
    test_augment: Augment | None = key("the same for tests", None)
    number_of_epochs: int | None = key("epochs to train; the limit of epoch_counter must refer to it", None, SIZE)
    num_workers: int = key("number of data workers, of each process that torchrun starts; 0: it reads audio itself", 2,
                           COUNT)
    cpu_ranks: int | None = key("processes that train on a CPU without torchrun; null: what is fastest, which is tried "
                                "before the first step", None, SIZE)
    cpu_threads: int | None = key("threads of each of them; null: likewise", None, SIZE)
    sample_rate: int = key("samples per second; recordings with other rates are resampled",
                           16_000, HERTZ)
    language: str | None = key("the code of the corpus's language, such as en, named in its bundle", None)
    experiment: str | None = key("a name for the experiment, named in its bundle", None)
    keep_checkpoints: int = key("how many of the best checkpoints are kept beside the last", 1, SIZE)
    keep_every: int | None = key("keep the checkpoint of every nth epoch permanently; 0: none", None, COUNT)
    ignore_findings: Sequence[str] | None = key("codes of warnings that `sbkit check` and the check that begins a "
                                                "run leave out; errors can't be left out", None, NAMES)
    average_checkpoints: int | str = key("test the average of this many of the best checkpoints", 1, AVERAGE_VALUES)

    def clashes(self) -> Iterator[Problem]:
        from sbkit.data.mixture import Mixture

        yield from super().clashes()
        there = vars(self)
        if isinstance(there.get("corpus"), Mixture) and getattr(there.get("batching"), "clips_per", None):
            yield Problem("corpus", "a mixture draws steps by its parts, and batching: clips_per by labels",
                          "leave one of them out")

    def rows_of_training(self, train: Manifest) -> Manifest:
        """Return what is trained on: the rows of the corpus, and those that the recipe makes."""
        return train

    @property
    def tested_weights(self) -> ChosenWeights:
        """The weights that the run tests at its end."""
        return ChosenWeights(BEST, average_of(self.average_checkpoints))

    @property
    def source_weights(self) -> ChosenWeights:
        """The weights to take from ``init_from``, if that is a run."""
        return ChosenWeights(self.init_checkpoint, average_of(self.init_average))

    @property
    def folder(self) -> Path:
        """The output folder; raises if the recipe has none."""
        if self.output_folder is None:
            raise SbkitError("missing-key",
                             "the recipe has no output_folder",
                             hint="say where checkpoints and results go",
                             key="output_folder")
        return Path(self.output_folder)
