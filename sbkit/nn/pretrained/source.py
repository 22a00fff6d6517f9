"""Finds the files of a pretrained encoder, in a folder or in a repository of the Hugging Face Hub."""

from __future__ import annotations

import contextlib
import json
import re
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError, first_line
from sbkit.system import untrusted
from sbkit.system.console import atomic_write

CONFIG, PREPROCESSOR, PROCESSOR = "config.json", "preprocessor_config.json", "processor_config.json"
CARD = "README.md"
#: Files of weights in the order of preference, and whether each is an index of several files.
WEIGHTS = {"model.safetensors": False, "model.safetensors.index.json": True,
           "pytorch_model.bin": False, "pytorch_model.bin.index.json": True}
HEADS = ("lm_head.", "ctc_head.")  # prefixes of CTC heads' tensors
_MAX_JSON_BYTES = 1 << 26  # an index of weights has all their names
_KEPT = "encoder.json"  # the copy in a run's folder, and its fields
_FIELDS = {"source": str, "config": dict, "preprocessor": dict, "adapter_language": str | None}
_ENCODER = "encoder_config"
_LISTED = 30  # languages in a message
_ADAPTER, _LANGUAGE = "adapter.{}.safetensors", re.compile(r"[\w-]+")  # of MMS, for a language
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


@dataclass(frozen=True)
class Settings:
    """The configuration of an encoder: all that is needed to build it, without its weights."""

    source: str
    config: dict[str, Any]
    """The contents of its config.json."""
    preprocessor: dict[str, Any]
    """The contents of its preprocessor_config.json, or the same of processor_config.json; empty if there is neither."""
    adapter_language: str | None = field(default=None, compare=False)
    """The language whose adapters a run loaded."""

    @classmethod
    def of(cls, source: str) -> Settings:
        """Read the settings of a folder or a repository."""
        config = read_object(find(source, CONFIG))
        if isinstance(config.get(_ENCODER), dict):  # of a model whose encoder has its own config
            config = config[_ENCODER]
        preprocessor: Any = None  # of JSON
        path = present(source, PREPROCESSOR)
        if path is not None:
            preprocessor = read_object(path)
        else:
            path = present(source, PROCESSOR)  # into which transformers 5 writes it
            if path is not None:
                preprocessor = read_object(path).get("feature_extractor")
        with contextlib.suppress(SbkitError):
            find(source, CARD)  # into the cache, for the licence in a run's model card
        return cls(source, config, preprocessor if isinstance(preprocessor, dict) else {})

    @property
    def sample_rate(self) -> int:
        """The sample rate of its training."""
        rate = self.preprocessor.get("sampling_rate")
        return rate if isinstance(rate, int) else 16_000

    @classmethod
    def kept(cls, source: str | None, folder: str | Path | None) -> Settings | None:
        """Read the copy in a run's folder; None if there is none of this source (None: of any)."""
        path = None if folder is None else Path(folder) / _KEPT
        if path is None or not path.is_file():
            return None
        values = {"adapter_language": None, **read_object(path)}
        if values.keys() != _FIELDS.keys() or not all(isinstance(values[name], _FIELDS[name]) for name in _FIELDS):
            return None  # a tokenizer's file may have the same name
        settings = cls(**values)
        return settings if source in (None, settings.source) else None

    @classmethod
    def of_run(cls, source: str | None, run: str | Path | None) -> Settings | None:
        """Read the copy in another run, given the path of its folder, of a checkpoint or of a file in one."""
        if run is None:
            return None
        path = Path(run).expanduser().absolute()
        below = [file.parent for file in sorted(path.glob(f"*/{_KEPT}"))]
        for folder in (*below, path, *path.parents[:2]):
            settings = cls.kept(source, folder)
            if settings is not None:
                return settings
        return None

    def keep(self, folder: str | Path) -> None:
        """Write a copy to a run's folder, so that its model can be built without the source."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        with atomic_write(Path(folder) / _KEPT) as out:
            json.dump(asdict(self), out, indent=1, ensure_ascii=False)


class _NoSuchFile(SbkitError):
    """The source exists, but lacks the file."""


def is_folder(source: str) -> bool:
    """Whether the source is a folder that exists."""
    return Path(source).expanduser().is_dir()


def names_model(source: str) -> bool:
    """Whether this is a folder with a model of transformers, or the name of a repository: ``owner/name``, unless there
    is a local folder ``owner`` without ``name`` in it."""
    folder = Path(source).expanduser()
    if folder.exists():
        with contextlib.suppress(SbkitError):
            return describes_model(source)
        return False
    mistyped = folder.parent.is_dir()
    return "/" in source and not mistyped and _REPOSITORY.fullmatch(source) is not None and not source.startswith(".")


def describes_model(source: str) -> bool:
    """Whether the source has the config of a model of transformers."""
    path = present(source, CONFIG)
    return path is not None and "model_type" in read_object(path)


def local(source: str) -> Path | None:
    """Return the source as a folder; None if it names a repository."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise SbkitError("no-such-path", f"the pretrained source {source} is a file", file=source,
                         hint=f"name the folder that holds it and {CONFIG}")
    if folder.is_absolute() or source.startswith((".", "~")) or not _REPOSITORY.fullmatch(source):
        raise SbkitError("no-such-path", f"the pretrained source {source} does not exist", file=source,
                         hint="name a folder, or a model of the Hugging Face Hub: owner/name or owner/name@revision")
    return None


