"""The recipe keys that every ``Brain`` reads, besides SpeechBrain's run options."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sbkit.recipe.choices import Range, Texts
from sbkit.recipe.keys import Keys, key
from sbkit.recipe.parts import FACTORS, FREEZE
from sbkit.train.monitor.loggers import KINDS


@dataclass(kw_only=True)
class TrainKeys(Keys):
    """Keys of every recipe, including those of your own scripts."""

    output_folder: str | None = key("where checkpoints, metrics.jsonl and the report go", None)
    seed: int | None = key("what random numbers of training are drawn from", 0, Range(whole=True))
    accelerate: bool = key("run SpeechBrain's layers by faster equivalents with the same outputs", True)
    tf32: bool = key("let a GPU round the inputs of what is computed in fp32 to 10 bits, as SpeechBrain does, which is "
                     "faster; features and spectra stay exact, unless they are compiled", True)
    ema: Any = key(  # an EMA, whose module imports this one
        "a sbkit.train.averaging.EMA: a moving average of the weights that is validated and tested", None)
    fsdp: bool | str | type | Sequence[str | type] | None = key(
        "share weights and optimizer out over the devices: true, or the layers to gather as one piece, "
        "by class or path (see sbkit.train.distributed.sharding)", None)
    activation_checkpointing: str | type | Sequence[str | type] | None = key(
        "compute activations again in backward, to hold less memory", None)
    freeze: Mapping[str, Any] | None = key("parts that don't train: never, or not in the first so many steps, such as "
                                           "`{CNN: true, Transformer.encoder: 500}`; the last that fits counts", None,
                                           FREEZE)
    learning_rates: Mapping[str, Any] | None = key("what the learning rate of parts is multiplied by, such as "
                                                   "`{ctc_lin: 10}`; the last that fits counts", None, FACTORS)
    layer_decay: float = key("each layer below the top one of the encoder trains at so many times the rate of the one "
                             "above", 1.0, Range(0, 1, above=True))
    log_interval: float = key("seconds between lines of metrics.jsonl", 10.0, Range(0))
    loggers: Sequence[str] = key("tools that get the same numbers, such as `[tensorboard, wandb]`", (),
                                 Texts("tools", tuple(KINDS)))
    tensorboard: bool = key("the former name of `loggers: [tensorboard]`", False)

    @property
    def average(self) -> Any:  # an EMA, as above
        """The moving average of the weights; None if the recipe has none, or one that is switched off."""
        return self.ema if getattr(self.ema, "decay", 1) > 0 else None


@dataclass(kw_only=True)
class ScriptKeys(TrainKeys):
    """Keys of a Brain in a script of one's own; a task always evaluates in shares."""

    share_validation: bool = key("share ordinary datasets out over ranks in validation and test", False)
