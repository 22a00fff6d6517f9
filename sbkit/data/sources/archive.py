"""Common Voice archives as downloaded: unpacked once, by streaming and resumably; malicious archives are refused."""

from __future__ import annotations

import gzip
import json
import logging
import os
import shutil
import tarfile
import zlib
from functools import cached_property
from pathlib import Path, PurePosixPath
from typing import IO, Any

from sbkit.data.lock import locked
from sbkit.data.sources.base import Rows, Source, stamp
from sbkit.data.sources.common_voice import CommonVoice
from sbkit.errors import SbkitError
from sbkit.system import disk, processes
from sbkit.system.console import atomic_write, progress

logger = logging.getLogger(__name__)

SUFFIXES = (".tar.gz", ".tgz", ".tar")
_STAMP = ".unpacked.json"  # names the archive that the folder has completely
_BEGUN = ".begun.json"  # names the archive that the folder has at least a part of
# MP3s barely compress, so a larger archive that grows by more than this factor is a zip bomb.
_MAX_GROWTH = 20
ALWAYS_ALLOWED = 256 << 20
# Limit for long names and other headers between the files; real ones have a few hundred bytes.
_MAX_HEADER_BYTES = 1 << 20
_BLOCK = 1 << 20
_DISTRUST = "Common Voice archives don't do that: download it again, from a source you trust"


class CommonVoiceArchive(Source):
    """A release as downloaded, which is unpacked below ``cache`` when its rows are first needed."""

    kind = "Common Voice"
    recorded = True

    def __init__(self, path: Path, cache: Path, language: str | None = None, show_progress: bool = True):
        self.path = path
        self.where = str(path)
        name = next(path.name[: -len(suffix)] for suffix in SUFFIXES if path.name.endswith(suffix))
        self.into = cache / name
        self.language = language
        self.show_progress = show_progress

    def fingerprint(self) -> list[Any]:
        return [self.kind, stamp(self.path)]

    def intact(self) -> bool:
        return is_unpacked(self.path, self.into)

    @cached_property
    def release(self) -> CommonVoice:
        unpack(self.path, self.into, show_progress=self.show_progress)
        try:
            return CommonVoice(self.into, self.language)
        except SbkitError as error:
            raise SbkitError(error.code, f"{self.path}: {error.message}", hint=error.hint, file=error.file,
                             line=error.line, key=error.key, value=error.value) from None

    def names(self) -> list[str]:
        return self.release.names()

    def read(self, name: str, show_progress: bool = True) -> Rows:
        self.release.inherit_needs(self)
        return self.release.read(name, show_progress)


def is_unpacked(archive: Path, into: Path) -> bool:
    """Whether the folder ``into`` has all of this version of the archive."""
    return _read(into / _STAMP) == stamp(archive)


def _read(path: Path) -> object:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def unpack(archive: Path, into: Path, show_progress: bool = True) -> None:
    """Unpack clips and TSVs to the folder ``into``, which appears completely or not at all.

    Files that an earlier, interrupted call has unpacked are not written again.
    """
    partial = into.with_name(into.name + ".partial")
    begun = {"archive": stamp(archive), "uptime": processes.machine()}
    with locked(into.with_name(f".{into.name}.lock")):
        if is_unpacked(archive, into):
            return
        # Only what an earlier version of this archive was unpacked to is replaced, and not a corpus of the user's.
        if into.is_dir() and any(into.iterdir()) and not (into / _STAMP).is_file():
            raise SbkitError("output-exists", f"{archive} would be unpacked to {into}, which has other files, so it is "
                             "not replaced",
                             hint="set the corpus's cache_folder to another folder; to read what is there, name that "
                                  "folder as the corpus", file=into)
        if _read(partial / _BEGUN) != begun:  # from another archive, or before a power cut
            shutil.rmtree(partial, ignore_errors=True)
        try:
            with disk.disk_errors_as_user_error(partial):
                partial.mkdir(parents=True, exist_ok=True)
                (partial / _BEGUN).write_text(json.dumps(begun), encoding="utf-8")
                unpacked_bytes = sum(file.stat().st_size for file in partial.rglob("*") if file.is_file())
                disk.check_room(partial, archive.stat().st_size - unpacked_bytes,
                                "set the corpus's cache_folder to a larger disk")
                _unpack(archive, partial, show_progress)
                disk.sync_file_system(partial)
                with atomic_write(partial / _STAMP) as file:
                    json.dump(stamp(archive), file)
                shutil.rmtree(into, ignore_errors=True)
                os.replace(partial, into)
                disk.sync_folder(into.parent)
        except (EOFError, zlib.error, gzip.BadGzipFile, tarfile.TarError) as error:
            raise SbkitError("damaged-download", f"{archive}: damaged or not completely downloaded ({error})",
                             hint="compare its size and checksum with the download page", file=archive) from None
        except OSError as error:
            raise SbkitError("not-writable", f"{error.filename or archive}: {error.strerror or error}",
                             file=error.filename or archive) from None


