"""Reading of untrusted files, only regular ones of limited size, and of standard input."""

from __future__ import annotations

import contextlib
import errno
import gzip
import io
import json
import os
import pickle
import pickletools
import stat
import sys
import zipfile
import zlib
from collections.abc import Iterable
from typing import Any, BinaryIO, TextIO

from sbkit.errors import CONTROL, SbkitError, is_out_of_memory, shown, summary
from sbkit.system import disk
from sbkit.system.environment import check_torch

#: No text compresses better than this (a language model's to a fifth), except small files.
MAX_PACKED, _PACKED_ANYHOW = 50, 16 << 20
_MAX_ZEROS = 1 << 20
_MAX_NAME = 1000  # characters of a class that a pickle names


def open_regular(path: str | os.PathLike[str]) -> BinaryIO:
    """Open a regular file to read bytes; a pipe or a device, which may never end, is an ``OSError`` at once."""
    handle = open_handle(path)
    try:
        return os.fdopen(handle, "rb")
    except BaseException:
        os.close(handle)
        raise


def open_handle(path: str | os.PathLike[str]) -> int:
    """Return a file descriptor of a file or folder, which the caller closes; anything else is an ``OSError``."""
    _check_kind(os.stat(path), path)  # before it is opened: some devices act when they are opened
    handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # otherwise it would wait for the writer of a pipe
    try:
        _check_kind(os.fstat(handle), path)  # another may have been put in its place
    except BaseException:
        os.close(handle)
        raise
    return handle


def _check_kind(status: os.stat_result, path: str | os.PathLike[str]) -> None:
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise OSError(errno.EINVAL, "it is not a regular file", os.fspath(path))


def read_bytes(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file; one of more than ``max_bytes`` bytes is an ``OSError`` before it is read."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        if size > max_bytes:
            raise OSError(errno.EINVAL, f"it has {disk.size(size)}; the limit is {disk.size(max_bytes)}",
                          os.fspath(path))
        return file.read(size)


def read_text(path: str | os.PathLike[str], max_bytes: int) -> str:
    """Read a regular file of at most ``max_bytes`` bytes as UTF-8."""
    return read_bytes(path, max_bytes).decode("utf-8")


def read_json(path: str | os.PathLike[str], max_bytes: int) -> Any:  # whatever JSON holds
    """Read JSON from a regular file of at most ``max_bytes`` bytes; any error is an OSError or a ValueError."""
    return parse_json(read_text(path, max_bytes))


def parse_json(text: str | bytes) -> Any:  # whatever JSON holds
    """Parse JSON; any error is a ValueError, including too deep a nesting."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def unpack(path: str | os.PathLike[str], max_bytes: int) -> bytes:
    """Read a regular file and unpack it if it is gzip's; more than ``max_bytes`` bytes are an ``OSError``.

    The same holds for more than a text can unpack to, because a small file may unpack to terabytes.
    """
    data = read_bytes(path, max_bytes)
    if data[:2] != b"\x1f\x8b":
        return data
    if data.find(bytes(_MAX_ZEROS)) >= 0:  # which gzip would step over one by one
        raise OSError(errno.EINVAL, "its compressed data is damaged: it has a long run of zeros", os.fspath(path))
    left = min(max_bytes, max(MAX_PACKED * len(data), _PACKED_ANYHOW))
    text = io.BytesIO()  # its value is not a copy
    try:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as file:
            while part := file.read(1 << 20):
                left -= len(part)
                if left < 0:
                    raise OSError(errno.EINVAL, f"it has {disk.size(len(data))} and unpacks to more than "
                                  f"{disk.size(text.tell())}, too much for a text", os.fspath(path))
                text.write(part)
    except zlib.error as error:
        raise OSError(errno.EINVAL, f"its compressed data is damaged: {error}", os.fspath(path)) from None
    return text.getvalue()


def check_tokens(tokens: Iterable[str], where: str) -> None:
    """Raise if a token of a vocabulary has a control character, which every transcript would send to a terminal."""
    for place, token in enumerate(tokens):
        if CONTROL.search(token) or "\n" in token or "\t" in token:
            raise SbkitError("control-character", f"token {place} of {where} has a control character: {shown(token)}",
                             hint="take another model, or remove it from the vocabulary", value=token)


def load_tensors(path: str | os.PathLike[str], device: Any = "cpu", mmap: bool = False) -> Any:  # what was saved
    """Unpickle a file of ``torch.save``, which can make only tensors, plain values and what torch was told is safe.

    It is the only place that unpickles files from others: an older torch, which a file could corrupt, is refused. An
    object of another kind is an ``UnpicklingError``, any other damage a ValueError.

    mmap : read values when they are used, if the file's format allows it; the file must not change until then
    """
    import torch

    check_torch(torch.__version__)
    class_name = _overlong_class(path)
    if class_name:
        raise pickle.UnpicklingError(f"GLOBAL {class_name[:_MAX_NAME]}")
    try:
        return torch.load(path, map_location=device, weights_only=True, mmap=mmap and zipfile.is_zipfile(path))
    except (OSError, pickle.UnpicklingError):
        raise
    except Exception as error:  # of any kind, by what is wrong
        if is_out_of_memory(error):
            raise
        raise ValueError(summary(error)) from error


def _overlong_class(path: str | os.PathLike[str]) -> str:
    """Return a class that a file of ``torch.save`` names, if its name is overlong; empty if there is none.

    torch searches its message of a class in a time that grows with the square of its name: hours for a megabyte.
    """
    class_name = ""
    # What else is wrong with a file is torch's to say.
    with contextlib.ExitStack() as opened, contextlib.suppress(Exception):
        if zipfile.is_zipfile(path):
            archive = opened.enter_context(zipfile.ZipFile(path))
            pickles = [opened.enter_context(archive.open(name)) for name in archive.namelist()
                       if name.endswith("data.pkl")]
        else:  # torch before 1.6 wrote five pickles one after the other
            pickles = [opened.enter_context(open_regular(path))] * 5
        for file in pickles:
            for operation, value, _ in pickletools.genops(file):
                if operation.name in ("GLOBAL", "INST") and len(str(value)) > _MAX_NAME:
                    class_name = str(value)
    return class_name


def standard_input(what: str, hint: str) -> TextIO:
    """Return standard input; raise if it is closed or a terminal.

    what : what is read from it, such as ``audio``
    hint : a command that provides it
    """
    if sys.stdin is None:
        raise SbkitError("no-standard-input",
                         f"- reads {what} from standard input, but standard input is closed",
                         hint=hint)
    if sys.stdin.isatty():
        raise SbkitError("no-standard-input", f"- reads {what} from standard input, but that is a terminal", hint=hint)
    return sys.stdin
