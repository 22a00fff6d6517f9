"""The process group of a run, as this process sees it: joining it, meeting the others in it, and leaving it.

While one rank works alone (preparing data, saving, scoring), the others poll the store of the group. They don't wait in
a collective, which would time out, and would not notice that the rank has failed (see ``failures``).
"""

from __future__ import annotations

import atexit
import gc
import math
import os
import sys
import time
import weakref
from collections import Counter
from typing import NoReturn

import torch
import torch.distributed as dist

from sbkit.train.distributed import ending, joining, launcher, place
from sbkit.train.distributed.failures import Failures
from sbkit.train.distributed.shared_sums import SharedSums, shared_sums
from sbkit.train.distributed.sums import Sums, TorchSums

# The first pause while waiting for other ranks, which usually arrive soon; each further one is longer.
_FIRST_PAUSE_SECONDS, _LONGEST_PAUSE_SECONDS = 0.002, 0.5
# Time for threads of the process group to finish.
_THREAD_END_SECONDS = 0.05


class RunGroup:
    """All that this process keeps about its process group; there is one, ``group``.

    It also serves scripts that join and leave a group themselves, by torch or by SpeechBrain.
    """

    def __init__(self) -> None:
        self.failures = Failures()
        self._joined_here = False  # by ``join``, so that ``shutdown`` leaves it
        self._cpu_group: dist.ProcessGroup | None = None
        self._torch_sums = TorchSums(self.cpu_group)
        self._shared_sums: SharedSums | None = None
        self._shared_by: weakref.ref[dist.ProcessGroup] | None = None  # the group whose ranks share memory, or can't
        self._keys: Counter[str] = Counter()  # how many keys of each kind ``new_key`` has made

    # ------------------------------------------------------------ joining and leaving

    def join(self, device: torch.device, backend: str | None = None) -> None:
        """Join the process group, if this process was launched as one of several.

        On a CUDA device, ``backend`` None or ``nccl`` means NCCL for tensors there and gloo for tensors on the CPU. On
        the CPU they mean gloo, since NCCL does not work there.
        """
        if not place.launched():
            return
        launcher.watch_launcher()
        atexit.unregister(self._at_exit)
        atexit.register(self._at_exit, os.getpid())
        if not place.connected():
            joining.join(device, backend)
            self._joined_here = True
        self.failures.watch()
        if device.type == "cpu" and place.world_size() > 1 and dist.get_backend() == "gloo":
            self._share_sums()

    def shutdown(self) -> None:
        """Leave the process group that ``join`` joined; if a rank has failed, only at the end of the process."""
        if ending.exit_is_scheduled():
            return
        if self._joined_here:
            self._leave()
        self._joined_here = False
        self._keys.clear()
        self.failures.forget()

    def _share_sums(self) -> None:
        """Have the ranks of this group sum in shared memory, if they can."""
        joined = dist.group.WORLD
        assert joined is not None
        if self._shared_by is not None and self._shared_by() is joined:
            return
        self._stop_sharing()
        self._shared_by = weakref.ref(joined)
        self._shared_sums = shared_sums(self.failures, self._torch_sums)

    def _stop_sharing(self) -> None:
        if self._shared_sums is not None:
            self._shared_sums.close()
        self._shared_sums = None
        self._shared_by = None

    def _leave(self) -> None:
        """Leave the process group, after its threads have ended.

        gloo's threads hold tensors of the last collective for a moment. A thread that releases them while Python shuts
        down aborts the process (SIGABRT), so a finished run would fail. Destroying the group waits for its threads, but
        it is destroyed only when nothing refers to it.
        """
        self._cpu_group = None
        self._stop_sharing()
        self.failures.stop_watching()
        gc.collect()
        if place.connected():
            dist.destroy_process_group()
        time.sleep(_THREAD_END_SECONDS)  # for threads of a group that something still refers to

    def _at_exit(self, process: int) -> None:
        """Leave the group at exit, for scripts that don't call ``shutdown``, or join and leave the group themselves."""
        if os.getpid() != process:  # forked from it
            return
        has_group = place.connected() or self._cpu_group is not None
        if not has_group or ending.exit_is_scheduled():
            return
        error = getattr(sys, "last_value", None)
        if error is not None:
            self.failures.announce(error)
        else:
            self._leave()

    def end_together(self) -> NoReturn:
        """End all ranks with exit code 0, once every rank has called this.

        Rank 0, which may hold the store, ends last.
        """
        end = SystemExit(0)
        if not place.is_alone():
            self.meet("end")
            others_end = self.new_key("ends")
            if place.is_main():
                self.wait_for(others_end)
            elif place.store().add(f"{others_end}/ack", 1) == place.world_size() - 1:
                place.store().set(others_end, b"1")
            self.failures.record(end)  # without announcing it: every rank ends
        raise end

    # ------------------------------------------------------------ meeting the others

    def cpu_group(self) -> dist.ProcessGroup | None:
        """Return a group for collectives on CPU tensors; all ranks must make the first call at the same point."""
        if not place.connected():
            return None
        if self._cpu_group is None:
            if "cpu:" in dist.get_backend_config():
                self._cpu_group = dist.group.WORLD
            else:
                self._cpu_group = dist.new_group(backend="gloo", timeout=joining.COLLECTIVE_TIMEOUT)
        return self._cpu_group

    @property
    def sums(self) -> Sums:
        """Sums over ranks: in shared memory if ``join`` found that its ranks can, otherwise by torch."""
        if self._shared_sums is None or self._shared_by is None or self._shared_by() is not dist.group.WORLD:
            return self._torch_sums
        return self._shared_sums

    def new_key(self, kind: str) -> str:
        """Return a new key of the store with each call: the same on all ranks, which make the same calls in order."""
        self._keys[kind] += 1
        return f"sbkit/{kind}/{self._keys[kind]}"

    def meet(self, name: str, patience: float | None = None) -> bool:
        """Wait until every rank is here, at most ``patience`` seconds; end if one of them fails.

        Returns whether all are here.
        """
        key = self.new_key(name)
        if place.store().add(f"{key}/here", 1) == place.world_size():
            place.store().set(f"{key}/all", b"1")
        return self.wait_for(f"{key}/all", patience)

    def wait_for(self, key: str, patience: float | None = None) -> bool:
        """Wait until the store has a key, at most ``patience`` seconds; end if a rank fails.

        Returns whether the store has it.
        """
        store = place.store()
        pause = _FIRST_PAUSE_SECONDS
        until = math.inf if patience is None else time.monotonic() + patience
        try:
            while self.failures.peer_exit_code is not None or not store.check([key]):
                self.failures.end_if_peer_failed()
                if time.monotonic() > until:
                    return False
                time.sleep(pause)
                pause = min(pause * 1.5, _LONGEST_PAUSE_SECONDS)
            return True
        except dist.DistError:
            self.failures.end_without_store()


group = RunGroup()
