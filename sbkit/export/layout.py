"""The layout of a bundle: the names of its files, and config.json. Needs neither torch nor numpy."""

from __future__ import annotations

import json
import math
import re
import unicodedata
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from types import UnionType
from typing import Any, ClassVar, TypeVar

from sbkit.data import publish
from sbkit.data.pronunciation import NAME
from sbkit.data.text import TextRules
from sbkit.errors import SbkitError
from sbkit.system import disk

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.model"
TOKENS = "tokens.txt"
RECIPE = "hyperparams.yaml"
PARITY = "parity.json"
README = "README.md"

ONNX, INT8, TORCH, SPEECHBRAIN, SHERPA = "onnx", "int8", "torch", "speechbrain", "sherpa"
SHERPA_STREAM = "sherpa stream"
#: The file that each format is read from.
MODELS = {ONNX: "model.onnx", INT8: "model.int8.onnx", TORCH: "model.pt2", SPEECHBRAIN: RECIPE,
          SHERPA: "model.sherpa.onnx", SHERPA_STREAM: "stream.sherpa.onnx"}
#: The same of a graph that takes a stream chunk by chunk.
STREAMS = {ONNX: "stream.onnx", INT8: "stream.int8.onnx", TORCH: "stream.pt2"}
#: The same of a codec's graph from codes to sound.
DECODERS = {ONNX: "decoder.onnx", TORCH: "decoder.pt2"}
#: Names of a graph's inputs, [B, S] float32 and [B] int64, and of a recogniser's outputs, [B, T, V] float32, [B] int64.
INPUTS = ("signals", "lengths")
OUTPUTS = ("log_probs", "frames")
#: The same of a voice: ids of symbols [B, U] and their numbers [B], int64, speakers [B] int64, speeds [B] float32; and
#: samples from -1 to 1 [B, S] float32, their numbers [B] int64, and frames of each symbol [B, U].
VOICE_INPUTS = ("text", "lengths", "speaker", "speed")
VOICE_OUTPUTS = ("audio", "audio_lengths", "durations")
#: The outputs of a codec, codes [B, T, Q] and the numbers of their frames [B], int64, which its decoder takes to give
#: signals and lengths again.
CODES = ("codes", "frames")

FORMAT, VERSION = "sbkit bundle", 1
#: Kinds of bundles, by how they are run.
CTC, GRAPH, VOICE, CODEC = "ctc", "graph", "voice", "codec"
#: Types of the tensors of a stream's state.
TYPES = ("float32", "int64")
#: Buffers get as large as these say, so there are bounds: bytes of a configuration (10,000 symbols have 200 kB), a rate
#: that no converter gives, seconds that a model pads to or looks around (Whisper's window, the longest known, has 30 s)
#: and of a codec's frame, and symbols that a voice is given at once (an hour's).
MOST_BYTES, MOST_RATE, MOST_SECONDS, MOST_FRAME_SECONDS, MOST_TEXT = 1 << 24, 768_000, 60, 1, 50_000

T = TypeVar("T", bound="Bundle | Streaming")
B = TypeVar("B", bound="Bundle")


