"""Where a pretrained encoder lies: a folder, or a repository of the Hugging Face Hub that is brought here once."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError

CONFIG, PREPROCESSOR = "config.json", "preprocessor_config.json"
#: Files of weights by the order in which they are looked for, and whether each is an index of several.
WEIGHTS = {"model.safetensors": False, "model.safetensors.index.json": True,
           "pytorch_model.bin": False, "pytorch_model.bin.index.json": True}
_KEPT = "encoder.json"  # in a run's folder
_REPOSITORY = re.compile(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?")


@dataclass(frozen=True)
class Settings:
    """What an encoder is made by, beside its weights."""

    source: str
    config: dict[str, Any]
    """Its config.json."""
    preprocessor: dict[str, Any]
    """Its preprocessor_config.json; empty where it has none."""

    @classmethod
    def of(cls, source: str) -> Settings:
        """Of a folder or a repository."""
        config = _object(find(source, CONFIG))
        try:
            preprocessor = _object(find(source, PREPROCESSOR))
        except _NoSuchFile:
            preprocessor = {}
        return cls(source, config, preprocessor)

    @classmethod
    def kept(cls, source: str, folder: str | Path | None) -> Settings | None:
        """Those of the same source that a run has kept."""
        path = None if folder is None else Path(folder) / _KEPT
        if path is None or not path.is_file():
            return None
        found = cls(**_object(path))
        return found if found.source == source else None

    def keep(self, folder: str | Path) -> None:
        """Write them down for whoever builds the run's model without its source."""
        Path(folder).mkdir(parents=True, exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False) + "\n"
        (Path(folder) / _KEPT).write_text(text, encoding="utf-8")


class _NoSuchFile(SbkitError):
    """A source that is there has no such file."""


def local(source: str) -> Path | None:
    """The folder that a source is; None for a repository."""
    folder = Path(source).expanduser()
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise SbkitError(f"the encoder's source {source} is a file",
                         hint=f"name the folder that holds it and {CONFIG}")
    if folder.is_absolute() or source.startswith((".", "~")) or not _REPOSITORY.fullmatch(source):
        raise SbkitError(f"the encoder's source {source} is not there",
                         hint="name a folder, or a model of the Hugging Face Hub: owner/name or owner/name@revision")
    return None


def find(source: str, name: str) -> Path:
    """One file of a source; of a repository from the cache, else from the hub, on from where a download ended."""
    folder = local(source)
    if folder is None:
        return _fetched(source, name)
    if not (folder / name).is_file():
        raise _NoSuchFile(f"{folder} has no {name}",
                          hint="name a folder that save_pretrained of transformers has written")
    return folder / name


def weights(source: str) -> list[Path]:
    """All files of a source's weights."""
    for name, several in WEIGHTS.items():
        try:
            path = find(source, name)
        except _NoSuchFile:
            continue
        if not several:
            return [path]
        shards = sorted(set(_object(path).get("weight_map", {}).values()))
        if not shards or any(Path(shard).name != shard for shard in shards):
            raise SbkitError(f"{path} names no files of weights", hint="fetch it again")
        return [_shard(source, shard, path) for shard in shards]
    raise SbkitError(f"the encoder's source {source} has no weights",
                     hint=f"it has to have {', '.join(WEIGHTS)}: one of them")


def _shard(source: str, name: str, index: Path) -> Path:
    try:
        return find(source, name)
    except _NoSuchFile:
        raise SbkitError(f"{index.parent} lacks {name}, one of the files that {index.name} names",
                         hint="it was not downloaded, or not to its end: fetch it again") from None


def _object(path: Path) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise SbkitError(f"{path} can't be read: {error}", hint="was it downloaded to its end?") from error
    if not isinstance(found, dict):
        raise SbkitError(f"{path} holds no settings")
    return found


# ---------------------------------------------------------------------------------------------- the hub


def _fetched(source: str, name: str) -> Path:
    """A file of a repository. The hub is asked for what the cache lacks, and for nothing else."""
    from huggingface_hub import hf_hub_download, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    repository, _, at = source.partition("@")
    revision = at or None
    cached = try_to_load_from_cache(repository, name, revision=revision)
    if isinstance(cached, str):
        return Path(cached)
    if cached is not None:  # the cache knows that there is none
        raise _NoSuchFile(f"{source} has no {name}")
    try:
        return Path(hf_hub_download(repository, name, revision=revision))
    except LocalEntryNotFoundError as error:  # also an EntryNotFoundError
        raise _explained(error, source, name) from error
    except EntryNotFoundError as error:
        raise _NoSuchFile(f"{source} has no {name}", hint="is it a model of transformers?") from error
    except Exception as error:  # whatever a network or the hub says
        raise _explained(error, source, name) from error


def _explained(error: Exception, source: str, name: str) -> SbkitError:
    from huggingface_hub import constants, errors

    page = f"{constants.ENDPOINT}/{source.partition('@')[0]}"
    meanings: list[tuple[Callable[[], bool], str, str]] = [
        (lambda: constants.HF_HUB_OFFLINE, f"no folder is called so, its {name} is not in the hub's cache, and "
         "HF_HUB_OFFLINE forbids to ask the hub", "unset HF_HUB_OFFLINE to download it, or name a folder"),
        (lambda: isinstance(error, errors.GatedRepoError), "it is given to those who asked for it",
         f"ask on {page}, then `hf auth login` or set HF_TOKEN"),
        (lambda: isinstance(error, errors.RevisionNotFoundError), "it has no such revision",
         f"its branches and commits are on {page}/commits/main"),
        (lambda: isinstance(error, errors.RepositoryNotFoundError), "no folder is called so, and the hub has no such "
         "model, or it is private", "check the name; for a private one `hf auth login` or set HF_TOKEN"),
    ]
    for means, what, hint in meanings:
        if means():
            return SbkitError(f"the encoder's source {source}: {what}", hint=hint)
    first = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return SbkitError(f"the encoder's source {source}: no folder is called so, and its {name} can't be fetched from "
                      f"{constants.ENDPOINT}: {first}",
                      hint="check the network and start again, what is stored already is kept; or name a folder")
