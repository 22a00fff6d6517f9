"""Decoders of a recogniser's output: greedy, beam search with a language model and hot words, and both for transducers,
with the two other graphs of their bundle. They need no torch."""

from __future__ import annotations

import threading
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from inspect import signature
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, Protocol, TypeVar

import numpy as np

from sbkit.decode.greedy_stream import GreedyStream
from sbkit.decode.search_options import check_weight
from sbkit.decode.spans import TokenSpans, best_path, collapse
from sbkit.decode.streaming import StreamSearch
from sbkit.decode.transducer import GraphJoint, Joint, TransducerSearch, TransducerStream, not_a_number
from sbkit.errors import SbkitError, shown
from sbkit.export import layout
from sbkit.export.layout import ByKind, Config, TransducerConfig
from sbkit.export.vocabulary import Vocabulary
from sbkit.infer import formats
from sbkit.infer.backends import open_graph
from sbkit.infer.device import DeviceChoice
from sbkit.infer.onnx_session import Interface

if TYPE_CHECKING:
    from sbkit.decode.posteriors import Events
    from sbkit.decode.token_search import TokenSearch

#: Rows of an example; graphs take any number.
_ROWS = 2


class DecodedTokens(NamedTuple):
    """Tokens, with frames relative to ``frame`` of the recording."""

    frame: int
    spans: TokenSpans


class Stretch(Protocol):
    """What a decoder keeps of a stretch of a recording; the rest of it is between that decoder and itself."""

    @property
    def frames(self) -> int:
        """The number of its output frames."""


S = TypeVar("S", bound=Stretch)


class Decoder(ABC, Generic[S]):
    """Keeps compact data ``S`` of each stretch of a recording, and decodes them when the recording is complete."""

    at_once: int
    """How many recordings to decode together."""
    joins = False
    """Whether words may continue in the next stretch."""

    @abstractmethod
    def keep(self, log_probs: np.ndarray) -> S:
        """Reduce a stretch [T, V] that ends in a pause to the data that decoding needs."""

    @abstractmethod
    def tokens(self, recordings: Sequence[Sequence[S]]) -> list[list[DecodedTokens]]:
        """Decode recordings, each given as its stretches in order."""

    def after(self, stretches: Sequence[S], frame: int) -> list[S]:
        """The part of stretches from ``frame`` on: the end of one, or a token's start if stretches are joined."""
        ends = accumulate(stretch.frames for stretch in stretches)
        return [stretch for stretch, end in zip(stretches, ends, strict=True) if end > frame]

    @abstractmethod
    def stream(self) -> StreamSearch:
        """Make the search of one stream."""


class BestLabels(NamedTuple):
    """The best label of each frame of a stretch [T] int32, and its confidence [T]."""

    labels: np.ndarray
    confidence: np.ndarray

    @property
    def frames(self) -> int:
        return len(self.labels)

    @classmethod
    def joined(cls, stretches: Sequence[BestLabels]) -> BestLabels:
        labels, confidence = zip(*stretches, strict=True)
        return cls(np.concatenate(labels), np.concatenate(confidence))


class Greedy(Decoder[BestLabels]):
    at_once = 1
    joins = True

    def __init__(self, vocabulary: Vocabulary):
        self._vocabulary = vocabulary
        self._blank = vocabulary.config.blank_id

    def keep(self, log_probs: np.ndarray) -> BestLabels:
        labels, confidence = best_path(log_probs[None], np.array([len(log_probs)]), self._blank)
        self._vocabulary.check(labels)
        return BestLabels(labels[0].astype(np.int32), confidence[0])

    def tokens(self, recordings: Sequence[Sequence[BestLabels]]) -> list[list[DecodedTokens]]:
        decoded = []
        for stretches in recordings:
            labels, confidence = BestLabels.joined(stretches)
            [spans] = collapse(labels[None].astype(np.int64), confidence[None], blank_id=self._blank)
            decoded.append([DecodedTokens(0, spans)])
        return decoded

    def after(self, stretches: Sequence[BestLabels], frame: int) -> list[BestLabels]:
        labels, confidence = BestLabels.joined(stretches)
        return [BestLabels(labels[frame:].copy(), confidence[frame:].copy())]

    def stream(self) -> GreedyStream:
        return GreedyStream(self._vocabulary.spelling, self._blank)


class LikelyTokens(NamedTuple):
    """What a beam search considers of a stretch: the likely tokens of its frames."""

    events: Events
    frames: int


