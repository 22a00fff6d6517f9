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

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from sbkit.errors import SbkitError
from sbkit.system.console import write_now
from sbkit.train.distributed import launcher

logger = logging.getLogger(__name__)

STOP_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGHUP)
# One Ctrl-C can reach a process twice: from the terminal, and a moment later from torchrun.
ECHO_SECONDS = 0.5
LAUNCHER_ECHO_SECONDS = 2.0

_wakeups: set[int] = set()
_outside: dict[int, Any] = {}  # the former handlers, inside of ``end_by_signals``


class Stopped(SbkitError, SystemExit):
    """Raised to end a run that was stopped by a signal.

    A command prints the message; a script that doesn't catch it ends with the exit code and no traceback.
    """

    exit_code = 128 + signal.SIGTERM
    prefix = ""  # who stops a run has made no mistake

    @property
    def code(self) -> int:  # type: ignore[override]  # where Python looks for it, which no pickle would keep
        return self.exit_code

    @staticmethod
    def by(signum: int, place: str, checkpoint: Path | None) -> Stopped:
        """Make the error for a signal after a place such as "step 3", and for the checkpoint saved then, if any."""
        if checkpoint is None:
            return _stopped(signum, f" after {place}, and nothing is saved, because there is no checkpointer",
                            goal="begin again")
        return _stopped(signum, f" after {place}, checkpoint saved at {checkpoint}")


class StopSignals:
    """A context that catches stop signals; ``signum`` is the first one that arrived, or None.

        with StopSignals() as stop:
            for batch in batches:
                ...
                if stop.signum:
                    save()
                    raise Stopped.by(stop.signum, f"step {step}", path)

    saves : says whether a checkpoint is going to be saved, for the message

    A signal that nothing acted on raises ``Stopped`` when the context is left: on all ranks of a run, whichever of them
    received it, as the others would go on to a collective that it never joins. So all ranks must leave the context
    together, or by an error. A thread, which runs even while the main one waits inside a collective or a kernel, prints
    a message, and ends the process at the second Ctrl-C.
    """

    def __init__(self, saves: Callable[[], bool] = lambda: True) -> None:
        self.signum: int | None = None
        self._saves = saves
        self._first: float | None = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Training runs outside the main thread, where stop signals can't be caught")
            return self

        def note(signum: int, frame: FrameType | None) -> None:  # in the main thread
            del frame
            self.signum = self.signum or signum

        self._before = _handle(STOP_SIGNALS, note)
        reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        _wakeups.add(self._writing)
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._watcher = threading.Thread(target=self._watch, args=(reading,), name="stop-signals", daemon=True)
        self._watcher.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if self._before:
            self._stop_catching()
        # Only now: from here on a signal does what it did before, so none comes between this and the end of catching.
        if kind is None:
            self._raise_if_any_rank_was_stopped()

    def _stop_catching(self) -> None:
        signal.set_wakeup_fd(self._wakeup_before)
        _restore(self._before)
        _wakeups.discard(self._writing)
        os.write(self._writing, b"\0")  # closing would not end the watcher: a forked process may hold the pipe
        self._watcher.join()
        os.close(self._writing)

    def _raise_if_any_rank_was_stopped(self) -> None:
        from sbkit.train.distributed import ranks  # imports torch: a signal is to be caught before

        signums = ranks.gather_objects(self.signum) if ranks.connected() else [self.signum]
        signum = next((signum for signum in signums if signum is not None), None)
        if signum is not None:
            ranks.raise_on_main(_stopped(signum, " after the end of training"))

    def _watch(self, reading: int) -> None:
        """Act on signals at once, in the thread; a 0 ends it."""
        echo = LAUNCHER_ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else ECHO_SECONDS
        while signum := os.read(reading, 1)[0]:
            now = time.monotonic()
            if signum not in STOP_SIGNALS:
                continue
            if self._first is None:
                self._first = now
                launcher.stopping.set()
                if os.environ.get("LOCAL_RANK", "0") == "0":
                    sooner = " (press Ctrl-C again to stop at once)" if signum == signal.SIGINT else ""
                    then = "saving a checkpoint after this step, then stopping" if self._saves() else \
                        "stopping after this step, without a checkpoint, because there is no checkpointer"
                    write_now(f"\n{signal.Signals(signum).name}: {then}{sooner}\n")
            elif signum == signal.SIGINT and now - self._first > echo:
                os._exit(128 + signal.SIGINT)
        os.close(reading)


class _Ending(SystemExit):
    """Raised anywhere in the main thread; not an ``Exception``, so that no error handler swallows it."""

    code: int


@contextlib.contextmanager
def end_by_signals() -> Iterator[None]:
    """Turn stop signals but Ctrl-C, which needs no such context, into ``Stopped``, for all work besides training."""
    stopped = False

    def note(signum: int, frame: FrameType | None) -> None:
        nonlocal stopped
        del frame
        if not stopped:  # torchrun sends the same signal again
            stopped = True
            raise _Ending(128 + signum)

    before = _handle((signum for signum in STOP_SIGNALS if signum != signal.SIGINT), note)
    _outside.update(before)
    try:
        yield
    except _Ending as error:
        raise _stopped(error.code - 128, goal="continue") from None
    finally:
        _restore(before)
        _outside.clear()


def _handle(signums: Iterable[int], handler: Callable[[int, FrameType | None], None]) -> dict[int, Any]:
    """Set the handler of signals, except a SIGHUP that ``nohup`` ignores; return the former ones."""
    if threading.current_thread() is not threading.main_thread():
        return {}
    return {signum: signal.signal(signum, handler) for signum in signums
            if signum != signal.SIGHUP or signal.getsignal(signum) is not signal.SIG_IGN}


def _restore(handlers: dict[int, Any]) -> None:
    for signum, handler in handlers.items():
        signal.signal(signum, signal.SIG_DFL if handler is None else handler)


def _stopped(signum: int, when: str = "", goal: str = "resume") -> Stopped:
    return Stopped(f"stopped by {signal.Signals(signum).name}{when}", hint=f"run the same command to {goal}",
                   exit_code=128 + signum)


def _forget() -> None:
    """In a forked process, keep signals from the parent's thread, and restore the former handlers."""
    _restore(_outside)
    if _wakeups:
        before = signal.set_wakeup_fd(-1)
        if before not in _wakeups:
            signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_forget)
