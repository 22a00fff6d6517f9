"""Durations of recordings, read from their headers: in parallel, resumable, and safe against damaged files."""

from __future__ import annotations

import contextlib
import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import astuple
from pathlib import Path
from typing import IO

import numpy as np

from sbkit.data.audio import AudioError, audio_info
from sbkit.data.remote import NOWHERE, Remote
from sbkit.system import helper_process
from sbkit.system.console import progress
from sbkit.system.cores import usable_cores

logger = logging.getLogger(__name__)

CHUNK = 256
# For fewer recordings, starting processes takes longer than measuring (about 60 microseconds per file).
WORTH_PROCESSES = 2000
_JOURNAL_SECONDS = 5.0
COMMAND = tuple(helper_process.command("sbkit.data.measure"))


def default_workers() -> int:
    """Twice the number of cores this process may use, because reading headers is mostly waiting; at most 32."""
    return min(32, 2 * usable_cores())


def measure(wavs: Sequence[str], *, workers: int | None = None, journal: Path | None = None, remote: Remote = NOWHERE,
            whole: bool = True, what: str = "measuring",
            show_progress: bool = True) -> tuple[np.ndarray, dict[int, str]]:
    """Read the duration of each recording from its header.

    Arguments
    ---------
    wavs : N recordings
    remote : which URLs may be opened
    whole : whether a recording that holds less or more audio than its header says can't be read
    journal : a file that stores results, so that a later call continues where this one was stopped

    Returns
    -------
    seconds : float64 [N], NaN for a recording that can't be read
    causes : for the index of each such recording, why
    """
    seconds = np.full(len(wavs), np.nan)
    causes: dict[int, str] = {}
    known = _read_journal(journal)
    todo = []
    for i, wav in enumerate(wavs):
        if wav in known:
            _store(seconds, causes, i, known[wav])
        else:
            todo.append(i)
    with _Journal(journal) as notes, progress(what=what, total=len(wavs), unit="file",
                                              show=show_progress) as bar:
        bar.update(len(wavs) - len(todo))
        chunks = [todo[i : i + CHUNK] for i in range(0, len(todo), CHUNK)]
        for chunk, results in _measured(chunks, wavs, (remote, whole), workers or default_workers()):
            for i, result in zip(chunk, results, strict=True):
                _store(seconds, causes, i, result)
                if not isinstance(result, str):  # failures aren't stored, so that they are tried again
                    notes.add(wavs[i], result)
            bar.update(len(chunk))
    return seconds, causes


def measure_one(wav: str, remote: Remote = NOWHERE, whole: bool = True) -> float | str:
    """The duration of a recording in seconds, or why it can't be read."""
    try:
        return audio_info(wav, remote, whole=whole)[0]
    except AudioError as error:
        return error.cause


def _store(seconds: np.ndarray, causes: dict[int, str], i: int, result: float | str) -> None:
    if isinstance(result, str):
        causes[i] = result
    else:
        seconds[i] = result


def _measured(chunks: list[list[int]], wavs: Sequence[str], how: tuple[Remote, bool],
              workers: int) -> Iterator[tuple[list[int], list[float | str]]]:
    if workers <= 1 or sum(map(len, chunks)) < WORTH_PROCESSES or not _Processes.work():
        for chunk in chunks:
            yield chunk, [measure_one(wavs[i], *how) for i in chunk]
        return
    with _Processes(min(workers, len(chunks)), *how) as processes, ThreadPoolExecutor(workers) as threads:
        waiting: dict[Future[list[float | str]], list[int]] = {}
        remaining = iter(chunks)
        try:
            while True:
                while len(waiting) < 2 * workers and (taken := next(remaining, None)) is not None:
                    waiting[threads.submit(processes.measure, [wavs[i] for i in taken])] = taken
                if not waiting:
                    return
                for done in wait(waiting, return_when=FIRST_COMPLETED).done:
                    yield waiting.pop(done), done.result()
        finally:
            for future in waiting:
                future.cancel()


class _Processes:
    """Helper processes that read headers: each runs this module and answers a line of JSON with another.

    A process with threads or a GPU must not fork, and multiprocessing's spawn would run the user's script again. A
    recording that crashes libsndfile ends only a helper process.
    """

    def __init__(self, count: int, remote: Remote, whole: bool = True):
        self._how = astuple(remote), whole
        self._free: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(count):
            self._free.append(self._start())

    @classmethod
    def work(cls) -> bool:
        """Whether helper processes run on this machine; if not, every recording would seem to crash them."""
        with cls(1, NOWHERE) as processes:
            works = processes._ask(processes._all[0], []) == []
        if not works:
            logger.warning("a helper process does not run here (%s): measuring in one process", sys.executable)
        return works

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=helper_process.environment(), text=True, encoding="utf-8")
        self._all.append(process)
        return process

    def measure(self, wavs: list[str]) -> list[float | str]:
        with self._lock:
            process = self._free.pop() if self._free else self._start()
        results = self._ask(process, wavs)
        if results is None:
            process.kill()
            if self._closed:
                return []
            if len(wavs) == 1:
                return ["crashes the decoder"]
            results = [result for wav in wavs for result in self.measure([wav])]
        else:
            with self._lock:
                self._free.append(process)
        return results

    def _ask(self, process: subprocess.Popen[str], wavs: list[str]) -> list[float | str] | None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            process.stdin.write(json.dumps([wavs, *self._how]) + "\n")
            process.stdin.flush()
            answer = process.stdout.readline()
        except (OSError, ValueError):
            return None
        return json.loads(answer) if answer.endswith("\n") else None

    def __enter__(self) -> _Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()


class _Journal:
    """Appends results to a file, flushed every few seconds; without a path they are dropped."""

    def __init__(self, path: Path | None):
        self.path, self.saved = path, time.monotonic()
        self.file: IO[str] | None = None

    def __enter__(self) -> _Journal:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a", encoding="utf-8")
            if self.path.stat().st_size:
                self.file.write("\n")  # ends a line that was interrupted
        return self

    def add(self, wav: str, result: float) -> None:
        if self.file is not None:
            self.file.write(json.dumps([wav, result]) + "\n")
            if time.monotonic() - self.saved > _JOURNAL_SECONDS:
                self.file.flush()
                self.saved = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self.file is not None:
            self.file.close()


def _read_journal(path: Path | None) -> dict[str, float]:
    known = {}
    if path is not None and path.is_file():
        with open(path, encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a line that was interrupted
                    wav, result = json.loads(line)
                    known[wav] = result
    return known


def _main() -> None:
    for line in sys.stdin:
        wavs, allowed, whole = json.loads(line)
        remote = Remote(*allowed)
        print(json.dumps([measure_one(wav, remote, whole) for wav in wavs]), flush=True)


if __name__ == "__main__":
    _main()
