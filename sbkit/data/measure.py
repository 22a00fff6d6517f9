"""Runs a function on each recording, such as measuring it: in parallel, resumable, safe from damaged files."""

from __future__ import annotations

import contextlib
import itertools
import json
import logging
import pkgutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Executor, Future, ThreadPoolExecutor, wait
from dataclasses import astuple
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from sbkit.data.audio import AudioError, open_recording
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.system import helper_process
from sbkit.system.console import progress
from sbkit.system.cores import usable_cores

logger = logging.getLogger(__name__)

CHUNK = 256
# For fewer recordings, starting processes takes longer than measuring (about 60 microseconds per file).
WORTH_PROCESSES = 2000
#: Fewer rows take no time, so they get no progress bar.
WORTH_A_BAR = 1000
COMMAND = tuple(helper_process.command("sbkit.data.measure"))


class Cause(NamedTuple):
    """Why a recording can't be used, or what of it isn't read: a code, and words."""

    code: str
    words: str

    @classmethod
    def of(cls, error: AudioError) -> Cause:
        return cls(error.code, error.cause)


def measure(wavs: Sequence[str], *, workers: int | None = None, journal: Path | None = None, remote: Remote = NO_REMOTE,
            whole: bool = True, what: str = "measuring",
            show_progress: bool = True) -> tuple[np.ndarray, dict[int, Cause]]:
    """Read the duration of each recording from its header; the arguments are those of :func:`run_job`.

    whole : whether a recording with less audio than its header says counts as unreadable

    Returns the seconds, float64 [N], NaN for an unreadable recording, and by index the reason for each of these, and
    what isn't read of others.
    """
    seconds = np.full(len(wavs), np.nan)
    causes: dict[int, Cause] = {}
    for i, result in run_job("sbkit.data.measure:measure_one", wavs, (whole,), workers=workers, journal=journal,
                         remote=remote, what=what, show_progress=show_progress):
        if isinstance(result, dict):
            causes[i] = Cause(**result)
        elif isinstance(result, list):
            seconds[i], notice = result
            causes[i] = Cause("longer-than-header", notice)
        else:
            seconds[i] = result
    return seconds, causes


def run_job(job: str, wavs: Sequence[Any], further: tuple[Any, ...] = (), *, workers: int | None = None,
        journal: Path | None = None, remote: Remote = NO_REMOTE, what: str = "", chunk: int | None = None,
        worth_processes: int | None = None, then: Callable[[Any], Any] = lambda result: result,
        show_progress: bool = True) -> Iterator[tuple[int, Any]]:
    """Run a function on each recording in helper processes; yields its index and the result, in any order.

    job : ``module:function``; called with a recording, ``remote`` and ``further``, it returns JSON data, and an
        object with the fields of a ``Cause`` if it failed
    wavs : N recordings, as ``job`` takes them: texts, or lists with a text first
    remote : which URLs may be opened
    journal : a file that stores results, so that a later call continues where this one was stopped
    chunk, worth_processes : recordings that one process gets at once, and from how many on processes are started
    then : converts each result before it is stored and yielded
    """
    stored = {} if journal is None else _stored_results(journal)
    names = [json.dumps(wav) for wav in wavs] if stored else []
    remaining = [i for i in range(len(wavs)) if not stored or names[i] not in stored]
    with contextlib.ExitStack() as opened:
        notes = None
        if journal is not None:
            journal.parent.mkdir(parents=True, exist_ok=True)
            notes = opened.enter_context(open(journal, "a", encoding="utf-8", buffering=1))
            if journal.stat().st_size:
                notes.write("\n")  # ends a line that was interrupted
        bar = opened.enter_context(progress(what=what, total=len(wavs), unit="file",
                                            show=show_progress and len(wavs) >= WORTH_A_BAR))
        bar.update(len(wavs) - len(remaining))
        yield from ((i, stored[name]) for i, name in enumerate(names) if name in stored)
        size = chunk or CHUNK
        chunks = [remaining[i : i + size] for i in range(0, len(remaining), size)]
        workers = workers or min(32, 2 * usable_cores())  # twice, as reading headers is mostly waiting
        for indices, results in _results(job, chunks, wavs, (remote, *further), workers,
                                         worth_processes or WORTH_PROCESSES):
            for i, result in zip(indices, results, strict=True):
                if not isinstance(result, dict):  # failures aren't stored, so that they are tried again
                    result = then(result)
                    if notes is not None:
                        notes.write(json.dumps([wavs[i], result]) + "\n")
                yield i, result
            bar.update(len(indices))


