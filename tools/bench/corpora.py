"""The corpora of tools.bench.learning, each prepared once for all systems."""

from __future__ import annotations

import json
import shutil
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from sbkit.data.manifest import Manifest
from sbkit.data.splits import SPLITS
from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write
from tools.bench.harness import read_lines

SAMPLE_RATE = 16_000
TRAIN_SHARE = 0.82  # of a demo corpus, for estimates before it exists


@dataclass(frozen=True)
class Spec:
    """A corpus on the command line: hours of synthesised speech, or a folder in any layout that a recipe reads."""

    language: str
    hours: float = 0.0
    folder: str | None = None

    @property
    def name(self) -> str:
        return f"{self.language}-{f'{self.hours:g}h' if self.folder is None else Path(self.folder).name}"


@dataclass(frozen=True)
class Corpus:
    """A prepared corpus: its audio, its texts, and how long its preparation took."""

    name: str
    language: str
    source: str  # the data_folder of a recipe
    manifests: str  # train.json, dev.json and test.json as NeMo reads them, of 16 kHz WAVs
    train_hours: float
    train_clips: int
    convert_seconds: float  # writing those WAVs

    def references(self, split: str) -> dict[str, str]:
        """Return the texts of a split by id."""
        return {row["id"]: row["text"] for row in read_lines(Path(self.manifests) / f"{split}.json")}


def parse(text: str) -> Spec:
    """Read a corpus from one word of the command line.

    >>> parse("es:0.3")
    Spec(language='es', hours=0.3, folder=None)
    """
    language, sign, folder = text.partition("=")
    if sign and language and folder:
        if not Path(folder).exists():
            raise SbkitError("bench", f"there is no corpus {text}: no such folder or archive")
        return Spec(language, folder=str(Path(folder).resolve()))
    language, _, hours = text.partition(":")
    try:
        length = float(hours)
    except ValueError:
        length = 0.0
    if not language or not 0 < length <= 1000:
        raise SbkitError("bench", f"cannot read the corpus {text!r}",
                         hint="write LANGUAGE:HOURS, such as es:1, for synthesised speech, or LANGUAGE=FOLDER")
    return Spec(language, hours=length)


def find(spec: Spec, out: Path) -> Corpus | None:
    """Return a corpus that an earlier call has prepared; None if there is none."""
    path = out / "corpora" / spec.name / "corpus.json"
    try:
        found = Corpus(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return None
    if spec.folder not in (None, found.source):
        raise SbkitError("bench", f"{path.parent} was made from {found.source}, not {spec.folder}",
                             hint="choose another --out")
    return found


def prepare(spec: Spec, out: Path, recipe: Path, options: Sequence[str]) -> Corpus:
    """Make a corpus if it does not exist: leave out what the recipe leaves out, and convert audio for NeMo."""
    found = find(spec, out)
    if found is not None:
        return found
    folder = out / "corpora" / spec.name
    source = source_of(spec, out)
    manifests = _manifests(spec, source, folder, recipe, options)
    began = time.perf_counter()
    for split in SPLITS:
        convert(manifests[split], folder / "nemo", split)
    found = Corpus(spec.name, spec.language, source, str(folder / "nemo"), manifests["train"].hours,
                   len(manifests["train"]), round(time.perf_counter() - began, 1))
    with atomic_write(folder / "corpus.json") as file:
        json.dump(asdict(found), file, indent=1)
    return found


def source_of(spec: Spec, out: Path) -> str:
    """Return the data_folder of a recipe, for which speech is synthesised if it does not exist."""
    from sbkit.data.demo import make_demo_corpus

    return spec.folder or str(make_demo_corpus(out / "corpora" / spec.name, hours=spec.hours, language=spec.language))


def _manifests(spec: Spec, source: str, folder: Path, recipe: Path, options: Sequence[str],
               ) -> dict[str, Manifest]:
    """Prepare sbkit's manifests by the recipe's rules."""
    from sbkit.recipe import arguments, load

    request = arguments.parse([str(recipe), *options, "--data_folder", source, "--language", spec.language,
                               "--output_folder", str(folder / "prepared")])
    return load.load(request.path, request.overrides)["corpus"].prepare(needed=SPLITS)


def convert(manifest: Manifest, folder: Path, split: str) -> None:
    """Write NeMo's manifest of a split, and each utterance as a WAV of 16 kHz."""
    import soundfile

    from sbkit.data.audio import read_utterance

    clips = folder / split
    shutil.rmtree(clips, ignore_errors=True)  # left by a call that was stopped
    clips.mkdir(parents=True)
    with atomic_write(folder / f"{split}.json") as lines:
        for number, row in enumerate(manifest):
            path = (clips / f"{number:06d}.wav").resolve()
            signal = read_utterance(row.wav, row.start, row.duration, sample_rate=SAMPLE_RATE)
            soundfile.write(path, signal, SAMPLE_RATE)
            lines.write(json.dumps({"id": row.id, "audio_filepath": str(path), "duration": len(signal) / SAMPLE_RATE,
                                    "text": row.text}, ensure_ascii=False) + "\n")
