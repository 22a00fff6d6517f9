"""What a bundle consists of: the names of its files and config.json; needs neither torch nor numpy."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from sbkit.errors import SbkitError

CONFIG = "config.json"
WEIGHTS = "model.safetensors"
TOKENIZER = "tokenizer.model"
TOKENS = "tokens.txt"
RECIPE = "hyperparams.yaml"
PARITY = "parity.json"
README = "README.md"

ONNX, INT8, TORCH, SPEECHBRAIN, SHERPA = "onnx", "int8", "torch", "speechbrain", "sherpa"
#: The file that each way of running a bundle reads.
MODELS = {ONNX: "model.onnx", INT8: "model.int8.onnx", TORCH: "model.pt2", SPEECHBRAIN: RECIPE,
          SHERPA: "model.sherpa.onnx"}
#: Names of a graph's inputs, [B, S] float32 and [B] int64, and of a recogniser's outputs, [B, T, V] float32, [B] int64.
INPUTS = ("signals", "lengths")
OUTPUTS = ("log_probs", "frames")

FORMAT, VERSION = "sbkit bundle", 1
#: What a bundle is to those who run it.
CTC, GRAPH = "ctc", "graph"


B = TypeVar("B", bound="Bundle")


@dataclass(kw_only=True)
class Bundle:
    """config.json: what somebody who runs a model has to know, of any kind."""

    kind: ClassVar[str]
    sample_rate: int
    language: str | None = None
    min_samples: int = 1
    """Shorter signals are padded with zeros to this many."""
    batching: bool = True
    """False: an utterance's neighbours in a batch would change what comes out, so each runs alone."""
    models: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each file its size in bytes and its sha256."""
    trained: dict[str, Any] = field(default_factory=dict)
    """The recipe, the checkpoint and its scores."""
    made_by: dict[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        """The text of config.json."""
        kind = {} if self.kind == CTC else {"kind": self.kind}  # as bundles were written before there were others
        return json.dumps({"format": FORMAT, "version": VERSION, **kind, **asdict(self)}, indent=1,
                          ensure_ascii=False) + "\n"

    @classmethod
    def read(cls: type[B], folder: str | Path) -> B:
        """The configuration of the bundle in ``folder``, which must be of this kind."""
        found = read(folder)
        if not isinstance(found, cls):
            what = "gives no words" if found.kind == GRAPH else "is a recogniser's"
            raise SbkitError(f"the bundle {folder} {what}", hint="sbkit.infer.load(bundle) runs it from Python")
        return found

    def check(self, path: Path) -> None:
        """Refuse values that nothing can run with."""
        self._check_sizes(path, "sample_rate", "min_samples")
        for name in (*self.models.values(), *self.files):
            if Path(name).name != name:
                raise SbkitError(f"{path} names a file outside of the bundle: {name!r}")

    def _check_sizes(self, path: Path, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SbkitError(f"{path}: {name} is {value!r} and must be a whole number above 0")


@dataclass(kw_only=True)
class Graph(Bundle):
    """A model that gives tensors, of a task that no more is known of."""

    kind = GRAPH
    outputs: list[str]
    """Names, in their order."""
    lengths: dict[str, str] = field(default_factory=dict)
    """Of an output whose second dimension is padded, the output that says how much of it is an utterance's."""
    labels: list[str] = field(default_factory=list)
    """What the last dimension of the first output stands for."""

    def check(self, path: Path) -> None:
        super().check(path)
        if not self.outputs or not all(isinstance(name, str) for name in self.outputs):
            raise SbkitError(f"{path}: outputs are {self.outputs!r} and must be names")


@dataclass(kw_only=True)
class Config(Bundle):
    """A recogniser with CTC: log-probabilities, and what they stand for."""

    kind = CTC
    hop_samples: int
    """Samples between two feature frames."""
    subsampling: int
    """Feature frames to one frame of the output."""
    vocabulary: int
    """Width V of the output, rows of tokens.txt."""
    blank_id: int = 0
    silent_ids: list[int] = field(default_factory=list)
    """Ids that are no text: the beginning and the end of a sentence."""
    word_separator: str | None = "▁"
    """Begins a word within a token; null where every token stands for itself (scripts without spaces)."""
    chunk_seconds: float = 20.0
    """What the model is used to hearing at once; longer audio is cut up."""

    @property
    def frame_seconds(self) -> float:
        """From one frame of the output to the next."""
        return self.hop_samples * self.subsampling / self.sample_rate

    def check(self, path: Path) -> None:
        super().check(path)
        self._check_sizes(path, "hop_samples", "subsampling", "vocabulary")
        if not isinstance(self.chunk_seconds, (int, float)) or self.chunk_seconds <= 0:
            raise SbkitError(f"{path}: chunk_seconds is {self.chunk_seconds!r} and must be above 0")
        if self.blank_id not in range(self.vocabulary):
            raise SbkitError(f"{path}: blank_id is {self.blank_id!r} and the vocabulary has {self.vocabulary} entries")


KINDS: dict[str, type[Bundle]] = {kind.kind: kind for kind in (Config, Graph)}


def read(folder: str | Path) -> Bundle:
    """The configuration of the bundle in ``folder``, of whatever kind it is."""
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problem = f"{folder} is no bundle: it has no {CONFIG}" if path.parent.is_dir() else f"{folder} is not there"
        hint = "sbkit export RUN --to BUNDLE makes one"
        if (before := replaced(folder)).is_dir() and not path.parent.exists():
            hint = f"an export that was killed left the one that was there as {before}: give it its name back"
        raise SbkitError(problem, hint=hint) from None
    except (OSError, ValueError) as error:
        raise SbkitError(f"{path} cannot be read: {error}") from error
    if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
        raise SbkitError(f"{path} does not describe a bundle of sbkit's")
    version = values.pop("version", None)
    if version != VERSION:
        raise SbkitError(f"{path} is of version {version} and this sbkit reads {VERSION}",
                         hint="install a newer sbkit" if isinstance(version, int) and version > VERSION else None)
    kind = KINDS.get(said) if isinstance(said := values.pop("kind", CTC), str) else None
    if kind is None:
        raise SbkitError(f"{path} is of kind {said!r}, and this sbkit knows {', '.join(KINDS)}",
                         hint="install a newer sbkit")
    wrong = sorted(set(values) - {each.name for each in fields(kind)})
    if wrong:
        raise SbkitError(f"{path} has unknown keys: {', '.join(wrong)}")
    try:
        config = kind(**values)
    except TypeError as error:
        raise SbkitError(f"{path} lacks keys: {error}") from None
    config.check(path)
    return config


def fingerprint(path: Path) -> dict[str, Any]:
    """Size and sha256 of a file."""
    digest = hashlib.sha256()
    with open(path, "rb") as file:
        while block := file.read(1 << 20):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def replaced(folder: str | Path) -> Path:
    """Where a bundle lies while another one takes its place, on a disk that can't exchange two folders."""
    path = Path(folder).resolve()
    return path.with_name(f".{path.name}.replaced")
