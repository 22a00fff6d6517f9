"""How the failure of one rank ends all: within seconds, with one message, and with the exit code of that rank.

A collective can't be cancelled, and those that wait in one for a failed rank would wait for half an hour. So failures
go through the store of the process group, which every rank can reach at any time.

The keys of the store
---------------------

===================  ===========================================  ================================================
key                  written                                      read
===================  ===========================================  ================================================
``sbkit/failed/R``   by rank R, first when it fails               ``sbkit/failed/0`` by another failing rank, for
                                                                  up to 2 s (``_ANSWER_SECONDS``): does rank 0 fail,
                                                                  too, whose message is then the only one?
``sbkit/failed``     by a rank that fails, next: its number       by all others: when, see below
                     and its exit code; by rank 0 for one that it
                     started, and that was killed
                     (``announce_for``)
``sbkit/ack``        by each rank that has read the failure of    by rank 0 when it fails, for up to 2 s, if the
                     another, once: counted up by 1               store lives in it and so ends with it
===================  ===========================================  ================================================

What the rank that fails does (``announce``)
--------------------------------------------
It decides its exit code, has the process end with it without Python's shutdown (``ending.schedule_exit``), writes the
keys, and waits for the answers above. Then its error goes on: on rank 0 the command prints it, and on another rank it
is logged, unless rank 0 fails as well.

What each other rank does
-------------------------
It ends without a message, by ``PeerFailed``, with the exit code of the rank that failed (1 if that is 0). How it learns
of the failure depends on where it is:

==================================  ==============================================================================
it waits for a key of the store     ``end_if_peer_failed``, between two looks, at most 0.5 s apart. It ends 3 s later
                                    (``_GRACE_SECONDS``): the launcher, which ends all ranks once one has ended,
                                    leaves the failed rank that time to print its message
it is in a collective of gloo       the collective raises a ``RuntimeError`` when the failed process is gone, and
                                    ``failing_together`` looks into the store. If nobody has written there, the
                                    process was killed: this rank fails, too, and says so
it waits in a sum in shared memory  every 0.1 s (``shared_sums.LOOK_SECONDS``) it looks whether the processes that it
                                    waits for have ended. If so, it raises ``PeerGone``, and all is as with gloo.
                                    Otherwise ``end_if_peer_failed``, as where it waits for a key
it is where nothing ends its wait   a thread looks every 0.5 s (``WATCH_SECONDS``), waits 4 s (``PATIENCE_SECONDS``)
(a collective of NCCL, the store)   for one of the above, then ends the process (``ending.exit_now``), after a
                                    checkpoint that is being written
the store is gone, with rank 0      it logs that, and ends with 1 at once
==================================  ==============================================================================

An error that every rank finds by itself needs none of this: ``raise_on_main``.
"""

from __future__ import annotations

import logging
import os
import pickle
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from sbkit.errors import SbkitError, first_line
from sbkit.train.distributed import ending, launcher, place
from sbkit.train.distributed.place import Store

logger = logging.getLogger(__name__)

#: How often the thread looks for failures of others, and the time that it leaves this rank to end by itself.
WATCH_SECONDS, PATIENCE_SECONDS = 0.5, 4.0
# Time for a failed rank to print its message, before the launcher sees another rank exit and ends it.
_GRACE_SECONDS = 3.0
# Time limit of a failing rank for what the others write: acknowledgements, or the failure of rank 0.
_ANSWER_SECONDS = 2.0
_POLL_SECONDS = 0.1

_FAILED_KEY, _ACK_KEY = "sbkit/failed", "sbkit/ack"


class PeerFailed(SystemExit):
    """Ends this rank without a message, because another rank failed and prints one."""


class PeerGone(RuntimeError):
    """The process of another rank, which this one waited for, has ended."""


