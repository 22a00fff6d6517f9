"""The bench of a check: device, folders, processes, and the report of its observations."""

from __future__ import annotations

import contextlib
import fcntl
import json
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sbkit.doctor.gpu.check import NOT_SHOWN, OK, REHEARSED, SHORT, Observation
from sbkit.errors import summary
from sbkit.system.processes import free_port, torchrun_environment

T = TypeVar("T")

#: Sizes that a rehearsal sets in a recipe.
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "d_ffn": 32, "kernel_size": 7,
         "cnn_first_channels": 4, "cnn_channels": 4, "num_workers": 0}


class Program(NamedTuple):
    """A finished program: exit code (negative: signal), output, duration."""

    code: int
    output: str
    seconds: float
    at: float
    """When it ended, in seconds since 1970."""

    def last_line(self) -> str:
        """The last line of the output."""
        return (self.output.strip().splitlines() or ["it said nothing"])[-1]


class ProgramFailed(Exception):
    """A program that a check needs ended with an error."""


@dataclass
class Bench:
    """The environment of one check.

    home: the folder shared by all checks of this run; folder: the check's own
    """

    name: str
    device: str
    rehearse: bool
    cards: int
    gib: float | None
    checkout: Path
    home: Path
    folder: Path
    _told: Path = field(init=False)

    def __post_init__(self) -> None:
        self._told = self.folder / "seen.jsonl"

    # ------------------------------------------------------------------ reporting

    def found(self, key: str, seen: str, good: bool, **figures: Any) -> None:
        """Report a line whose verdict is the same on every device."""
        self._tell(Observation(key, seen, OK if good else SHORT, figures))

    def measured(self, key: str, seen: str, good: bool, **figures: Any) -> None:
        """Report a line with a target for cards: a rehearsal shows the figure without judging it."""
        self._tell(Observation(key, seen, REHEARSED if self.rehearse else OK if good else SHORT, figures))

    def not_shown(self, key: str, why: str) -> None:
        """Report a line that can't be checked here, through no fault of sbkit."""
        self._tell(Observation(key, why, NOT_SHOWN))

    def note(self, text: str) -> None:
        """Add a sentence to the report's details."""
        self._append({"note": text})

    def stand_in(self, text: str) -> None:
        """Note what a rehearsal does in place of something that needs a card."""
        if self.rehearse:
            self.note(f"stand-in: {text}")

    def _tell(self, seen: Observation) -> None:
        self._append(asdict(seen))
        print(f"{self.name}: {seen.key}: {seen.seen} ({seen.verdict})", flush=True)

    def _append(self, line: dict[str, Any]) -> None:
        with open(self._told, "a", encoding="utf-8") as file:
            file.write(json.dumps(line, default=str) + "\n")

    # ------------------------------------------------------------------ sizes

    def size(self, card: T, small: T) -> T:
        """Choose the first on a card, the second in a rehearsal."""
        return small if self.rehearse else card

    def recipe(self, name: str) -> Path:
        """The path of the recipe ``flagship`` or ``large``."""
        where = {"flagship": "hparams/ctc.yaml", "large": "recipes/CommonVoice/ASR/CTC/hparams/large.yaml"}
        return self.checkout / where[name]

    def run(self, name: str, folder: Path, *words: str, epochs: int, device: str | None = None, **keys: Any
            ) -> list[str]:
        """The words of ``sbkit train`` into a folder, without the recipe check, which is the same each time."""
        keys = {"number_of_epochs": epochs, "output_folder": folder, "ckpt_interval_minutes": 0, "least_steps": 0,
                **keys}
        return ["train", *self.words(name, device, **keys), *words, "--no-check"]

    def words(self, name: str, device: str | None = None, **keys: Any) -> list[str]:
        """A command's arguments: recipe, device, corpus, sizes, and overridden keys."""
        from sbkit.doctor.gpu.corpus import corpus

        small = SMALL if self.rehearse else {}
        given = {"data_folder": corpus(self), "language": "en", **small, **self._batches(name), **keys}
        pairs = [word for key, value in given.items() for word in (f"--{key}", str(value))]
        return [str(self.recipe(name)), "--device", device or self.device, *pairs]

    def _batches(self, name: str) -> dict[str, Any]:
        if self.rehearse:
            vocabulary = {"output_neurons": 40} if name == "large" else {}
            return {"max_batch_seconds": 8, "step_seconds": 8, "corpus.max_duration": 8, **vocabulary}
        if name == "flagship":
            return {}
        seconds = 500 if self.gib is None or self.gib >= 38 else max(40, int(500 * self.gib / 40))  # as large.yaml says
        return {"max_batch_seconds": seconds, "step_seconds": seconds}

    # ------------------------------------------------------------------ processes

    def program(self, words: Sequence[str], **environment: str) -> Program:
        """Run ``sbkit WORDS`` in a separate process that has all imports done."""
        (done,) = self.programs([words], ranks=False, patience=None, **environment)
        return done

    def needed(self, words: Sequence[str], **environment: str) -> Program:
        """Run a program; a failure ends the check."""
        done = self.program(words, **environment)
        if done.code:
            raise ProgramFailed(f"sbkit {words[0]} ended with code {done.code}: {done.last_line()}")
        return done

    def programs(self, lines: Sequence[Sequence[str]], ranks: bool = False, patience: float | None = None,
                 **environment: str) -> list[Program]:
        """Run several programs at once; ``ranks``: as one job; ``patience``: seconds after which they are killed."""
        port = free_port() if ranks else 0
        began, started, processes, outputs = time.time(), time.monotonic(), [], []
        for i, words in enumerate(lines):
            handle, name = tempfile.mkstemp(dir=self.folder, prefix=f"{words[0]}-", suffix=".txt")
            os.close(handle)
            place = torchrun_environment(i, len(lines), port) if ranks else {}
            process = _FORK.Process(target=_sbkit, args=(list(words), name, self.folder, place | environment))
            process.start()
            processes.append(process)
            outputs.append(Path(name))
        ends: dict[int, tuple[int, float]] = {}  # exit codes and seconds
        while len(ends) < len(processes):
            for i, process in enumerate(processes):
                if i not in ends and process.exitcode is not None:
                    ends[i] = process.exitcode, time.monotonic() - started
                elif patience is not None and time.monotonic() - started > patience:
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

    @contextlib.contextmanager
    def alone(self, what: str) -> Iterator[None]:
        """Context for one check at a time: the second finds what the first made."""
        with open(self.home / f".{what}.lock", "w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


_FORK = multiprocessing.get_context("fork")


def _sbkit(words: list[str], output: str, cwd: Path, environment: dict[str, str]) -> None:
    handle = os.open(output, os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(handle, stream)
    sys.stdout, sys.stderr = (open(stream, "w", buffering=1, closefd=False) for stream in (1, 2))  # noqa: SIM115
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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code or 0)


def _own_threads() -> None:
    """Create torch's thread pool in a forked process while it has one thread: two at once would abort it."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


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
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a library's exit handler may hang if its device has failed
