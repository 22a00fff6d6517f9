"""config.json: what it says of each kind of bundle, and how it is read. Needs neither torch nor numpy."""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sbkit.data import publish
from sbkit.data.pronunciation import NAME
from sbkit.data.text import TextRules
from sbkit.errors import SbkitError, shown
from sbkit.export.layout.checks import (
    check_fields,
    check_formats,
    check_state,
    check_unique,
    parse,
    refuse,
)
from sbkit.export.layout.limits import (
    BOOKS,
    FILE,
    MAX_BYTES,
    MAX_CHUNK_SECONDS,
    MAX_CONTEXT,
    MAX_FRAME_SECONDS,
    MAX_JOINT,
    MAX_RATE,
    MAX_RULE_CHARACTERS,
    MAX_RULES,
    MAX_SECONDS,
    MAX_TEXT,
    MAX_TOKENS,
    SAMPLES,
    STATE,
)
from sbkit.export.layout.names import (
    CODEC,
    CONFIG,
    CTC,
    ENHANCER,
    FORMAT,
    GRAPH,
    LABELS,
    OUTPUTS,
    STATES,
    TRANSDUCER,
    VERSION,
    VOICE,
)
from sbkit.system import untrusted
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
    String,
    integer,
    value,
)

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
        config = parse(cls, values, path)
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
            raise SbkitError("wrong-bundle-kind",
                             f"the bundle {folder} has {config.what}, but {cls.what} is needed here",
                             hint=config.use.format(folder), file=folder)
        return config

    def check(self, path: Path) -> None:
        """Refuse values that no model can run with: first each value, then combinations."""
        check_fields(path, self)
        refuse(path, "min_samples", self.min_samples, integer(maximum=MAX_SECONDS * self.sample_rate))

    def onnx_metadata(self) -> dict[str, str]:
        """Return metadata for an ONNX file of the bundle."""
        return {}


@dataclass(kw_only=True)
class GraphConfig(Bundle):
    """The configuration of a model that outputs tensors, of any task."""

    kind = GRAPH
    what = "a model that outputs tensors"
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
        check_unique(path, "outputs", self.outputs)
        of_outputs = Enumerated(tuple(self.outputs))
        refuse(path, "lengths", self.lengths, Object(of_outputs, of_outputs))


@dataclass(kw_only=True)
class LabelsConfig(GraphConfig):
    """The configuration of a model that gives a recording any number of ``labels``: those with a high enough score."""

    kind = LABELS
    what = "a model that outputs labels"
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
        check_unique(path, "labels", self.labels)
        if not len(self.thresholds) == len(self.labels) > 0:
            raise SbkitError("damaged-bundle", f"{path}: there are {len(self.labels)} labels and "
                             f"{len(self.thresholds)} thresholds, but each label needs one",
                             hint="give as many thresholds as labels", file=path, key="thresholds")
        if self.outputs[0] in self.lengths:
            raise SbkitError("damaged-bundle", f"{path}: {self.outputs[0]} has values for each frame, but labels are "
                             "of whole recordings", hint="let the first output have one value for each label",
                             file=path, key="outputs")


@dataclass(kw_only=True)
class EnhancerConfig(GraphConfig):
    """The configuration of a speech enhancer, for whole recordings and for streams."""

    kind = ENHANCER
    what = "a speech enhancer"
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
            refuse(path, name, getattr(self, name), integer(0, MAX_FRAME_SECONDS * self.sample_rate))
        check_state(path, self.state)
        check_formats(path, "streams", self.streams, self.models)


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
    overlap: int = value(SAMPLES)
    """Samples by which feature frames overlap."""
    before: int = value(SAMPLES)
    after: int = value(SAMPLES)
    state: dict[str, dict[str, Any]] = value(STATE)
    """Inputs that hold the state: ``type`` (float32 or int64) and ``shape``, to which a batch adds a first dimension.
    The next state is in the outputs of these names after ``next_``. A stream begins with zeros."""
    ahead: int = value(integer(0), default=0)
    """Lookahead: the last output frames of a full window, which the next one repeats and outputs."""
    models: dict[str, str] = value(Object(FILE), default_factory=dict)
    """The file of each format."""

    def check(self, path: Path) -> None:
        """Refuse values that no stream can run with."""
        check_fields(path, self, "streaming")
        if self.ahead >= min(self.chunks):
            raise SbkitError("damaged-bundle", f"{path}: streaming: ahead is {self.ahead}, but must be below the "
                             "smallest of chunks", hint="export the model again", file=path, key="ahead",
                             value=self.ahead)
        check_state(path, self.state, "streaming")