def _unpack(archive: Path, folder: Path, show_progress: bool) -> None:
    size = archive.stat().st_size
    with open(archive, "rb") as raw, progress(
            what=f"unpacking {archive.name}", total=size, unit="B", show=show_progress) as bar:
        compressed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        stream: Any = _Counted(gzip.GzipFile(fileobj=raw) if compressed else raw, archive, size)  # tarfile only reads
        with tarfile.open(fileobj=stream, mode="r|", tarinfo=_Member) as tar:
            for member in tar:
                path = PurePosixPath(member.name)
                if path.is_absolute() or ".." in path.parts or "\\" in member.name or "\0" in member.name:
                    raise SbkitError("suspicious-file", f"{archive}: its entry {member.name!r} would be written "
                                     "outside of the folder", hint=_DISTRUST, file=archive)
                if not (member.isfile() or member.isdir()) or member.issparse():
                    raise SbkitError("suspicious-file", f"{archive}: its entry {member.name!r} is neither a plain file "
                                     "nor a folder", hint=_DISTRUST, file=archive)
                # Only clips and tables are unpacked, and no hidden files, such as macOS's.
                if member.isfile() and not path.name.startswith(".") and (
                        path.suffix == ".tsv" or path.parent.name == "clips"):
                    content = tar.extractfile(member)
                    assert content is not None, "a file's"
                    target = folder / Path(*path.parts)
                    if not target.is_file() or target.stat().st_size != member.size:
                        target.parent.mkdir(parents=True, exist_ok=True)
                        partial = target.with_name(f".{target.name}.part")
                        with open(partial, "wb") as file:
                            shutil.copyfileobj(content, file, _BLOCK)
                        os.replace(partial, target)
                bar.update(raw.tell() - bar.n)
                tar.members = []  # type: ignore[attr-defined]  # otherwise tarfile keeps 1 GB for two million clips
        while stream.read(_BLOCK):  # up to the checksum
            pass


class _Counted:
    """Reads a stream, and refuses one that grows beyond a limit."""

    def __init__(self, stream: IO[bytes] | gzip.GzipFile, archive: Path, size: int):
        self.stream = stream
        self.archive = archive
        self.size = size
        self.left = max(size * _MAX_GROWTH, ALWAYS_ALLOWED)

    def read(self, size: int) -> bytes:
        data = self.stream.read(size)
        self.left -= len(data)
        if self.left < 0:
            raise SbkitError("suspicious-file", f"{self.archive}: grows to more than {_MAX_GROWTH} times its size when "
                             "unpacked", hint=_DISTRUST, file=self.archive)
        return data


class _Member(tarfile.TarInfo):
    """A header that is refused if it is damaged, where tarfile would stop silently, or too large for memory."""

    @classmethod
    def frombuf(cls, buf: bytes | bytearray, encoding: str, errors: str) -> _Member:
        try:
            member = super().frombuf(buf, encoding, errors)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]  # the stubs leave it out
            raise
        except tarfile.HeaderError as error:
            raise tarfile.ReadError(f"{error} where an entry or the end should be") from None
        if member.type not in tarfile.REGULAR_TYPES and member.size > _MAX_HEADER_BYTES:
            raise tarfile.ReadError("its headers are too large")
        return member
