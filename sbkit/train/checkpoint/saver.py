"""Writes checkpoints, on all ranks together: at once, in the background, or held back until they are needed.

Rank 0 alone writes the folder. The other ranks take part, because hooks may communicate, and because a rank that finds
its own disk full must not leave the others waiting. A checkpoint comes about in three steps, whichever way it is saved:

======================  ===============  ============================================================================
begin                   rank 0           makes a hidden folder; without one, no rank goes on
collect                 all ranks        takes the states to write, and runs hooks that write to that folder themselves
write and publish       rank 0           writes the states, and gives the complete folder its name
======================  ===============  ============================================================================

``Saver.save`` does all three; with ``in_background``, a thread does the third. ``Saver.hold`` does the first two, and
``Saver.publish`` the third if it turns out that the checkpoint is needed; otherwise ``Saver.drop`` discards it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from speechbrain.utils.checkpoints import PARAMFILE_EXT, Checkpoint
from speechbrain.utils.distributed import MainProcessContext, main_process_only

from sbkit.system import disk
from sbkit.train.checkpoint import ranking
from sbkit.train.checkpoint.files import CheckpointError
from sbkit.train.checkpoint.hooks import TENSORS, Hook, saving_hook
from sbkit.train.checkpoint.pending import BackgroundWriter, PendingCheckpoint, plain
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

#: Mid-epoch saves in a row that fail on a full disk, before this is an error.
PATIENCE = 3
#: Every function that SpeechBrain wraps to run on rank 0 only has this code, by which such a hook is recognised.
_MAIN_ONLY_CODE = main_process_only(len).__code__


class Contents(NamedTuple):
    """What a checkpoint saves."""

    recoverables: Mapping[str, Any]
    """The objects with a state, by name."""
    custom_hooks: Mapping[str, Hook]
    """The recipe's own hooks for some of them."""


class Destination(NamedTuple):
    """Where a checkpoint goes."""

    path: Path
    earlier: Sequence[Checkpoint]
    """The readable checkpoints that are there already."""


#: Looks at the disk, on rank 0, once nothing is being written any more.
FindDestination = Callable[[], Destination]


@dataclass
class Save:
    """One call of ``Saver.save``: what it is asked to write, and on rank 0 the checkpoint that comes of it."""

    contents: Contents
    find_destination: FindDestination
    meta: Mapping[str, Any]
    end_of_epoch: bool
    verbosity: int
    in_background: bool
    delete_others: Callable[[], None] | None = None
    """Called on rank 0 after saving, to delete other checkpoints."""
    deciding_keys: Sequence[str] = ()
    """The meta keys by which ``delete_others`` decides."""
    pending: PendingCheckpoint | None = None
    """Set by the first step; stays None on the other ranks."""


