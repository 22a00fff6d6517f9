"""Hugging Face datasets: from the hub, from ``save_to_disk`` folders and from parquet files, without decoding audio."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import socket
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import parse_qs, urlsplit

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from sbkit.data.sources.base import ALIASES, META_ALIASES, Rows, Source, find_column, no_column, stamp
from sbkit.data.sources.embedded import is_stored, store_rows
from sbkit.data.sources.files import MAX_LINE_BYTES
from sbkit.data.sources.parquet import BATCH, ParquetFiles
from sbkit.errors import SbkitError
from sbkit.system import disk, untrusted
from sbkit.system.console import atomic_write, stored_json

if TYPE_CHECKING:
    import datasets

logger = logging.getLogger(__name__)

# Increase when the same dataset is stored differently from before.
_FORMAT = 2
_PARQUET_SPLIT = re.compile(r"^(?P<name>.*?)(-\d+-of-\d+(-[0-9a-f]+)?|[-_.]?\d+)?$")
_COMMIT = re.compile(r"[0-9a-f]{40}")
_NO_NAME = re.compile(r"[^\w.-]+")
_TIMEOUT = 10.0  # seconds to wait for the hub's current commit, which is optional
_HUB_OPTIONS = ("config", "revision", "streaming")


class HuggingFace(Source):
    """Base of datasets with an audio column, whose bytes are stored in tar shards below ``cache``."""

    hint = "is it complete? Compare it with the original"

    def __init__(self, cache: Path, columns: Mapping[str, str]):
        self.columns = columns
        self.cache = cache

    def unreadable(self, where: str, error: Exception) -> SbkitError:
        """Return the error to raise instead of those of `datasets`, which are of many kinds."""
        return SbkitError("unreadable-dataset", f"{where} cannot be read: {reason(error)}", hint=self.hint, value=where)

    @abstractmethod
    def load(self, name: str) -> OpenDataset | ParquetFiles:
        """Open a split."""

    @property
    def folder(self) -> Path:
        """The folder of this version of the dataset; other versions have other folders."""
        facts: list[Any] = [_FORMAT, self.fingerprint(), dict(self.columns)]
        # These came later: a dataset that was stored before keeps its folder.
        if not self.needs_text:
            facts.append("text")
        if self.wanted:
            facts.append(dict(self.wanted))
        digest = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        return self.cache / f"{self._label()}-{digest[:12]}"

    def _label(self) -> str:
        return _NO_NAME.sub("-", Path(self.where).name).strip("-") or "dataset"

    def read(self, name: str, show_progress: bool = True) -> Rows:
        origin = f"{self.where} [{name}]"
        try:
            dataset = self.load(name)
            layout = _Layout(origin, dataset, self.columns, self.needed, self.wanted)
            return store_rows(layout.tables, self.folder, _NO_NAME.sub("-", name), origin, total=dataset.rows,
                              show_progress=show_progress)
        except SbkitError:
            raise
        except Exception as error:  # `datasets` raises the errors of many readers and clients
            raise self.unreadable(origin, error) from error

    def intact(self) -> bool:
        return self.folder.is_dir() and all(
            is_stored(self.folder, file.stem) for file in self.folder.glob("*.json"))


class Hub(HuggingFace):
    """A dataset on the hub, ``hf://owner/name?config=fr&revision=main&streaming=true``, or simply ``owner/name``.

    It is prepared again when the revision's commit on the hub has changed, and that commit is read. With
    ``streaming=true`` only the shards are written; otherwise `datasets` keeps a copy in its cache, too.
    """

    kind = "Hugging Face hub"

    def __init__(self, address: str, cache: Path, columns: Mapping[str, str]):
        super().__init__(cache, columns)
        if "://" in address:
            self._hint_prefix = ""
            parts = urlsplit(address)
        else:  # owner/name, which may have been meant for a folder
            self._hint_prefix = f"there is no local folder {address}; if you mean the hub, "
            parts = urlsplit(f"hf://{address}")
        self.id = f"{parts.netloc}{parts.path}".strip("/")
        options = {name: values[-1] for name, values in parse_qs(parts.query).items()}
        for name in options:
            if name not in _HUB_OPTIONS:
                raise SbkitError("bad-hub-address", f"{address}: there is no option {name!r}",
                                 hint=f"options are {', '.join(_HUB_OPTIONS)}", key=name, value=address)
        if not re.fullmatch(r"[\w.-]+(/[\w.-]+)?", self.id):
            raise SbkitError("bad-hub-address", f"{address} is not the name of a dataset",
                             hint="write hf://owner/name?config=fr", value=address)
        self.config = options.get("config")
        self.revision = options.get("revision")
        streaming = options.get("streaming", "false")
        if streaming.lower() not in ("true", "false"):
            raise SbkitError("bad-hub-address", f"{address}: streaming is {streaming!r}", hint="it is true or false",
                             key="streaming", value=streaming)
        self.streaming = streaming.lower() == "true"
        self.where = f"hf://{self.id}" + (f"?config={self.config}" if self.config else "")

    def unreadable(self, where: str, error: Exception) -> SbkitError:
        code, why, hint = explain_error(error, self.id, self.revision)
        return SbkitError(code, f"{where} cannot be read: {why}", hint=self._hint_prefix + hint, value=where)

    def _label(self) -> str:
        return _NO_NAME.sub("-", f"{self.id}-{self.config or 'default'}")

    @cached_property
    def commit(self) -> str | None:
        """The current commit of ``revision`` (by default main); if the hub doesn't answer, the last stored one."""
        if self.revision is not None and _COMMIT.fullmatch(self.revision):
            return self.revision
        import huggingface_hub

        try:
            return huggingface_hub.HfApi().dataset_info(self.id, revision=self.revision, timeout=_TIMEOUT).sha
        except huggingface_hub.errors.OfflineModeIsEnabled:  # `datasets` may have it in its cache
            return self._stored_commit()
        except Exception as error:  # any error of its HTTP client
            stored = self._stored_commit()
            if stored is None:
                raise self.unreadable(self.where, error) from error
            _, why, _ = explain_error(error, self.id, self.revision)
            logger.warning("%s: the hub does not return its commit (%s): using the stored one, %s", self.where, why,
                           stored)
            return stored

    @property
    def _commit_file(self) -> Path:
        """The file with the last stored commit."""
        revision = f"-{_NO_NAME.sub('-', self.revision)}" if self.revision else ""
        return self.cache / f"{self._label()}{revision}.json"

    def _stored_commit(self) -> str | None:
        return stored_json(self._commit_file).get("commit")

    def fingerprint(self) -> list[Any]:
        return [self.kind, self.id, self.config, self.revision, self.commit]

    def read(self, name: str, show_progress: bool = True) -> Rows:
        rows = super().read(name, show_progress)
        if self.commit is not None and self.commit != self._stored_commit():
            with atomic_write(self._commit_file) as file:
                json.dump({"commit": self.commit}, file)
        return rows

    def names(self) -> list[str]:
        import datasets

        try:
            return list(datasets.get_dataset_split_names(
                self.id, self.config, revision=self.commit or self.revision))
        except Exception as error:  # see `read`
            if isinstance(error, ValueError):  # mostly a config that it lacks, or that is needed
                self._check_config()
            raise self.unreadable(self.where, error) from error

    def _check_config(self) -> None:
        """Refuse a config that the dataset doesn't have, or none if it has several."""
        import datasets

        try:
            configs = datasets.get_dataset_config_names(self.id, revision=self.commit or self.revision)
        except Exception as error:  # see `read`
            raise self.unreadable(self.where, error) from error
        if self.config not in configs and (self.config or len(configs) > 1):
            wrong = f"has no config {self.config!r}" if self.config else f"has {len(configs)} configs"
            raise SbkitError("ambiguous-corpus", f"hf://{self.id} {wrong}",
                             hint=f"say which, such as hf://{self.id}?config={configs[0]}: it has {', '.join(configs)}",
                             key="config", value=self.config) from None

    def load(self, name: str) -> OpenDataset:
        import datasets

        return OpenDataset(datasets.load_dataset(
            self.id, self.config, split=name, revision=self.commit or self.revision, streaming=self.streaming))


