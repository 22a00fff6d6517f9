"""Decodes what a transducer's model gives, with the two further graphs of its bundle; needs no torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.decode.spans import TokenSpans
from sbkit.decode.transducer import Greedy, TransducerStream
from sbkit.errors import SbkitError
from sbkit.export.layout import TransducerConfig
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer import formats
from sbkit.infer.decoding import DecodedTokens
from sbkit.infer.device import Device
from sbkit.infer.onnx_session import Interface, Session, open_session

#: The number of rows in an example; a graph takes any number.
_ROWS = 2


class OnnxJoint:
    """Prediction and joint network of a bundle, on the CPU: they take one frame after the other.

    Arguments
    ---------
    folder : of the bundle
    """

    def __init__(self, folder: Path, config: TransducerConfig):
        self.context, self.blank = config.context, config.blank_id
        states = np.zeros((_ROWS, config.joint_size), np.float32)
        self._decoder = _opened(folder / config.decoder, config,
                                Interface({"tokens": np.zeros((_ROWS, config.context), np.int64)}, ["predicted"]))
        self._joiner = _opened(folder / config.joiner, config,
                               Interface({"encoded": states, "predicted": states}, ["scores"]))
        for what, found, width in (
                (config.decoder, self.predict(np.zeros((_ROWS, config.context), np.int64)), config.joint_size),
                (config.joiner, self.join(states, states), config.vocabulary)):
            if found.shape != (_ROWS, width):
                raise SbkitError(f"{folder / what} gives {list(found.shape)} for {_ROWS} rows, but must give "
                                 f"{[_ROWS, width]}", hint="do its files come from the same export?")

    def predict(self, tokens: np.ndarray) -> np.ndarray:
        """Map the last tokens [N, context] to states [N, J]."""
        found: np.ndarray = self._decoder.run(None, {"tokens": tokens})[0]
        return found

    def join(self, encoded: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Map states [N, J] of both to log-probabilities [N, V]."""
        scores = self._joiner.run(None, {"encoded": encoded, "predicted": predicted})[0]
        scores = scores - scores.max(-1, keepdims=True)
        found: np.ndarray = scores - np.log(np.exp(scores).sum(-1, keepdims=True))
        return found


def _opened(path: Path, config: TransducerConfig, interface: Interface) -> Session:
    formats.check_file(path, config)
    return open_session(path, Device(), 1, interface, spin=False).session


Stretch = tuple[TokenSpans, int]
"""The tokens of a stretch, and the number of its frames."""


class GreedyTransducer:
    """Greedy decoding of a transducer; each stretch begins like an utterance."""

    at_once = 1
    joins = False

    def __init__(self, vocabulary: Vocabulary, joint: OnnxJoint):
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
    return GreedyTransducer(vocabulary, OnnxJoint(vocabulary.folder, config))
