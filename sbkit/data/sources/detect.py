"""Detects the kind of a corpus from its path or name, and opens it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from sbkit.data.sources.archive import SUFFIXES, CommonVoiceArchive
from sbkit.data.sources.base import Source
from sbkit.data.sources.common_voice import CommonVoice, is_language_folder, language_folders
from sbkit.data.sources.files import FileSource, Mixed
from sbkit.data.sources.folders import AudioFolder, LibriSpeech, VoiceBank, VoxCeleb
from sbkit.data.sources.huggingface import Hub, Parquet, SavedToDisk
from sbkit.data.sources.json_lines import JsonLines
from sbkit.data.sources.ljspeech import LJSpeech
from sbkit.data.sources.speechbrain_csv import SpeechBrainCsv
from sbkit.errors import SbkitError

#: How a recipe may name a source: a path, a hub address, or files by split.
Named = str | Path | Mapping[str, str | Path | Sequence[str | Path]]

#: Ends of the names of files that are a split each.
ONE_SPLIT: tuple[str, ...] = (*SpeechBrainCsv.suffixes, ".tsv", *JsonLines.suffixes, ".parquet")
_FILE_KINDS: tuple[type[FileSource], ...] = (SpeechBrainCsv, JsonLines)
_SHARD = re.compile(r"(?P<split>.+)-(?P<number>\d+)-of-(?P<shards>\d+)")
_HUB_PAGE = "https://huggingface.co/datasets/"
_EXPECTED = (
    "expected a Common Voice folder (clips/ and train.tsv) or its .tar.gz, a folder with train.csv, "
    "train.jsonl or train*.parquet, LJSpeech's metadata.csv and wavs/, LibriSpeech, a save_to_disk folder, VoxCeleb, "
    "VoiceBank-DEMAND or recordings alone (where no texts are needed), or hf://owner/name"
)


def open_source(source: Named, *, cache: Path, language: str | None = None,
                columns: Mapping[str, str] | None = None, data_root: str | Path | None = None,
                show_progress: bool = True) -> Source:
    """Open a corpus of any kind.

    source : a path, a hub address, or a mapping of split names to a file or several
    cache : where audio that must be unpacked is stored
    language : chooses one of a release's languages
    columns : names of columns by role, for those that aren't found by name
    data_root : replaces ``$data_root`` in paths, and relative paths start from it; by default their file's folder
    """
    columns = columns or {}
    if not isinstance(source, Mapping) and Path(source).is_dir():
        return _open_folder(Path(source), cache, language, columns, data_root)
    check_exists(source)
    if isinstance(source, Mapping):
        return Mixed({split: [_open_file(path, cache, columns, data_root) for path in _paths(split, files)]
                      for split, files in source.items()})
    path = Path(source)
    if str(source).startswith(("hf://", _HUB_PAGE)):
        return Hub(str(source).replace(_HUB_PAGE, "hf://"), cache, columns)
    if path.is_file():
        if path.name.endswith(SUFFIXES):
            return CommonVoiceArchive(path, cache, language, show_progress)
        return Mixed({"train": [_open_file(path, cache, columns, data_root)]})
    return Hub(str(source), cache, columns)  # owner/name


def check_exists(source: Named) -> None:
    """Refuse a source whose files or folders don't exist, or that is of no known kind, without reading it."""
    if isinstance(source, Mapping):
        names: list[str | Path] = [path for split, files in source.items() for path in _paths(split, files)]
        suffixes = ONE_SPLIT
        kind = "file"
        expected = f"expected {', '.join(ONE_SPLIT)}"
    else:
        names = [] if is_hub_address(source) else [source]
        suffixes = (*SUFFIXES, *ONE_SPLIT)
        kind = "file or folder"
        expected = _EXPECTED
    for name in names:
        path = Path(name)
        if not path.exists():
            raise SbkitError("no-such-path", f"{name}: no such {kind}", hint=expected, file=name)
        if path.is_file() and not str(name).endswith(suffixes):
            raise SbkitError("unknown-corpus-format", f"{name}: unknown format", hint=expected, file=name)
        # Of a release's folder of languages one is chosen later; any other folder is of a known kind or refused here.
        if path.is_dir() and not isinstance(source, Mapping) and not language_folders(path):
            _open_folder(path, Path(), None, {}, None)


def is_hub_address(source: str | Path) -> bool:
    """Whether a source's name is that of a dataset on the hub."""
    path = Path(source)
    return str(source).startswith(("hf://", _HUB_PAGE)) or (
        len(path.parts) == 2 and not path.is_absolute() and not path.parent.exists() and not path.suffix)