class SavedToDisk(HuggingFace):
    """A folder written by ``save_to_disk``, with one dataset per split, or a single one, which counts as train."""

    kind = "Hugging Face dataset"

    def __init__(self, path: Path, cache: Path, columns: Mapping[str, str]):
        super().__init__(cache, columns)
        self.path = path
        self.where = str(path)
        self._splits = path / "dataset_dict.json"  # only if there are several, each in a folder

    @staticmethod
    def matches(path: Path) -> bool:
        return (path / "dataset_dict.json").is_file() or (path / "state.json").is_file()

    def fingerprint(self) -> list[Any]:
        files = (*self.path.rglob("*.arrow"), *self.path.rglob("*.json"))
        return [self.kind, [stamp(file) for file in sorted(files)]]

    def names(self) -> list[str]:
        if not self._splits.is_file():
            return ["train"]
        try:
            return list(json.loads(self._splits.read_text(encoding="utf-8"))["splits"])
        except (OSError, ValueError, KeyError) as error:
            raise self.unreadable(str(self._splits), error) from error

    def header(self, name: str) -> list[str] | None:
        # Without this file, they are unknown until the dataset is read.
        folder = self.path / name if self._splits.is_file() else self.path
        return list(stored_json(folder / "dataset_info.json").get("features") or ()) or None

    def load(self, name: str) -> OpenDataset:
        import datasets

        folder = self.path / name if self._splits.is_file() else self.path
        return OpenDataset(datasets.load_from_disk(str(folder)))