class Beam(Decoder[LikelyTokens]):
    """Beam search with a language model, a lexicon and hot words, in any number of threads.

    options : options of ``sbkit.decode.beam.BeamSearch``: lm, lm_weight, word_score, hot_words, hot_boost, beam, ...
    """

    at_once = 32

    def __init__(self, vocabulary: Vocabulary, options: Mapping[str, Any]):
        from sbkit.decode.beam import BeamSearch

        self._spelling = vocabulary.spelling
        self._search = _make_search(BeamSearch, vocabulary, options)

    def keep(self, log_probs: np.ndarray) -> LikelyTokens:
        return LikelyTokens(self._search.events(log_probs[None], np.array([len(log_probs)])), len(log_probs))

    def tokens(self, recordings: Sequence[Sequence[LikelyTokens]]) -> list[list[DecodedTokens]]:
        # One search of all stretches, whose results are in the same order.
        events = self._search.join([stretch.events for stretches in recordings for stretch in stretches])
        results = iter(self._search.search(events))
        decoded = []
        for stretches in recordings:
            frame = 0
            parts = []
            for stretch in stretches:
                hypotheses = next(results)
                if hypotheses:
                    parts.append(DecodedTokens(frame, hypotheses[0].spans))
                frame += stretch.frames
            decoded.append(parts)
        return decoded

    def stream(self) -> StreamSearch:
        return self._search.stream(self._spelling)


class SpansOfStretch(NamedTuple):
    """The tokens of a stretch that is decoded already."""

    spans: TokenSpans
    frames: int


class GreedyTransducer(Decoder[SpansOfStretch]):
    """Greedy decoding of a transducer; each stretch starts like an utterance."""

    at_once = 1

    def __init__(self, vocabulary: Vocabulary, joint: Joint):
        self._spelling = vocabulary.spelling
        self._joint = joint

    def keep(self, log_probs: np.ndarray) -> SpansOfStretch:
        return SpansOfStretch(TransducerSearch(self._joint).feed([log_probs])[0], len(log_probs))

    def tokens(self, recordings: Sequence[Sequence[SpansOfStretch]]) -> list[list[DecodedTokens]]:
        return [_with_offsets(stretches) for stretches in recordings]

    def stream(self) -> TransducerStream:
        return TransducerStream(self._spelling, self._joint)


class LazyTokens:
    """A stretch of a transducer's states until it is searched, then its tokens."""

    spans: TokenSpans

    def __init__(self, states: np.ndarray):
        self.frames = len(states)
        self.states: np.ndarray | None = states


class BeamTransducer(Decoder[LazyTokens]):
    """Beam search of a transducer, in any number of threads.

    options : as for ``Beam``
    """

    at_once = 32

    def __init__(self, vocabulary: Vocabulary, joint: Joint, options: Mapping[str, Any]):
        from sbkit.decode.transducer_beam import TransducerBeam

        self._spelling = vocabulary.spelling
        self._search = _make_search(TransducerBeam, vocabulary, options)
        self._search.joint = joint
        self._lock = threading.Lock()
        # A set in order of arrival. Weak, so that those of a recording that is cancelled or fails go with it.
        self._waiting: weakref.WeakKeyDictionary[LazyTokens, None] = weakref.WeakKeyDictionary()

    def keep(self, log_probs: np.ndarray) -> LazyTokens:
        """Keep a stretch's states until there are several, which are then searched: tokens take much less memory."""
        # Checked here, because a later search is also of other recordings, which must not fail with it.
        if not np.isfinite(log_probs).all():
            raise not_a_number()
        stretch = LazyTokens(log_probs)
        with self._lock:
            self._waiting[stretch] = None
            batch = list(self._waiting) if len(self._waiting) >= self.at_once else []
        self._search_all(batch)
        return stretch

    def tokens(self, recordings: Sequence[Sequence[LazyTokens]]) -> list[list[DecodedTokens]]:
        self._search_all([stretch for stretches in recordings for stretch in stretches])
        return [_with_offsets([SpansOfStretch(stretch.spans, stretch.frames) for stretch in stretches])
                for stretches in recordings]

    def stream(self) -> StreamSearch:
        return self._search.stream(self._spelling)

    def _search_all(self, stretches: Sequence[LazyTokens]) -> None:
        """Search stretches together; two threads that search the same one get the same result."""
        unsearched = []
        states_of_unsearched = []
        for stretch in stretches:
            states = stretch.states  # read once, because another thread may set it to None meanwhile
            if states is not None:
                unsearched.append(stretch)
                states_of_unsearched.append(states)
        with self._lock:
            for stretch in stretches:
                self._waiting.pop(stretch, None)
        results = self._search.search(self._search.near_speech(states_of_unsearched))
        for stretch, hypotheses in zip(unsearched, results, strict=True):
            # In this order: a thread that sees no states reads the spans.
            stretch.spans = hypotheses[0].spans
            stretch.states = None