def find(source: str, name: str) -> Path:
    """Return the path of a source's file; asks the hub only for those of a repository that the cache lacks."""
    folder = local(source)
    if folder is not None:
        if not (folder / name).is_file():
            raise _NoSuchFile("damaged-pretrained", f"{folder} has no {name}", file=folder / name,
                              hint="name a folder that was written by save_pretrained of transformers")
        return folder / name
    from huggingface_hub import (
        constants,
        errors,
        get_hf_file_metadata,
        hf_hub_download,
        hf_hub_url,
        try_to_load_from_cache,
    )

    repository, _, revision_name = source.partition("@")
    revision = revision_name or None
    page = f"{constants.ENDPOINT}/{repository}"
    try:
        cached = try_to_load_from_cache(repository, name, revision=revision)
        if isinstance(cached, str):
            return Path(cached)
        if cached is not None:  # the cache knows that there is no such file
            raise errors.EntryNotFoundError(f"{source} has no {name}")
        with contextlib.suppress(errors.HfHubHTTPError):  # fails fast: offline, a download retries for 30 s
            get_hf_file_metadata(hf_hub_url(repository, name, revision=revision))
        return Path(hf_hub_download(repository, name, revision=revision))
    except Exception as error:  # any error of the network or the hub
        lost = isinstance(error, errors.LocalEntryNotFoundError)  # for lack of a network, also an EntryNotFoundError
        if isinstance(error, errors.EntryNotFoundError) and not lost:
            raise _NoSuchFile("damaged-pretrained", f"{source} has no {name}", hint="is it a model for transformers?",
                              file=name) from error
        code = "no-such-path"
        if constants.HF_HUB_OFFLINE:
            code = "no-network"
            what = (f"no folder has this name, its {name} is not in the hub's cache, and HF_HUB_OFFLINE forbids "
                    "downloads")
            hint = "unset HF_HUB_OFFLINE to download it, or name a folder"
        elif isinstance(error, errors.GatedRepoError):  # also a RepositoryNotFoundError
            code = "gated-model"
            what, hint = "access has to be requested", f"request it on {page}, then `hf auth login` or set HF_TOKEN"
        elif isinstance(error, errors.RevisionNotFoundError):
            what, hint = "it has no such revision", f"its branches and commits are on {page}/commits/main"
        elif isinstance(error, errors.RepositoryNotFoundError):
            what = "no folder has this name, and the hub has no such model, or it is private"
            hint = "check the name; for a private one `hf auth login` or set HF_TOKEN"
        else:  # the hub's own error, if it has one below it, is a paragraph of advice
            code = "no-network"
            reason = error.__cause__ if lost and isinstance(error.__cause__, Exception) else error
            what = (f"no folder has this name, and its {name} can't be downloaded from {constants.ENDPOINT}: "
                    f"{first_line(reason)}")
            hint = ("with a network, starting again continues the download; without one, name a folder, or set HF_HOME "
                    "to a cache that has it")
        raise SbkitError(code, f"the pretrained source {source}: {what}", hint=hint, value=source) from error


