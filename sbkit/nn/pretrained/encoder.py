"""A pretrained encoder as a recipe names it, the head on top, and what brings its weights."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from speechbrain.utils.distributed import if_main_process
from torch import Tensor, nn
from torch.nn import functional

from sbkit.errors import SbkitError
from sbkit.nn.lengths import N, lengths_to_mask
from sbkit.nn.pretrained import families, source, tensors
from sbkit.nn.pretrained.options import Options
from sbkit.nn.pretrained.source import Settings

logger = logging.getLogger(__name__)


class Encoder(nn.Module):
    """Waveforms [B, S] and sample counts [B] to states [B, T, D], each utterance as if it were alone.

    Built by what its config says, with weights as they are drawn: :class:`Weights`, or ``load``, brings those of the
    source. A run keeps the config, so that its checkpoints can be used where the source is not.

    Arguments
    ---------
    source : a folder that transformers' ``save_pretrained`` has written, or a repository of the Hugging Face Hub,
        ``owner/name`` or ``owner/name@revision``, fetched once
    folder : where a run keeps the config
    freeze_front : leave the convolutions in front as they are
    layers : take so many of the lowest layers; None: all
    dropout : of all kinds within; None: as its config says
    mask_time_prob, mask_time_length : this share of the frames is masked in training, in spans of this length; None: as
        its config says
    mask_feature_prob, mask_feature_length : the same of the features
    whole_window : give Whisper's encoder 30 seconds each time, silence behind the utterance, as in its pretraining
    """

    sample_rate = 16_000
    """Samples a second of the waveforms that all these families were pretrained on."""

    def __init__(self, source: str, folder: str | Path | None = None, *, freeze_front: bool = True,
                 layers: int | None = None, dropout: float | None = None, mask_time_prob: float | None = None,
                 mask_time_length: int | None = None, mask_feature_prob: float | None = None,
                 mask_feature_length: int | None = None, whole_window: bool = False):
        super().__init__()
        if not isinstance(source, str) or not source:
            raise SbkitError("nothing says which pretrained encoder is to be taken",
                             hint="give its folder, or its name on the Hugging Face Hub: --encoder_source owner/name")
        kept = Settings.kept(source, folder)
        self.settings, self.folder = kept or Settings.of(source), folder
        self.network: Any = families.build(self.settings, Options(
            freeze_front, layers, dropout, mask_time_prob, mask_time_length, mask_feature_prob, mask_feature_length,
            whole_window))
        self._kept_frozen = {name for name, value in self.network.named_parameters() if not value.requires_grad}
        if kept is None and _is_folder(source):  # at hand, so what doesn't fit is told before anything costs time
            self.look()

    @property
    def source(self) -> str:
        """Where its weights come from."""
        return self.settings.source

    @property
    def width(self) -> int:
        """Values of a state."""
        return self.network.width

    @property
    def makes_loudness_equal(self) -> bool:
        """Whether it is the same to the layers how loud a recording is."""
        return getattr(self.network, "normalizes", False)

    @property
    def kept_frozen(self) -> list[nn.Parameter]:
        """What never trains, whatever a recipe's ``freeze`` thaws."""
        return [parameter for name, parameter in self.network.named_parameters() if name in self._kept_frozen]

    def frames(self, samples: N) -> N:
        """States of so many samples."""
        return self.network.frames(samples)

    def forward(self, signals: Tensor, samples: Tensor) -> Tensor:
        """[B, S], [B] -> [B, T, D]."""
        inside = lengths_to_mask(samples, signals.shape[1])
        return self.network(signals.masked_fill(~inside, 0.0), samples)

    def look(self) -> tuple[tensors.TensorFiles, list[str]]:
        """The source's tensors, if the encoder can do with them, and what is worth telling of them."""
        there = tensors.TensorFiles(source.weights(self.source), self.network.prefixes)
        return there, tensors.check(self.network, there, self.source)

    def load(self) -> None:
        """Take the source's weights."""
        there, told = self.look()
        tensors.fill(self.network, there)
        if if_main_process():
            logger.info("%s: %s", self.source, "; ".join(told))

    def keep(self) -> None:
        """Write the config down for who has the run and not the source; refuse one that is another by now."""
        if Settings.of(self.source) != self.settings:
            raise SbkitError(f"the config of {self.source} is another than when this run began",
                             hint="name another output_folder, or bring back what it was")
        if self.folder is not None:
            self.settings.keep(self.folder)


class Head(nn.Linear):
    """Encoder states [B, T, D] to scores [B, T, V].

    Arguments
    ---------
    encoder : whose states it takes
    n_neurons : how many scores
    dropout : before it, in training
    """

    def __init__(self, encoder: Encoder, n_neurons: int, dropout: float = 0.0):
        super().__init__(encoder.width, n_neurons)
        self.dropout = dropout

    def forward(self, states: Tensor) -> Tensor:
        """[B, T, D] -> [B, T, V]."""
        return super().forward(functional.dropout(states, self.dropout, self.training))


class Weights:
    """What a recipe's ``pretrainer`` is for an encoder: fetched by one rank, loaded before training begins.

    >>> Weights(encoder)  # doctest: +SKIP
    """

    collect_in = None

    def __init__(self, encoder: Encoder):
        self.loadables = {"encoder": encoder}
        self.paths = {"encoder": Path(encoder.source)}
        self.custom_hooks = {"encoder": _load}

    def is_loadable(self, name: str) -> bool:
        """Whether that is to be loaded."""
        return name in self.loadables

    def collect_files(self) -> dict[str, Any]:
        """Bring all files here, and keep in the run what it is to be built by."""
        encoder = self.loadables["encoder"]
        encoder.keep()
        source.weights(encoder.source)
        return {"encoder": encoder.source}


def _load(encoder: Encoder, path: str) -> None:
    """As SpeechBrain's Pretrainer calls it."""
    encoder.load()


def _is_folder(name: str) -> bool:
    return source.local(name) is not None