def _stored_results(journal: Path) -> dict[str, Any]:
    """The results in a journal, by their recordings as JSON."""
    results = {}
    if journal.is_file():
        with open(journal, encoding="utf-8", errors="replace") as file:
            for line in file:
                with contextlib.suppress(ValueError):  # a line that was interrupted
                    wav, result = json.loads(line)
                    results[json.dumps(wav)] = result
    return results


def measure_one(wav: str, remote: Remote = NO_REMOTE, whole: bool = True) -> float | dict[str, str] | list[float | str]:
    """The duration of a recording in seconds, or why it can't be read, or its duration and what isn't read of it."""
    try:
        with open_recording(wav, wav, remote) as opened:
            seconds = opened.file.frames / opened.file.samplerate
            notice = opened.check_length() if whole else None
            return seconds if notice is None else [seconds, notice]
    except AudioError as error:
        return Cause.of(error)._asdict()


def _results(job: str, chunks: list[list[int]], wavs: Sequence[Any], arguments: tuple[Any, ...], workers: int,
             worth_processes: int) -> Iterator[tuple[list[int], list[Any]]]:
    if workers <= 1 or sum(map(len, chunks)) < worth_processes or not _Processes.available():
        function = pkgutil.resolve_name(job)
        for chunk in chunks:
            yield chunk, [function(wavs[i], *arguments) for i in chunk]
        return
    with _Processes(min(workers, len(chunks)), job, *arguments) as processes, ThreadPoolExecutor(workers) as threads:
        yield from map_unordered(threads, lambda chunk: processes.run([wavs[i] for i in chunk]), chunks, 2 * workers)


J = TypeVar("J")
R = TypeVar("R")


def map_unordered(pool: Executor, function: Callable[[J], R], jobs: Iterable[J], ahead: int) -> Iterator[tuple[J, R]]:
    """Yield each job with its result, in any order; at most ``ahead`` jobs, which may be large, are submitted."""
    waiting: dict[Future[R], J] = {}
    remaining = iter(jobs)
    try:
        while True:
            for job in itertools.islice(remaining, ahead - len(waiting)):
                waiting[pool.submit(function, job)] = job
            if not waiting:
                return
            for future in wait(waiting, return_when=FIRST_COMPLETED).done:
                yield waiting.pop(future), future.result()
    finally:
        for future in waiting:
            future.cancel()


class _Processes(contextlib.AbstractContextManager["_Processes"]):
    """Helper processes that read recordings: each runs this module, reads lines of JSON and writes one for each.

    A process with threads or a GPU must not fork, and multiprocessing's spawn would run the user's script again. A
    recording that crashes libsndfile ends only a helper process.
    """

    def __init__(self, count: int, job: str, remote: Remote = NO_REMOTE, *further: Any):  # JSON data
        self._arguments = job, astuple(remote), *further
        self._free: list[subprocess.Popen[str]] = []
        self._all: list[subprocess.Popen[str]] = []
        self._lock = threading.Lock()
        self._closed = False
        for _ in range(count):
            self._free.append(self._start())

    @classmethod
    def available(cls) -> bool:
        """Whether helper processes run on this machine; if not, every recording would seem to crash them."""
        with cls(1, "sbkit.data.measure:measure_one") as processes:
            works = processes._send(processes._all[0], []) == []
        if not works:
            logger.warning("helper processes do not start here (%s): measuring in one process", sys.executable)
        return works

    def _start(self) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            COMMAND, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            env=helper_process.environment(), text=True, encoding="utf-8")
        self._all.append(process)
        return process

    def run(self, wavs: list[Any]) -> list[Any]:
        with self._lock:
            process = self._free.pop() if self._free else self._start()
        results = self._send(process, wavs)
        if results is None:
            process.kill()
            if self._closed:
                return []
            if len(wavs) == 1:
                return [Cause("damaged-audio", "crashes the decoder")._asdict()]
            results = [result for wav in wavs for result in self.run([wav])]
        else:
            with self._lock:
                self._free.append(process)
        return results

    def _send(self, process: subprocess.Popen[str], wavs: list[Any]) -> list[Any] | None:
        assert process.stdin is not None and process.stdout is not None, "both are pipes"
        try:
            process.stdin.write(json.dumps([wavs, *self._arguments]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except (OSError, ValueError):
            return None
        return json.loads(line) if line.endswith("\n") else None

    def __exit__(self, *_: object) -> None:
        self._closed = True
        for process in self._all:
            process.kill()
        for process in self._all:
            process.wait()
            for pipe in filter(None, (process.stdin, process.stdout)):
                pipe.close()


if __name__ == "__main__":
    for line in sys.stdin:
        wavs, job, allowed, *further = json.loads(line)
        remote = Remote(*allowed)
        print(json.dumps([pkgutil.resolve_name(job)(wav, remote, *further) for wav in wavs]), flush=True)