@dataclass(kw_only=True)
class Bundle:
    """The contents of config.json that bundles of all kinds have."""

    kind: ClassVar[str]
    what: ClassVar[str]
    """What such a bundle has, as a message says it."""
    use: ClassVar[str]
    """How one begins to use it; ``{}`` stands for its folder."""
    sample_rate: int
    language: str | None = None
    min_samples: int = 1
    """Shorter signals are padded with zeros to this length."""
    batching: bool = True
    """False where an utterance's outputs would depend on its batch, so that each has to run alone."""
    models: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Size in bytes and sha256 of each file."""
    trained: dict[str, Any] = field(default_factory=dict)
    """The recipe, the checkpoint and its scores."""
    made_by: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """Make the text of config.json."""
        kind = {} if self.kind == CTC else {"kind": self.kind}  # version 1 began with CTC alone
        return json.dumps({"format": FORMAT, "version": VERSION, **kind, **self._values()}, indent=1,
                          ensure_ascii=False) + "\n"

    def _values(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def read(cls: type[B], folder: str | Path) -> B:
        """Read the configuration of the bundle in ``folder``, which must be of this kind."""
        found = read(folder)
        if not isinstance(found, cls):
            raise SbkitError(f"the bundle {folder} has {found.what}, and {cls.what} is needed here",
                             hint=found.use.format(folder))
        return found

    def check(self, path: Path) -> None:
        """Refuse values that no model can run with."""
        check_kinds(path, self, str | None, "language")
        check_kinds(path, self, bool, "batching")
        check_kinds(path, self, dict, "models", "trained", "made_by")
        check_files(path, self.files)
        check_sizes(path, self, "sample_rate", most=MOST_RATE)
        check_sizes(path, self, "min_samples", most=MOST_SECONDS * self.sample_rate)
        check_names(path, *self.models.values(), *self.files)

    def told(self) -> dict[str, str]:
        """Return what an ONNX file of the bundle has to say of itself, where it says it."""
        return {}


@dataclass(kw_only=True)
class Graph(Bundle):
    """The configuration of a model that gives tensors, of any task."""

    kind, what = GRAPH, "a model that gives no words"
    use = "in Python: sbkit.infer.load('{}').run(FILE)"
    outputs: list[str]
    """Names of the outputs, in the model's order."""
    lengths: dict[str, str] = field(default_factory=dict)
    """For each output whose second dimension is padded, the output that holds the lengths of its utterances."""
    labels: list[str] = field(default_factory=list)
    """Names for the entries of the first output's last dimension."""

    def check(self, path: Path) -> None:
        super().check(path)
        if not isinstance(self.outputs, list) or not self.outputs or not all(map(is_name, self.outputs)):
            raise SbkitError(f"{path}: outputs must be a list of names, not {self.outputs!r}")
        check_kinds(path, self, dict, "lengths")
        check_kinds(path, self, list, "labels")


@dataclass(kw_only=True)
class Streaming:
    """What a program needs to know to run a recogniser on streams: windows of samples and a state in, log-probabilities
    and the next state out.

    A stream is continued by its mirror image, ``before`` samples at its beginning and ``after`` at its end. The first
    window begins where that does, and each further one ``ahead`` frames and ``overlap`` samples before the end of the
    one before.
    """

    chunks: list[int]
    """Output frames of a chunk: the sizes that the model was trained for."""
    left: int
    """Output frames before its chunk that a frame sees."""
    overlap: int
    """Samples of a feature frame beyond those of the step to the next."""
    before: int
    after: int
    state: dict[str, dict[str, Any]]
    """Inputs that hold the state: ``type`` (float32 or int64) and ``shape``, to which a batch adds a first dimension.
    The next state is in the outputs of these names after ``next_``. A stream begins with zeros."""
    ahead: int = 0
    """The last output frames of a full window, which the next one begins with and says."""
    models: dict[str, str] = field(default_factory=dict)
    """The file of each format."""

    def check(self, path: Path) -> None:
        """Refuse values that no stream can run with."""
        told = f"{path}: streaming"
        if not isinstance(self.chunks, list) or not self.chunks or not all(is_whole(size, 1) for size in self.chunks):
            raise SbkitError(f"{told}: chunks is {self.chunks!r}, but must be a list of whole numbers above 0")
        check_sizes(told, self, "left")
        check_sizes(told, self, "overlap", "before", "after", "ahead", least=0)
        if self.ahead >= min(self.chunks):
            raise SbkitError(f"{told}: ahead is {self.ahead}, but must be below the smallest of chunks")
        if not isinstance(self.state, dict) or not self.state or not all(map(_is_tensor, self.state.values())):
            raise SbkitError(f"{told}: state must give each name a type, {' or '.join(TYPES)}, and a shape, not "
                             f"{self.state!r}")
        if not isinstance(self.models, dict):
            raise SbkitError(f"{told}: models is {self.models!r}, but must give each format its file")
        check_names(path, *self.models.values())


