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

How a signal stops a training (``StopSignals``), on whichever rank it arrives:

1. The main thread of that rank notes it, as soon as Python runs again there, and goes on.
2. A thread of that rank says at once what will happen, if the rank is the first of its machine.
3. The rank sends the flag "stop" with its next step (``Trainer.flags``), so all ranks know of it at the same step.
4. All ranks save and raise ``Stopped`` (``Trainer.save_and_stop``). In a validation they ask each other at its end.

All other work is ended right where it is (``end_by_signals``).
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

# Of this process, so that one that it forks can let go of them.
_watchers_pipes: set[int] = set()
"""The pipes of watchers to which Python writes signals."""
_handlers_before_ending: dict[int, Any] = {}
"""Inside of ``end_by_signals``, the handlers from before."""

_STOPPED = "stopped"


class Stopped(SbkitError, SystemExit):
    """Raised to end a run that was stopped by a signal.

    A command prints the message; a script that doesn't catch it ends with the exit code and no traceback.
    """

    exit_code = 128 + signal.SIGTERM
    prefix = ""  # whoever stops a run has made no mistake

    # Python looks for the exit code where other errors have their code; no pickle would keep it.
    @property  # type: ignore[override]
    def code(self) -> int:
        return self.exit_code

    @code.setter  # type: ignore[override]
    def code(self, code: str) -> None:
        assert code == _STOPPED

    @property
    def shown(self) -> str:
        """The line that ends a command, without a code: there is nothing to mend."""
        return str(self)

    def as_json(self) -> dict[str, object]:
        return super().as_json() | {"code": _STOPPED}

    @staticmethod
    def by(signum: int, place: str, checkpoint: Path | None) -> Stopped:
        """Make the error for a signal after a place such as "step 3", and for the checkpoint saved then, if any."""
        if checkpoint is None:
            return _stopped(signum, f" after {place}, and nothing is saved, because there is no checkpointer",
                            goal="begin again")
        return _stopped(signum, f" after {place}, checkpoint saved at {checkpoint}")


# ------------------------------------------------------------ while a run trains


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
    together, or by an error.
    """

    def __init__(self, saves: Callable[[], bool] = lambda: True) -> None:
        self.signum: int | None = None
        self._saves = saves
        self._handlers_before: dict[int, Any] = {}
        self._watcher: _Watcher | None = None
        """None outside of the context, and where signals can't be caught."""

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            logger.warning("Training runs outside the main thread, where stop signals can't be caught")
            return self
        self._handlers_before = _handle(STOP_SIGNALS, self._note)
        self._watcher = _Watcher(self._saves)
        return self

    def _note(self, signum: int, frame: FrameType | None) -> None:
        """Handle a signal, in the main thread."""
        del frame
        self.signum = self.signum or signum

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *rest: object) -> None:
        if self._watcher is not None:
            self._watcher.take_no_more_signals()
            _restore(self._handlers_before)
            self._watcher.end()
            self._watcher = None
        # Only now: from here on a signal does what it did before, so none comes between this and the end of catching.
        if kind is None:
            self._raise_if_any_rank_was_stopped()

    def _raise_if_any_rank_was_stopped(self) -> None:
        from sbkit.train.distributed import ranks  # imports torch: a signal is to be caught before

        signums = ranks.gather_objects(self.signum) if ranks.connected() else [self.signum]
        signum = next((signum for signum in signums if signum is not None), None)
        if signum is not None:
            ranks.raise_on_main(_stopped(signum, " after the end of training"))


class _Watcher:
    """A thread that acts on signals at once, even while the main one waits inside a collective or a kernel.

    It says that the run is going to stop, and ends the process at the second Ctrl-C. Python writes the number of each
    signal to a pipe, as soon as it arrives, and the thread reads it from there.
    """

    def __init__(self, saves: Callable[[], bool]) -> None:
        self._saves = saves
        self._stopping_since: float | None = None
        self._reading, self._writing = os.pipe()
        os.set_blocking(self._writing, False)
        _watchers_pipes.add(self._writing)
        self._wakeup_before = signal.set_wakeup_fd(self._writing, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._watch, name="stop-signals", daemon=True)
        self._thread.start()

    def take_no_more_signals(self) -> None:
        """Have Python write signals to where it wrote them before."""
        signal.set_wakeup_fd(self._wakeup_before)

    def end(self) -> None:
        """End the thread."""
        _watchers_pipes.discard(self._writing)
        os.write(self._writing, b"\0")  # closing would not end it: a forked process may hold the pipe
        self._thread.join()
        os.close(self._writing)

    def _watch(self) -> None:
        echo = LAUNCHER_ECHO_SECONDS if "TORCHELASTIC_RUN_ID" in os.environ else ECHO_SECONDS
        while signum := os.read(self._reading, 1)[0]:  # a 0 ends it
            now = time.monotonic()
            if signum not in STOP_SIGNALS:
                continue
            if self._stopping_since is None:
                self._stopping_since = now
                launcher.stopping.set()
                self._say_what_follows(signum)
            elif signum == signal.SIGINT and now - self._stopping_since > echo:
                os._exit(128 + signal.SIGINT)
        os.close(self._reading)

    def _say_what_follows(self, signum: int) -> None:
        """Print it on the first rank of each machine, whose terminal shows what all of its ranks print."""
        if os.environ.get("LOCAL_RANK", "0") != "0":
            return
        then = "saving a checkpoint after this step, then stopping"
        if not self._saves():
            then = "stopping after this step, without a checkpoint, because there is no checkpointer"
        sooner = " (press Ctrl-C again to stop at once)" if signum == signal.SIGINT else ""
        write_now(f"\n{signal.Signals(signum).name}: {then}{sooner}\n")


# ------------------------------------------------------------ while a command does anything else


class _Ending(SystemExit):
    """Raised anywhere in the main thread; not an ``Exception``, so that no error handler swallows it."""

    code: int


@contextlib.contextmanager
def end_by_signals() -> Iterator[None]:
    """Raise ``Stopped`` inside this context at a stop signal, except Ctrl-C, at which Python raises an error anyway."""
    is_ending = False

    def end(signum: int, frame: FrameType | None) -> None:
        nonlocal is_ending
        del frame
        if not is_ending:  # torchrun sends the same signal again
            is_ending = True
            raise _Ending(128 + signum)

    before = _handle((signum for signum in STOP_SIGNALS if signum != signal.SIGINT), end)
    _handlers_before_ending.update(before)
    try:
        yield
    except _Ending as error:
        raise _stopped(error.code - 128, goal="continue") from None
    finally:
        _restore(before)
        _handlers_before_ending.clear()


# ------------------------------------------------------------ handlers


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
    return Stopped(_STOPPED, f"stopped by {signal.Signals(signum).name}{when}", hint=f"run the same command to {goal}",
                   exit_code=128 + signum)


def _forget() -> None:
    """In a forked process, keep signals from the parent's thread, and restore the former handlers."""
    _restore(_handlers_before_ending)
    if _watchers_pipes:
        before = signal.set_wakeup_fd(-1)
        if before not in _watchers_pipes:
            signal.set_wakeup_fd(before)


os.register_at_fork(after_in_child=_forget)
