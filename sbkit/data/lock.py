"""One process at a time: a second one that wants the same folder waits, and finds the work done."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TextIO

from sbkit.errors import SbkitError

logger = logging.getLogger(__name__)


@contextlib.contextmanager
def locked(path: Path) -> Iterator[TextIO]:
    """Hold the file ``path`` locked; a file system or platform without locks goes on without one.

    What comes back is open for as long: a process that is forked meanwhile must close it, else it holds the lock too.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = open(path, "w")  # noqa: SIM115 (closed below; only opening it may fail here)
    except OSError as error:
        raise SbkitError(f"{error.filename or path}: cannot be written ({error.strerror})") from None
    with file:
        try:
            import fcntl

            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                logger.warning("%s: another process is at work there, waiting for it", path.parent)
                fcntl.flock(file, fcntl.LOCK_EX)
        except (ImportError, OSError) as error:  # Windows; some network file systems
            logger.debug("%s: no lock (%s)", path, error)
        yield file
