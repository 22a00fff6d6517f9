"""Stop signals: the first one asks for a checkpoint and an orderly end, a second Ctrl-C leaves at once.

======== ==== ==========================================================================================
SIGTERM  143  ``kill``, ``scancel``, Kubernetes, a spot machine being taken back. torchrun passes it on to
              its processes and kills them 30 s later, so a step and a checkpoint have to fit into that.
SIGINT   130  Ctrl-C.
SIGUSR1  138  SLURM's warning before the time limit: ``#SBATCH --signal=USR1@300`` sends it 300 s before.
              A job script then asks for more time with
              ``srun ... || [ $? -ne 138 ] || scontrol requeue $SLURM_JOB_ID``.
======== ==== ==========================================================================================

The numbers are exit codes, 128 + signal, which is what schedulers and shells take for "ended by this
signal". torchrun ends with code 1 after any of them, and dies of a SIGUSR1, with which its processes end too, unless
it is started with ``--signals-to-handle SIGTERM,SIGINT,SIGHUP,SIGQUIT,SIGUSR1`` (torch 2.9 on; earlier
``TORCHELASTIC_SIGNALS_TO_HANDLE``): it then passes it on. ``tools/launch_slurm.sh`` needs none of this.
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
from sbkit.train.distributed import launcher

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)
# One Ctrl-C can reach a process twice: from the terminal, and passed on by torchrun a moment later.
ECHO_SECONDS = 0.5
LAUNCHER_ECHO_SECONDS = 2.0

_wakeups: set[int] = set()


class Stopped(SbkitError, SystemExit):
    """Ends a run that a signal stopped after a checkpoint.

    A command shows its line; a script that catches nothing ends with the exit code and no traceback.
    """

    def __init__(self, message: str, *, hint: str | None = None, exit_code: int = 128 + signal.SIGTERM):
        super().__init__(message, hint=hint, exit_code=exit_code)
        self.code = exit_code

    @classmethod
    def by(cls, signum: int, step: int, checkpoint: Path | None) -> Stopped:
        """For signal ``signum`` after optimizer step ``step`` and the checkpoint saved there, if it was."""
        saved = f"checkpoint saved at {checkpoint}" if checkpoint else "no checkpoint could be saved then"
        return cls(f"stopped by {signal.Signals(signum).name} after step {step}, {saved}",
                   hint="run the same command to resume", exit_code=128 + signum)


class _Caught(abc.ABC):
    """Signals that are caught while it is entered: ``_note`` in the main thread, ``_heard`` in one of its own.

    The C part of the handler wakes that thread, also while the main one waits inside a collective or a kernel.
    """

    def __init__(self, signals: tuple[int, ...]):
        self.signals = signals
        self._before: dict[int, Any] = {}

    def __enter__(self) -> _Caught:
        if threading.current_thread() is not threading.main_thread():
            return self
        for signum in self.signals:
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
        self._give_back()
        _wakeups.discard(self._writing)
        os.write(self._writing, b"\0")  # closing would not end the watcher while a forked process lives
        self._watcher.join()
        os.close(self._writing)

    def _give_back(self) -> None:
        for signum, handler in self._before.items():
            signal.signal(signum, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    @abc.abstractmethod
    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Take a signal in, in the main thread."""

    @abc.abstractmethod
    def _heard(self, signum: int) -> None:
        """Act on a signal at once, in a thread of its own."""

    def _watch(self, reading: int) -> None:
        while signum := os.read(reading, 1)[0]:
            if signum in self.signals:
                self._heard(signum)
        os.close(reading)


class StopSignals(_Caught):
    """Catches stop signals while it is entered; ``signum`` is the first one that came, else None.

        with StopSignals() as stop:
            for batch in batches:
                ...
                if stop.signum:
                    save()
                    raise Stopped.by(stop.signum, step, path)

    A signal that came too late to be acted on is raised as ``Stopped`` when this is left, and so never lost.
    A thread writes the line to stderr and leaves at the second Ctrl-C.
    """

    def __init__(self, signals: tuple[int, ...] = STOP_SIGNALS):
        super().__init__(signals)
        self.signum: int | None = None
        self._first: float | None = None

    def __enter__(self) -> StopSignals:
        super().__enter__()
        if not self._before:
            logger.warning("Training runs in a thread: stop signals can't be caught there")
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        caught = bool(self._before)
        super().__exit__(kind, error, *rest)
        if caught and kind is None and self.signum is not None:
            from sbkit.train.distributed import ranks  # imports torch: a signal is to be caught before

            ranks.raise_on_main(Stopped(
                f"stopped by {signal.Signals(self.signum).name} when training had ended",
                hint="run the same command to go on from there", exit_code=128 + self.signum,
            ))

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self.signum is None:
            self.signum = signum

    def _heard(self, signum: int) -> None:
        now = time.monotonic()
        echo = LAUNCHER_ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else ECHO_SECONDS
        if self._first is None:
            self._first = now
            launcher.stopping()
            if os.environ.get("LOCAL_RANK", "0") == "0":
                os.write(2, f"\n{signal.Signals(signum).name}: saving a checkpoint after this step, then "
                            "stopping (Ctrl-C once more leaves at once)\n".encode())
        elif signum == signal.SIGINT and now - self._first > echo:
            os._exit(128 + signal.SIGINT)


class _Ending(SystemExit):
    """Raised wherever the main thread is; no mistake, so that nothing there takes it for one and goes on."""

    code: int


class EndSignals(_Caught):
    """What stops training after a checkpoint ends all else in order, wherever the main thread is, with ``Stopped``.

    Ctrl-C does that without it. Where the main thread is inside C code for longer than ``PATIENCE`` seconds, the
    process ends all the same. What is raised inside a destructor or a callback is lost, and raised again.
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
            raise _stopped(error.code - 128) from None

    def _note(self, signum: int, frame: FrameType | None) -> None:
        del frame
        if self._raised() is None:  # else it is ending
            raise self._remembered(_Ending(128 + signum))

    def _remembered(self, error: _Ending) -> _Ending:
        """Only for as long as something raises or handles it: no variable of a frame on its way may hold it."""
        self._raised = weakref.ref(error)
        return error

    def _heard(self, signum: int) -> None:
        until, main = time.monotonic() + self.PATIENCE, threading.main_thread().ident
        while not self._left.wait(self.AGAIN) and time.monotonic() < until:
            if self._raised() is None and main is not None:
                signal.pthread_kill(main, signum)
        if not self._left.is_set():
            if os.environ.get("RANK", "0") == "0":
                os.write(2, f"error: {_stopped(signum)}\n".encode())
            os._exit(128 + signum)


def _stopped(signum: int) -> Stopped:
    return Stopped(f"stopped by {signal.Signals(signum).name}", hint="the same command does what is missing",
                   exit_code=128 + signum)


def _forget_wakeup() -> None:
    """A signal to a forked process must not look like one to its parent."""
    if _wakeups:
        before = signal.set_wakeup_fd(-1)
        if before not in _wakeups:
            signal.set_wakeup_fd(before)


def _forget_end() -> None:
    """A forked process ends by a signal as it would otherwise."""
    for caught in EndSignals._entered:
        caught._give_back()
    EndSignals._entered.clear()


os.register_at_fork(after_in_child=_forget_wakeup)
os.register_at_fork(after_in_child=_forget_end)
