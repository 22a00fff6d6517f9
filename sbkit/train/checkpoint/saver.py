"""Saving of checkpoints: states are collected on all ranks, written to a hidden folder by one, and published."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from speechbrain.utils import checkpoints as stock
from speechbrain.utils.checkpoints import Checkpoint
from speechbrain.utils.distributed import MainProcessContext, main_process_only

from sbkit.system import disk
from sbkit.train.checkpoint import files, shelf
from sbkit.train.checkpoint.files import CheckpointError
from sbkit.train.checkpoint.pending import BackgroundWriter, PendingCheckpoint, plain
from sbkit.train.checkpoint.state import TENSORS, Hook, Recoverable, hook_for, outside
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

PATIENCE = 3  # mid-epoch saves in a row that fail on a full disk, before this is an error
_HELD = f"{stock.CKPT_PREFIX}+held"  # hidden folder of a checkpoint that is held
_MAIN_ONLY = main_process_only(len).__code__  # identifies hooks that SpeechBrain runs on rank 0 only


@dataclass(frozen=True)
class SaveContext:
    """The objects to save and where, as a Checkpointer has them at the moment."""

    recoverables: Mapping[str, Any]
    hooks: Mapping[str, Hook]
    """The recipe's own save hooks, by the names of recoverables."""
    folder: Path
    checkpoints: Callable[[], list[Checkpoint]]
    """Returns the present checkpoints, in no order."""
    path: Callable[[str | None], Path]
    """Returns the folder for a checkpoint of this name; None means a new name."""
    warn: Callable[[str], None]


class Saver:
    """Saves checkpoints for a ``Checkpointer``; ``writer`` is the thread that writes in the background.

    ``save``, ``hold`` and ``publish`` must be called on every rank.
    """

    def __init__(self, writer: BackgroundWriter):
        self._writer = writer
        self._failures = 0
        self._saved: Checkpoint | None = None
        self._held: PendingCheckpoint | None = None

    def wait(self) -> Checkpoint | None:
        """Wait until nothing is being written; return the last checkpoint, or None if the disk was full."""
        self._writer.wait()
        return self._saved

    def save(
        self, context: SaveContext, meta: dict[str, Any], end_of_epoch: bool, name: str | None, verbosity: int, *,
        background: bool, tidy: Callable[[], None] | None = None, keys: Sequence[str] = (),
    ) -> Checkpoint | None:
        """Save every recoverable; return the checkpoint on rank 0, and None elsewhere or after a warning.

        background : return once the state is copied
        tidy : called on rank 0 after saving, to delete other checkpoints
        keys : meta keys that ``tidy`` uses; a key that no checkpoint has is an error, raised after saving
        """
        pending: PendingCheckpoint | None = None  # stays None on the other ranks

        def begin() -> tuple[Path | None, CheckpointError | None]:
            nonlocal pending
            self.wait()
            for message in outside(context.recoverables):
                context.warn(message)
            metas = [meta, *(ckpt.meta for ckpt in context.checkpoints())]
            complaint = shelf.unknown_key(context.folder, keys, metas)
            pending = self._begin(context, meta, end_of_epoch, name, verbosity)
            return pending.folder if pending is not None else None, complaint

        def refuse(error: OSError) -> None:
            assert pending is not None, "this rank writes"
            self._failed(context, pending, error)

        def finish() -> bool:
            assert pending is not None, "this rank writes"
            return self._finish(context, pending, None if complaint else tidy)

        with ranks.failing_together():
            folder, complaint = ranks.run_on_main(begin)
            if folder is None:
                return None
            refused = _call_hooks(context, folder, pending, "all" if background else None)
            refusals = [each for each in ranks.gather_objects(refused) if each]
            if refusals:
                ranks.run_on_main(refuse, refusals[0])
                return None
            saved = True
            if not background:
                saved = ranks.run_on_main(finish)
            elif pending is not None:
                self._writer.start(finish)
            if complaint is not None:  # the epoch is saved, and nothing was deleted by a wrong key
                ranks.run_on_main(self.wait)
                ranks.raise_on_main(complaint)
        return pending.result if pending is not None and saved else None

    def hold(self, context: SaveContext, meta: Mapping[str, Any]) -> None:
        """Hold the present state for a mid-epoch checkpoint that ``publish`` may write later.

        Tensors are not copied, so nothing may change them until ``publish`` or ``drop``. A full disk is no error.
        """
        self.drop()
        pending: PendingCheckpoint | None = None

        def begin() -> Path | None:
            nonlocal pending
            pending = PendingCheckpoint(context.folder / _HELD, plain(meta), False, logging.DEBUG)
            try:
                pending.begin()
            except OSError as error:
                logger.debug("no checkpoint is held: %s", error)
                pending = None
            return pending.folder if pending is not None else None

        with ranks.failing_together():
            folder = ranks.run_on_main(begin)
            mine = folder is None or _call_hooks(context, folder, pending, "numbers") is not None
            refused = any(ranks.gather_objects(mine))
        if pending is not None and refused:
            pending.discard()
        self._held = None if refused else pending

    def publish(self, context: SaveContext) -> Checkpoint | None:
        """Write and publish the held state, and return the checkpoint; None if nothing is held."""

        def write() -> Checkpoint | None:
            self.wait()
            pending, self._held = self._held, None
            if pending is None:
                return None
            pending.final = context.path(None)
            pending.meta = {**_times(context, end_of_epoch=False), **pending.meta}
            return pending.result if self._finish(context, pending, None) else None

        return ranks.run_on_main(write)

    def drop(self) -> None:
        """Discard the held state, if there is one."""
        if self._held is not None:
            self._held.discard()
            self._held = None

    def _begin(
        self, context: SaveContext, meta: dict[str, Any], end_of_epoch: bool, name: str | None, verbosity: int
    ) -> PendingCheckpoint | None:
        final = context.path(name)
        pending = PendingCheckpoint(final, {**_times(context, end_of_epoch), **plain(meta)}, end_of_epoch, verbosity)
        try:
            pending.begin()
        except OSError as error:
            self._failed(context, pending, error)
            return None
        return pending

    def _finish(self, context: SaveContext, pending: PendingCheckpoint, tidy: Callable[[], None] | None) -> bool:
        try:
            pending.write()
        except Exception as error:
            self._failed(context, pending, error)
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

    def _failed(self, context: SaveContext, pending: PendingCheckpoint, error: Exception) -> None:
        """Handle a failed save: warn, or raise if the checkpoint was important or too many failed."""
        self._saved = None
        needed = pending.size()
        pending.discard()
        refused = disk.refusal(error)
        if refused is None:
            raise error
        good = next(iter(shelf.ranked(context.checkpoints())), None)
        explained = files.explain_disk(refused, pending.final, needed, good and good.path)
        self._failures += 1
        if pending.end_of_epoch or self._failures >= PATIENCE:
            raise explained from error
        logger.warning("%s. Training continues; after %d such failures in a row it ends (this is number %d).",
                       explained.message, PATIENCE, self._failures)


