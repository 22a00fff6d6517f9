"""The layout of a bundle: the names of its files, and config.json. Needs neither torch nor numpy."""

from __future__ import annotations

import json
import math
import os
import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sbkit.data import publish
from sbkit.data.pronunciation import NAME
from sbkit.data.text import TextRules
from sbkit.errors import SbkitError, shown, shown_names
from sbkit.score.run_files import BUNDLE
from sbkit.system import disk, memory, untrusted
from sbkit.system.schema import (
    SHA256,
    SHARE,
    Array,
    Boolean,
    Enumerated,
    Nullable,
    Number,
    Object,
    Record,
    Schema,
    String,
    integer,
    value,
)

CONFIG = BUNDLE
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.model"
TOKENS = "tokens.txt"
RECIPE = "hyperparams.yaml"
PARITY = "parity.json"
README = "README.md"

ONNX, INT8, TORCH, SPEECHBRAIN, SHERPA = "onnx", "int8", "torch", "speechbrain", "sherpa"
SHERPA_STREAM = "sherpa stream"
#: The formats of a traced graph.
TRACED = (ONNX, INT8, TORCH)
#: The file that each format is read from.
MODELS = {ONNX: "model.onnx", INT8: "model.int8.onnx", TORCH: "model.pt2", SPEECHBRAIN: RECIPE,
          SHERPA: "model.sherpa.onnx", SHERPA_STREAM: "stream.sherpa.onnx"}
#: The same for a streaming graph.
STREAMS = {ONNX: "stream.onnx", INT8: "stream.int8.onnx", TORCH: "stream.pt2"}
#: The same for a codec's graph from codes to audio.
DECODERS = {ONNX: "decoder.onnx", TORCH: "decoder.pt2"}
#: Names of a graph's inputs, [B, S] float32 and [B] int64, and of a recogniser's outputs, [B, T, V] float32, [B] int64.
INPUTS = ("signals", "lengths")
OUTPUTS = ("log_probs", "frames")
#: The outputs of a transducer, [B, T, J] float32, [B] int64; and the files of its prediction and its joint network.
STATES = ("states", "frames")
PREDICTION, JOINER = "decoder.onnx", "joiner.onnx"
#: The same for a voice: ids of symbols [B, U] and their numbers [B], int64, speakers [B] int64, speeds [B] float32; and
#: samples from -1 to 1 [B, S] float32, their numbers [B] int64, and frames of each symbol [B, U].
VOICE_INPUTS = ("text", "lengths", "speaker", "speed")
VOICE_OUTPUTS = ("audio", "audio_lengths", "durations")
#: The outputs of a codec, codes [B, T, Q] and the numbers of their frames [B], int64. Its decoder maps them to signals
#: and lengths.
CODES = ("codes", "frames")

FORMAT, VERSION = "sbkit bundle", 1
#: What may be replaced as a bundle: the folder has this format's mark, and no file that isn't listed in it.
FOLDER = publish.FolderKind("a bundle", CONFIG, FORMAT, lambda values: values.get("files", ()))
#: Kinds of bundles, by how they are run.
CTC, TRANSDUCER, GRAPH, LABELS = "ctc", "transducer", "graph", "labels"
VOICE, CODEC, ENHANCER = "voice", "codec", "enhancer"
#: Types of the tensors of a stream's state.
TYPES = ("float32", "int64")
# Bounds on values that determine the sizes of buffers.
#: Bytes of a configuration (10,000 symbols have 200 kB), and of tokens.txt.
MAX_BYTES = 1 << 24
#: The sample rate.
MAX_RATE = 768_000
#: Seconds of padding, context or a stream's window (Whisper's window, the longest known, has 30 s).
MAX_SECONDS = 60
#: Seconds of a frame.
MAX_FRAME_SECONDS = 1
#: Seconds of audio that a model takes at once.
MAX_CHUNK_SECONDS = 600
#: Values of a transducer's joint state, and the tokens that its prediction network sees.
MAX_JOINT, MAX_CONTEXT = 1 << 16, 16
#: Symbols of a text that a voice takes at once: an hour of speech.
MAX_TEXT = 50_000
#: Tokens; the largest vocabularies have 260,000.
MAX_TOKENS = 1_000_000
#: Numbers in the state of a stream.
MAX_STATE = 1 << 26
#: The most bytes of a bundle, as a multiple of this machine's memory: it has one model in several formats.
_MAX_MEMORIES = 4
#: Replacement rules of a text, and characters of each: those of a language have up to 14 rules of two characters.
_MAX_RULES, _MAX_RULE = 1000, 100
FILE = String(1, 255, r"(?!\.{1,2}$)[^/\\\x00-\x1f\x7f]+", "the name of a file in the bundle's folder")
#: Entries of each codebook.
BOOKS = Array(integer(maximum=1 << 24), max_items=256)
#: Inputs of a streaming graph that hold their state.
STATE = Object(min_items=1, values=Record(
    {"type": Enumerated(TYPES), "shape": Array(integer(maximum=MAX_STATE), max_items=8)}, needed=True))
