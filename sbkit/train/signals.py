"""Stop signals: the first one asks for a checkpoint and an orderly end; a second Ctrl-C ends the process at once.

======== ==== ==========================================================================================
SIGTERM  143  ``kill``, ``scancel``, Kubernetes, reclaimed spot machines. torchrun forwards it to its
              processes and kills them 30 s later, so a step and a checkpoint must not take longer.
SIGINT   130  Ctrl-C.
SIGHUP   129  The end of the terminal or of the connection to it. Under ``nohup`` it is ignored.
SIGUSR1  138  SLURM's warning before the time limit: ``#SBATCH --signal=USR1@300`` sends it 300 s before.
              A job script can then requeue itself with
              ``srun ... || [ $? -ne 138 ] || scontrol requeue $SLURM_JOB_ID``.
======== ==== ==========================================================================================

The numbers are exit codes, 128 + signal, as usual for processes ended by a signal. torchrun itself exits with code 1
after any of them. A SIGUSR1 kills it and its processes, unless it forwards that signal: start it with
``--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1``. ``tools/launch_slurm.sh`` needs none
of this.
"""

from __future__ import annotations

import abc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any, ClassVar

from sbkit.errors import SbkitError
from sbkit.system.console import write_now
from sbkit.train.distributed import ending

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# One Ctrl-C can reach a process twice: from the terminal, and a moment later from torchrun.
ECHO_SECONDS = 0.5
LAUNCHER_ECHO_SECONDS = 2.0

_wakeups: set[int] = set()


class Stopped(SbkitError, SystemExit):
    """Raised to end a run that was stopped by a signal.

    A command prints the message; a script that doesn't catch it ends with the exit code and no traceback.
    """

    exit_code = 128 + signal.SIGTERM

    @property
    def code(self) -> int:  # type: ignore[override]  # where Python looks for it, which no pickle would keep
        return self.exit_code

    @staticmethod
    def by(signum: int, place: str, checkpoint: Path | None) -> Stopped:
        """Make the error for a signal after a place such as "step 3", and for the checkpoint saved then, if any."""
        saved = f"checkpoint saved at {checkpoint}" if checkpoint else "no checkpoint could be saved"
        return _stopped(signum, f" after {place}, {saved}")


