"""The processes of a run: rank and group, exchange between ranks, and how the failure of one ends all.

While one rank works alone (preparing data, saving, scoring), the others poll the store of the process group. They don't
wait in a collective, which would time out, and would not notice that the rank has failed.
"""

from __future__ import annotations

import atexit
import datetime
import gc
import logging
import math
import os
import pickle
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.nn  # once there is a group it is too late: its default arguments would hold that
from speechbrain.utils.distributed import MainProcessContext, ddp_prevent_block
from torch.distributed.distributed_c10d import PrefixStore
from torch.distributed.rendezvous import rendezvous

from sbkit.errors import SbkitError, first_line
from sbkit.train.distributed import ending

logger = logging.getLogger(__name__)
T = TypeVar("T")
Store = Any  # torch's stub of dist.Store lets set take no bytes

# Collectives only wait for ranks that do the same work, so a long wait means a dead rank.
COLLECTIVE_TIMEOUT = datetime.timedelta(minutes=30)
_POLL_SECONDS = 0.1
# Time after which those that are still missing are named.
SILENT_SECONDS = 60.0
# The first pause while waiting for other ranks, which usually arrive soon; each further one is longer.
_FIRST_PAUSE_SECONDS = 0.002
# Time for a failed rank to print its message, before the launcher sees another rank exit and ends it.
_GRACE_SECONDS = 3.0
# Without torchrun's agent the store lives in rank 0, which waits this long for the others to read why it ends.
_ACK_SECONDS = 2.0
# How often a rank looks for failures of others, and the time limit for one that is stuck in a collective.
WATCH_SECONDS, PATIENCE_SECONDS = 0.5, 4.0
# Time for threads of the process group to finish.
_THREAD_END_SECONDS = 0.05
_FAILED_KEY, _ACK_KEY = "sbkit/failed", "sbkit/ack"

_calls: dict[str, int] = {}
_cpu_group: dist.ProcessGroup | None = None
_started_here = False
_failed_here = False
_peer_exit_code: int | None = None  # the exit code of the rank that failed first
_watched: threading.Event | None = None


class PeerFailed(SystemExit):
    """Ends this rank without a message, because another rank failed and prints one."""


def launched() -> bool:
    """Return whether torchrun, or a launcher that sets the same variables, started this process."""
    return "RANK" in os.environ and "LOCAL_RANK" in os.environ


def connected() -> bool:
    """Return whether this process has joined a process group."""
    return dist.is_available() and dist.is_initialized()


def rank() -> int:
    """Return the rank of this process."""
    if connected():
        return dist.get_rank()
    return int(os.environ["RANK"]) if launched() else 0


def world_size() -> int:
    """Return the number of ranks."""
    if connected():
        return dist.get_world_size()
    return int(os.environ.get("WORLD_SIZE", "1")) if launched() else 1


def is_main() -> bool:
    """Return whether this is rank 0."""
    return rank() == 0