_SAMPLES = integer(0, MAX_SECONDS * MAX_RATE)

T = TypeVar("T", bound="Bundle | Streaming")
B = TypeVar("B", bound="Bundle")
V = TypeVar("V")
#: Where installed packages say which module adds a kind to ``KINDS``: an entry point with its name.
ENTRY_POINTS = "sbkit.bundles"


@dataclass(kw_only=True)
class Bundle:
    """The contents of config.json that bundles of all kinds have."""

    kind: ClassVar[str]
    """Its name in config.json."""
    what: ClassVar[str]
    """What such a bundle has, for messages."""
    use: ClassVar[str]
    """How to use it; ``{}`` stands for its folder."""
    pipeline_tag: ClassVar[str | None] = None
    """The task's name on the Hugging Face Hub, if it has one."""
    sample_rate: int = value(integer(1000, MAX_RATE))
    language: str | None = value(Nullable(String(0, 100)), default=None)
    min_samples: int = value(integer(maximum=MAX_SECONDS * MAX_RATE), default=1)
    """Shorter signals are padded with zeros to this length."""
    batching: bool = value(Boolean(), default=True)
    """False if an utterance's outputs depend on its batch, so that each must run alone."""
    models: dict[str, str] = value(Object(FILE), default_factory=dict)
    files: dict[str, dict[str, Any]] = value(
        Object(Record({"bytes": integer(0, 2**63), "sha256": SHA256}), FILE), default_factory=dict)
    """Size in bytes and sha256 of each file."""
    trained: dict[str, Any] = value(Object(), default_factory=dict)
    """The recipe, the checkpoint and its scores."""
    made_by: dict[str, str] = value(Object(), default_factory=dict)
    left_out: dict[str, str] = value(Object(String(0, 100_000)), default_factory=dict)
    """Formats that the export left out, with the reason."""

    @classmethod
    def of(cls: type[B], values: dict[str, Any], path: Path) -> B:
        """Make a configuration of the values in config.json, and check it."""
        config = _parse(cls, values, str(path))
        config.check(path)
        return config

    def to_json(self) -> str:
        kind = {} if self.kind == CTC else {"kind": self.kind}  # version 1 began with CTC alone
        return json.dumps({"format": FORMAT, "version": VERSION, **kind, **self._values()}, indent=1,
                          ensure_ascii=False) + "\n"

    def _values(self) -> dict[str, Any]:
        return {name: contents for name, contents in asdict(self).items() if contents or name != "left_out"}

    @classmethod
    def read(cls: type[B], folder: str | Path) -> B:
        """Read the configuration of the bundle in ``folder``, which must be of this kind."""
        config = read(folder)
        if not isinstance(config, cls):
            raise SbkitError(f"the bundle {folder} has {config.what}, but {cls.what} is needed here",
                             hint=config.use.format(folder))
        return config

    def check(self, path: Path) -> None:
        """Refuse values that no model can run with: first each value, then combinations."""
        _check_fields(str(path), self)
        _refuse(str(path), "min_samples", self.min_samples, integer(maximum=MAX_SECONDS * self.sample_rate))

    def onnx_metadata(self) -> dict[str, str]:
        """Return metadata for an ONNX file of the bundle."""
        return {}


