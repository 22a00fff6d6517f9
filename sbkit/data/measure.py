"""Measures recordings by their headers: parallel, resumable, and no damaged file can crash it."""

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

_CHUNK = 256
# Below this, starting processes takes longer than measuring (some 60 microseconds a file).
_WORTH_PROCESSES = 2000
_JOURNAL_SECONDS = 5.0
_COMMAND = tuple(helper_process.command("sbkit.data.measure"))


def default_workers() -> int:
    """Twice the cores this process may use, since headers are waited for; 32 at most."""
    return min(32, 2 * usable_cores())


def measure(wavs: Sequence[str], *, workers: int | None = None, journal: Path | None = None, remote: Remote = NOWHERE,
            what: str = "measuring", show_progress: bool = True) -> tuple[np.ndarray, dict[int, str]]:
    """Length of each recording.

    Arguments
    ---------
    wavs : N recordings
    remote : which URLs may be opened
    journal : a file that remembers results, so that a later call goes on where this one was stopped

    Returns
    -------
    seconds : float64 [N], NaN where a recording cannot be read
    causes : index -> why it cannot
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
        chunks = [todo[i : i + _CHUNK] for i in range(0, len(todo), _CHUNK)]
        for chunk, results in _measured(chunks, wavs, remote, workers or default_workers()):
            for i, result in zip(chunk, results, strict=True):
                _store(seconds, causes, i, result)
                if not isinstance(result, str):  # what failed is tried again
                    notes.add(wavs[i], result)
            bar.update(len(chunk))
    return seconds, causes


def measure_one(wav: str, remote: Remote = NOWHERE) -> float | str:
    """Seconds of a recording, or why it can't be read."""
    try:
        return audio_info(wav, remote)[0]
    except AudioError as error:
        return error.cause


def _store(seconds: np.ndarray, causes: dict[int, str], i: int, result: float | str) -> None:
    if isinstance(result, str):
        causes[i] = result
    else:
        seconds[i] = result


def _measured(chunks: list[list[int]], wavs: Sequence[str], remote: Remote,
              workers: int) -> Iterator[tuple[list[int], list[float | str]]]:
    if workers <= 1 or sum(map(len, chunks)) < _WORTH_PROCESSES or not _Processes.work():
        for chunk in chunks:
            yield chunk, [measure_one(wavs[i], remote) for i in chunk]
        return
    with _Processes(min(workers, len(chunks)), remote) as processes, ThreadPoolExecutor(workers) as threads:
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
    """Helper processes that read headers, this module run by itself: a line of JSON in, a line out.

    Neither forks (a process with threads or a GPU must not) nor multiprocessing's spawn (it runs the user's
    script again); and a recording that crashes libsndfile costs one helper process, not the run.
    """

    def __init__(self, count: int, remote: Remote):
        self._remote = astuple(remote)
        self._free: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(count):
            self._free.append(self._start())

    @classmethod
    def work(cls) -> bool:
        """Whether such processes run here at all; else every recording would seem to crash them."""
        with cls(1, NOWHERE) as processes:
            works = processes._ask(processes._all[0], []) == []
        if not works:
            logger.warning("a helper process does not run here (%s): measuring in one process", sys.executable)
        return works

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            _COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
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
            process.stdin.write(json.dumps([wavs, self._remote]) + "\n")
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
    """Appends results to a file every few seconds; without a path it forgets them."""

    def __init__(self, path: Path | None):
        self.path, self.saved = path, time.monotonic()
        self.file: IO[str] | None = None

    def __enter__(self) -> _Journal:
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self.file = open(self.path, "a", encoding="utf-8")
            if self.path.stat().st_size:
                self.file.write("\n")  # ends a line that was cut short
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
                with contextlib.suppress(ValueError):  # the line that was being written
                    wav, result = json.loads(line)
                    known[wav] = result
    return known


def _main() -> None:
    for line in sys.stdin:
        wavs, allowed = json.loads(line)
        remote = Remote(*allowed)
        print(json.dumps([measure_one(wav, remote) for wav in wavs]), flush=True)


if __name__ == "__main__":
    _main()