@dataclass(kw_only=True)
class Config(Bundle):
    """The configuration of a CTC recogniser, whose outputs are log-probabilities of tokens."""

    kind = CTC
    what = "a speech recogniser"
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
            values["streaming"] = parse(Streaming, values["streaming"], path, "streaming")
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
            raise SbkitError("bad-option", f"chunks of {requested:g} s were requested, but the model takes at most "
                             f"{self.longest_seconds:g} s at once",
                             hint="leave out --chunk-seconds: longer audio is cut at pauses",
                             key="--chunk-seconds", value=requested)
        return requested or self.chunk_seconds

    @property
    def frame_seconds(self) -> float:
        """Seconds from one output frame to the next."""
        return self.hop_samples * self.subsampling / self.sample_rate

    def check(self, path: Path) -> None:
        super().check(path)
        if self.hop_samples * self.subsampling > MAX_FRAME_SECONDS * self.sample_rate:
            raise SbkitError("damaged-bundle", f"{path}: a frame has hop_samples * subsampling = "
                             f"{self.hop_samples * self.subsampling:,} samples, but must have "
                             f"{MAX_FRAME_SECONDS * self.sample_rate:,} at most",
                             hint="export the model again", file=path, key="subsampling")
        if self.longest_seconds is not None and self.chunk_seconds > self.longest_seconds:
            raise SbkitError("damaged-bundle", f"{path}: longest_seconds is {self.longest_seconds!r}, but must be at "
                             f"least chunk_seconds, which is {self.chunk_seconds:g}", hint="export the model again",
                             file=path, key="longest_seconds", value=self.longest_seconds)
        confidences, shares = map(list, zip(*self.reliability, strict=True))
        if confidences != sorted(set(confidences)) or shares != sorted(shares):
            raise SbkitError("damaged-bundle", f"{path}: reliability must have increasing confidences, and shares "
                             f"that don't decrease, not {shown(self.reliability)}", hint="export the model again",
                             file=path, key="reliability")
        refuse(path, "blank_id", self.blank_id, integer(0, self.vocabulary - 1))
        refuse(path, "silent_ids", self.silent_ids, Array(integer(0, self.vocabulary - 1)))
        if self.streaming is not None:
            self.streaming.check(path)
            limit = MAX_SECONDS * self.sample_rate
            size = self.hop_samples + self.streaming.overlap  # a stream keeps at least the samples of one feature frame
            refuse(path, "before", self.streaming.before, integer(0, limit), "streaming")
            refuse(path, "after", self.streaming.after, integer(0, size), "streaming")
            window = self.window(max(self.streaming.chunks))
            refuse(path, "the window of the largest of chunks", window, integer(0, limit), "streaming", key="chunks")


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

    kind = VOICE
    what = "a voice"
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
        check_unique(path, "symbols", self.symbols)
        check_unique(path, "speakers", self.speakers)
        if bool(self.characters) != (self.spelling is not None):
            raise SbkitError("damaged-bundle", f"{path}: a voice has characters if, and only if, it has a spelling",
                             hint="export the model again", file=path, key="characters")
        for symbol in [*self.symbols[1:], *self.characters]:
            if len(symbol) != 1 or unicodedata.normalize("NFC", symbol) != symbol:
                raise SbkitError("damaged-bundle",
                                 f"{path}: the symbol {symbol!a} is not one character in Unicode's form NFC",
                                 hint="export the model again", file=path, key="symbols", value=symbol)
        if self.text is None:
            return
        if self.text.keys() - TextRules().options().keys():
            raise SbkitError("newer-bundle", f"{path}: text must have options of TextRules, not {shown(self.text)}",
                             hint="was it written by a newer sbkit?", file=path, key="text")
        try:
            rules = TextRules(**self.text)
        except (SbkitError, TypeError) as error:
            raise SbkitError("damaged-bundle", f"{path}: {error}", hint="export the model again", file=path,
                             key="text") from None
        pairs = [*rules.replace.items(), *rules.case_pairs.items()]
        if len(pairs) > MAX_RULES or any(len(text) > MAX_RULE_CHARACTERS for pair in pairs for text in pair):
            raise SbkitError("damaged-bundle", f"{path}: text has more than {MAX_RULES} replacement rules, or one of "
                             f"more than {MAX_RULE_CHARACTERS} characters", hint="export the model again", file=path,
                             key="text")


