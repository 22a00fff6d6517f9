"""The command ``sbkit resynthesize``: decodes shards of codes to audio files."""

from __future__ import annotations

import itertools
import json
import re
import sys
import time
import unicodedata
from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from sbkit.codes import CodedUtterance, Codes
from sbkit.codes.shards import MANIFEST
from sbkit.data import publish
from sbkit.data.manifest import Manifest
from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer.codec import CodecModel
from sbkit.infer.codec_engine import books_of
from sbkit.infer.formats import ModelRequest
from sbkit.infer.sound_file import write_sound
from sbkit.system.console import progress, time_span

#: The manifest of the audio files: ids, texts and speakers.
SOUNDS = "manifest.csv"
#: Lists all files, because a folder with a manifest may as well be a corpus.
RECORD = "resynthesis.json"
FORMAT = "sbkit resynthesis"
FOLDER = publish.FolderKind("a folder of resynthesized audio", RECORD, FORMAT, lambda values: values["files"])
#: Seconds of codes that are decoded at once.
AT_ONCE_SECONDS = 600.0


@dataclass(frozen=True)
class ResynthesizeRequest(ModelRequest):
    """The codes to decode, and the output folder.

    folder : of codes, or with such a folder for each split
    to : the output folder
    format : ``wav`` or ``flac``
    """

    bundle: Path
    folder: Path
    to: Path
    format: str = "wav"
    force: bool = False


def resynthesize(request: ResynthesizeRequest) -> int:
    """Decode codes and return the exit code. All of them are checked before anything is written."""
    books = books_of(layout.CodecConfig.read(request.bundle))
    to = request.to.resolve()
    publish.clean_up(to, FOLDER)
    if request.to.exists() and not request.force:
        raise SbkitError("output-exists", f"{request.to} exists",
                         hint="choose another folder, or replace it with --force", file=request.to)
    FOLDER.check_replaceable(request.to)
    folders = {path.parent.name: path.parent for path in sorted(request.folder.glob(f"*/{MANIFEST}"))}
    if (request.folder / MANIFEST).is_file() or not folders:  # without splits
        folders = {"": request.folder}
    splits = {name: Codes(folder, books) for name, folder in folders.items()}
    for codes in splits.values():
        codes.check()
    with CodecModel.open(request.bundle, request.model, request.device, request.threads) as codec:
        print(codec.running, file=sys.stderr)
        began = time.perf_counter()
        seconds = 0.0
        with publish.temporary_folder(to, FOLDER) as staging:
            for name, codes in splits.items():
                seconds += _write_sounds(codec, name, codes, staging / name, request.format)
            files = sorted(str(path.relative_to(staging)) for path in staging.rglob("*") if path.is_file())
            with (staging / RECORD).open("w", encoding="utf-8") as record:
                json.dump({"format": FORMAT, "files": files}, record, indent=1, ensure_ascii=False)
            publish.publish(staging, to, FOLDER, request.force)
    elapsed = time.perf_counter() - began
    count = sum(map(len, splits.values()))
    print(f"{request.to}: {count:,} recordings, {time_span(seconds)}; it took {time_span(elapsed)} (real-time factor "
          f"{elapsed / seconds:.4f})")
    return 0


def _write_sounds(codec: CodecModel, name: str, codes: Codes, folder: Path, format: str) -> float:
    """Write the audio files of a split and their manifest; returns their seconds."""
    folder.mkdir(exist_ok=True)
    names = iter(file_names(codes.ids))
    ids: list[str] = []
    durations: list[float] = []
    paths: list[str] = []
    texts: list[str] = []
    speakers: list[str] = []
    with progress(what=f"resynthesizing {name}".rstrip(), total=len(codes), unit="clip") as bar:
        for window in _windows(codes, codec.books.frame_rate):
            sounds = codec.decode([utterance.codes for utterance in window])
            for utterance, sound in zip(window, sounds, strict=True):
                path = folder / f"{next(names)}.{format}"
                with path.open("wb") as file:
                    write_sound(file, format, codec.sample_rate, sound)
                ids.append(utterance.id)
                durations.append(len(sound) / codec.sample_rate)
                paths.append(str(path))
                texts.append(utterance.text or "")
                speakers.append(utterance.speaker or "")
            bar.update(len(window))
    manifest = Manifest(ids=ids, durations=np.array(durations), wavs=paths, texts=texts, speakers=speakers)
    manifest.write(folder / SOUNDS, data_root=folder)
    return sum(durations)


def _windows(codes: Codes, frame_rate: float) -> Iterator[list[CodedUtterance]]:
    """Yield some minutes of codes at a time, or one utterance that is longer."""
    window: list[CodedUtterance] = []
    frames = 0
    for utterance in codes:
        if window and frames + len(utterance.codes) > AT_ONCE_SECONDS * frame_rate:
            yield window
            window = []
            frames = 0
        window.append(utterance)
        frames += len(utterance.codes)
    yield window


_BYTES = 180  # of the 255 that a file name may have; the rest is for a number and a suffix
#: Characters of a name that are read: NFC composes at most four into one.
_CHARACTERS = 4 * _BYTES
#: Device names on Windows.
_DEVICES = re.compile(r"(?i)(con|prn|aux|nul|com\d|lpt\d)(\.|$)")


def file_name(name: str) -> str:
    """Return a name without separators and other characters that are special or invalid on some file system."""
    begin = name[:_CHARACTERS].encode("utf-8", "replace").decode("utf-8")
    text = re.sub(r"[^\w.+=@,-]", "_", unicodedata.normalize("NFC", begin)).strip(".")
    text = text.encode()[:_BYTES].decode("utf-8", "ignore").rstrip(".")
    return f"_{text}" if not text or _DEVICES.match(text) or text.startswith("-") else text


def file_names(names: Iterable[str]) -> list[str]:
    """Return a file name for each; names that are the same, ignoring case, get a number."""
    taken: set[str] = set()
    counters: defaultdict[str, Iterator[int]] = defaultdict(lambda: itertools.count(2))
    unique_names = []
    for name in names:
        base = file_name(name)
        unique_name = base
        while unique_name.casefold() in taken:
            unique_name = f"{base}-{next(counters[base.casefold()])}"
        taken.add(unique_name.casefold())
        unique_names.append(unique_name)
    return unique_names
