"""What a bundle consists of: the names of its files and config.json; needs neither torch nor numpy."""

from __future__ import annotations

import hashlib
import json
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

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
#: Names of the graph's inputs and outputs.
INPUTS = ("signals", "lengths")  # [B, S] float32, [B] int64
OUTPUTS = ("log_probs", "frames")  # [B, T, V] float32, [B] int64

FORMAT, VERSION = "sbkit bundle", 1


@dataclass
class Config:
    """config.json: what somebody who runs the model has to know."""

    sample_rate: int
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
    language: str | None = None
    min_samples: int = 1
    """Shorter signals are padded with zeros to this many."""
    chunk_seconds: float = 20.0
    """What the model is used to hearing at once; longer audio is cut up."""
    batching: bool = True
    """False: an utterance's neighbours in a batch would change its transcript, so each runs alone."""
    models: dict[str, str] = field(default_factory=dict)
    files: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Of each file its size in bytes and its sha256."""
    trained: dict[str, Any] = field(default_factory=dict)
    """The recipe, the checkpoint and its scores."""
    made_by: dict[str, str] = field(default_factory=dict)

    @property
    def frame_seconds(self) -> float:
        """From one frame of the output to the next."""
        return self.hop_samples * self.subsampling / self.sample_rate

    def to_json(self) -> str:
        """The text of config.json."""
        return json.dumps({"format": FORMAT, "version": VERSION, **asdict(self)}, indent=1, ensure_ascii=False) + "\n"

    @classmethod
    def read(cls, folder: str | Path) -> Config:
        """The configuration of the bundle in ``folder``."""
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
        return cls._from_json(values, path)

    @classmethod
    def _from_json(cls, values: Any, path: Path) -> Config:
        if not isinstance(values, dict) or values.pop("format", None) != FORMAT:
            raise SbkitError(f"{path} does not describe a bundle of sbkit's")
        version = values.pop("version", None)
        if version != VERSION:
            raise SbkitError(f"{path} is of version {version} and this sbkit reads {VERSION}",
                             hint="install a newer sbkit" if isinstance(version, int) and version > VERSION else None)
        known = {each.name for each in fields(cls)}
        wrong = sorted(set(values) - known)
        if wrong:
            raise SbkitError(f"{path} has unknown keys: {', '.join(wrong)}")
        try:
            config = cls(**values)
        except TypeError as error:
            raise SbkitError(f"{path} lacks keys: {error}") from None
        config.check(path)
        return config

    def check(self, path: Path) -> None:
        """Refuse values that nothing can run with."""
        for name in ("sample_rate", "hop_samples", "subsampling", "vocabulary", "min_samples"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise SbkitError(f"{path}: {name} is {value!r} and must be a whole number above 0")
        if not isinstance(self.chunk_seconds, (int, float)) or self.chunk_seconds <= 0:
            raise SbkitError(f"{path}: chunk_seconds is {self.chunk_seconds!r} and must be above 0")
        if self.blank_id not in range(self.vocabulary):
            raise SbkitError(f"{path}: blank_id is {self.blank_id!r} and the vocabulary has {self.vocabulary} entries")
        for name in (*self.models.values(), *self.files):
            if Path(name).name != name:
                raise SbkitError(f"{path} names a file outside of the bundle: {name!r}")


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