@dataclass(kw_only=True)
class Config(Bundle):
    """The configuration of a CTC recogniser, whose outputs are log-probabilities of tokens."""

    kind, what = CTC, "a speech recogniser"
    use = "use it: sbkit transcribe {} FILES..."
    hop_samples: int
    """Samples between two feature frames."""
    subsampling: int
    """Feature frames per output frame."""
    vocabulary: int
    """Number of tokens: the width V of the output and the rows of tokens.txt."""
    blank_id: int = 0
    silent_ids: list[int] = field(default_factory=list)
    """Ids of tokens that are not text, such as the beginning and the end of a sentence."""
    word_separator: str | None = "▁"
    """The character that starts a word in tokens; null for scripts without spaces, where each token is a word."""
    chunk_seconds: float = 20.0
    """Longest audio to give the model at once, as in training; longer audio is split."""
    longest_seconds: float | None = None
    """The longest audio that the model can hear at once; null: any."""
    streaming: Streaming | None = None
    """Only of a model that also takes streams."""

    def window(self, chunk: int) -> int:
        """Return the samples of a stream's window for a chunk of so many output frames."""
        assert self.streaming is not None, "asked of models that take streams"
        return chunk * self.subsampling * self.hop_samples + self.streaming.overlap

    def _values(self) -> dict[str, Any]:
        values = super()._values()
        return {name: value for name, value in values.items()
                if name not in ("streaming", "longest_seconds") or value is not None}

    def chunk(self, asked: float | None) -> float:
        """Return the seconds of audio to give the model at once, as asked for if it can hear that much."""
        if asked is not None and self.longest_seconds is not None and asked > self.longest_seconds:
            raise SbkitError(f"chunks of {asked:g} s are asked for, and the model hears at most "
                             f"{self.longest_seconds:g} s at once",
                             hint="leave out --chunk-seconds: longer audio is cut at pauses")
        return asked or self.chunk_seconds

    @property
    def frame_seconds(self) -> float:
        """Seconds from one output frame to the next."""
        return self.hop_samples * self.subsampling / self.sample_rate

    def check(self, path: Path) -> None:
        super().check(path)
        check_sizes(path, self, "hop_samples", "subsampling", "vocabulary")
        if not is_number(self.chunk_seconds) or not 0 < self.chunk_seconds < math.inf:
            raise SbkitError(f"{path}: chunk_seconds is {self.chunk_seconds!r}, but must be above 0")
        if self.longest_seconds is not None and not (is_number(self.longest_seconds)
                                                     and self.chunk_seconds <= self.longest_seconds < math.inf):
            raise SbkitError(f"{path}: longest_seconds is {self.longest_seconds!r}, but must be no less than "
                             f"chunk_seconds, which is {self.chunk_seconds:g}")
        check_kinds(path, self, list, "silent_ids")
        check_kinds(path, self, str | None, "word_separator")
        if self.blank_id not in range(self.vocabulary):
            raise SbkitError(f"{path}: blank_id is {self.blank_id!r}, but the vocabulary has {self.vocabulary} entries")
        if self.streaming is not None:
            self.streaming.check(path)


@dataclass(kw_only=True)
class Voice(Bundle):
    """The configuration of a voice: text in, samples out."""

    kind, what = VOICE, "a voice"
    use = "use it: sbkit speak {} TEXT --to FILE"
    symbols: list[str]
    """The character of each id of a text; the first id is padding, and its name no symbol of any text."""
    speakers: list[str]
    """Names of the voices; the first is the default."""
    max_symbols: int
    """Ids of the longest text that the model is given at once; longer texts are cut."""
    frame_seconds: float
    """Seconds of a frame, in which durations are counted."""
    codec: str | None = None
    """The sha256 of the codec that the voice learnt to speak through."""
    books: list[int] = field(default_factory=list)
    """Entries of each of the codec's books."""
    spelling: str | None = None
    """The voice of espeak-ng by whose pronunciation words become symbols; null: their characters are the symbols."""
    characters: list[str] = field(default_factory=list)
    """With a spelling: the characters that words may have."""
    text: dict[str, Any] | None = None
    """The options of the ``TextRules`` that its texts were written by; null: as they are, but for the case."""

    def told(self) -> dict[str, str]:
        return {"sample_rate": str(self.sample_rate), "symbols": json.dumps(self.symbols, ensure_ascii=False),
                "speakers": json.dumps(self.speakers, ensure_ascii=False)}

    @property
    def rules(self) -> TextRules | None:
        """The rules that its texts were written by, if it knows them."""
        return None if self.text is None else TextRules(**self.text)

    def check(self, path: Path) -> None:
        super().check(path)
        check_sizes(path, self, "max_symbols", most=MOST_TEXT)
        if not is_number(self.frame_seconds) or not 0 < self.frame_seconds < math.inf:
            raise SbkitError(f"{path}: frame_seconds is {self.frame_seconds!r}, but must be above 0")
        for name, least in (("symbols", 2), ("speakers", 1)):
            values = getattr(self, name)
            if not isinstance(values, list) or len(values) < least or not all(map(is_name, values)):
                raise SbkitError(f"{path}: {name} must be a list of {least} or more texts, not {values!r}")
            if twice := sorted({each for each in values if values.count(each) > 1}):
                raise SbkitError(f"{path}: {name} has {', '.join(map(repr, twice))} twice")
        if self.spelling is not None and (not isinstance(self.spelling, str) or not NAME.fullmatch(self.spelling)):
            raise SbkitError(f"{path}: spelling is {self.spelling!r}, which is no voice of espeak-ng")
        if not isinstance(self.characters, list) or not all(map(is_name, self.characters)) \
                or bool(self.characters) != (self.spelling is not None):
            raise SbkitError(f"{path}: characters must be a list of texts, with a spelling alone")
        for symbol in [*self.symbols[1:], *self.characters]:
            if len(symbol) != 1 or unicodedata.normalize("NFC", symbol) != symbol:
                raise SbkitError(f"{path}: the symbol {symbol!a} is not one character in Unicode's form NFC",
                                 hint="export the model again")
        check_books(path, self.books)
        check_kinds(path, self, str | None, "codec")
        check_rules(path, self.text)