class Parquet(HuggingFace):
    """Parquet files with the name of their split, as on the hub (``train-00000-of-00004.parquet``)."""

    kind = "parquet"

    def __init__(self, files: Mapping[str, list[Path]], where: Path, cache: Path, columns: Mapping[str, str]):
        super().__init__(cache, columns)
        self.files = files
        self.where = str(where)

    @staticmethod
    def in_folder(folder: Path) -> dict[str, list[Path]]:
        """The parquet files in a folder, or else in the one folder below it, by split."""
        paths = sorted(folder.glob("*.parquet")) or sorted(folder.glob("*/*.parquet"))
        folders = sorted({path.parent for path in paths})
        if len(folders) > 1:
            raise SbkitError("ambiguous-corpus", f"{folder} has parquet files in several folders",
                             hint=f"choose one of {', '.join(map(str, folders))}", file=folder)
        splits: dict[str, list[Path]] = {}
        for path in paths:
            match = _PARQUET_SPLIT.match(path.stem)
            name = match["name"] if match else ""
            splits.setdefault(name or "train", []).append(path)
        return splits

    def names(self) -> list[str]:
        return list(self.files)

    def fingerprint(self) -> list[Any]:
        return [self.kind, [stamp(path) for paths in self.files.values() for path in paths]]

    def header(self, name: str) -> list[str] | None:
        try:
            with untrusted.open_regular(self.files[name][0]) as file:
                return list(pq.read_schema(file).names)
        except (OSError, pa.ArrowInvalid):  # reading it raises the error
            return None

    def load(self, name: str) -> ParquetFiles:
        return ParquetFiles(self.files[name])