@dataclass(kw_only=True)
class GraphConfig(Bundle):
    """The configuration of a model that outputs tensors, of any task."""

    kind, what = GRAPH, "a model that outputs tensors"
    use = "use it: sbkit run {} FILES..."
    outputs: list[str] = value(Array(String(), 1, 1000))
    """Names of the outputs, in the model's order."""
    lengths: dict[str, str] = value(Object(String()), default_factory=dict)
    """For each output whose second dimension is padded, the output that holds the lengths of its utterances."""
    labels: list[str] = value(Array(String(0)), default_factory=list)
    """Names for the entries of the first output's last dimension."""

    def results(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        """Return what a recording's outputs, arrays by name, say besides their values, for JSON: its label."""
        if not self.labels:
            return {}
        scores = outputs[self.outputs[0]]
        return {"label": self.labels[int(scores.argmax())]}

    def check(self, path: Path) -> None:
        super().check(path)
        _check_unique(path, "outputs", self.outputs)
        of_outputs = Enumerated(tuple(self.outputs))
        _refuse(str(path), "lengths", self.lengths, Object(of_outputs, of_outputs))


@dataclass(kw_only=True)
class LabelsConfig(GraphConfig):
    """The configuration of a model that gives a recording any number of ``labels``: those with a high enough score."""

    kind, what = LABELS, "a model that outputs labels"
    thresholds: list[float] = value(Array(Number(-1e9, 1e9)))
    """The least value of each entry of the first output with which its label is a result."""

    def results(self, outputs: Mapping[str, Any]) -> dict[str, Any]:
        return {"labels": self.found(outputs[self.outputs[0]].tolist())}

    def found(self, scores: Sequence[float]) -> dict[str, float]:
        """Return a recording's labels with their scores, the highest first."""
        rows = sorted(zip(scores, self.labels, self.thresholds, strict=True), key=lambda row: -row[0])
        return {label: score for score, label, threshold in rows if score >= threshold}

    def check(self, path: Path) -> None:
        super().check(path)
        _check_unique(path, "labels", self.labels)
        if not len(self.thresholds) == len(self.labels) > 0:
            raise SbkitError(f"{path}: there are {len(self.labels)} labels and {len(self.thresholds)} thresholds, but "
                             "each label needs one")
        if self.outputs[0] in self.lengths:
            raise SbkitError(f"{path}: {self.outputs[0]} has values for each frame, but labels are a recording's",
                             hint="let the first output have one value for each label")


@dataclass(kw_only=True)
class EnhancerConfig(GraphConfig):
    """The configuration of a speech enhancer, for whole recordings and for streams."""

    kind, what = ENHANCER, "a speech enhancer"
    use = "use it: sbkit enhance {} FILES... --to FOLDER"
    pipeline_tag = "audio-to-audio"
    hop: int = value(integer())
    """A piece of a stream has a multiple of this many samples."""
    delay: int = value(integer(0))
    """Samples by which a stream's output lags behind its input."""
    state: dict[str, dict[str, Any]] = value(STATE)
    """Inputs of the streaming graph, as ``Streaming.state``."""
    streams: dict[str, str] = value(Object(FILE), default_factory=dict)
    """The file of that graph in each format."""

    def check(self, path: Path) -> None:
        super().check(path)
        for name in ("hop", "delay"):
            _refuse(str(path), name, getattr(self, name), integer(0, MAX_FRAME_SECONDS * self.sample_rate))
        _check_state(str(path), self.state)
        _check_formats(path, "streams", self.streams, self.models)


@dataclass(kw_only=True)
class Streaming:
    """What a program needs to run a recogniser on streams: windows of samples and a state in, log-probabilities and the
    next state out.

    A stream is continued by its mirror image, ``before`` samples at its beginning and ``after`` at its end. The first
    window begins where that does, and each further one ``ahead`` frames and ``overlap`` samples before the end of the
    one before.
    """

    chunks: list[int] = value(Array(integer(), 1, 1000))
    """Output frames of a chunk: the sizes that the model was trained for."""
    left: int = value(integer())
    """Output frames before the chunk that its frames can see (left context)."""
    overlap: int = value(_SAMPLES)
    """Samples by which feature frames overlap."""
    before: int = value(_SAMPLES)
    after: int = value(_SAMPLES)
    state: dict[str, dict[str, Any]] = value(STATE)
    """Inputs that hold the state: ``type`` (float32 or int64) and ``shape``, to which a batch adds a first dimension.
    The next state is in the outputs of these names after ``next_``. A stream begins with zeros."""
    ahead: int = value(integer(0), default=0)
    """Lookahead: the last output frames of a full window, which the next one repeats and outputs."""
    models: dict[str, str] = value(Object(FILE), default_factory=dict)
    """The file of each format."""

    def check(self, path: Path) -> None:
        """Refuse values that no stream can run with."""
        where = f"{path}: streaming"
        _check_fields(where, self)
        if self.ahead >= min(self.chunks):
            raise SbkitError(f"{where}: ahead is {self.ahead}, but must be below the smallest of chunks")
        _check_state(where, self.state)


@dataclass(kw_only=True)
class Config(Bundle):
    """The configuration of a CTC recogniser, whose outputs are log-probabilities of tokens."""

    kind, what = CTC, "a speech recogniser"
    outputs: ClassVar[tuple[str, str]] = OUTPUTS
    """Names of the graph's outputs, [B, T, ...] float32 and the numbers of frames [B] int64."""
    use = "use it: sbkit transcribe {} FILES..."
    pipeline_tag = "automatic-speech-recognition"
    hop_samples: int = value(integer())
    """Samples between two feature frames."""
    subsampling: int = value(integer())
    """Feature frames per output frame."""
    vocabulary: int = value(integer(maximum=MAX_TOKENS))
    """Number of tokens: the width V of the output and the rows of tokens.txt."""
    blank_id: int = value(integer(0), default=0)
    silent_ids: list[int] = value(Array(integer(0)), default_factory=list)
    """Ids of tokens that are not text, such as the beginning and the end of a sentence."""
    word_separator: str | None = value(Nullable(String(1, 10)), default="▁")
    """The character that starts a word in tokens; null for scripts without spaces, where each token is a word."""
    chunk_seconds: float = value(Number(0, MAX_CHUNK_SECONDS, above=True), default=20.0)
    """Longest audio to give the model at once, as in training; longer audio is split."""
    longest_seconds: float | None = value(Nullable(Number(0, MAX_CHUNK_SECONDS, above=True)), default=None)
    """The longest audio that the model can take at once; null: any."""
    reliability: list[list[float]] = value(
        Array(Array(SHARE, 2, 2), 1), default_factory=lambda: [[0.0, 0.0], [1.0, 1.0]])
    """Points of the curve from the lowest probability of a word's tokens to the share of such words that are right."""
    streaming: Streaming | None = None
    """Only for a model that can also run on streams."""

    @classmethod
    def of(cls: type[B], values: dict[str, Any], path: Path) -> B:
        if values.get("streaming") is not None:
            values["streaming"] = _parse(Streaming, values["streaming"], f"{path}: streaming")
        return super().of(values, path)

    @property
    def width(self) -> int:
        """The number of values per output frame."""
        return self.vocabulary

    def window(self, chunk: int) -> int:
        """Return the samples of a stream's window for a chunk of ``chunk`` output frames."""
        assert self.streaming is not None, "only for streaming models"
        return chunk * self.subsampling * self.hop_samples + self.streaming.overlap

    def _values(self) -> dict[str, Any]:
        values = super()._values()
        return {name: contents for name, contents in values.items()
                if name not in ("streaming", "longest_seconds") or contents is not None}

    def chunk(self, requested: float | None) -> float:
        """Return the seconds of audio to give the model at once: those requested, if it can take that much."""
        if requested is not None and self.longest_seconds is not None and requested > self.longest_seconds:
            raise SbkitError(f"chunks of {requested:g} s were requested, but the model takes at most "
                             f"{self.longest_seconds:g} s at once",
                             hint="leave out --chunk-seconds: longer audio is cut at pauses")
        return requested or self.chunk_seconds

    @property
    def frame_seconds(self) -> float:
        """Seconds from one output frame to the next."""
        return self.hop_samples * self.subsampling / self.sample_rate

    def check(self, path: Path) -> None:
        super().check(path)
        if self.hop_samples * self.subsampling > MAX_FRAME_SECONDS * self.sample_rate:
            raise SbkitError(f"{path}: a frame has hop_samples * subsampling = {self.hop_samples * self.subsampling:,} "
                             f"samples, but must have {MAX_FRAME_SECONDS * self.sample_rate:,} at most",
                             hint="export the model again")
        if self.longest_seconds is not None and self.chunk_seconds > self.longest_seconds:
            raise SbkitError(f"{path}: longest_seconds is {self.longest_seconds!r}, but must be at least "
                             f"chunk_seconds, which is {self.chunk_seconds:g}")
        confidences, shares = map(list, zip(*self.reliability, strict=True))
        if confidences != sorted(set(confidences)) or shares != sorted(shares):
            raise SbkitError(f"{path}: reliability must have growing confidences, and shares that don't fall, not "
                             f"{shown(self.reliability)}", hint="export the model again")
        _refuse(str(path), "blank_id", self.blank_id, integer(0, self.vocabulary - 1))
        _refuse(str(path), "silent_ids", self.silent_ids, Array(integer(0, self.vocabulary - 1)))
        if self.streaming is not None:
            self.streaming.check(path)
            limit = MAX_SECONDS * self.sample_rate
            size = self.hop_samples + self.streaming.overlap  # a stream keeps at least the samples of one feature frame
            for name, samples, bound in (
                    ("before", self.streaming.before, limit), ("after", self.streaming.after, size),
                    ("the window of the largest of chunks", self.window(max(self.streaming.chunks)), limit)):
                _refuse(f"{path}: streaming", name, samples, integer(0, bound))


@dataclass(kw_only=True)
class TransducerConfig(Config):
    """The configuration of a transducer: its model outputs frame states, and two further graphs predict tokens."""

    kind = TRANSDUCER
    outputs = STATES
    joint_size: int = value(integer(maximum=MAX_JOINT))
    """Number of values of a state, J."""
    context: int = value(integer(maximum=MAX_CONTEXT))
    """The number of previous tokens that the prediction network sees; blanks stand for those before the first."""
    decoder: str = value(FILE)
    """ONNX, the last tokens [N, context] int64 to states [N, J]."""
    joiner: str = value(FILE)
    """ONNX, a frame's state [N, J] and that of the last tokens [N, J] to scores of the next one [N, V]."""

    @property
    def width(self) -> int:
        return self.joint_size


@dataclass(kw_only=True)
class VoiceConfig(Bundle):
    """The configuration of a voice: text in, samples out."""

    kind, what = VOICE, "a voice"
    use = "use it: sbkit speak {} TEXT --to FILE"
    pipeline_tag = "text-to-speech"
    symbols: list[str] = value(Array(String(), 2))
    """The character of each id of a text; the first id is padding, and its name occurs in no text."""
    speakers: list[str] = value(Array(String(), 1))
    """Names of the voices; the first is the default."""
    max_symbols: int = value(integer(maximum=MAX_TEXT))
    """Ids of the longest text that the model takes at once; longer texts are split."""
    frame_seconds: float = value(Number(0, MAX_FRAME_SECONDS, above=True))
    """Seconds of a frame, the unit of durations."""
    codec: str | None = value(Nullable(SHA256), default=None)
    """The sha256 of the codec whose codes the voice outputs."""
    books: list[int] = value(BOOKS, default_factory=list)
    """Entries of each of the codec's codebooks."""
    spelling: str | None = value(Nullable(String(1, 100, NAME.pattern, "a voice of espeak-ng")), default=None)
    """The voice of espeak-ng whose phonemes are the symbols; null: characters are the symbols."""
    characters: list[str] = value(Array(String()), default_factory=list)
    """With a spelling: the characters that words may have."""
    text: dict[str, Any] | None = value(Nullable(Object()), default=None)
    """The options of the ``TextRules`` of its training texts; null: only the case was changed."""

    def onnx_metadata(self) -> dict[str, str]:
        return {"sample_rate": str(self.sample_rate), "symbols": json.dumps(self.symbols, ensure_ascii=False),
                "speakers": json.dumps(self.speakers, ensure_ascii=False)}

    @property
    def rules(self) -> TextRules | None:
        """The text rules of its training, if they are known."""
        return None if self.text is None else TextRules(**self.text)

    def check(self, path: Path) -> None:
        super().check(path)
        _check_unique(path, "symbols", self.symbols)
        _check_unique(path, "speakers", self.speakers)
        if bool(self.characters) != (self.spelling is not None):
            raise SbkitError(f"{path}: there must be characters if there is a spelling, and none otherwise")
        for symbol in [*self.symbols[1:], *self.characters]:
            if len(symbol) != 1 or unicodedata.normalize("NFC", symbol) != symbol:
                raise SbkitError(f"{path}: the symbol {symbol!a} is not one character in Unicode's form NFC",
                                 hint="export the model again")
        if self.text is None:
            return
        if self.text.keys() - TextRules().options().keys():
            raise SbkitError(f"{path}: text must have options of TextRules, not {shown(self.text)}",
                             hint="was it written by a newer sbkit?")
        try:
            rules = TextRules(**self.text)
        except (SbkitError, TypeError) as error:
            raise SbkitError(f"{path}: {error}", hint="export the model again") from None
        pairs = [*rules.replace.items(), *rules.case_pairs.items()]
        if len(pairs) > _MAX_RULES or any(len(text) > _MAX_RULE for pair in pairs for text in pair):
            raise SbkitError(f"{path}: text has more than {_MAX_RULES} replacement rules, or one of more than "
                             f"{_MAX_RULE} characters", hint="export the model again")


@dataclass(kw_only=True)
class CodecConfig(Bundle):
    """The configuration of a codec: samples in, codes out, and by its decoder back again."""

    kind, what = CODEC, "a codec"
    use = "use it: sbkit tokenize {} CORPUS --to FOLDER"
    pipeline_tag = "audio-to-audio"
    codec: str = value(SHA256)
    """The sha256 of its weights and of everything else that defines its codes."""
    books: list[int] = value(BOOKS._replace(min_items=1))
    """Entries of each of its codebooks."""
    stride: int = value(integer())
    """Samples of a frame; the last frame may reach beyond the recording's end."""
    context: int | None = value(Nullable(integer(0)))
    """Frames on each side that a frame's codes and samples depend on; null: all."""
    min_frames: int = value(integer(), default=1)
    """Fewer frames of codes are padded with zeros to this number."""
    decoders: dict[str, str] = value(Object(FILE), default_factory=dict)
    """The decoder's file of each format."""

    def onnx_metadata(self) -> dict[str, str]:
        return {"sample_rate": str(self.sample_rate), "codec": self.codec, "books": ",".join(map(str, self.books)),
                "stride": str(self.stride)}

    def check(self, path: Path) -> None:
        super().check(path)
        _refuse(str(path), "stride", self.stride, integer(maximum=MAX_FRAME_SECONDS * self.sample_rate))
        limit = MAX_SECONDS * self.sample_rate // self.stride
        _refuse(str(path), "min_frames", self.min_frames, integer(maximum=limit))
        _refuse(str(path), "context", self.context, Nullable(integer(0, limit)))
        _check_formats(path, "decoders", self.decoders, self.models)


#: The configuration of each kind of bundle, by its name in config.json. ``sbkit.infer.add_kind`` adds one of your own.
KINDS: dict[str, type[Bundle]] = {
    GRAPH: GraphConfig,
    LABELS: LabelsConfig,
    ENHANCER: EnhancerConfig,
    CTC: Config,
    TRANSDUCER: TransducerConfig,
    VOICE: VoiceConfig,
    CODEC: CodecConfig,
}


def add_kind(config: type[Bundle]) -> None:
    """Add a configuration to ``KINDS`` under its ``kind``; raises if another class has that name."""
    known = KINDS.get(config.kind, config)
    # A module that is imported anew defines the same class again.
    if (known.__module__, known.__qualname__) != (config.__module__, config.__qualname__):
        raise SbkitError(f"{config.__name__} has the kind {config.kind!r}, which {known.__name__} of "
                         f"{known.__module__} has already", hint=f"give {config.__name__} a kind of its own")
    KINDS[config.kind] = config


def check_kind(config: Bundle) -> None:
    """Raise unless a bundle that is written with this configuration can be read again."""
    if KINDS.get(config.kind) is not type(config):
        name = type(config).__name__
        raise SbkitError(f"bundles with a {name} could not be read, because its kind {config.kind!r} was never added",
                         hint=f"call sbkit.infer.add_kind({name}) in the file that defines it")


class ByKind(dict[type[Bundle], V]):
    """A value for each kind of bundle; a kind without one has that of its base class."""

    def of(self, config: Bundle) -> V:
        """Return the value for a bundle's kind; raises if there is none."""
        for kind in type(config).__mro__:
            if kind in self:
                return self[kind]
        raise SbkitError(f"the bundle has {config.what}, which can't be run here",
                         hint=f"import the code that runs bundles of kind {config.kind}")


_MADE_BY = "make one by sbkit export RUN --to BUNDLE, or by sbkit import of a model of transformers or SpeechBrain"


def read(folder: str | Path) -> Bundle:
    """Read the configuration of the bundle in ``folder``, of any kind."""
    path = Path(folder) / CONFIG
    try:
        values = untrusted.read_json(path, MAX_BYTES)
    except FileNotFoundError:
        problem = f"is not a bundle: it has no {CONFIG}" if path.parent.is_dir() else "does not exist"
        hint = _MADE_BY
        previous = [place for place in (publish.kept_meanwhile(folder), publish.replaced(folder)) if place.is_dir()]
        if previous and not path.parent.exists():
            hint = f"an export that was killed left the previous bundle at {previous[0]}: rename it back"
        elif (path.parent / "bundle" / CONFIG).is_file():  # a run that `make demo` or the README exported
            hint = f"its bundle is {path.parent / 'bundle'}"
        elif re.fullmatch(r"[\w-]+/[\w.-]+", str(folder)) and not path.parent.parent.exists():
            hint = f"of a model of the Hugging Face Hub, sbkit import {folder} --to BUNDLE makes one"
        raise SbkitError(f"{folder} {problem}", hint=hint) from None
    except NotADirectoryError:
        raise SbkitError(f"{folder} is a file, and a bundle is a folder",
                         hint="name the bundle's folder, which comes before its recordings") from None
    except (OSError, ValueError) as error:
        raise SbkitError(f"{path} cannot be read: {getattr(error, 'strerror', None) or error}") from None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise SbkitError(f"{path} does not describe an sbkit bundle", hint=_MADE_BY)
    version = values.pop("version", None)
    if version != VERSION:
        raise SbkitError(f"{path} has version {shown(version)}, but this sbkit reads version {VERSION}",
                         hint="install a newer sbkit" if isinstance(version, int) and version > VERSION else None)
    name = values.pop("kind", CTC)
    if isinstance(name, str) and name not in KINDS:  # of an installed package
        for point in entry_points(group=ENTRY_POINTS, name=name):
            point.load()
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SbkitError(f"{path} is of kind {shown(name)}, but this sbkit reads {', '.join(KINDS)}",
                         hint="install a newer sbkit, or the package that defines that kind and names it as an entry "
                              f"point of {ENTRY_POINTS}; a program of your own imports its file first")
    return kind.of(values, path)


def _parse(kind: type[T], values: object, where: str) -> T:
    """Create an instance from values read from JSON."""
    if not isinstance(values, dict):
        raise SbkitError(f"{where} is {shown(values)}, but must be an object")
    unknown = sorted(set(values) - {declared.name for declared in fields(kind)})
    if unknown:
        raise SbkitError(f"{where} has unknown keys: {shown_names(unknown)}", hint="was it written by a newer sbkit?")
    try:
        return kind(**values)
    except TypeError as error:
        raise SbkitError(f"{where} lacks keys: {error}") from None


def _check_fields(where: str, values: Bundle | Streaming) -> None:
    """Refuse the first value that its declaration doesn't allow."""
    for declared in fields(values):
        if "allowed" in declared.metadata:  # others are dataclasses with their own check
            _refuse(where, declared.name, getattr(values, declared.name), declared.metadata["allowed"])


def _refuse(where: str, name: str, contents: object, allowed: Schema) -> None:
    """Raise unless what a field has is allowed."""
    if contents not in allowed:
        raise SbkitError(f"{where}: {name} is {shown(contents)}, but must be {allowed}", hint="export the model again")


def _check_state(where: str, state: dict[str, dict[str, Any]]) -> None:
    if sum(math.prod(part["shape"]) for part in state.values()) > MAX_STATE:
        raise SbkitError(f"{where}: state has more than {MAX_STATE:,} numbers", hint="export the model again")


def _check_formats(path: Path, name: str, files: dict[str, str], models: dict[str, str]) -> None:
    if files.keys() != models.keys():
        raise SbkitError(f"{path}: {name} must give a file for each of {', '.join(models)}, not {shown(files)}")


def _check_unique(path: Path, name: str, values: list[str]) -> None:
    duplicates = sorted(text for text, count in Counter(values).items() if count > 1)
    if duplicates:
        raise SbkitError(f"{path}: {name} has {shown(duplicates[0])} twice")


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and the sha256 of a regular file."""
    with untrusted.open_regular(path) as file:
        return {"bytes": os.fstat(file.fileno()).st_size, "sha256": disk.sha256_of(file)}


def is_as_written(path: Path, written: Mapping[str, Any]) -> bool:
    """Return whether a regular file has the size and the sha256 that the export wrote.

    The size is compared first, so that a sparse file, which may have terabytes of zeros, isn't read.
    """
    with untrusted.open_regular(path) as file:
        return os.fstat(file.fileno()).st_size == written["bytes"] and disk.sha256_of(file) == written["sha256"]


def check_files(folder: Path, config: Bundle) -> None:
    """Raise unless a bundle's files are what the export wrote; README.md may be edited, and files may be missing.

    Its folder must have nothing that a reader could wait for without end, listed or not: pipes, devices, or more bytes
    than any model has that this machine can run.
    """
    sizes: dict[str, int] = {}
    try:
        for path in sorted(folder.iterdir()):
            if not path.is_dir():
                with untrusted.open_regular(path) as file:
                    sizes[path.name] = os.fstat(file.fileno()).st_size
        if sum(sizes.values()) > _MAX_MEMORIES * memory.total():
            raise SbkitError(f"the files of {folder} have {disk.size(sum(sizes.values()))}, and this machine has "
                             f"{disk.size(memory.total())} of memory", hint="copy the bundle again")
        for name, written in config.files.items():
            if name in sizes and name != README and not is_as_written(folder / name, written):
                raise SbkitError(f"{folder / name} is not what the export wrote", hint="copy the bundle again")
    except OSError as error:
        raise SbkitError(f"{error.filename or folder} cannot be read: {error.strerror or error}",
                         hint="copy the bundle again") from None


def external_weights(path: Path) -> Path:
    """Return the file of the weights of a large ONNX model, which has them outside of its own file."""
    return path.with_name(f"{path.name}.data")


def size(folder: Path, *names: str) -> int:
    """Return the bytes of these files and of their external weights; missing ones count as 0."""
    paths = [path for name in names for path in (folder / name, external_weights(folder / name))]
    return sum(path.stat().st_size for path in paths if path.exists())