@dataclass(kw_only=True)
class Codec(Bundle):
    """The configuration of a codec: samples in, codes out, and by its decoder back again."""

    kind, what = CODEC, "a codec"
    use = "use it: sbkit tokenize {} CORPUS --to FOLDER"
    codec: str
    """The sha256 of its weights and of what else defines its codes."""
    books: list[int]
    """Entries of each of its books."""
    stride: int
    """Samples of a frame, the last of which may reach beyond the end."""
    context: int | None
    """Frames on each side of one that decide its codes and its samples; null: all there are."""
    min_frames: int = 1
    """Fewer codes are padded with zeros to so many frames."""
    decoders: dict[str, str] = field(default_factory=dict)
    """The decoder's file of each format."""

    def told(self) -> dict[str, str]:
        return {"sample_rate": str(self.sample_rate), "codec": self.codec, "books": ",".join(map(str, self.books)),
                "stride": str(self.stride)}

    def check(self, path: Path) -> None:
        super().check(path)
        check_sizes(path, self, "stride", most=MOST_FRAME_SECONDS * self.sample_rate)
        most = MOST_SECONDS * self.sample_rate // self.stride
        check_sizes(path, self, "min_frames", most=most)
        if self.context is not None:
            check_sizes(path, self, "context", least=0, most=most)
        if not isinstance(self.codec, str) or not re.fullmatch("[0-9a-f]{64}", self.codec):
            raise SbkitError(f"{path}: codec must be a sha256 in hexadecimal, not {self.codec!r}")
        if not self.books:
            raise SbkitError(f"{path}: books is empty, but a codec has one or more")
        check_books(path, self.books)
        if not isinstance(self.decoders, dict) or self.decoders.keys() != self.models.keys():
            raise SbkitError(f"{path}: decoders must give a file for each of {', '.join(self.models)}, not "
                             f"{self.decoders!r}")
        check_names(path, *self.decoders.values())


KINDS: dict[str, type[Bundle]] = {kind.kind: kind for kind in (Config, Graph, Voice, Codec)}


def read(folder: str | Path) -> Bundle:
    """Read the configuration of the bundle in ``folder``, of any kind."""
    path = Path(folder) / CONFIG
    try:
        with path.open("rb") as file:
            values = json.loads(file.read(MOST_BYTES).decode())  # one that was cut is no JSON
    except FileNotFoundError:
        problem = f"is not a bundle: it has no {CONFIG}" if path.parent.is_dir() else "does not exist"
        hint = "sbkit export RUN --to BUNDLE makes one"
        if (before := publish.replaced(folder)).is_dir() and not path.parent.exists():
            hint = f"an export that was killed left the previous bundle at {before}: rename it back"
        raise SbkitError(f"{folder} {problem}", hint=hint) from None
    except (OSError, ValueError, RecursionError) as error:
        raise SbkitError(f"{path} cannot be read: {error}") from None
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise SbkitError(f"{path} does not describe a bundle of sbkit")
    version = values.pop("version", None)
    if version != VERSION:
        raise SbkitError(f"{path} has version {version}, but this sbkit reads version {VERSION}",
                         hint="install a newer sbkit" if isinstance(version, int) and version > VERSION else None)
    name = values.pop("kind", CTC)
    kind = KINDS.get(name) if isinstance(name, str) else None
    if kind is None:
        raise SbkitError(f"{path} is of kind {name!r}, but this sbkit reads {', '.join(KINDS)}",
                         hint="install a newer sbkit")
    if kind is Config and values.get("streaming") is not None:
        values["streaming"] = _made(Streaming, values["streaming"], f"{path}: streaming")
    config = _made(kind, values, str(path))
    config.check(path)
    return config


