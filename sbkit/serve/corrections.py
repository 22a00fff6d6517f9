"""Corrections: recordings with the words that people say were spoken, kept in a folder that is a corpus."""

from __future__ import annotations

import errno
import hashlib
import io
import json
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
from sbkit.errors import SbkitError
from sbkit.serve.errors import ApiError, invalid, no_room
from sbkit.serve.limits import MEGABYTE
from sbkit.system import disk
from sbkit.system.console import atomic_write

#: The longest recording that is corrected as one: longer ones are left out of training by most recipes.
MAX_SECONDS = 30.0
MAX_CHARACTERS = 2000


def worth(words: Sequence[Word], corrected: Mapping[str, int]) -> float:
    """How much can be learnt from correcting a recording, 0 to 1: the mean doubt of its words, where one that is in the
    corrections n times counts 1 / (1 + n).

    corrected : how many times, by the word in lower case
    """
    doubts = [(1 - word.confidence) / (1 + corrected.get(word.text.casefold(), 0)) for word in words]
    return sum(doubts) / max(1, len(doubts))


class Corrections:
    """A folder with ``corrections.jsonl``, which ``--data_folder`` takes, and its recordings in ``clips``.

    A recording is one row, however often it is corrected: the last words count. A new row is appended; only one that
    changes or goes costs a new list.

    max_bytes : the most that its recordings and their list may take together
    """

    def __init__(self, folder: Path, max_bytes: int):
        self._list, self._clips, self._max_bytes = folder / "corrections.jsonl", folder / "clips", max_bytes
        try:
            self._clips.mkdir(parents=True, exist_ok=True)
            self._lock = Lock(folder)
            if self._lock.acquire() is False:
                self._lock.close()
                raise SbkitError(f"--corrections {folder}: another server writes there", hint="name another folder")
            data = self._list.read_bytes() if self._list.exists() else b""
            whole = data.rfind(b"\n") + 1
            if data[whole:]:
                try:  # whoever edited the list may have left out its last line break
                    json.loads(data[whole:])["id"]
                except (ValueError, KeyError, TypeError):  # a server that was killed while it appended left a part
                    os.truncate(self._list, whole)
                else:
                    with open(self._list, "ab") as file:
                        file.write(b"\n")
                    whole = len(data)
            # Not splitlines, which also splits at what JSON leaves as it is, such as U+2028.
            lines = data[:whole].decode("utf-8").split("\n")
            self._rows: dict[str, dict[str, Any]] = {row["id"]: row for row in map(json.loads, filter(None, lines))}
            self.words = Counter(word for row in self._rows.values() for word in row["text"].casefold().split())
            """How many times each word, in lower case, is in the corrections."""
            self._bytes = sum(path.stat().st_size for path in self._clips.glob("*.wav"))
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise SbkitError(f"--corrections {folder}: cannot be used: {error}",
                             hint="name a folder that this server can write, new or made by --corrections") from None
        self._writing = threading.Lock()

    def close(self) -> None:
        self._lock.close()

    def save(self, signal: np.ndarray, rate: int, text: str, **facts: str | None) -> dict[str, Any]:
        """Keep a recording [S] and its words; return its row."""
        text = " ".join(text.split())
        if not text:
            raise invalid("the text is empty: send the words that were spoken", "text")
        if len(text) > MAX_CHARACTERS or not text.isprintable():
            raise invalid(f"the text must have at most {MAX_CHARACTERS} characters, all of them printable", "text")
        known = {name: value and " ".join(value.split())[:MAX_CHARACTERS] for name, value in facts.items()}
        file = io.BytesIO()
        soundfile.write(file, signal, rate, format="WAV", subtype="PCM_16")
        data = file.getvalue()
        name = hashlib.sha256(data).hexdigest()[:20]
        path = self._clips / f"{name}.wav"
        row = {"id": name, "audio_filepath": f"clips/{name}.wav", "duration": round(len(signal) / rate, 4),
               "text": text, **known, "saved": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())}
        with self._writing:
            fresh = not path.exists()
            listed = self._list.stat().st_size if self._list.exists() else 0
            # The list counts too: recordings may be of a sample, and words of many bytes.
            if self._bytes + len(data) * fresh + listed + len(json.dumps(row)) > self._max_bytes:
                raise no_room(f"this server keeps {self._max_bytes // MEGABYTE} MB of corrections, and they are full")
            try:
                former = self._rows.get(name)
                row["corrected"] = 1 if former is None else former.get("corrected", 1) + (former["text"] != text)
                if fresh:
                    with atomic_write(path, "wb") as out:
                        out.write(data)
                if former is None:
                    self._append(row)
                else:
                    self._write(self._rows | {name: row})
            except BaseException as error:
                if fresh:  # what was not saved is not kept
                    path.unlink(missing_ok=True)
                if isinstance(error, SbkitError):  # of the disk
                    raise no_room(str(error)) from None
                raise
            self._bytes += len(data) * fresh
            self.words.update(text.casefold().split())
            if former is not None:
                self.words.subtract(former["text"].casefold().split())
        return row

    def delete(self, name: str) -> None:
        """Forget a recording and its words."""
        with self._writing:
            row = self._rows.get(name)
            if row is None:
                raise ApiError(404, f"there is no correction {name[:40]!r}", code="not_found")
            path = self._clips / f"{name}.wav"
            size = path.stat().st_size if path.exists() else 0
            path.unlink(missing_ok=True)  # first: on a full disk, the list needs its room
            self._bytes -= size
            try:
                self._write({each: row for each, row in self._rows.items() if each != name})
            except SbkitError as error:
                raise no_room(str(error)) from None
            self.words.subtract(row["text"].casefold().split())

    def _append(self, row: dict[str, Any]) -> None:
        line = (json.dumps(row, ensure_ascii=False) + "\n").encode()
        with disk.disk_errors_as_user_error(self._list), open(self._list, "ab", buffering=0) as out:
            size = out.seek(0, os.SEEK_END)
            try:
                if out.write(line) < len(line):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._list))
                os.fsync(out.fileno())
            except BaseException:
                out.truncate(size)
                raise
        self._rows[row["id"]] = row

    def _write(self, rows: dict[str, dict[str, Any]]) -> None:
        with atomic_write(self._list) as out:
            out.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in rows.values())
        self._rows = rows
