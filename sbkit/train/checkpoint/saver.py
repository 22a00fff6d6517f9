"""The saving half of the Checkpointer: states are collected on all ranks, written aside by one, and then appear."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain.utils import checkpoints as stock
from speechbrain.utils.checkpoints import Checkpoint, ckpt_recency
from speechbrain.utils.distributed import MainProcessContext, main_process_only
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.system import disk
from sbkit.train.checkpoint import files, shelf
from sbkit.train.checkpoint.files import CheckpointError
from sbkit.train.checkpoint.pending import PendingCheckpoint, Writer, plain
from sbkit.train.checkpoint.shelf import Predicate
from sbkit.train.checkpoint.state import TENSORS, hook_for, outside, unsaved
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

KEEP = "keep"  # meta key of a checkpoint that save_and_keep_only never deletes
PATIENCE = 3  # mid-epoch saves in a row that a full disk refuses, the last of which is an error
_HELD = f"{stock.CKPT_PREFIX}+held"  # the hidden folder of a checkpoint that waits to be needed
_MAIN_ONLY = main_process_only(len).__code__  # what marks a hook that SpeechBrain runs on rank 0 only


class Saving(stock.Checkpointer):
    """What ``Checkpointer`` does to save; deleting, finding and recovering are its own."""

    def _set_up(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self._writer = Writer()
        self._failures = 0
        self._saved: Checkpoint | None = None
        self._held: PendingCheckpoint | None = None
        self._told: set[str] = set()

    def save_checkpoint(
        self, meta: Mapping[str, Any] | None = None, end_of_epoch: bool = True, name: str | None = None,
        verbosity: int = logging.INFO,
    ) -> Checkpoint | None:
        """Save every recoverable; gives the checkpoint on rank 0, None elsewhere (and after a warning).

        While ``asynchronous``, it is the checkpoint that will stand; ``wait`` says whether it does.
        """
        return self._save(dict(meta or {}), end_of_epoch, name, verbosity)

    def save_and_keep_only(
        self, meta: Mapping[str, Any] | None = None, end_of_epoch: bool = True, name: str | None = None,
        num_to_keep: int = 1, keep_recent: bool = True, importance_keys: Sequence[Callable] = (),
        max_keys: Sequence[str] = (), min_keys: Sequence[str] = (), ckpt_predicate: Predicate | None = None,
        verbosity: int = logging.INFO, keep_every: int | None = None,
    ) -> None:
        """Save, then delete what is neither among the best nor the most recent; SpeechBrain's arguments, and

        keep_every : int, optional
            Keep the checkpoint at the end of every so many epochs for good (its meta gets ``keep: true``).
        """
        meta = dict(meta or {})
        if keep_every and end_of_epoch and self._epoch(meta) % keep_every == 0:
            meta[KEEP] = True
        recency = [ckpt_recency] if keep_recent else []
        orders = shelf.orders(min_keys, max_keys, [*importance_keys, *recency])

        def tidy() -> None:
            self._delete(num_to_keep, orders, ckpt_predicate, verbosity, spare=lambda c: c.meta.get(KEEP))

        self._save(meta, end_of_epoch, name, verbosity, tidy, (*min_keys, *max_keys))

    def wait(self) -> Checkpoint | None:
        """Wait until nothing is being written; gives what the last save left, None if a full disk refused it.

        Raises what went wrong in the background.
        """
        return ranks.run_on_main(self._settle)

    def look(self) -> None:
        """Raise what has gone wrong in the background by now, on the rank that writes; wait for nothing."""
        self._writer.look()

    def _save(
        self, meta: dict[str, Any], end_of_epoch: bool, name: str | None, verbosity: int,
        tidy: Callable[[], None] | None = None, keys: Sequence[str] = (),
    ) -> Checkpoint | None:
        pending: PendingCheckpoint | None = None  # stays None on the other ranks

        def begin() -> tuple[Path | None, CheckpointError | None]:
            nonlocal pending
            self._settle()
            for message in outside(self.recoverables):
                self._warn_once(message)
            metas = [meta, *(ckpt.meta for ckpt in self._list())]
            complaint = shelf.unknown_key(self.checkpoints_dir, keys, metas)
            pending = self._begin(meta, end_of_epoch, name, verbosity)
            return pending and pending.folder, complaint

        def finish() -> bool:
            return self._finish(pending, None if complaint else tidy)

        with ranks.failing_together():
            folder, complaint = ranks.run_on_main(begin)
            if folder is None:
                return None
            refused = self._call_save_hooks(folder, pending, "all" if self.asynchronous else None)
            refusals = [each for each in ranks.gather_objects(refused) if each]
            if refusals:
                ranks.run_on_main(lambda: self._failed(pending, refusals[0]))
                return None
            saved = True
            if not self.asynchronous:
                saved = ranks.run_on_main(finish)
            elif pending is not None:
                self._writer.start(finish)
            if complaint is not None:  # the epoch's work is safe; nothing was deleted by a wrong key
                self.wait()
                ranks.raise_on_main(complaint)
        return pending.result if pending is not None and saved else None

    def hold(self, meta: Mapping[str, Any]) -> None:
        """Take the state as it is now, for a mid-epoch checkpoint that may be needed: see ``publish``.

        Tensors are not copied: until then nothing may change them. A disk that refuses it is no error.
        """
        self.drop()
        pending: PendingCheckpoint | None = None

        def begin() -> Path | None:
            nonlocal pending
            pending = PendingCheckpoint(self.checkpoints_dir / _HELD, plain(meta), False, logging.DEBUG)
            try:
                pending.begin()
            except OSError as error:
                logger.debug("no checkpoint is held: %s", error)
                pending = None
            return pending and pending.folder

        with ranks.failing_together():
            folder = ranks.run_on_main(begin)
            refused = folder is None or self._call_save_hooks(folder, pending, "numbers")
            refused = any(ranks.gather_objects(bool(refused)))
        if pending is not None and refused:
            pending.discard()
        self._held = None if refused else pending

    def publish(self) -> Checkpoint | None:
        """Let the checkpoint that is held appear; None where none is."""

        def write() -> Checkpoint | None:
            self._settle()
            pending, self._held = self._held, None
            if pending is None:
                return None
            pending.final = self._new_checkpoint_dirpath()
            pending.meta = {**self._times(end_of_epoch=False), **pending.meta}
            return pending.result if self._finish(pending, None) else None

        return ranks.run_on_main(write)

    def drop(self) -> None:
        """Forget the checkpoint that is held, if one is."""
        if self._held is not None:
            self._held.discard()
            self._held = None

    def _times(self, end_of_epoch: bool) -> dict[str, Any]:
        """What every meta file holds. The newest has the latest time, also when the clock was set back meanwhile."""
        latest = max((ckpt.meta["unixtime"] for ckpt in self._list()), default=0.0)
        return {"unixtime": max(time.time(), latest + 0.001), "end-of-epoch": end_of_epoch}

    def _begin(
        self, meta: dict[str, Any], end_of_epoch: bool, name: str | None, verbosity: int
    ) -> PendingCheckpoint | None:
        final = self._new_checkpoint_dirpath() if name is None else self._custom_checkpoint_dirpath(name)
        pending = PendingCheckpoint(final, {**self._times(end_of_epoch), **plain(meta)}, end_of_epoch, verbosity)
        try:
            pending.begin()
        except OSError as error:
            self._failed(pending, error)
            return None
        return pending

    def _call_save_hooks(self, folder: Path, pending: PendingCheckpoint | None, copy: str | None) -> OSError | None:
        """Collect states and run the hooks that write files themselves; a disk's refusal is returned.

        copy: what of a state dict is copied, see ``PendingCheckpoint.add``

        After a refusal the other hooks still run: other ranks may wait for this one inside them.
        """
        refusal = None
        for name, obj in self.recoverables.items():
            try:
                self._call_save_hook(name, obj, folder / f"{name}{stock.PARAMFILE_EXT}", pending, copy)
            except Exception as error:
                found = disk.refusal(error)
                if found is None:
                    if pending is not None:
                        pending.discard()
                    raise
                refusal = refusal or OSError(found.errno, found.strerror)
        return refusal

    def _call_save_hook(
        self, name: str, obj: Any, path: Path, pending: PendingCheckpoint | None, copy: str | None
    ) -> None:
        hook = hook_for(obj, self.custom_save_hooks.get(name), stock.DEFAULT_SAVE_HOOKS, "save")
        if pending is not None:
            pending.names[name] = path.name
        if hook in TENSORS:
            if pending is not None:
                pending.add(name, obj.state_dict(), copy)
        elif getattr(hook, "__code__", None) is not _MAIN_ONLY:
            hook(obj, path)
        elif ranks.is_main():
            with MainProcessContext():  # not the wrapper's broadcast: the others would hang if this raised
                hook.__wrapped__(obj, path)

    def _finish(self, pending: PendingCheckpoint, tidy: Callable[[], None] | None) -> bool:
        try:
            pending.write()
        except Exception as error:
            self._failed(pending, error)
            return False
        self._failures, self._saved = 0, pending.result
        kind = "end-of-epoch" if pending.end_of_epoch else "intra-epoch"
        logger.log(pending.verbosity, "Saved an %s checkpoint in %s", kind, pending.final)
        if tidy is not None:
            try:
                tidy()
            except OSError as error:
                logger.warning("Could not delete an old checkpoint: %s", error)
        return True

    def _failed(self, pending: PendingCheckpoint, error: Exception) -> None:
        """Warn and let training go on, or raise."""
        self._saved = None
        needed = pending.needed()
        pending.discard()
        refused = disk.refusal(error)
        if refused is None:
            raise error
        good = next(iter(self._find()), None)
        told = files.explain_disk(refused, pending.final, needed, good and good.path)
        self._failures += 1
        if pending.end_of_epoch or self._failures >= PATIENCE:
            raise told from error
        logger.warning("%s. Training goes on; the %d. time in a row ends it (this is the %d.)",
                       told.message, PATIENCE, self._failures)

    def _settle(self) -> Checkpoint | None:
        self._writer.settle()
        return self._saved

    def _epoch(self, meta: Mapping[str, Any]) -> int:
        counters = (obj for obj in self.recoverables.values() if isinstance(obj, EpochCounter))
        epoch = meta.get("epoch", next((counter.current for counter in counters), None))
        if epoch is None:
            raise CheckpointError("keep_every needs to know the epoch",
                             hint="add the epoch counter to the recoverables, or epoch to meta")
        return int(epoch)

    def unsaved(self, objects: Mapping[str, Any]) -> list[str]:
        """Names of objects (of a YAML, say) with state of their own to save that are no recoverables."""
        return unsaved(self.recoverables, objects)

    def _warn_once(self, message: str) -> None:
        if message not in self._told:
            self._told.add(message)
            logger.warning(message)