class Failures:
    """What this process knows of failures in its group, and what it does about them."""

    def __init__(self) -> None:
        self.is_ending = False
        """Whether an error ends this rank already: its own, or ``PeerFailed``."""
        self.peer_exit_code: int | None = None
        """The exit code of another rank that has failed, once this rank, or its thread, has read it."""
        self._watch_is_over: threading.Event | None = None  # None: no thread watches

    def forget(self) -> None:
        """Begin anew, after the group was left."""
        self.is_ending = False
        self.peer_exit_code = None

    # ------------------------------------------------------------ this rank fails

    @contextmanager
    def failing_together(self) -> Iterator[None]:
        """End the other ranks if an exception leaves this context on one rank."""
        try:
            yield
        except PeerFailed:
            raise
        except BaseException as error:
            launcher.exit_if_orphaned()
            if isinstance(error, RuntimeError):
                self._end_if_caused_by_peer(error)
                if isinstance(error, PeerGone) or "gloo/transport" in str(error):
                    lost = SbkitError(
                        "lost-rank",
                        f"lost the connection to another rank ({first_line(error)})", exit_code=1,
                        hint="if no other message explains it, its process was killed or its machine is down; "
                             "run the same command again")
                    self.announce(lost)
                    raise lost from error
            self.announce(error)
            raise

    def _end_if_caused_by_peer(self, error: RuntimeError) -> None:
        """End silently if another rank has failed, after which collectives raise such errors."""
        code = None
        if place.connected():
            with suppress(RuntimeError):  # the store has gone as well
                code = self._read_peer_failure(place.store())
        if code is not None:
            logger.debug("error after the failure of another rank", exc_info=error)
            self._end_silently(code, grace=0.0)

    def announce(self, error: BaseException) -> None:
        """Tell the other ranks that this one ends; do nothing if it is ending already."""
        if not place.connected() or self.is_ending:
            return
        rank = place.rank()
        failure = pickle.dumps((rank, self.record(error)))
        try:
            store = place.store()
            store.set(f"{_FAILED_KEY}/{rank}", b"1")
            store.set(_FAILED_KEY, failure)
            if place.is_main():
                _wait_for_acknowledgements(store)
            elif isinstance(error, SbkitError) and not _main_fails_too(store):
                _log_failure(rank, error)
        except (RuntimeError, OSError) as problem:  # the store is gone: the launcher ends the others
            logger.debug("could not notify the other ranks: %s", problem)
            if isinstance(error, SbkitError) and not place.is_main():
                _log_failure(rank, error)

    def announce_for(self, rank: int, message: str) -> None:
        """Tell all ranks that another one is gone, which had no time to announce it, and log why.

        A thread calls this, of rank 0, which has started that rank.
        """
        if not place.connected():  # the main thread waits for that rank to join, and nothing else ends that
            ending.exit_with_error("lost-rank", message)
            return
        logger.error("%s [lost-rank]", message)
        if self.is_ending or self.peer_exit_code is not None:
            return
        with suppress(RuntimeError, ValueError):  # the store is gone, so the run ends already
            place.store().clone().set(_FAILED_KEY, pickle.dumps((rank, 1)))

    def record(self, error: BaseException) -> int:
        """Record that an error ends this rank, without telling the others, and return its exit code."""
        self.is_ending = True
        exit_code = _exit_code_of(error)
        if place.world_size() > 1:
            ending.schedule_exit(exit_code)
        return exit_code

    def raise_on_main(self, error: SbkitError) -> None:
        """Raise an error that every rank has found on rank 0 only; the others end without a message."""
        if not place.connected() or place.is_main():
            self.record(error)  # without announcing it: every rank has it
            raise error
        self._end_silently(error.exit_code)

    # ------------------------------------------------------------ another rank has failed

    def end_if_peer_failed(self) -> None:
        """End silently if another rank has failed."""
        code = self._read_peer_failure(place.store())
        if code is not None:
            self._end_silently(code)

    def end_without_store(self) -> NoReturn:
        """End after the store has gone, because another rank failed, or because rank 0 is gone without a word."""
        if self.peer_exit_code is not None:
            self._end_silently(self.peer_exit_code)
        logger.error("Rank %d ends: rank 0, which it was waiting for, is gone [lost-rank]", place.rank())
        self._end_silently(1, grace=0.0)

    def _read_peer_failure(self, store: Store) -> int | None:
        """Return the exit code of another rank that has failed, if any, and acknowledge it."""
        if self.peer_exit_code is None and store.check([_FAILED_KEY]):
            failed_rank, code = pickle.loads(store.get(_FAILED_KEY))
            if failed_rank != place.rank():
                self.peer_exit_code = code or 1
                store.add(_ACK_KEY, 1)
                logger.info("Rank %d ends because rank %d failed.", place.rank(), failed_rank)
        return self.peer_exit_code

    def _end_silently(self, code: int, grace: float = _GRACE_SECONDS) -> NoReturn:
        error = PeerFailed(code or 1)
        self.record(error)
        time.sleep(grace)
        raise error from None

    # ------------------------------------------------------------ the thread

    def watch(self) -> None:
        """Start a thread that ends this process if another rank fails while this one is stuck in a collective."""
        if place.world_size() > 1 and self._watch_is_over is None:
            self._watch_is_over = threading.Event()
            threading.Thread(target=self._watch, args=(self._watch_is_over,), name="peers", daemon=True).start()

    def stop_watching(self) -> None:
        """End the thread, if there is one."""
        if self._watch_is_over is not None:
            self._watch_is_over.set()
            self._watch_is_over = None

    def _watch(self, is_over: threading.Event) -> None:
        store = None
        while not is_over.wait(WATCH_SECONDS):
            try:
                # Another connection, as the setup of NCCL blocks the main thread's.
                store = store or place.store().clone()
                code = self._read_peer_failure(store)
            except (RuntimeError, ValueError):  # the store or the group is gone, so the run ends
                return
            if code is not None:
                left_meanwhile = is_over.wait(PATIENCE_SECONDS)
                if not left_meanwhile and not self.is_ending:
                    ending.exit_now(code)
                return


def _exit_code_of(error: BaseException) -> int:
    if isinstance(error, SystemExit):
        code = error.code
    elif isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    else:
        code = getattr(error, "exit_code", 1)
    return code if isinstance(code, int) else 1


def _wait_for_acknowledgements(store: Store) -> None:
    """Give the other ranks time to read why rank 0 ends, if the store lives in it."""
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return
    until = time.monotonic() + _ANSWER_SECONDS
    while time.monotonic() < until and store.add(_ACK_KEY, 0) < place.world_size() - 1:
        time.sleep(_POLL_SECONDS)


def _main_fails_too(store: Store) -> bool:
    """Return whether rank 0, where a command prints its error, fails within seconds."""
    until = time.monotonic() + _ANSWER_SECONDS
    while not store.check([f"{_FAILED_KEY}/0"]):
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _log_failure(rank: int, error: SbkitError) -> None:
    logger.error("Rank %d failed: %s", rank, error.shown.removeprefix(error.prefix))
