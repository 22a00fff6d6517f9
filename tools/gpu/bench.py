"""A check in its process: device, sizes, programs that it runs, what it reports, and its time limit.

A crash or a hang doesn't affect the other checks.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sbkit.errors import summary
from sbkit.rehearsal import fake_gpu
from sbkit.system import processes

from . import corpus, process_group
from .check import DRY_RUN, NOT_SHOWN, OK, SHORT, Check, Observation, Result, complete, without_values

T = TypeVar("T")

CHECKOUT = Path(__file__).resolve().parents[2]
RECIPES = {"flagship": CHECKOUT / "hparams/ctc.yaml",
           "large": CHECKOUT / "recipes/CommonVoice/ASR/CTC/hparams/large.yaml"}
#: Sizes that a dry run sets in a recipe.
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "d_ffn": 32, "kernel_size": 7,
         "cnn_first_channels": 4, "cnn_channels": 4, "num_workers": 0}
#: Seconds that a check's child processes may take to end once killed.
_END_SECONDS = 30.0
_FORK = multiprocessing.get_context("fork")


class Program(NamedTuple):
    """A finished program: exit code (negative: signal), output, duration."""

    code: int
    output: str
    seconds: float
    at: float
    """When it ended, in seconds since 1970."""

    def last_line(self) -> str:
        """The last line of the output."""
        return (self.output.strip().splitlines() or ["no output"])[-1]


class ProgramFailed(Exception):
    """A program that a check needs ended with an error."""


@dataclass
class Bench:
    """The environment of one check.

    gib : memory of the first card
    home : the folder shared by all checks of this run; folder: the check's own
    """

    name: str
    device: str
    dry_run: bool
    cards: int
    gib: float | None
    home: Path
    folder: Path

    # ------------------------------------------------------------------ reporting

    def found(self, key: str, seen: str, good: bool, **figures: Any) -> None:
        """Report a line whose verdict is the same on every device."""
        self._observe(Observation(key, seen, OK if good else SHORT, figures))

    def measured(self, key: str, seen: str, good: bool, **figures: Any) -> None:
        """Report a line with a target for cards: a dry run shows the figure without judging it."""
        self._observe(Observation(key, seen, DRY_RUN if self.dry_run else OK if good else SHORT, figures))

    def not_shown(self, key: str, why: str) -> None:
        """Report a line that can't be checked here, through no fault of sbkit."""
        self._observe(Observation(key, why, NOT_SHOWN))

    def note(self, text: str) -> None:
        """Add a sentence to the report's details."""
        self._append({"note": text})

    def _observe(self, seen: Observation) -> None:
        self._append(asdict(seen))
        print(f"{self.name}: {seen.key}: {seen.seen} ({seen.verdict})", flush=True)

    def _append(self, line: dict[str, Any]) -> None:
        with open(self.folder / "seen.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    # ------------------------------------------------------------------ sizes

    def size(self, card: T, small: T) -> T:
        """Choose the first on a card, the second in a dry run."""
        return small if self.dry_run else card

    def corpus(self, hours: float = 1.0) -> Path:
        """Return the folder of a corpus with as many hours to train on; above one hour, recordings are repeated."""
        whole = self.home / "corpus"
        if not (whole / "test.csv").exists():  # the last file written
            sizes = self.size({"train": 1.0, "dev": 0.05, "test": 0.05}, {"train": 0.012, "dev": 0.002, "test": 0.002})
            corpus.write(whole, sizes, longest=self.size(corpus.LONGEST, 2.5))
        if self.dry_run or hours == 1.0:
            return whole
        return corpus.repeated(whole, self.home / f"corpus-{hours:g}", hours)

    def run(self, name: str, folder: Path, *words: str, epochs: int, **options: Any) -> list[str]:
        """The words of ``sbkit train`` into a folder, without the recipe check, which is the same each time."""
        options = {"number_of_epochs": epochs, "output_folder": folder, "ckpt_interval_minutes": 0, "min_steps": 0,
                   **options}
        return ["train", *self.words(name, **options), *words, "--no-check"]

    def words(self, name: str, device: str | None = None, hours: float = 1.0, **keys: Any) -> list[str]:
        """A command's arguments: recipe, device, corpus, sizes, and overridden keys."""
        small = SMALL if self.dry_run else {}
        given = {"data_folder": self.corpus(hours), "language": "en", **small, **self._batches(name), **keys}
        pairs = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        return [str(RECIPES[name]), "--device", device or self.device, *pairs]

    def _batches(self, name: str) -> dict[str, Any]:
        if self.dry_run:
            vocabulary = {"output_neurons": 40} if name == "large" else {}
            return {"max_batch_seconds": 8, "step_seconds": 8, "corpus.max_duration": 8, **vocabulary}
        if name == "flagship":
            return {}
        seconds = 500 if self.gib is None or self.gib >= 38 else max(40, int(500 * self.gib / 40))  # as large.yaml says
        return {"max_batch_seconds": seconds, "step_seconds": seconds}

    # ------------------------------------------------------------------ processes

    def program(self, words: Sequence[str], **environment: str) -> Program:
        """Run ``sbkit WORDS`` in a separate process that has all imports done."""
        return self.programs([words], ranks=False, patience=1e9, **environment)[0]

    def needed(self, words: Sequence[str], **environment: str) -> Program:
        """Run a program; a failure ends the check."""
        done = self.program(words, **environment)
        if done.code:
            raise ProgramFailed(f"sbkit {words[0]} ended with code {done.code}: {done.last_line()}")
        return done

    def programs(self, lines: Sequence[Sequence[str]], ranks: bool = False, patience: float = 1e9,
                 **environment: str) -> list[Program]:
        """Run several programs at once; ``ranks``: as one job; ``patience``: seconds after which they are killed."""
        port = processes.free_port() if ranks else 0
        began, started, running, outputs = time.time(), time.monotonic(), [], []
        for i, words in enumerate(lines):
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=f"{words[0]}-", suffix=".txt")
            os.close(handle)
            place = processes.torchrun_environment(i, len(lines), port) if ranks else {}
            running.append(_FORK.Process(target=_sbkit, args=(list(words), name, self.folder, place | environment)))
            running[-1].start()
            outputs.append(Path(name))
        ends: dict[int, tuple[int, float]] = {}  # exit codes and seconds
        while len(ends) < len(running):
            for i, process in enumerate(running):
                if i not in ends and process.exitcode is not None:
                    ends[i] = process.exitcode, time.monotonic() - started
                elif time.monotonic() - started > patience:
                    process.kill()
            time.sleep(0.02)
        done = [Program(ends[i][0], output.read_text(errors="replace"), ends[i][1], began + ends[i][1])
                for i, output in enumerate(outputs)]
        for words, each in zip(lines, done, strict=True):
            print(f"--- sbkit {' '.join(words)}\n{each.output}--- code {each.code}, {each.seconds:.1f} s", flush=True)
        return done

    def call(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function in a separate process, so that its effects on the device end with it."""
        ours, theirs = _FORK.Pipe(duplex=False)
        process = _FORK.Process(target=_answer, args=(theirs, function, args))
        process.start()
        theirs.close()
        try:
            value, error = ours.recv()
        except EOFError:
            process.join()
            raise ProgramFailed(f"{function.__name__} ended its process with code {process.exitcode}") from None
        process.join()
        if error is not None:
            raise ProgramFailed(f"{function.__name__}: {error}")
        return value


def _sbkit(words: list[str], output: str, cwd: Path, environment: dict[str, str]) -> None:
    _print_to(os.open(output, os.O_WRONLY | os.O_APPEND))
    os.environ.update(environment)
    os.chdir(cwd)
    _own_threads()
    sys.argv = sys.orig_argv = ["sbkit", *words]
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    code: int | None = 1
    try:
        runpy.run_module("sbkit", run_name="__main__")  # as ``python -m sbkit`` does
    except SystemExit as end:
        code = end.code if end.code is None or isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    _leave(code or 0)


def _answer(pipe: Connection, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    value = error = None
    _own_threads()
    try:
        value = function(*args)
    except BaseException as raised:
        traceback.print_exc()
        error = summary(raised)
    pipe.send((value, error))
    pipe.close()
    _leave(0)


def _print_to(handle: int) -> None:
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115


def _own_threads() -> None:
    """Create torch's thread pool in a forked process while it has one thread: two at once would abort it."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _leave(code: int) -> None:
    """End the process at once: a library's exit handler may hang if its device has failed."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# ------------------------------------------------------------------ the check's own process


class CheckProcess:
    """A running check with a time limit; what it has reported by then counts."""

    def __init__(self, check: Check, settings: Mapping[str, Any], logs: Path, limit: float):
        self.check, self._limit, self._cards = check, limit, settings["cards"]
        self._log, self._folder = logs / f"{check.name}.log", settings["home"] / check.name
        self._folder.mkdir(parents=True)
        bench = Bench(check.name, folder=self._folder, **settings)
        importlib.import_module(".preload", __package__)  # of all checks that are forked from this process
        self._process = _FORK.Process(target=_check, args=(check.function, bench, str(self._log)))
        self._started = time.monotonic()
        self._process.start()

    def result(self) -> Result:
        """Wait for the check's end or its limit."""
        # Not join: what the check has forked may outlive it, and holds the pipe that join waits for.
        while self._process.exitcode is None and time.monotonic() < self._started + self._limit:
            time.sleep(0.05)
        seconds, late = time.monotonic() - self._started, self._process.exitcode is None
        self.end()
        how = f"cut off after {seconds:.0f} s, its limit" if late else self._how(self._process.exitcode)
        file = self._folder / "seen.jsonl"
        lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()] if file.exists() else []
        found = [Observation(**line) for line in lines if "note" not in line]
        seen = complete(self.check, found, how, late, self._cards)
        return Result(self.check, without_values(self.check, seen) if fake_gpu.active() else seen,
                      [line["note"] for line in lines if "note" in line], seconds, str(self._log))

    def end(self) -> None:
        """Kill the check and its children, and wait until they are gone: one may still be writing a file."""
        group = self._process.pid
        assert group is not None, "it was started"
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(group, signal.SIGKILL)
        if self._process.exitcode is None:
            self._process.kill()
        self._process.join()
        until = time.monotonic() + _END_SECONDS
        while process_group.lives(group) and time.monotonic() < until:
            time.sleep(0.05)

    def _how(self, code: int | None) -> str:
        if not code:
            return ""
        if code < 0:
            return f"its process was ended by {processes.ended_by(-code)}"
        lines = self._log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else f"its process ended with code {code}"


def _check(function: str, bench: Bench, log: str) -> None:
    """Run the check in its process."""
    os.setpgid(0, 0)  # its children are ended with it
    for signum in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, signal.SIG_DFL)
    _print_to(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    multiprocessing.set_start_method("fork", force=True)  # for its own children, as in an ordinary program
    try:
        if fake_gpu.active():  # shows that each check runs and ends in its time, and nothing about values
            from sbkit.rehearsal import no_values

            no_values.install()
        if bench.dry_run:
            import torch

            from sbkit.recipe import speed

            torch.set_num_threads(1)
            torch._dynamo.config.disable = True
            speed.MEASURE_SECONDS = 0.0  # measuring the CPU's speed takes longer than these runs
        module, name = function.split(":")
        getattr(importlib.import_module(module, __package__), name)(bench)
    except BaseException as error:
        traceback.print_exc()
        print(summary(error), file=sys.stderr)
        _leave(1)
    _leave(0)