def init(device: torch.device, backend: str | None = None) -> None:
    """Join the process group, if this process was launched as one of several.

    On a CUDA device, ``backend`` None or ``nccl`` means NCCL for tensors there and gloo for tensors on the CPU. On the
    CPU they mean gloo, since NCCL does not work there.
    """
    global _started_here
    if not launched():
        return
    ending.watch_launcher()
    atexit.unregister(_at_exit)
    atexit.register(_at_exit, os.getpid())
    if connected():
        _watch()
        return
    missing = [name for name in ("WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
    if missing:
        raise SbkitError(f"RANK and LOCAL_RANK are set, but not {', '.join(missing)}",
                         hint="start with torchrun, or set the same variables as torchrun")
    if backend not in (None, "nccl", "gloo", "mpi"):
        raise SbkitError(f"distributed_backend is {backend!r}", hint="choose nccl, gloo or mpi")
    if device.type == "cpu":
        backend = "gloo" if backend in (None, "nccl") else backend
    elif device.type == "cuda" and backend in (None, "nccl"):
        backend = "cpu:gloo,cuda:nccl"
    store, place, world = next(rendezvous("env://", timeout=COLLECTIVE_TIMEOUT))
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = _fresh_store(store, place, world)
    dist.init_process_group(backend=backend, store=store, rank=place, world_size=world, timeout=COLLECTIVE_TIMEOUT)
    _started_here = True
    _watch()


def _fresh_store(store: Store, place: int, world: int) -> Store:
    """Return a part of torchrun's store that no earlier start of these ranks has written to.

    The store outlives a restart, with the addresses of ranks that are gone. Counts of restarts differ between machines,
    so rank 0 chooses a name, and hands it to each rank under a number that only a process of this start can know.
    """
    me = uuid.uuid4().hex
    store.set(f"sbkit/start/{place}", me)
    if place:
        _wait_for_ranks(lambda: [] if store.check([f"sbkit/name/{me}"]) else [0], describe=place == 1)
        name = store.get(f"sbkit/name/{me}").decode()
        store.set(f"{name}/named/{place}", b"1")
        return PrefixStore(name, store)
    answered: set[bytes] = set()

    def missing() -> list[int]:
        unnamed = [other for other in range(1, world) if not store.check([f"{me}/named/{other}"])]
        for other in unnamed:
            key = f"sbkit/start/{other}"
            if not store.check([key]):
                continue
            token = store.get(key)
            if token not in answered:
                answered.add(token)
                store.set(f"sbkit/name/{token.decode()}", me)
        return unnamed

    _wait_for_ranks(missing, describe=True)
    return PrefixStore(me, store)


def _wait_for_ranks(missing: Callable[[], list[int]], describe: bool) -> None:
    """Wait until no rank is missing; after a minute, warn of those that are."""
    began = time.monotonic()
    while absent := missing():
        waited = time.monotonic() - began
        who = f"rank{'s' * (len(absent) > 1)} {', '.join(map(str, absent))}"
        if waited > COLLECTIVE_TIMEOUT.total_seconds():
            raise SbkitError(f"{who} didn't join the others in {waited:.0f} s",
                             hint="see their output; was one started on each machine?")
        if describe and waited > SILENT_SECONDS:
            logger.warning("Waiting for %s, which didn't join the others in %.0f s. Is it still starting, and can it "
                           "reach this machine?", who, waited)
            describe = False
        time.sleep(_POLL_SECONDS)


def shutdown() -> None:
    """Leave the process group that ``init`` joined; if a rank has failed, only at the end of the process."""
    global _started_here, _failed_here
    if ending.exit_is_scheduled():
        return
    if _started_here:
        _leave_group()
    _started_here = _failed_here = False
    _calls.clear()


def _leave_group() -> None:
    """Leave the process group, after its threads have ended.

    gloo's threads hold tensors of the last collective for a moment. A thread that releases them while Python shuts down
    aborts the process (SIGABRT), so a finished run would fail. Destroying the group waits for its threads, but it is
    destroyed only when nothing refers to it.
    """
    global _cpu_group, _watched
    _cpu_group = None
    if _watched is not None:
        _watched.set()
        _watched = None
    gc.collect()
    if connected():
        dist.destroy_process_group()
    time.sleep(_THREAD_END_SECONDS)  # for threads of a group that something still refers to


def _at_exit(process: int) -> None:
    """Leave the group at exit, for scripts that don't call ``shutdown``, or join and leave the group themselves."""
    if os.getpid() != process or not (connected() or _cpu_group is not None) or ending.exit_is_scheduled():
        return
    error = getattr(sys, "last_value", None)
    if error is not None:
        announce_failure(error)
    else:
        _leave_group()


def cpu_group() -> dist.ProcessGroup | None:
    """Return a group for collectives on CPU tensors; all ranks must make the first call at the same point."""
    global _cpu_group
    if not connected():
        return None
    if _cpu_group is None:
        serves_cpu = "cpu:" in dist.get_backend_config()
        _cpu_group = dist.group.WORLD if serves_cpu else dist.new_group(backend="gloo", timeout=COLLECTIVE_TIMEOUT)
    return _cpu_group


def run_on_main(fn: Callable[..., T], *args: Any, **kwargs: Any) -> T:
    """Run ``fn`` on rank 0 and return its result, which must be picklable, on every rank.

    The others wait without a time limit. If it raises, rank 0 raises, and the others end within seconds without a
    message.
    """
    if is_alone():
        return fn(*args, **kwargs)
    key = _key("run_on_main")
    answer = [b""]
    if is_main():
        try:
            with MainProcessContext():  # otherwise SpeechBrain's barriers in fn would wait for the others
                result = fn(*args, **kwargs)
            answer = [pickle.dumps(result)]
        except BaseException as error:
            announce_failure(error)
            raise
        _store().set(key, b"done")
    _wait_for(key)
    dist.broadcast_object_list(answer, src=0, group=cpu_group())  # all are here, so it does not wait
    return result if is_main() else pickle.loads(answer[0])


def barrier(name: str = "meet", patience: float | None = None) -> bool:
    """Wait until every rank is here, at most ``patience`` seconds; end if one of them fails. Return whether all are."""
    if is_alone():
        return True
    key = _key(name)
    if _store().add(f"{key}/here", 1) == world_size():
        _store().set(f"{key}/all", b"1")
    return _wait_for(f"{key}/all", patience)


def gather_objects(obj: T) -> list[T]:
    """Return the objects of all ranks, in the order of ranks, on every rank."""
    if is_alone():
        return [obj]
    barrier("gather")
    objects: list[Any] = [None] * world_size()
    dist.all_gather_object(objects, obj, group=cpu_group())
    return objects


def sum_across(tensor: torch.Tensor) -> torch.Tensor:
    """Return the sum of a tensor over ranks; the given tensor does not change."""
    if is_alone():
        return tensor
    summed = tensor.clone()
    dist.all_reduce(summed, group=cpu_group() if summed.device.type == "cpu" else None)
    return summed


@torch.no_grad()
def take_from_main(tensors: Iterable[torch.Tensor]) -> None:
    """Overwrite tensors with rank 0's values."""
    for tensor in tensors if world_size() > 1 else ():
        dist.broadcast(tensor.detach(), src=0)


def any_of(flags: dict[str, bool]) -> dict[str, bool]:
    """Return each flag as true if it is true on any rank."""
    raised = sum_across(torch.tensor([int(value) for value in flags.values()], dtype=torch.int32))
    return {name: bool(count) for name, count in zip(flags, raised.tolist(), strict=True)}


@contextmanager
def failing_together() -> Iterator[None]:
    """End the other ranks if an exception leaves this context on one rank."""
    try:
        yield
    except PeerFailed:
        raise
    except BaseException as error:
        ending.exit_if_orphaned()
        code = None
        if isinstance(error, RuntimeError) and connected():  # gloo's collectives fail after another rank
            with suppress(RuntimeError):  # the store has gone as well
                code = _peer_failed()
        if code is not None:
            logger.debug("error after the failure of another rank", exc_info=error)
            _exit_silently(code, grace=0.0)
        if isinstance(error, RuntimeError) and "gloo/transport" in str(error):
            lost = SbkitError(f"lost the connection to another rank ({first_line(error)})", exit_code=1,
                              hint="if no other message explains it, its process was killed or its machine is down; "
                                   "run the same command again")
            announce_failure(lost)
            raise lost from error
        announce_failure(error)
        raise


def _record_failure(error: BaseException) -> int:
    """Record that an error ends this rank, and return its exit code."""
    global _failed_here
    _failed_here = True
    if isinstance(error, SystemExit):
        code = error.code
    elif isinstance(error, KeyboardInterrupt):
        code = 128 + signal.SIGINT
    else:
        code = getattr(error, "exit_code", 1)
    exit_code = code if isinstance(code, int) else 1
    if world_size() > 1:
        ending.schedule_exit(exit_code)
    return exit_code


def announce_failure(error: BaseException) -> None:
    """Tell the other ranks that this one ends."""
    if not connected() or _failed_here:
        return
    failure = pickle.dumps((rank(), _record_failure(error)))
    try:
        _store().set(f"{_FAILED_KEY}/{rank()}", b"1")
        _store().set(_FAILED_KEY, failure)
        if is_main():
            _wait_for_acknowledgements()
        elif isinstance(error, SbkitError):
            _log_unless_main_fails(error)
    except (RuntimeError, OSError) as problem:  # the store is gone: the launcher ends the others
        logger.debug("could not notify the other ranks: %s", problem)
        if isinstance(error, SbkitError) and not is_main():
            logger.error("Rank %d failed: %s", rank(), error)


def _wait_for_acknowledgements() -> None:
    """Give other ranks time to read why rank 0 ends, if the store lives in it."""
    if "TORCHELASTIC_USE_AGENT_STORE" in os.environ:
        return
    until = time.monotonic() + _ACK_SECONDS
    while time.monotonic() < until and _store().add(_ACK_KEY, 0) < world_size() - 1:
        time.sleep(_POLL_SECONDS)


def _log_unless_main_fails(error: SbkitError) -> None:
    """Log an error that rank 0, where a command prints it, doesn't have as well."""
    until = time.monotonic() + _ACK_SECONDS
    while not _store().check([f"{_FAILED_KEY}/0"]):
        if time.monotonic() > until:
            logger.error("Rank %d failed: %s", rank(), error)
            return
        time.sleep(_POLL_SECONDS)


def raise_on_main(error: SbkitError) -> None:
    """Raise an error that every rank has found on rank 0 only; the others end without a message."""
    if not connected() or is_main():
        _record_failure(error)  # without announcing it: every rank has it
        raise error
    _exit_silently(error.exit_code)


def end_together() -> NoReturn:
    """End all ranks with exit code 0, once every rank has called this.

    Rank 0, which may hold the store, ends last.
    """
    end = SystemExit(0)
    if not is_alone():
        barrier("end")
        key = _key("ends")
        if is_main():
            _wait_for(key)
        elif _store().add(f"{key}/ack", 1) == world_size() - 1:
            _store().set(key, b"1")
        _record_failure(end)  # without announcing it: every rank ends
    raise end


def is_alone() -> bool:
    """Return whether this process must not communicate: it is the only one, or only the main process is working."""
    return ddp_prevent_block() or world_size() == 1


def _exit_silently(code: int, grace: float = _GRACE_SECONDS) -> NoReturn:
    """End this rank without a message."""
    error = PeerFailed(code or 1)
    _record_failure(error)
    time.sleep(grace)
    raise error from None


def _wait_for(key: str, patience: float | None = None) -> bool:
    """Wait until the store has a key, at most ``patience`` seconds; end if a rank fails. Return whether it has it."""
    store = _store()
    pause = _FIRST_PAUSE_SECONDS
    until = math.inf if patience is None else time.monotonic() + patience
    try:
        while _peer_exit_code is not None or not store.check([key]):
            code = _peer_failed()
            if code is not None:
                _exit_silently(code)
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(pause * 1.5, 0.5)
        return True
    except dist.DistError:
        if _peer_exit_code is not None:
            _exit_silently(_peer_exit_code)
        logger.error("Rank %d ends: rank 0, which it was waiting for, is gone.", rank())
        _exit_silently(1, grace=0.0)


def _peer_failed(store: Store | None = None) -> int | None:
    """Return the exit code of another rank that has failed, if any, and confirm that this rank knows."""
    global _peer_exit_code
    store = store or _store()
    if _peer_exit_code is None and store.check([_FAILED_KEY]):
        failed, code = pickle.loads(store.get(_FAILED_KEY))
        if failed != rank():
            _peer_exit_code = code or 1
            store.add(_ACK_KEY, 1)
            logger.info("Rank %d ends because rank %d failed.", rank(), failed)
    return _peer_exit_code


def _watch() -> None:
    """Start a thread that ends this process if another rank fails while this one is stuck in a collective."""
    global _watched
    if world_size() > 1 and _watched is None:
        _watched = threading.Event()
        threading.Thread(target=_watch_peers, args=(_watched,), name="peers", daemon=True).start()


def _watch_peers(over: threading.Event) -> None:
    store = None
    while not over.wait(WATCH_SECONDS):
        try:
            store = store or _store().clone()  # another connection: the setup of NCCL blocks the main thread's
            code = _peer_failed(store)
        except (RuntimeError, ValueError):  # the store or the group is gone, so the run ends
            return
        if code is not None:
            if not over.wait(PATIENCE_SECONDS) and not _failed_here:
                ending.exit_now(code)
            return


def _key(what: str) -> str:
    """Return a new name with each call, the same on all ranks, which make the same calls in the same order."""
    _calls[what] = _calls.get(what, 0) + 1
    return f"sbkit/{what}/{_calls[what]}"


def _store() -> Store:
    return dist.distributed_c10d._get_default_store()
