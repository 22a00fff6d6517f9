"""The layout of a bundle: the names of its files, and config.json. Needs neither torch nor numpy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

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
#: The file that each format is read from.
MODELS = {ONNX: "model.onnx", INT8: "model.int8.onnx", TORCH: "model.pt2", SPEECHBRAIN: RECIPE,
          SHERPA: "model.sherpa.onnx"}
#: Names of a graph's inputs, [B, S] float32 and [B] int64, and of a recogniser's outputs, [B, T, V] float32, [B] int64.
INPUTS = ("signals", "lengths")
OUTPUTS = ("log_probs", "frames")

FORMAT, VERSION = "sbkit bundle", 1
#: Kinds of bundles, by how they are run.
CTC, GRAPH = "ctc", "graph"


B = TypeVar("B", bound="Bundle")


@dataclass(kw_only=True)
class Bundle:
    """The contents of config.json that bundles of all kinds have."""

    kind: ClassVar[str]
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
        return json.dumps({"format": FORMAT, "version": VERSION, **kind, **asdict(self)}, indent=1,
                          ensure_ascii=False) + "\n"

    @classmethod
    def read(cls: type[B], folder: str | Path) -> B:
        """Read the configuration of the bundle in ``folder``, which must be of this kind."""
        found = read(folder)
        if not isinstance(found, cls):
            what = "has a model that gives no words" if found.kind == GRAPH else "has a speech recogniser"
            raise SbkitError(f"the bundle {folder} {what}", hint="sbkit.infer.load(bundle) runs it from Python")
        return found

    def check(self, path: Path) -> None:
        """Refuse values that no model can run with."""
        self._check_sizes(path, "sample_rate", "min_samples")
        for name in (*self.models.values(), *self.files):
            if Path(name).name != name:
                raise SbkitError(f"{path} names a file outside of the bundle: {name!r}",
                                 hint="export the model again")

    def _check_sizes(self, path: Path, *names: str) -> None:
        for name in names:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SbkitError(f"{path}: {name} is {value!r}, but must be a whole number above 0")


@dataclass(kw_only=True)
class Graph(Bundle):
    """The configuration of a model that gives tensors, of any task."""

    kind = GRAPH
    outputs: list[str]
    """Names of the outputs, in the model's order."""
    lengths: dict[str, str] = field(default_factory=dict)
    """For each output whose second dimension is padded, the output that holds the lengths of its utterances."""
    labels: list[str] = field(default_factory=list)
    """Names for the entries of the first output's last dimension."""

    def check(self, path: Path) -> None:
        super().check(path)
        if not self.outputs or not all(isinstance(name, str) for name in self.outputs):
            raise SbkitError(f"{path}: outputs must be a list of names, not {self.outputs!r}")


@dataclass(kw_only=True)
class Config(Bundle):
    """The configuration of a CTC recogniser, whose outputs are log-probabilities of tokens."""

    kind = CTC
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

    @property
    def frame_seconds(self) -> float:
        """Seconds from one output frame to the next."""
        return self.hop_samples * self.subsampling / self.sample_rate

    def check(self, path: Path) -> None:
        super().check(path)
        self._check_sizes(path, "hop_samples", "subsampling", "vocabulary")
        if not isinstance(self.chunk_seconds, (int, float)) or self.chunk_seconds <= 0:
            raise SbkitError(f"{path}: chunk_seconds is {self.chunk_seconds!r}, but must be above 0")
        if self.blank_id not in range(self.vocabulary):
            raise SbkitError(f"{path}: blank_id is {self.blank_id!r}, but the vocabulary has {self.vocabulary} entries")


KINDS: dict[str, type[Bundle]] = {kind.kind: kind for kind in (Config, Graph)}


def read(folder: str | Path) -> Bundle:
    """Read the configuration of the bundle in ``folder``, of any kind."""
    path = Path(folder) / CONFIG
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        problem = f"is not a bundle: it has no {CONFIG}" if path.parent.is_dir() else "does not exist"
        hint = "sbkit export RUN --to BUNDLE makes one"
        if (before := replaced(folder)).is_dir() and not path.parent.exists():
            hint = f"an export that was killed left the previous bundle at {before}: rename it back"
        raise SbkitError(f"{folder} {problem}", hint=hint) from None
    except (OSError, ValueError) as error:
        raise SbkitError(f"{path} cannot be read: {error}") from error
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
    unknown = sorted(set(values) - {each.name for each in fields(kind)})
    if unknown:
        raise SbkitError(f"{path} has unknown keys: {', '.join(unknown)}", hint="was it written by a newer sbkit?")
    try:
        config = kind(**values)
    except TypeError as error:
        raise SbkitError(f"{path} lacks keys: {error}") from None
    config.check(path)
    return config


def fingerprint(path: Path) -> dict[str, Any]:
    """Return the size and the sha256 of a file."""
    return {"bytes": path.stat().st_size, "sha256": disk.sha256(path)}


def replaced(folder: str | Path) -> Path:
    """Return where a bundle is kept while it is being replaced, on disks that can't exchange two folders."""
    path = Path(folder).resolve()
    return path.with_name(f".{path.name}.replaced")