class _SignalHandler(abc.ABC):
    """A context that catches signals: calls ``_note`` in the main thread and ``_on_signal`` in a separate thread.

    The separate thread runs even while the main thread waits inside a collective or a kernel.
    """

    def __init__(self, signals: tuple[int, ...]):
        self.signals = signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _SignalHandler:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self.signals:
            if signum == signal.SIGHUP and signal.getsignal(signum) is signal.SIG_IGN:
                continue
            self._before[signum] = signal.signal(signum, self._note)
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        _wakeups.add(self._writing)
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, args=(reading,), name="stop-signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if not self._before:
            return
        signal.set_wakeup_fd(self._wakeup_before)
        self._restore_handlers()
        _wakeups.discard(self._writing)
        os.write(self._writing, b"\0")  # closing would not end the watcher: a forked process may hold the pipe
        self._watcher.join()
        os.close(self._writing)

    def _restore_handlers(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @abc.abstractmethod
    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Record a signal, in the main thread."""

    @abc.abstractmethod
    def _on_signal(self, signum: int) -> None:
        """Act on a signal at once, in a separate thread."""

    def _watch(self, reading: int) -> None:
        while signum := os.read(reading, 1)[0]:
            if signum in self.signals:
                self._on_signal(signum)
        os.close(reading)


class StopSignals(_SignalHandler):
    """A context that catches stop signals; ``signum`` is the first one that arrived, or None.

        with StopSignals() as stop:
            for batch in batches:
                ...
                if stop.signum:
                    save()
                    raise Stopped.by(stop.signum, f"step {step}", path)

    A signal that nothing acted on raises ``Stopped`` when the context is left. A separate thread prints a message, and
    ends the process at the second Ctrl-C.
    """

    def __init__(self) -> None:
        super().__init__(STOP_SIGNALS)
        self.signum: int | None = None
        self._first: float | None = None

    def __enter__(self) -> StopSignals:
        super().__enter__()
        if not self._before:
            logger.warning("Training runs outside the main thread, where stop signals can't be caught")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        caught = bool(self._before)
        super().__exit__(kind, error, *rest)
        if caught and kind is None and self.signum is not None:
            from sbkit.train.distributed import ranks  # imports torch: a signal is to be caught before

            ranks.raise_on_main(_stopped(self.signum, " after the end of training"))

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.signum is None:
            self.signum = signum

    def _on_signal(self, signum: int) -> None:
        now = time.monotonic()
        echo = LAUNCHER_ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else ECHO_SECONDS
        if self._first is None:
            self._first = now
            ending.allow_time_to_save()
            if os.environ.get("LOCAL_RANK", "0") == "0":
                sooner = " (press Ctrl-C again to stop at once)" if signum == signal.SIGINT else ""
                write_now(f"\n{signal.Signals(signum).name}: saving a checkpoint after this step, then "
                          f"stopping{sooner}\n")
        elif signum == signal.SIGINT and now - self._first > echo:
            os._exit(128 + signal.SIGINT)


class _Ending(SystemExit):
    """Raised anywhere in the main thread; not an ``Exception``, so that no error handler swallows it."""

    code: int


class EndSignals(_SignalHandler):
    """A context that turns SIGTERM and SIGUSR1 into ``Stopped`` in the main thread, for all work besides training.

    Ctrl-C needs no such context. If the main thread stays inside C code for ``PATIENCE`` seconds, the process ends
    anyway. An exception raised inside a destructor or a callback is lost, so it is raised again.
    """

    PATIENCE, AGAIN = 10.0, 0.5
    _entered: ClassVar[set[EndSignals]] = set()

    def __init__(self) -> None:
        super().__init__(tuple(signum for signum in STOP_SIGNALS if signum != signal.SIGINT))
        self._raised: Callable[[], _Ending | None] = lambda: None
        self._left = threading.Event()

    def __enter__(self) -> EndSignals:
        super().__enter__()
        EndSignals._entered.add(self)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        EndSignals._entered.discard(self)
        self._left.set()
        super().__exit__(kind, error, *rest)
        if isinstance(error, _Ending):
            raise _stopped(error.code - 128, goal="continue") from None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._raised() is None:  # otherwise it is already being raised
            raise self._remembered(_Ending(128 + signum))

    def _remembered(self, error: _Ending) -> _Ending:
        """Keep only a weak reference to the error, which is dead once nothing raises or handles the error."""
        self._raised = weakref.ref(error)
        return error

    def _on_signal(self, signum: int) -> None:
        until, main = time.monotonic() + self.PATIENCE, threading.main_thread().ident
        while not self._left.wait(self.AGAIN) and time.monotonic() < until:
            if self._raised() is None and main is not None:
                signal.pthread_kill(main, signum)
        if not self._left.is_set():
            if os.environ.get("RANK", "0") == "0":
                write_now(f"error: {_stopped(signum, goal='continue')}\n")
            os._exit(128 + signum)


def _stopped(signum: int, when: str = "", goal: str = "resume") -> Stopped:
    return Stopped(f"stopped by {signal.Signals(signum).name}{when}", hint=f"run the same command to {goal}",
                   exit_code=128 + signum)


def _forget() -> None:
    """In a forked process, keep signals from the parent's thread, and restore the default handlers."""
    if _wakeups:
        before = signal.set_wakeup_fd(-1)
        if before not in _wakeups:
            signal.set_wakeup_fd(before)
    for caught in EndSignals._entered:
        caught._restore_handlers()
    EndSignals._entered.clear()


os.register_at_fork(after_in_child=_forget)
