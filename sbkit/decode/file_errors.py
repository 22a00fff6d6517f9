"""Errors of files that a user names: one that can't be read, or can't be written."""

from __future__ import annotations

import errno
import os

from sbkit.errors import SbkitError


def unreadable(path: str | os.PathLike[str], error: Exception, hint: str | None = None) -> SbkitError:
    """Return what a user reads if a file can't be read.

    path : the file, or what the message calls it
    error : what reading it raised
    hint : what to do, if another file would help
    """
    if isinstance(error, UnicodeDecodeError):
        return SbkitError("not-utf8", f"{path} is not UTF-8: {error.reason} at byte {error.start}",
                          hint=hint or "convert it, for example with iconv -f latin1 -t utf-8", file=path)
    code = "no-such-path" if isinstance(error, FileNotFoundError) else "not-readable"
    return SbkitError(code, f"{path} cannot be read: {getattr(error, 'strerror', None) or error}", hint=hint,
                      file=path)


def unwritable(path: str | os.PathLike[str], error: OSError, hint: str | None = None) -> SbkitError:
    """Return what a user reads if a file can't be written; the arguments are as for :func:`unreadable`."""
    code = "disk-full" if error.errno in (errno.ENOSPC, errno.EDQUOT) else "not-writable"
    return SbkitError(code, f"cannot write {path}: {error.strerror or error}", hint=hint, file=path)