def _with_offsets(stretches: Sequence[SpansOfStretch]) -> list[DecodedTokens]:
    ends = accumulate(frames for _, frames in stretches)
    return [DecodedTokens(end - frames, spans) for end, (spans, frames) in zip(ends, stretches, strict=True)]


T = TypeVar("T", bound="TokenSearch")


def _make_search(kind: type[T], vocabulary: Vocabulary, options: Mapping[str, Any]) -> T:
    """Make a beam search of the options that a user gave."""
    config = vocabulary.config
    # A recording gets one transcript, so nbest would have no effect; the others come from the bundle.
    allowed = signature(kind).parameters.keys() - {"tokenizer", "nbest", "blank_id", "separator", "joint"}
    unknown = sorted(options.keys() - allowed)
    if unknown:
        raise SbkitError("unknown-argument", f"the beam search has no option {shown(unknown[0])}",
                         hint=f"its options are {', '.join(sorted(allowed))}", key=unknown[0])
    try:
        search = kind(vocabulary.symbols, blank_id=config.blank_id, separator=config.word_separator, **options)
    except TypeError as error:
        raise SbkitError("bad-value", f"beam search: {error}") from None
    search.model_spelling = vocabulary.spelling
    search.load()  # raises errors of its files now
    return search


def _ctc(vocabulary: Vocabulary, search: Mapping[str, Any] | None) -> Beam | Greedy:
    return Beam(vocabulary, search) if search else Greedy(vocabulary)


def _transducer(vocabulary: Vocabulary, search: Mapping[str, Any] | None) -> BeamTransducer | GreedyTransducer:
    """Open the prediction and the joint network too, on the CPU, because they process one frame at a time."""
    config = vocabulary.config
    assert isinstance(config, TransducerConfig) and vocabulary.folder is not None, "the vocabulary of a bundle"
    tokens = np.zeros((_ROWS, config.context), np.int64)
    states = np.zeros((_ROWS, config.joint_size), np.float32)
    decoder_interface = Interface({"tokens": tokens}, ["predicted"])
    joiner_interface = Interface({"encoded": states, "predicted": states}, ["scores"])
    predictor = _open_graph(vocabulary.folder / config.decoder, config, decoder_interface, config.joint_size)
    joiner = _open_graph(vocabulary.folder / config.joiner, config, joiner_interface, config.vocabulary)
    joint = GraphJoint(predictor, joiner, config.vocabulary, config.context, config.blank_id)
    return BeamTransducer(vocabulary, joint, search) if search else GreedyTransducer(vocabulary, joint)


def _open_graph(path: Path, config: TransducerConfig, interface: Interface, width: int) -> Callable[..., np.ndarray]:
    """Open a graph with one output [rows, width]; raises if it has another shape for the example of ``interface``."""
    formats.check_file(path, config)
    graph = open_graph(path, layout.ONNX, DeviceChoice("cpu", "cpu"), 1, interface, spin=False)

    def run(*inputs: np.ndarray) -> np.ndarray:
        return graph(*inputs)[0]

    shape = run(*interface.inputs.values()).shape
    if shape != (_ROWS, width):
        raise SbkitError("mismatched-bundle", f"{path} outputs {list(shape)} for {_ROWS} rows instead of "
                         f"{[_ROWS, width]}", hint="do its files come from the same export?", file=path)
    return run


#: Makes a decoder from a recogniser's vocabulary and a search's options, if any.
MakeDecoder = Callable[[Vocabulary, Mapping[str, Any] | None], Decoder[Any]]
#: What makes the decoder of each kind of recogniser. ``sbkit.infer.add_kind`` adds that of a kind of your own.
DECODERS: ByKind[MakeDecoder] = ByKind({
    Config: _ctc,
    TransducerConfig: _transducer,
})


def decoder(vocabulary: Vocabulary, search: Mapping[str, Any] | None) -> Decoder[Any]:
    """Make a recogniser's decoder: a beam search if any search option is given, otherwise greedy."""
    check_weight(search or {})
    return DECODERS.of(vocabulary.config)(vocabulary, search)