def _times(context: SaveContext, end_of_epoch: bool) -> dict[str, Any]:
    """Return the meta data of every checkpoint, with a time later than all others, even if the clock was set back."""
    latest = max((ckpt.meta["unixtime"] for ckpt in context.checkpoints()), default=0.0)
    return {"unixtime": max(time.time(), latest + 0.001), "end-of-epoch": end_of_epoch}


def _call_hooks(context: SaveContext, folder: Path, pending: PendingCheckpoint | None,
                copy: str | None) -> OSError | None:
    """Collect states and run hooks that write files themselves; return the error of a full disk.

    copy : see ``PendingCheckpoint.add``

    After such an error the other hooks still run, because other ranks may wait for this one inside them.
    """
    refusal = None
    for name, obj in context.recoverables.items():
        try:
            _call_hook(context, name, obj, folder / f"{name}{stock.PARAMFILE_EXT}", pending, copy)
        except Exception as error:
            found = disk.refusal(error)
            if found is None:
                if pending is not None:
                    pending.discard()
                raise
            refusal = refusal or OSError(found.errno, found.strerror)
    return refusal


def _call_hook(
    context: SaveContext, name: str, obj: Recoverable, path: Path, pending: PendingCheckpoint | None, copy: str | None
) -> None:
    hook: Any = hook_for(obj, context.hooks.get(name), stock.DEFAULT_SAVE_HOOKS, "save")  # may be a wrapper's
    if pending is not None:
        pending.names[name] = path.name
    if hook in TENSORS:
        if pending is not None:
            pending.add(name, obj.state_dict(), copy)
    elif getattr(hook, "__code__", None) is not _MAIN_ONLY:
        hook(obj, path)
    elif ranks.is_main():
        with MainProcessContext():  # without the wrapper's broadcast, in which others would hang if this raised
            hook.__wrapped__(obj, path)
