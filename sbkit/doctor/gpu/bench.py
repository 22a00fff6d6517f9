"""What a check works with: the device, folders, processes of its own, and where it tells what it has seen."""

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
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from sbkit.doctor.gpu.check import NOT_SHOWN, OK, REHEARSED, SHORT, Observation
from sbkit.system.processes import free_port, torchrun_environment

T = TypeVar("T")

#: Sizes of a recipe in a rehearsal.
SMALL = {"d_model": 16, "nhead": 2, "num_encoder_layers": 1, "num_decoder_layers": 1, "d_ffn": 32, "kernel_size": 7,
         "cnn_first_channels": 4, "cnn_channels": 4, "num_workers": 0}


class Program(NamedTuple):
    """How a program ended (negative: the signal), what it said, how long it took."""

    code: int
    output: str
    seconds: float
    at: float
    """When it ended, in seconds since 1970."""

    def last_line(self) -> str:
        """What it said last."""
        return (self.output.strip().splitlines() or ["it said nothing"])[-1]


class ProgramFailed(Exception):
    """A program that a check needs ended with an error."""


@dataclass
class Bench:
    """One check's workplace.

    home: the folder that all checks of this run share; folder: its own
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

    # ------------------------------------------------------------------ telling

    def found(self, key: str, seen: str, good: bool, **figures: Any) -> None:
        """A line's verdict, the same on every device."""
        self._tell(Observation(key, seen, OK if good else SHORT, figures))

    def measured(self, key: str, seen: str, good: bool, **figures: Any) -> None:
        """A line whose target is a card's: a rehearsal shows the figure and doesn't judge it."""
        self._tell(Observation(key, seen, REHEARSED if self.rehearse else OK if good else SHORT, figures))

    def not_shown(self, key: str, why: str) -> None:
        """A line that can't be looked at here, through no fault of sbkit's."""
        self._tell(Observation(key, why, NOT_SHOWN))

    def note(self, text: str) -> None:
        """A sentence for the report's details."""
        self._append({"note": text})

    def stand_in(self, text: str) -> None:
        """What a rehearsal does in the place of what only a card can."""
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
        """The first on a card, the second in a rehearsal."""
        return small if self.rehearse else card

    def recipe(self, name: str) -> Path:
        """``flagship`` or ``large``."""
        where = {"flagship": "hparams/ctc.yaml", "large": "recipes/CommonVoice/ASR/CTC/hparams/large.yaml"}
        return self.checkout / where[name]

    def run(self, name: str, folder: Path, *words: str, epochs: int, device: str | None = None, **keys: Any
            ) -> list[str]:
        """``sbkit train`` into a folder, without the check of the recipe, which is the same each time."""
        keys = {"number_of_epochs": epochs, "output_folder": folder, "ckpt_interval_minutes": 0, "least_steps": 0,
                **keys}
        return ["train", *self.words(name, device, **keys), *words, "--no-check"]

    def words(self, name: str, device: str | None = None, **keys: Any) -> list[str]:
        """A command's words: recipe, device, corpus, sizes, and other values of some keys."""
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
        """``sbkit WORDS`` in a process of its own, whose imports are done."""
        (done,) = self.programs([words], ranks=False, patience=None, **environment)
        return done

    def needed(self, words: Sequence[str], **environment: str) -> Program:
        """The same; a failure ends the check."""
        done = self.program(words, **environment)
        if done.code:
            raise ProgramFailed(f"sbkit {words[0]} ended with code {done.code}: {done.last_line()}")
        return done

    def programs(self, lines: Sequence[Sequence[str]], ranks: bool = False, patience: float | None = None,
                 **environment: str) -> list[Program]:
        """Several at once; ``ranks``: those of one job; ``patience``: seconds after which they are killed."""
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
        ends: dict[int, tuple[int, float]] = {}  # their codes, and after how many seconds
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
        """A function's value, out of a process of its own: what it does to the device goes with it."""
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
        """One check at a time: who comes second finds what the first has made."""
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
    code: Any = 1
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
    """Make a forked process's pool of threads while it has but one: where two ask torch for it at once, it aborts."""
    import torch

    torch.set_num_threads(torch.get_num_threads())


def _answer(pipe: Any, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    value = error = None
    _own_threads()
    try:
        value = function(*args)
    except BaseException as raised:
        traceback.print_exc()
        lines = str(raised).strip().splitlines()
        error = f"{type(raised).__name__}: {lines[0]}" if lines else type(raised).__name__
    pipe.send((value, error))
    pipe.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # a library's own end may hang where its device has failed
