"""Corrections: recordings with the words that people say were spoken, kept in a folder that is a corpus."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import io
import json
import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import soundfile

from sbkit.data.lock import Lock
from sbkit.decode.spans import Word
from sbkit.errors import SbkitError, printable
from sbkit.serve.correction_rows import parse_rows
from sbkit.serve.errors import SERVER, ApiError, invalid, no_room
from sbkit.serve.limits import MEGABYTE
from sbkit.system import disk, untrusted
from sbkit.system.console import atomic_write, remove_partials

#: The longest recording that is corrected as one: longer ones are left out of training by most recipes.
MAX_SECONDS = 30.0
MAX_CHARACTERS = 2000
_log = logging.getLogger(__name__)


def worth(words: Sequence[Word], corrected: Mapping[str, int]) -> float:
    """How much can be learnt from correcting a recording, 0 to 1: the mean doubt of its words, where one that is in the
    corrections n times counts 1 / (1 + n).

    corrected : how many times, by the word in lower case
    """
    doubts = [(1 - word.confidence) / (1 + corrected.get(word.text.casefold(), 0)) for word in words]
    return sum(doubts) / max(1, len(doubts))


class _Edited(Exception):
    """The list was edited after it was last read."""


class Corrections:
    """A folder with ``corrections.jsonl``, which ``--data_folder`` takes, and its recordings in ``clips``.

    A recording is one row, however often it is corrected: the last words count. A new row is appended; a changed or
    deleted one rewrites the list.

    The server's operator may edit the list at any time. Before each write a changed list is read again, so edited rows
    stay edited and deleted ones stay deleted. A list that can't be read is not written, so nothing is saved then.

    max_bytes : the most that its recordings and their list may take together
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._list = folder / "corrections.jsonl"
        self._clips = folder / "clips"
        self._max_bytes = max_bytes
        self.words: Counter[str] = Counter()
        """How many times each word, in lower case, is in the corrections; none is there 0 times."""
        self._rows: dict[str, dict[str, Any]] = {}
        self._bytes = 0  # of the recordings
        self._state: tuple[int, ...] | None = None  # of the list when it was last read or written
        self._last_line_open = False  # whether the list lacks its last line break
        self._writing = threading.Lock()
        try:
            self._clips.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder)
            if self._lock.acquire() is False:
                self._lock.close()
                raise SbkitError("folder-in-use", f"--corrections {folder} is in use by another server",
                                 hint="name another folder", file=folder, key="--corrections")
            for written in (folder, self._clips):
                remove_partials(written)
            self._drop_partial_row()
            self._read()
        except (OSError, ValueError) as error:
            code = "malformed-row" if isinstance(error, ValueError) else "not-writable"
            raise SbkitError(code, f"--corrections {folder} can't be used: {error}",
                             hint="name a folder that this server can write, new or made by --corrections", file=folder,
                             key="--corrections") from None

    def close(self) -> None:
        self._lock.close()

    def save(self, signal: np.ndarray, rate: int, text: str, **facts: str | None) -> dict[str, Any]:
        """Keep a recording [S] and its words; return its row.

        facts : further columns of the row
        """
        text = " ".join(text.split())
        if not text:
            raise invalid("empty_input", "the text is empty: send the words that were spoken", "text")
        if len(text) > MAX_CHARACTERS or not text.isprintable():
            raise invalid("invalid_value", f"the text must have at most {MAX_CHARACTERS} characters, all of them "
                          "printable", "text")
        printable_facts = {}
        for name, value in facts.items():
            printable_facts[name] = value and printable(" ".join(value.split()))[:MAX_CHARACTERS]
        file = io.BytesIO()
        soundfile.write(file, signal, rate, format="WAV", subtype="PCM_16")
        data = file.getvalue()
        row_id = hashlib.sha256(data).hexdigest()[:20]
        row = {"id": row_id, "audio_filepath": f"clips/{row_id}.wav", "duration": round(len(signal) / rate, 4),
               "text": text, **printable_facts, "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with self._writing:
            while True:
                self._take_in_edits()
                with contextlib.suppress(_Edited):
                    return self._save(row, data)

    def delete(self, name: str) -> None:
        """Forget a recording and its words."""
        with self._writing:
            while True:
                self._take_in_edits()
                with contextlib.suppress(_Edited):
                    return self._delete(name)

    def _save(self, row: dict[str, Any], data: bytes) -> dict[str, Any]:
        """Save a row and the bytes of its recording; with the lock held."""
        name = row["id"]
        path = self._clips / f"{name}.wav"
        new_bytes = 0 if path.exists() else len(data)
        list_bytes = self._list.stat().st_size if self._list.exists() else 0
        # The list counts too: recordings may be of a sample, and words of many bytes.
        if self._bytes + new_bytes + list_bytes + len(json.dumps(row)) > self._max_bytes:
            raise no_room("the corrections on this server have reached their limit of "
                          f"{self._max_bytes // MEGABYTE} MB")
        try:
            former = self._rows.get(name)
            row["corrected"] = 1
            if former is not None:
                times = former.get("corrected")
                row["corrected"] = (times if isinstance(times, int) else 1) + (former["text"] != row["text"])
            if new_bytes:
                with atomic_write(path, "wb") as out:
                    out.write(data)
            if former is None:
                self._append(row)
            else:
                self._write(self._rows | {name: row})
        except BaseException as error:
            if new_bytes:  # what was not saved is not kept
                path.unlink(missing_ok=True)
            if isinstance(error, SbkitError):  # of the disk
                raise no_room(str(error)) from None
            raise
        self._bytes += new_bytes
        self._count(row["text"], 1)
        if former is not None:
            self._count(former["text"], -1)
        return row

    def _delete(self, name: str) -> None:
        """Delete a row and its recording; with the lock held."""
        row = self._rows.get(name)
        if row is None:
            raise ApiError(404, "not_found", f"there is no correction {name[:40]!r}")
        path = self._clips / f"{name}.wav"
        size = path.stat().st_size if path.exists() else 0
        path.unlink(missing_ok=True)  # first: on a full disk, the list needs its room
        self._bytes -= size
        try:
            self._write({row_id: row for row_id, row in self._rows.items() if row_id != name})
        except SbkitError as error:
            raise no_room(str(error)) from None
        self._count(row["text"], -1)

    def _count(self, text: str, times: int) -> None:
        for word in text.casefold().split():
            count = self.words[word] + times
            if count > 0:
                self.words[word] = count
            else:  # not 0: the words of all corrections that were replaced would stay in memory
                self.words.pop(word, None)

    # ------------------------------------------------------------------ the list on the disk

    def _drop_partial_row(self) -> None:
        """Remove the part of a row that a server left which was killed while it appended."""
        data = self._read_list() if self._list.exists() else b""
        complete_bytes = data.rfind(b"\n") + 1
        rest = data[complete_bytes:]
        if not rest.strip():
            return
        try:  # whoever edited the list may have left out its last line break
            parse_rows(rest)
        except ValueError:
            last_line = printable(rest.decode(errors="replace"))[:500]
            _log.warning("%s: the last line is incomplete, as when a server is killed while it writes, and is removed: "
                         "%s", self._list, last_line)
            os.truncate(self._list, complete_bytes)

    def _read_list(self) -> bytes:
        with untrusted.open_regular(self._list) as file:  # a pipe would never end
            return file.read()

    def _read(self) -> None:
        """Read the list; raises ``ValueError`` or ``OSError``, and changes nothing, if it can't be read."""
        state = _file_state(self._list)  # before it is read: what is edited meanwhile is read the next time
        data = b"" if state is None else self._read_list()
        self._rows = parse_rows(data)
        self._last_line_open = bool(data) and not data.endswith(b"\n")
        self._state = state
        self.words = Counter(word for row in self._rows.values() for word in row["text"].casefold().split())
        self._bytes = sum(path.stat().st_size for path in self._clips.glob("*.wav"))

    def _take_in_edits(self) -> None:
        """Read the list again if it was edited since; raises ``ApiError`` 503 if it can't be read."""
        if _file_state(self._list) == self._state:
            return
        previous_rows = self._rows
        try:
            self._read()
        except (OSError, ValueError) as error:
            _log.error("%s was edited and can't be read, so no correction is saved until it is fixed: %s "
                       "[corrections_unreadable]", self._list, printable(str(error)))
            raise ApiError(503, "corrections_unreadable",
                           "the list of corrections on this server was edited and can't be read; try again later",
                           type=SERVER, headers={"retry-after": "60"}) from None
        changed = sum(previous_rows.get(name) != row for name, row in self._rows.items())
        # Rows may be missing because they were saved while an editor had the older list open, so each is named.
        gone = sorted(previous_rows.keys() - self._rows.keys())
        _log.warning("%s was edited while this server runs, and was read again: new or changed rows: %d; deleted "
                     "rows: %s", self._list, changed, printable(", ".join(gone)) or "none")

    def _append(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        with disk.disk_errors_as_user_error(self._list), open(self._list, "ab", buffering=0) as out:
            state = _file_state(out.fileno())
            size = out.seek(0, os.SEEK_END)
            if state != self._state and not (self._state is None and size == 0):  # None: it was made just now
                raise _Edited
            if self._last_line_open:
                line = b"\n" + line
            try:
                if out.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._list))
                os.fsync(out.fileno())
            except BaseException:
                out.truncate(size)
                raise
            self._state = _file_state(out.fileno())
            self._last_line_open = False
        self._rows[row["id"]] = row

    def _write(self, rows: dict[str, dict[str, Any]]) -> None:
        with atomic_write(self._list) as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
            out.flush()
            os.fsync(out.fileno())  # now, so that nearly no time is left for an edit before the list is replaced
            written = _file_state(out.fileno())
            if _file_state(self._list) != self._state:
                raise _Edited
        self._rows = rows
        self._state = written
        self._last_line_open = False


def _file_state(file: Path | int) -> tuple[int, ...] | None:
    """Device, inode, size and time of a file, which differ after an edit or a replacement; None if there is none."""
    try:
        stat = os.stat(file)
    except FileNotFoundError:
        return None
    return stat.st_dev, stat.st_ino, stat.st_size, stat.st_mtime_ns
