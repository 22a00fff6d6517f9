"""Keys that the transducer task reads."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from sbkit.recipe.keys import Problem, key
from sbkit.system.schema import Number
from sbkit.tasks.recognise.keys import EncoderKeys

if TYPE_CHECKING:
    from torch import nn

    from sbkit.nn.transducer import TransducerHead


@dataclass(kw_only=True)
class TransducerKeys(EncoderKeys):
    """Keys of the prediction and joint network, and of the auxiliary CTC loss."""

    transducer: TransducerHead = key("prediction and joint network, a sbkit.nn.transducer.TransducerHead")
    ctc_lin: nn.Module | None = key("a CTC head, encoder states to scores [B, T, V], for an auxiliary loss", None)
    ctc_weight: float = key("CTC's share of the loss, which makes the encoder learn sooner; 0: none", 0.0,
                            Number(0, 1))

    def clashes(self) -> Iterator[Problem]:
        from sbkit.decode.transducer_beam import TransducerBeam

        yield from super().clashes()
        if (self.ctc_weight > 0) != (self.ctc_lin is not None):
            yield Problem("ctc_weight", f"it is {self.ctc_weight:g}, but ctc_lin is "
                          f"{'missing' if self.ctc_lin is None else 'set, which nothing would train'}",
                          "write ctc_weight: 0.3 and a ctc_lin, or ctc_weight: 0 and ctc_lin: null")
        if self.ctc_weight == 1:
            yield Problem("ctc_weight", "it is 1, so nothing trains the transducer, which outputs the transcripts",
                          "write 0.3, or train hparams/streaming.yaml")
        if self.decoder is not None and not isinstance(self.decoder, TransducerBeam):
            yield Problem("decoder", f"it is a {type(self.decoder).__name__}, which can't search the outputs of a "
                          "transducer", "write !new:sbkit.decode.transducer_beam.TransducerBeam, or decoder: null")
