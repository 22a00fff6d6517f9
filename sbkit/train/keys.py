"""What a ``Brain`` reads of a recipe, beside SpeechBrain's run options."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sbkit.recipe.choices import Range
from sbkit.recipe.keys import Keys, key


@dataclass(kw_only=True)
class TrainKeys(Keys):
    """Keys of any recipe, a script of one's own too."""

    output_folder: str | None = key("where checkpoints, metrics.jsonl and the report go", None)
    seed: int | None = key("what random numbers of training are drawn from", 0, Range(whole=True))
    accelerate: bool = key("run SpeechBrain's layers by faster equivalents with the same outputs", True)
    ema: Any = key("a sbkit.train.averaging.EMA: a moving average of the weights that is validated and tested", None)
    fsdp: Any = key("share weights and optimizer out over the devices: true, or what sbkit.train.sharding says", None)
    activation_checkpointing: Any = key("compute activations again in backward, to hold less memory", None)
    share_validation: bool = key("share ordinary datasets out over ranks in validation and test", False)
    log_interval: float = key("seconds between lines of metrics.jsonl", 10.0, Range(0))
    tensorboard: bool = key("write the same numbers for TensorBoard", False)