@dataclass(kw_only=True)
class CodecConfig(Bundle):
    """The configuration of a codec: samples in, codes out, and by its decoder back again."""

    kind = CODEC
    what = "a codec"
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
        refuse(path, "stride", self.stride, integer(maximum=MAX_FRAME_SECONDS * self.sample_rate))
        limit = MAX_SECONDS * self.sample_rate // self.stride
        refuse(path, "min_frames", self.min_frames, integer(maximum=limit))
        refuse(path, "context", self.context, Nullable(integer(0, limit)))
        check_formats(path, "decoders", self.decoders, self.models)


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
        raise SbkitError("duplicate-bundle-kind", f"{config.__name__} has the kind {config.kind!r}, which "
                         f"{known.__name__} of {known.__module__} has already",
                         hint=f"give {config.__name__} another kind", value=config.kind)
    KINDS[config.kind] = config


def check_kind(config: Bundle) -> None:
    """Raise unless a bundle that is written with this configuration can be read again."""
    if KINDS.get(config.kind) is not type(config):
        name = type(config).__name__
        raise SbkitError("unknown-bundle-kind", f"bundles with a {name} could not be read, because its kind "
                         f"{config.kind!r} was never added",
                         hint=f"call sbkit.infer.add_kind({name}) in the file that defines it", value=config.kind)


class ByKind(dict[type[Bundle], V]):
    """A value for each kind of bundle; a kind without one has that of its base class."""

    def of(self, config: Bundle) -> V:
        """Return the value for a bundle's kind; raises if there is none."""
        for kind in type(config).__mro__:
            if kind in self:
                return self[kind]
        raise SbkitError("unknown-bundle-kind", f"the bundle has {config.what}, which can't be run here",
                         hint=f"import the code that runs bundles of kind {config.kind}", value=config.kind)


_MADE_BY = "make one by sbkit export RUN --to BUNDLE, or by sbkit import of a model of transformers or SpeechBrain"


def read(folder: str | Path) -> Bundle:
    """Read the configuration of the bundle in ``folder``, of any kind."""
    path = Path(folder) / CONFIG
    values = _read_values(folder, path)
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise SbkitError("not-a-bundle", f"{path} does not describe an sbkit bundle", hint=_MADE_BY, file=path)
    version = values.pop("version", None)
    if version != VERSION:
        raise SbkitError("newer-bundle", f"{path} has version {shown(version)}, but this sbkit reads version {VERSION}",
                         hint="install a newer sbkit" if isinstance(version, int) and version > VERSION else None,
                         file=path, key="version", value=version)

    name = values.pop("kind", CTC)
    kind = _kind_named(name) if isinstance(name, str) else None
    if kind is None:
        raise SbkitError("unknown-bundle-kind",
                         f"{path} is of kind {shown(name)}, but this sbkit reads {', '.join(KINDS)}",
                         hint="install a newer sbkit, or the package that defines that kind and names it as an entry "
                              f"point of {ENTRY_POINTS}; a program of your own imports its file first",
                         file=path, key="kind", value=name)
    return kind.of(values, path)


def _read_values(folder: str | Path, path: Path) -> object:
    """Read config.json; raises ``SbkitError`` if there is none, or it can't be read."""
    try:
        return untrusted.read_json(path, MAX_BYTES)
    except FileNotFoundError:
        hint = _where_a_bundle_is(folder)
        if path.parent.is_dir():
            raise SbkitError("not-a-bundle", f"{folder} is not a bundle: it has no {CONFIG}", hint=hint, file=folder
                             ) from None
        raise SbkitError("no-such-path", f"{folder} does not exist", hint=hint, file=folder) from None
    except NotADirectoryError:
        raise SbkitError("not-a-bundle", f"{folder} is a file, and a bundle is a folder",
                         hint="name the bundle's folder, which comes before its recordings", file=folder) from None
    except (OSError, ValueError) as error:
        raise SbkitError("damaged-bundle", f"{path} cannot be read: {getattr(error, 'strerror', None) or error}",
                         hint="copy the bundle again", file=path) from None


def _where_a_bundle_is(folder: str | Path) -> str:
    """Guess where the bundle is that somebody looked for in ``folder``, or how to make one."""
    path = Path(folder)
    if not path.exists():
        for previous in (publish.kept_meanwhile(folder), publish.replaced(folder)):
            if previous.is_dir():
                return f"an export that was killed left the previous bundle at {previous}: rename it back"
    if (path / "bundle" / CONFIG).is_file():  # a run that `make demo` or the README exported
        return f"its bundle is {path / 'bundle'}"
    if re.fullmatch(r"[\w-]+/[\w.-]+", str(folder)) and not path.parent.exists():
        return f"of a model of the Hugging Face Hub, sbkit import {folder} --to BUNDLE makes one"
    return _MADE_BY


def _kind_named(name: str) -> type[Bundle] | None:
    """Return the configuration of a kind, after importing the installed package that defines it, if one does."""
    if name not in KINDS:
        for point in entry_points(group=ENTRY_POINTS, name=name):
            point.load()
    return KINDS.get(name)