def _open_folder(path: Path, cache: Path, language: str | None, columns: Mapping[str, str],
                 data_root: str | Path | None) -> Source:
    if SavedToDisk.matches(path):
        return SavedToDisk(path, cache, columns)
    if is_language_folder(path) or language_folders(path):
        return CommonVoice(path, language)
    if LJSpeech.matches(path):
        return LJSpeech(path, columns, data_root)
    if VoiceBank.matches(path):
        return VoiceBank(path, columns)
    for kind in _FILE_KINDS:
        if files := kind.in_folder(path):
            return _of_files(kind, path, files, columns, data_root)
    if parquet := Parquet.in_folder(path):
        return Parquet(parquet, path, cache, columns)
    if list(path.glob("*.tsv")):
        raise SbkitError("unknown-corpus-format", f"{path} has TSVs but no folder clips/ with the recordings",
                         hint="unpack a release of Common Voice completely; name other TSVs: {train: FILE, dev: FILE}",
                         file=path)
    if LibriSpeech.matches(path):
        return LibriSpeech(path)
    if VoxCeleb.matches(path):
        return VoxCeleb(path)
    if AudioFolder.matches(path):
        return AudioFolder(path)
    if (path / "wav.scp").is_file() or any(path.glob("*/wav.scp")):
        raise SbkitError("unknown-corpus-format", f"{path} has Kaldi's lists, which sbkit doesn't read",
                         hint='write a train.jsonl with a line {"audio_filepath": PATH, "text": TEXT} for each of '
                              'wav.scp and text', file=path)
    raise SbkitError("unknown-corpus-format", f"{path} is not a corpus that sbkit recognises", hint=_EXPECTED,
                     file=path)


def _of_files(kind: type[FileSource], folder: Path, files: Mapping[str, Path], columns: Mapping[str, str],
              data_root: str | Path | None) -> Source:
    """Open a folder's files, one per split or shard of a split (``train-3-of-16.jsonl``); all shards must exist."""
    # By split and (number of shards, number of this one), which is (0, 0) for a whole file: the name.
    splits: dict[str, dict[tuple[int, int], str]] = {}
    for name in files:
        match = _SHARD.fullmatch(name)
        if match is None:
            splits.setdefault(name, {})[0, 0] = name
        else:
            splits.setdefault(match["split"], {})[int(match["shards"]), int(match["number"])] = name
    if all(list(names) == [(0, 0)] for names in splits.values()):
        return kind(files, columns, data_root)

    for split, names in splits.items():
        shards, _ = max(names)
        first = 0 if (shards, 0) in names else 1
        expected = [(shards, number) for number in range(first, first + shards)] or [(0, 0)]
        missing = [number for _, number in expected if (shards, number) not in names]
        if missing:
            raise SbkitError("incomplete-corpus", f"{folder} lacks {len(missing)} of the {shards} shards of {split}, "
                             f"such as {split}-{missing[0]}-of-{shards}",
                             hint="add what is missing, or name the files: {train: [FILE, FILE]}", file=folder)
        if len(names) > len(expected):
            raise SbkitError("incomplete-corpus", f"{folder} has shards of {split} from two versions, with different "
                             "numbers of shards", hint="remove those of the version that you don't need", file=folder)
    return Mixed({split: [kind({names[place]: files[names[place]]}, columns, data_root) for place in sorted(names)]
                  for split, names in splits.items()})


def _paths(split: str, files: object) -> list[Path]:
    """The paths of a split's files, of which a recipe names one or several."""
    paths = [files] if isinstance(files, (str, Path)) else files
    if not isinstance(paths, Sequence) or not paths or not all(isinstance(path, (str, Path)) for path in paths):
        raise SbkitError("bad-value", f"corpus: {split} is {files!r}", hint="expected a file, or a list of files",
                         key=f"corpus.{split}", value=files)
    return [Path(path) for path in paths]


def _open_file(path: Path, cache: Path, columns: Mapping[str, str], data_root: str | Path | None) -> Source:
    if path.is_dir():
        raise SbkitError("bad-value", f"{path} is a folder, not a list",
                         hint="name a file in it, or the folder alone as the corpus", file=path)
    if path.suffix == ".parquet":
        return Parquet({path.stem: [path]}, path, cache, columns)
    kind = JsonLines if path.name.endswith(JsonLines.suffixes) else SpeechBrainCsv  # also of a .tsv
    return kind({path.stem: path}, columns, data_root)