def _made(kind: type[T], values: object, told: str) -> T:
    """Make an instance of values as they were read."""
    if not isinstance(values, dict):
        raise SbkitError(f"{told} is {values!r}, but must be an object")
    unknown = sorted(set(values) - {each.name for each in fields(kind)})
    if unknown:
        raise SbkitError(f"{told} has unknown keys: {', '.join(unknown)}", hint="was it written by a newer sbkit?")
    try:
        return kind(**values)
    except TypeError as error:
        raise SbkitError(f"{told} lacks keys: {error}") from None


def _is_tensor(value: object) -> bool:
    return isinstance(value, dict) and value.keys() == {"type", "shape"} and value["type"] in TYPES \
        and isinstance(value["shape"], list) and all(is_whole(size, 1) for size in value["shape"])


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and the sha256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": disk.sha256(path)}


def size(folder: Path, *names: str) -> int:
    """Return the bytes of these files, of their weights beside them, and of none that is missing."""
    paths = [folder / each for name in names for each in (name, f"{name}.data")]
    return sum(path.stat().st_size for path in paths if path.exists())


#: No dimension of a tensor is larger in any runtime.
MOST = 2**31 - 1
#: Rules of a text that replace, and the characters of each: a language's own have 14, and two characters.
_MOST_RULES, _MOST_RULE = 1000, 100
_KINDS: dict[type | UnionType, str] = {dict: "an object", list: "a list", bool: "true or false",
                                       str | None: "a text or null"}


def check_sizes(told: object, values: object, *names: str, least: int = 1, most: int = MOST) -> None:
    """Refuse what is no whole number from ``least`` to ``most``."""
    for name in names:
        if not is_whole(value := getattr(values, name), least):
            raise SbkitError(f"{told}: {name} is {value!r}, but must be a whole number of {least} or more"
                             if least != 1 else f"{told}: {name} is {value!r}, but must be a whole number above 0")
        if value > most:
            raise SbkitError(f"{told}: {name} is {str(value)[:40]}, but must be {most:,} at most",
                             hint="export the model again")


def check_kinds(path: Path, values: object, kind: type | UnionType, *names: str) -> None:
    """Refuse values of another type."""
    for name in names:
        if not isinstance(value := getattr(values, name), kind):
            wanted = _KINDS[kind]
            raise SbkitError(f"{path}: {name} must be {wanted}, not {repr(value)[:200]}", hint="export the model again")


def check_files(path: Path, files: object) -> None:
    """Refuse what doesn't give each file its size and its sha256."""
    if not isinstance(files, dict) or not all(
            isinstance(each, dict) and is_whole(each.get("bytes", 0), 0) and isinstance(each.get("sha256", ""), str)
            for each in files.values()):
        raise SbkitError(f"{path}: files must give each file its bytes and sha256, not {repr(files)[:200]}",
                         hint="export the model again")


def check_books(path: Path, books: object) -> None:
    """Refuse what is no list of sizes of codebooks."""
    if not isinstance(books, list) or not all(is_whole(size, 1) for size in books):
        raise SbkitError(f"{path}: books must be a list of whole numbers above 0, not {repr(books)[:200]}")


def check_rules(path: Path, text: object) -> None:
    """Refuse options that ``TextRules`` doesn't have, and rules that are no language's."""
    if text is None:
        return
    if not isinstance(text, dict) or text.keys() - TextRules().options().keys():
        raise SbkitError(f"{path}: text must have options of TextRules, not {repr(text)[:200]}",
                         hint="was it written by a newer sbkit?")
    try:
        rules = TextRules(**text)
    except (SbkitError, TypeError) as error:
        raise SbkitError(f"{path}: {error}", hint="export the model again") from None
    pairs = [*rules.replace.items(), *rules.case_pairs.items()]
    if len(pairs) > _MOST_RULES or any(len(each) > _MOST_RULE for pair in pairs for each in pair):
        raise SbkitError(f"{path}: text replaces by more than {_MOST_RULES} rules, or by one of more than {_MOST_RULE} "
                         "characters", hint="export the model again")


def check_names(path: Path, *names: object) -> None:
    """Refuse names of files outside of the bundle."""
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise SbkitError(f"{path} names a file outside of the bundle: {name!r}", hint="export the model again")


def is_whole(value: object, least: int) -> bool:
    """Whether this is a whole number of ``least`` or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_number(value: object) -> bool:
    """Whether this is a number, which may be infinite or none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def is_name(value: object) -> bool:
    """Whether this is a text that is not empty."""
    return isinstance(value, str) and bool(value)
