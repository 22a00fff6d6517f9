"""The recipe keys that every ``Brain`` reads, besides SpeechBrain's run options."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbkit.errors import SbkitError
from sbkit.recipe.keys import Keys, Problem, key
from sbkit.recipe.patterns import FACTORS, FREEZE
from sbkit.system.schema import NOT_NEGATIVE, Number
from sbkit.train.monitor.loggers import NAMES, class_of


@dataclass(kw_only=True)
class TrainKeys(Keys):
    """Keys of every recipe, including those of your own scripts."""

    output_folder: str | None = key("where checkpoints, metrics.jsonl and the report go", None)
    seed: int | None = key("the random seed of training", 0, Number(whole=True))
    accelerate: bool = key("replace SpeechBrain's layers with faster equivalents with the same outputs", True)
    tf32: bool = key("use TF32 on a GPU, as SpeechBrain does; features and spectra stay exact unless compiled", True)
    graphs: bool | None = key("capture steps on a GPU as CUDA graphs, which launch their kernels at once, if a first "
                              "replay computes what the step did: true, also for a class of your own; false; null: if "
                              "the class says that it can be", None)
    ema: Any = key(  # an EMA, whose module imports this one
        "a sbkit.train.averaging.EMA: a moving average of the weights that is validated and tested", None)
    fsdp: bool | str | type | Sequence[str | type] | None = key(
        "shard weights and optimizer over the devices: true, or the layers to gather as a unit, "
        "by class or path (see sbkit.train.distributed.sharding)", None)
    activation_checkpointing: str | type | Sequence[str | type] | None = key(
        "layers whose activations are recomputed in backward, to save memory", None)
    freeze: Mapping[str, Any] | None = key("parts that don't train, either at all or for a number of steps, such as "
                                           "`{CNN: true, Transformer.encoder: 500}`; the last match counts", None,
                                           FREEZE)
    learning_rates: Mapping[str, Any] | None = key("factors of the learning rate by part, such as "
                                                   "`{ctc_lin: 10}`; the last match counts", None, FACTORS)
    layer_decay: float = key("factor of the learning rate from each encoder layer to the one below", 1.0,
                             Number(0, 1, above=True))
    log_interval: float = key("seconds between lines of metrics.jsonl", 10.0, NOT_NEGATIVE)
    loggers: Sequence[str] = key("tools that the same numbers are sent to, such as `[tensorboard, wandb]`", (),
                                 NAMES)

    def missing(self) -> Iterator[Problem]:
        yield from super().missing()
        for name in self.loggers:
            try:
                class_of(name)
            except SbkitError as error:
                yield Problem("loggers", error.message.removeprefix(f"{error.key}: "), error.hint or "")

    @property
    def moving_average(self) -> Any:  # an EMA, as above
        """The moving average of the weights; None if the recipe has none, or one that is switched off."""
        if self.ema is not None and not hasattr(self.ema, "decay"):
            raise SbkitError("bad-value",
                             f"ema is {self.ema!r}, not an EMA",
                             hint="write !new:sbkit.train.averaging.EMA", key="ema")
        return self.ema if self.ema is not None and self.ema.decay > 0 else None


@dataclass(kw_only=True)
class ScriptKeys(TrainKeys):
    """Keys of a Brain in a script without a task; a task always evaluates in shares."""

    share_validation: bool = key("divide ordinary datasets among ranks in validation and test", False)