class Saver:
    """Writes the checkpoints of one checkpointer, one at a time. Only rank 0 has more than an empty state in it."""

    def __init__(self) -> None:
        self.writer = BackgroundWriter()
        self.last_saved: Checkpoint | None = None
        """What the last save has written; None if the disk was full. The background thread sets it."""
        self._full_disks_in_a_row = 0
        self._held: PendingCheckpoint | None = None

    # ------------------------------------------------------------ saving at once, or in the background

    def save(self, save: Save) -> Checkpoint | None:
        """Save; return the checkpoint on rank 0, and None elsewhere or after a warning."""
        with ranks.failing_together():
            folder, key_error = ranks.run_on_main(self._begin, save)
            if folder is None:
                return None

            # Training may change the states before a thread has written them.
            copy = "all" if save.in_background else None
            disk_error = self._collect(save.contents, folder, save.pending, copy)
            if disk_error is not None:
                ranks.run_on_main(self._give_up, save, disk_error)
                return None

            # An unknown key can't decide what to delete.
            delete_others = save.delete_others if key_error is None else None
            is_saved = self._write_now_or_later(save, delete_others)
            if key_error is not None:
                # Only now: the epoch is saved, and nothing was deleted by that key.
                ranks.run_on_main(self.writer.wait)
                ranks.raise_on_main(key_error)
        return save.pending.result if save.pending is not None and is_saved else None

    def _begin(self, save: Save) -> tuple[Path | None, CheckpointError | None]:
        """Make the hidden folder; return it, None if the disk is full, and the error for a key no checkpoint has."""
        self.writer.wait()
        path, earlier = save.find_destination()
        key_error = ranking.unknown_key(save.deciding_keys, [save.meta, *(ckpt.meta for ckpt in earlier)], path.parent)
        meta = {**_standard_meta(save.end_of_epoch, earlier), **plain(save.meta)}

        save.pending = PendingCheckpoint(path, meta, save.end_of_epoch, save.verbosity, earlier)
        try:
            save.pending.begin()
        except OSError as error:
            self._give_up(save, error)
            return None, key_error
        return save.pending.folder, key_error

    def _give_up(self, save: Save, error: OSError) -> None:
        """Discard what has begun: a warning, or an error if this save was important."""
        assert save.pending is not None, "this rank writes"
        self._handle_failure(save.pending, error)

    def _write_now_or_later(self, save: Save, delete_others: Callable[[], None] | None) -> bool:
        """Have rank 0 write; return False if that has failed already, and it was only a warning."""

        def write() -> bool:
            assert save.pending is not None, "this rank writes"
            return self._write(save.pending, delete_others)

        if not save.in_background:
            return ranks.run_on_main(write)
        if save.pending is not None:
            self.writer.start(write)
        return True

    # ------------------------------------------------------------ holding back

    def hold(self, contents: Contents, folder: Path, meta: Mapping[str, Any]) -> None:
        """Hold the present states, which ``publish`` may write later; a full disk is no error.

        Tensors are not copied, so nothing may change them until ``publish`` or ``drop``.

        folder : names the hidden folder in which hooks write until then
        """
        self.drop()
        is_complete = False
        try:
            with ranks.failing_together():
                hidden_folder = ranks.run_on_main(self._begin_to_hold, folder, meta)
                if hidden_folder is not None:
                    # Numbers are copied: those of optimizers and counters are changed in place by what comes next.
                    is_complete = self._collect(contents, hidden_folder, self._held, "numbers") is None
        finally:
            if not is_complete:
                self.drop()

    def _begin_to_hold(self, folder: Path, meta: Mapping[str, Any]) -> Path | None:
        """Make the hidden folder, and return it; None if the disk is full."""
        pending = PendingCheckpoint(folder, plain(meta), False, logging.DEBUG)
        try:
            pending.begin()
        except OSError as error:
            logger.debug("no checkpoint is held: %s", error)
            return None
        self._held = pending
        return pending.folder

    def publish(self, find_destination: FindDestination,
                delete_earlier: Callable[[Mapping[str, Any]], None]) -> Checkpoint | None:
        """Write and publish what is held, and return the checkpoint; None if nothing is held.

        It is written by a thread, because the process waits for that one even if it has to end after another rank's
        failure.

        delete_earlier : called after saving, with the meta data that ``hold`` got
        """
        self.writer.wait()
        pending = self._held
        self._held = None
        if pending is None:
            return None
        meta_of_held = pending.meta
        pending.final, pending.earlier = find_destination()
        pending.meta = {**_standard_meta(False, pending.earlier), **meta_of_held}
        self.writer.start(lambda: self._write(pending, lambda: delete_earlier(meta_of_held)))
        self.writer.wait()
        return self.last_saved

    def drop(self) -> None:
        """Discard what is held, if anything is."""
        if self._held is not None:
            self._held.discard()
            self._held = None

    # ------------------------------------------------------------ the steps of both ways

    def _collect(self, contents: Contents, folder: Path, pending: PendingCheckpoint | None,
                 copy: str | None) -> OSError | None:
        """Collect states and run hooks that write files themselves; return the error of a full disk of any rank.

        pending : gets the states; None on other ranks than 0
        copy : see ``PendingCheckpoint.add``

        After such an error the other hooks still run, because other ranks may wait for this one inside them.
        """
        disk_error: OSError | None = None
        for name, obj in contents.recoverables.items():
            path = folder / f"{name}{PARAMFILE_EXT}"
            hook: Any = saving_hook(obj, contents.custom_hooks.get(name))  # SpeechBrain's have different arguments
            if pending is not None:
                pending.names[name] = path.name
            try:
                if hook in TENSORS:
                    if pending is not None:
                        pending.add(name, obj.state_dict(), copy)
                else:
                    _run_hook(hook, obj, path)
            except Exception as error:
                cause = disk.disk_error(error)
                if cause is None:
                    if pending is not None:
                        pending.discard()
                    raise
                disk_error = disk_error or OSError(cause.errno, cause.strerror)
        disk_errors = ranks.gather_objects(disk_error)
        return next((error for error in disk_errors if error is not None), None)

    def _write(self, pending: PendingCheckpoint, delete_others: Callable[[], None] | None) -> bool:
        """Write and publish on rank 0, then delete others; return False after a failure that is only a warning."""
        try:
            pending.write()
        except Exception as error:
            self._handle_failure(pending, error)
            return False
        self._full_disks_in_a_row = 0
        self.last_saved = pending.result
        kind = "end-of-epoch" if pending.end_of_epoch else "intra-epoch"
        logger.log(pending.verbosity, "Saved an %s checkpoint in %s", kind, pending.final)
        if delete_others is not None:
            try:
                delete_others()
            except OSError as error:
                logger.warning("Could not delete an old checkpoint: %s", error)
        return True

    def _handle_failure(self, pending: PendingCheckpoint, error: Exception) -> None:
        """Handle a failed save: warn, or raise if the checkpoint was important or too many failed."""
        self.last_saved = None
        needed_bytes = pending.size()  # before the files are gone
        pending.discard()
        disk_error = disk.disk_error(error)
        if disk_error is None:
            raise error
        newest = next(iter(ranking.ranked(pending.earlier)), None)
        kept = f"the last good one, {newest.path}, is kept" if newest else "there is no earlier one"
        failure = CheckpointError(disk.code_of(disk_error),
                                  f"the checkpoint {disk.explain(disk_error, pending.final, needed_bytes)}; {kept}",
                                  hint="free space or raise the quota there, then run the same command to resume",
                                  file=pending.final)
        self._full_disks_in_a_row += 1
        if pending.end_of_epoch or self._full_disks_in_a_row >= PATIENCE:
            raise failure from error
        logger.warning("%s. Training continues; after %d such failures in a row it ends (this is number %d).",
                       failure.message, PATIENCE, self._full_disks_in_a_row)


def _run_hook(hook: Any, obj: object, path: Path) -> None:  # SpeechBrain's hooks have different arguments
    """Run a hook that writes a file itself, on every rank, or on rank 0 if it is one of SpeechBrain's for that."""
    if getattr(hook, "__code__", None) is not _MAIN_ONLY_CODE:
        hook(obj, path)
    elif ranks.is_main():
        # Without the wrapper, because a hook that fails inside it leaves the other ranks waiting in its broadcast.
        with MainProcessContext():
            hook.__wrapped__(obj, path)


def _standard_meta(end_of_epoch: bool, earlier: Sequence[Checkpoint]) -> dict[str, Any]:
    """Return the meta data that every checkpoint has, with a time later than all others, even if the clock went back.
    """
    latest = max((ckpt.meta["unixtime"] for ckpt in earlier), default=0.0)
    return {"unixtime": max(time.time(), latest + 0.001), "end-of-epoch": end_of_epoch}
