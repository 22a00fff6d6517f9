"""Keys that the CTC task reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from sbkit.errors import SbkitError
from sbkit.recipe.keys import Problem, key
from sbkit.system.schema import NOT_NEGATIVE, SHARE, Number
from sbkit.tasks.recognise.keys import EncoderKeys

if TYPE_CHECKING:
    from torch import nn


@dataclass(kw_only=True)
class CTCKeys(EncoderKeys):
    """Keys of the heads and of the loss."""

    ctc_lin: nn.Module = key("the CTC head, encoder states to scores [B, T, V]")
    seq_lin: Any = key("the attention decoder's head, for joint training", None)  # a module; null is never called
    ctc_weight: float = key("CTC's share of the loss; below 1 the attention decoder trains too", 1.0,
                            Number(0, 1, above=True))
    label_smoothing: float = key("label smoothing of the attention decoder's cross-entropy", 0.0, SHARE)
    intermediate_ctc: float = key("the share of the CTC loss computed from inner layers of the encoder", 0.0, SHARE)
    intermediate_layers: list[int] | None = key("the inner layers for it, counted from 1; null: the middle one", None)
    consistency: float = key("CR-CTC: the weight of the divergence between two augmented views of an utterance", 0.0,
                             NOT_NEGATIVE)
    consistency_warmup: float = key("the share of the run over which that weight rises", 0.1, SHARE)

    @property
    def ends(self) -> tuple[int, int]:
        """The ids that begin and end a sentence; raises if the recipe has none, since joint training needs them."""
        if self.bos_index is None or self.eos_index is None:
            raise SbkitError("missing-key", "the attention decoder needs bos_index and eos_index", key="bos_index",
                             hint="set both to ids of the tokenizer that are no text, such as 1 and 2")
        return self.bos_index, self.eos_index

    def clashes(self) -> Iterator[Problem]:
        from sbkit.decode.transducer_beam import TransducerBeam

        yield from super().clashes()
        if isinstance(self.decoder, TransducerBeam):
            yield Problem("decoder", "it is a TransducerBeam, which searches the outputs of a transducer, but this is "
                          "CTC", "write !new:sbkit.decode.beam.BeamSearch, or decoder: null")
        if self.chunks is not None and self.ctc_weight < 1:
            yield Problem("ctc_weight", f"it is {self.ctc_weight:g}, so an attention decoder trains, which needs whole "
                          "utterances, but chunks are for live streams",
                          "write ctc_weight: 1.0, or leave chunks out")