class OpenDataset:
    """The rows of a dataset that `datasets` has opened, with audio as it is stored."""

    def __init__(self, dataset: datasets.Dataset | datasets.IterableDataset):
        import datasets

        self.features = dataset.features or {}
        for name, feature in self.features.items():
            if isinstance(feature, datasets.Audio):
                dataset = dataset.cast_column(name, datasets.Audio(decode=False))
        self._dataset = dataset
        self.rows = len(dataset) if hasattr(dataset, "__len__") else None
        if self.features:
            self.schema = dataset.features.arrow_schema
        else:  # of a stream without a description
            self.schema = next(self._batches(dataset, 1), pa.table({})).schema

    @staticmethod
    def _batches(dataset: datasets.Dataset | datasets.IterableDataset, size: int) -> Iterator[pa.Table]:
        return iter(dataset.with_format("arrow").iter(batch_size=size))

    def batches(self, columns: Sequence[str], skip: int) -> Iterator[pa.Table]:
        """Yield tables of ``BATCH`` rows with these columns, from a row number on."""
        dataset = self._dataset.select_columns(list(columns))
        return self._batches(dataset.skip(skip) if skip else dataset, BATCH)


class _Layout:
    """Finds the roles of a dataset's columns, and converts its rows to tables with our columns."""

    def __init__(self, origin: str, dataset: OpenDataset | ParquetFiles, columns: Mapping[str, str],
                 needed: Sequence[str], wanted: Mapping[str, bool]):
        import datasets

        self._origin = origin
        self._dataset = dataset
        schema = dataset.schema
        features = dataset.features
        self.roles = {role: find_column(role, schema.names, columns) for role in dict.fromkeys((*ALIASES, *wanted))}
        audio_columns = [field.name for field in schema if pa.types.is_struct(field.type)
                         and {"bytes", "path"} <= {child.name for child in field.type.fields}]
        # A column whose type is audio is likelier to be the recordings than one with a usual name, such as "path".
        if "audio" not in columns and audio_columns and self.roles["audio"] not in audio_columns:
            without_role = [name for name in audio_columns if name not in self.roles.values()]
            self.roles["audio"] = (without_role or audio_columns)[0]
        for role in needed:
            if self.roles[role] is None:
                raise no_column(origin, role, schema.names, columns)
        self.meta = {ours: next((name for name in theirs if name in schema.names), None)
                     for ours, theirs in META_ALIASES.items()}
        self.meta.update({role: self.roles[role] for role in wanted if role not in ALIASES})
        self.audio = [role for role, is_recording in wanted.items()
                      if is_recording and self.roles[role] in audio_columns]
        self.labels = {name: feature.names for name, feature in features.items()
                       if isinstance(feature, datasets.ClassLabel)}
        used = {*filter(None, self.roles.values()), *filter(None, self.meta.values())}
        self._used = [name for name in schema.names if name in used]

    def tables(self, skip: int) -> Iterator[pa.Table]:
        for table in self._dataset.batches(self._used, skip):
            audio = table.column(self.roles["audio"]).combine_chunks()
            if pa.types.is_struct(audio.type):
                data = pc.struct_field(audio, "bytes")
                path = pc.struct_field(audio, "path")
            elif pa.types.is_binary(audio.type) or pa.types.is_large_binary(audio.type):
                data = audio
                path = pa.nulls(len(table), pa.string())
            else:
                data = pa.nulls(len(table), pa.binary())
                path = audio
            paths = []
            for name, is_embedded in zip(path.cast(pa.string()).to_pylist(), data.is_valid().to_pylist(), strict=True):
                is_local = name is not None and not is_embedded and "://" not in name
                paths.append(os.path.abspath(name) if is_local else name)
            columns = {"bytes": data, "path": pa.array(paths, pa.string())}
            for role in ("id", "text", "speaker", "duration", "start"):
                columns[role] = self._text(table, self.roles[role])
            for ours, theirs in self.meta.items():
                if ours in self.audio:
                    columns[f"audio {ours}"] = table.column(theirs).combine_chunks()
                elif theirs is not None:
                    columns[f"meta {ours}"] = self._text(table, theirs)
            yield pa.table(columns)

    def _text(self, table: pa.Table, name: str | None) -> pa.Array:
        if name is None:
            return pa.nulls(len(table), pa.string())
        column = table.column(name).combine_chunks()
        if name in self.labels:  # stored as numbers
            labels = dict(enumerate(self.labels[name]))
            return pa.array([labels.get(number) for number in column.to_pylist()], pa.string())
        if pa.types.is_nested(column.type):
            values = [None if value is None else str(value) for value in column.to_pylist()]
            return pa.array(values, pa.string())
        texts = column.cast(pa.string())
        longest = pc.max(pc.binary_length(texts)).as_py() or 0
        if longest > MAX_LINE_BYTES:
            raise SbkitError("malformed-row", f"{self._origin}: a row has {disk.size(longest)} of {name}, and the "
                             f"limit is {disk.size(MAX_LINE_BYTES)}", hint="is it the right column?", key=name)
        return texts


