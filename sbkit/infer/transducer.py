"""Decodes what a transducer's model gives, with the two further graphs of its bundle; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.decode.spans import TokenSpans
from sbkit.decode.transducer import GraphJoint, Greedy, Joint, TransducerStream
from sbkit.errors import SbkitError
from sbkit.export.layout import TransducerConfig
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer import formats
from sbkit.infer.decoding import DecodedTokens
from sbkit.infer.device import Device
from sbkit.infer.onnx_session import Interface, open_session

#: The number of rows in an example; a graph takes any number.
_ROWS = 2


def joint(folder: Path, config: TransducerConfig) -> GraphJoint:
    """Open the prediction and the joint network of a bundle, on the CPU: they take one frame after the other."""
    tokens, states = np.zeros((_ROWS, config.context), np.int64), np.zeros((_ROWS, config.joint_size), np.float32)
    decoder = _opened(folder / config.decoder, config, Interface({"tokens": tokens}, ["predicted"]), config.joint_size)
    joiner = _opened(folder / config.joiner, config, Interface({"encoded": states, "predicted": states}, ["scores"]),
                     config.vocabulary)
    return GraphJoint(decoder, joiner, config.context, config.blank_id)


def _opened(path: Path, config: TransducerConfig, interface: Interface, width: int) -> Callable[..., np.ndarray]:
    formats.check_file(path, config)
    session = open_session(path, Device(), 1, interface, spin=False).session

    def run(*inputs: np.ndarray) -> np.ndarray:
        found: np.ndarray = session.run(None, dict(zip(interface.inputs, inputs, strict=True)))[0]
        return found

    if (found := run(*interface.inputs.values())).shape != (_ROWS, width):
        raise SbkitError(f"{path} gives {list(found.shape)} for {_ROWS} rows, but must give {[_ROWS, width]}",
                         hint="do its files come from the same export?")
    return run


Stretch = tuple[TokenSpans, int]
"""The tokens of a stretch, and the number of its frames."""


class GreedyTransducer:
    """Greedy decoding of a transducer; each stretch begins like an utterance."""

    at_once = 1
    joins = False

    def __init__(self, vocabulary: Vocabulary, joint: Joint):
        self._spelling, self._joint = vocabulary.spelling, joint

    def keep(self, states: np.ndarray) -> Stretch:
        return Greedy(self._joint).feed([states])[0], len(states)

    def tokens(self, recordings: Sequence[Sequence[Stretch]]) -> list[list[DecodedTokens]]:
        found = []
        for stretches in recordings:
            begins = accumulate((frames for _, frames in stretches), initial=0)
            found.append([DecodedTokens(begin, spans) for begin, (spans, _) in zip(begins, stretches, strict=False)])
        return found

    def frames(self, kept: Stretch) -> int:
        return kept[1]

    def after(self, stretches: Sequence[Stretch], frame: int) -> list[Any]:
        ends = accumulate(map(self.frames, stretches))
        return [each for each, end in zip(stretches, ends, strict=True) if end > frame]

    def stream(self) -> TransducerStream:
        return TransducerStream(self._spelling, self._joint)


def decoder(vocabulary: Vocabulary, search: Mapping[str, Any] | None) -> GreedyTransducer:
    """Make the decoder of a bundle."""
    config = vocabulary.config
    assert isinstance(config, TransducerConfig) and vocabulary.folder is not None, "of a bundle of this kind"
    if search:
        raise SbkitError(f"a transducer is decoded greedily, so it takes no {', '.join(sorted(search))}",
                         hint="leave it out, or use a CTC model for a search with a language model or hot words")
    return GreedyTransducer(vocabulary, joint(vocabulary.folder, config))