def present(source: str, name: str) -> Path | None:
    """Return the path of a source's file; None if it has none of this name."""
    try:
        return find(source, name)
    except _NoSuchFile:
        return None


def weights(source: str) -> list[Path]:
    """Return the paths of all files of a source's weights."""
    for name, several in WEIGHTS.items():
        path = present(source, name)
        if path is None:
            continue
        if not several:
            return [path]
        files = read_object(path).get("weight_map")
        shards = list(files.values()) if isinstance(files, dict) else []
        if not shards or not all(isinstance(shard, str) and Path(shard).name == shard for shard in shards):
            raise SbkitError("damaged-pretrained", f"{path} names no files of weights", hint="download it again",
                             file=path)
        paths = []
        for shard in sorted(set(shards)):
            shard_path = present(source, shard)
            if shard_path is None:
                raise SbkitError("damaged-pretrained",
                                 f"{path.parent} lacks {shard}, one of the files that {path.name} "
                                 "names", file=path.parent / shard,
                                 hint="the download is incomplete: download it again")
            paths.append(shard_path)
        return paths
    raise SbkitError("damaged-pretrained", f"the pretrained source {source} has no weights", value=source,
                     hint=f"it must have one of {', '.join(WEIGHTS)}")


def check_language(language: object) -> None:
    """Raise unless this can be MMS's code of a language; it becomes part of a file's name."""
    if not (isinstance(language, str) and _LANGUAGE.fullmatch(language)):
        raise SbkitError("bad-value", f"adapter_language is {language!r}, which is no language code",
                         key="adapter_language", value=language, hint="MMS has codes such as fra or uig-script_arabic")


def adapter(source: str, language: str) -> Path:
    """Return the path of the adapter that MMS has for a language, by its code there, such as ``fra``."""
    check_language(language)
    name = _ADAPTER.format(language)
    folder = local(source)
    try:
        return find(source, name)
    except _NoSuchFile:
        if folder is None:
            hint = f"the page of {source} on the hub has the files, adapter.CODE.safetensors"
        elif (folder / f"adapter.{language}.bin").is_file():
            hint = f"adapter.{language}.bin is a pickle, and not read: fetch {name}"
        else:
            languages = sorted(path.name.split(".")[1] for path in folder.glob(_ADAPTER.format("*")))
            more = [f"{len(languages) - _LISTED} more"] if len(languages) > _LISTED else []
            hint = f"copy {name} into it"
            if languages:
                hint = f"it has those of {', '.join([*languages[:_LISTED], *more])}"
        raise SbkitError("no-language-adapter", f"{source} has no adapter for the language {language} ({name})",
                         hint=hint, key="adapter_language", value=language) from None


def read_object(path: Path) -> dict[str, Any]:
    """Read a file of one JSON object, of limited size."""
    try:
        values = untrusted.read_json(path, _MAX_JSON_BYTES)
    except (OSError, ValueError) as error:
        raise SbkitError("damaged-pretrained", f"{path} can't be read: {error}", file=path,
                         hint="if the download is incomplete, download it again") from error
    if not isinstance(values, dict):
        raise SbkitError("damaged-pretrained", f"{path} does not hold a JSON object",
                         hint="download it again", file=path)
    return values