E = TypeVar("E", bound=BaseException)
_LOG_IN = "`hf auth login`, or set HF_TOKEN"
_NETWORK = ("check the network (HTTPS_PROXY names a proxy, HF_ENDPOINT another hub) and start again: what is "
            "stored already is kept")
# HTTP clients of the versions of huggingface_hub.
_CLIENTS = ("httpx", "httpx2", "httpcore", "httpcore2", "requests", "urllib3", "aiohttp")


def explain_error(error: BaseException, dataset: str, revision: str | None = None) -> tuple[str, str, str]:
    """Return a code, a message and a hint for an error while loading ``dataset``."""
    from datasets.data_files import EmptyDatasetError
    from datasets.exceptions import DataFilesNotFoundError, DatasetNotFoundError
    from huggingface_hub import constants, errors

    causes: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None:
        causes.append(cause)
        cause = cause.__cause__ or cause.__context__
    page = f"{constants.ENDPOINT}/datasets/{dataset}"

    def first_of(*kinds: type[E]) -> E | None:
        return next((cause for cause in causes if isinstance(cause, kinds)), None)

    if first_of(errors.RevisionNotFoundError):
        return ("missing-dataset", f"it has no revision {revision!r}",
                f"its branches and commits are on {page}/commits/main")
    if first_of(errors.GatedRepoError, DatasetNotFoundError):  # `datasets` hides the cause
        return "dataset-access-denied", reason(error), f"ask for access on {page} and log in: {_LOG_IN}"
    if first_of(errors.RepositoryNotFoundError):
        return ("missing-dataset", "the hub has no such dataset, or it is private",
                f"check the name; for a private one log in: {_LOG_IN}")
    network_errors = [cause for cause in causes if isinstance(cause, (ConnectionError, TimeoutError, socket.gaierror))
                      or type(cause).__module__.partition(".")[0] in _CLIENTS]
    if network_errors and constants.HF_HUB_OFFLINE:
        return ("no-network", "it is not in the cache, and HF_HUB_OFFLINE forbids asking the hub",
                "unset HF_HUB_OFFLINE to download it")
    if first_of(DataFilesNotFoundError, EmptyDatasetError):
        return "missing-dataset", "it has no files that `datasets` can load", f"look at what it has: {page}/tree/main"
    answer = first_of(errors.HfHubHTTPError)
    if answer is not None and answer.response.status_code == 401:
        return "dataset-access-denied", "the hub refuses your token", f"log in again: {_LOG_IN}"
    if answer is not None and answer.response.status_code == 403:
        return "dataset-access-denied", reason(answer), f"log in with an account that may read {page}: {_LOG_IN}"
    if answer is not None or network_errors:
        return "no-network", f"{reason(answer or network_errors[-1])} ({constants.ENDPOINT})", _NETWORK
    return "unreadable-dataset", reason(error), f"look at its files: {page}/tree/main"


def reason(error: BaseException) -> str:
    """Return the informative line of an error: the first, or for answers of the hub the line after the HTTP status.

    For a failed generation by `datasets`, it is that of the cause.
    """
    from datasets.exceptions import DatasetGenerationError

    while isinstance(error, DatasetGenerationError) and error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    return lines[1] if "Client Error" in lines[0] and len(lines) > 1 else lines[0]

