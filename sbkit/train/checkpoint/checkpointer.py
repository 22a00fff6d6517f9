"""SpeechBrain's Checkpointer, with safe writes: each checkpoint is complete or absent, and damaged ones are skipped.

``Checkpointer`` says what is done on which rank, and in which order. What it builds on has files of its own: folders on
disk (``files``), a checkpoint that is being written and the thread that writes it (``pending``), the hooks that save
and load an object (``hooks``), copies of states (``snapshot``), loading them (``state``), and which checkpoint is the
most important (``ranking``).
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain.utils import checkpoints as stock
from speechbrain.utils.checkpoints import PARAMFILE_EXT, Checkpoint, ckpt_recency
from speechbrain.utils.distributed import MainProcessContext, get_rank, main_process_only
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.system import disk
from sbkit.train.checkpoint import files, ranking
from sbkit.train.checkpoint.files import CheckpointError
from sbkit.train.checkpoint.hooks import TENSORS, Hook, loading_hook, saving_hook, unsaved_state
from sbkit.train.checkpoint.pending import BackgroundWriter, PendingCheckpoint, plain
from sbkit.train.checkpoint.ranking import Importance
from sbkit.train.checkpoint.state import NotLoaded, load_recoverable
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

KEEP = "keep"  # meta key of a checkpoint that save_and_keep_only never deletes
VISIBLE_WITHIN = 30  # seconds until a network disk shows another node's folder
PATIENCE = 3  # mid-epoch saves in a row that fail on a full disk, before this is an error
_HELD = f"{stock.CKPT_PREFIX}+held"  # hidden folder of a checkpoint that is held
_MAIN_ONLY = main_process_only(len).__code__  # identifies hooks that SpeechBrain runs on rank 0 only

Predicate = Callable[[Checkpoint], bool]


class Checkpointer(stock.Checkpointer):
    """A drop-in for ``speechbrain.utils.checkpoints.Checkpointer``; each can read the other's checkpoints.

    ============================  ==================================================================
    killed while saving           no checkpoint appears; its files are removed at the next start
    a file damaged or cut off     the checkpoint is skipped with a warning, and the next one is used
    all checkpoints damaged       an error: a run never silently starts from scratch
    disk full, mid-epoch          a warning, and training continues; the third in a row is an error
    disk full, end of an epoch    an error; the last good checkpoint is kept
    another model's checkpoint    an error that lists keys and shapes
    ============================  ==================================================================

    Methods that save, delete or recover, and ``wait``, must be called on every rank, as in SpeechBrain.

    checkpoints_dir, recoverables, custom_load_hooks, custom_save_hooks, allow_partial_load
        As in SpeechBrain.
    asynchronous : bool
        Whether a save returns once the state is copied, while a background thread writes it (one write at a time).
        Off by default, so that the checkpoint exists when the call returns, as scripts for SpeechBrain expect;
        ``sbkit.Brain`` turns it on. An error of the thread is raised by the next call, at the latest by ``wait()``.
        At exit, Python waits for the write.
    """

    def __init__(
        self, checkpoints_dir: str | os.PathLike[str], recoverables: Mapping[str, Any] | None = None,
        custom_load_hooks: Mapping[str, Hook] | None = None, custom_save_hooks: Mapping[str, Hook] | None = None,
        allow_partial_load: bool = False, asynchronous: bool = False,
    ):
        super().__init__(checkpoints_dir, recoverables, custom_load_hooks, custom_save_hooks, allow_partial_load)
        self._set_up(asynchronous)

    @classmethod
    def adopt(cls, old: stock.Checkpointer | None, asynchronous: bool = False) -> Checkpointer | None:
        """Turn SpeechBrain's checkpointer into one of this class in place, so that references to it stay valid."""
        if old is None:
            return None
        if isinstance(old, cls):
            old.asynchronous = asynchronous
            return old
        kind = type(old)
        # a recipe's own subclass keeps its overrides, and its super() calls reach this class
        old.__class__ = cls if kind is stock.Checkpointer else type(kind.__name__, (kind, cls), {})
        old._set_up(asynchronous)
        return old

    def _set_up(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        # The rest is of rank 0, which alone writes; the background thread sets the two about the last save.
        self.writer = BackgroundWriter()
        self._saved: Checkpoint | None = None  # by the last save, unless the disk was full
        self._failures = 0  # saves in a row that have failed on a full disk
        self._held: PendingCheckpoint | None = None
        self._warnings_given: set[str] = set()
        if get_rank() in (None, 0):
            for name in files.sweep(self.checkpoints_dir):
                logger.info("Removed %s, which a killed run left in %s", name, self.checkpoints_dir)

    # ------------------------------------------------------------ saving

    def save_checkpoint(self, meta: Mapping[str, Any] | None = None, end_of_epoch: bool = True, name: str | None = None,
                        verbosity: int = logging.INFO) -> Checkpoint | None:
        """Save every recoverable; return the checkpoint on rank 0, and None elsewhere or after a warning.

        If ``asynchronous``, the checkpoint is still being written; ``wait`` returns it once it exists.
        """
        return _Save(self, dict(meta or {}), end_of_epoch, name, verbosity).run()

    def save_and_keep_only(
        self, meta: Mapping[str, Any] | None = None, end_of_epoch: bool = True, name: str | None = None,
        num_to_keep: int = 1, keep_recent: bool = True, importance_keys: Sequence[Importance] = (),
        max_keys: Sequence[str] = (), min_keys: Sequence[str] = (), ckpt_predicate: Predicate | None = None,
        verbosity: int = logging.INFO, keep_every: int | None = None,
    ) -> None:
        """Save, then delete checkpoints that are neither the best nor the newest; SpeechBrain's arguments, and

        keep_every : int, optional
            Never delete the checkpoint at the end of every ``keep_every``-th epoch (its meta gets ``keep: true``).
        """
        meta = dict(meta or {})
        if keep_every and end_of_epoch:
            counters = (obj for obj in self.recoverables.values() if isinstance(obj, EpochCounter))
            epoch = meta.get("epoch", next((counter.current for counter in counters), None))
            if epoch is None:
                raise CheckpointError("no-epoch-counter", "keep_every needs to know each checkpoint's epoch",
                                      hint="add the epoch counter to the recoverables, or epoch to meta")
            if int(epoch) % keep_every == 0:
                meta[KEEP] = True
        importance_keys = [*importance_keys, *([ckpt_recency] if keep_recent else [])]

        def tidy() -> None:
            self._delete(num_to_keep, min_keys, max_keys, importance_keys, ckpt_predicate, verbosity, keep_key=KEEP)

        _Save(self, meta, end_of_epoch, name, verbosity, tidy, keys=(*min_keys, *max_keys)).run()

    def hold(self, meta: Mapping[str, Any]) -> None:
        """Hold the present state for a mid-epoch checkpoint that ``publish`` may write later.

        Tensors are not copied, so nothing may change them until ``publish`` or ``drop``. A full disk is no error.
        """
        self.drop()
        is_complete = False
        try:
            with ranks.failing_together():
                folder = ranks.run_on_main(self._begin_to_hold, meta)
                is_complete = folder is not None and self._collect(folder, self._held, "numbers") is None
        finally:
            if not is_complete:
                self.drop()

    def _begin_to_hold(self, meta: Mapping[str, Any]) -> Path | None:
        """Make the hidden folder on rank 0, and return it; None if the disk is full."""
        pending = PendingCheckpoint(self.checkpoints_dir / _HELD, plain(meta), False, logging.DEBUG)
        try:
            pending.begin()
        except OSError as error:
            logger.debug("no checkpoint is held: %s", error)
            return None
        self._held = pending
        return pending.folder

    def publish(self) -> Checkpoint | None:
        """Write and publish the held state, delete earlier ones, and return the checkpoint; None if nothing is held.

        Only the main process holds anything. It writes in the background, which it outlives if another rank fails.
        """
        self.writer.wait()
        pending = self._held
        self._held = None
        if pending is None:
            return None
        meta_of_held = pending.meta
        pending.final = self._new_checkpoint_dirpath()
        pending.meta = {**self._standard_meta(end_of_epoch=False), **meta_of_held}

        def delete_earlier() -> None:
            self._delete(1, (), (), [ckpt_recency], lambda ckpt: meta_of_held.keys() <= ckpt.meta.keys(), logging.DEBUG)

        self.writer.start(lambda: self._finish(pending, delete_earlier))
        self.writer.wait()
        return self._saved

    def drop(self) -> None:
        """Discard the held state, if there is one."""
        if self._held is not None:
            self._held.discard()
            self._held = None

    def wait(self) -> Checkpoint | None:
        """Wait until nothing is being written; return the last checkpoint, or None if the disk was full.

        Raises an error that occurred in the background.
        """
        def last() -> Checkpoint | None:
            self.writer.wait()
            return self._saved

        return ranks.run_on_main(last)

    def _standard_meta(self, end_of_epoch: bool) -> dict[str, Any]:
        """Return the meta data of every checkpoint, with a time later than all others, even if the clock went back."""
        latest = max((ckpt.meta["unixtime"] for ckpt in self._readable()), default=0.0)
        return {"unixtime": max(time.time(), latest + 0.001), "end-of-epoch": end_of_epoch}

    def _collect(self, folder: Path, pending: PendingCheckpoint | None, copy: str | None) -> OSError | None:
        """Collect states and run hooks that write files themselves; return the error of a full disk of any rank.

        copy : see ``PendingCheckpoint.add``

        After such an error the other hooks still run, because other ranks may wait for this one inside them.
        """
        disk_error: OSError | None = None
        for name, obj in self.recoverables.items():
            path = folder / f"{name}{PARAMFILE_EXT}"
            hook: Any = saving_hook(obj, self.custom_save_hooks.get(name))  # SpeechBrain's have different arguments
            if pending is not None:
                pending.names[name] = path.name
            try:
                if hook in TENSORS:
                    if pending is not None:
                        pending.add(name, obj.state_dict(), copy)
                elif getattr(hook, "__code__", None) is not _MAIN_ONLY:
                    hook(obj, path)
                elif ranks.is_main():
                    with MainProcessContext():  # without the wrapper's broadcast, in which others would hang
                        hook.__wrapped__(obj, path)
            except Exception as error:
                cause = disk.disk_error(error)
                if cause is None:
                    if pending is not None:
                        pending.discard()
                    raise
                disk_error = disk_error or OSError(cause.errno, cause.strerror)
        return next(filter(None, ranks.gather_objects(disk_error)), None)

    def _finish(self, pending: PendingCheckpoint, tidy: Callable[[], None] | None) -> bool:
        """Write and publish on rank 0, then tidy up; return False after a failure that is only a warning."""
        try:
            pending.write()
        except Exception as error:
            self._handle_failure(pending, error)
            return False
        self._failures = 0
        self._saved = pending.result
        kind = "end-of-epoch" if pending.end_of_epoch else "intra-epoch"
        logger.log(pending.verbosity, "Saved an %s checkpoint in %s", kind, pending.final)
        if tidy is not None:
            try:
                tidy()
            except OSError as error:
                logger.warning("Could not delete an old checkpoint: %s", error)
        return True

    def _handle_failure(self, pending: PendingCheckpoint, error: Exception) -> None:
        """Handle a failed save: warn, or raise if the checkpoint was important or too many failed."""
        self._saved = None
        needed = pending.size()
        pending.discard()
        disk_error = disk.disk_error(error)
        if disk_error is None:
            raise error
        newest = next(iter(self._rank()), None)
        earlier = f"the last good one, {newest.path}, is kept" if newest else "there is no earlier one"
        failure = CheckpointError(disk.code_of(disk_error),
                                  f"the checkpoint {disk.explain(disk_error, pending.final, needed)}; {earlier}",
                                  hint="free space or raise the quota there, then run the same command to resume",
                                  file=pending.final)
        self._failures += 1
        if pending.end_of_epoch or self._failures >= PATIENCE:
            raise failure from error
        logger.warning("%s. Training continues; after %d such failures in a row it ends (this is number %d).",
                       failure.message, PATIENCE, self._failures)

    def _warn_once(self, message: str) -> None:
        if message not in self._warnings_given:
            self._warnings_given.add(message)
            logger.warning(message)

    # ------------------------------------------------------------ deleting

    def delete_checkpoints(
        self, *, num_to_keep: int = 1, min_keys: Sequence[str] | None = None,
        max_keys: Sequence[str] | None = None, importance_keys: Sequence[Importance] = (ckpt_recency,),
        ckpt_predicate: Predicate | None = None, verbosity: int = logging.INFO,
    ) -> None:
        """Delete the least important checkpoints, with SpeechBrain's arguments and rules."""

        def delete() -> None:
            self.writer.wait()
            self._delete(num_to_keep, min_keys or (), max_keys or (), importance_keys, ckpt_predicate, verbosity)

        ranks.run_on_main(delete)

    def _delete(
        self, num_to_keep: int, min_keys: Iterable[str], max_keys: Iterable[str],
        importance_keys: Iterable[Importance], ckpt_predicate: Predicate | None, verbosity: int,
        keep_key: str | None = None,
    ) -> None:
        """Delete checkpoints; ``keep_key``: the meta key of those that stay whatever their rank."""
        if num_to_keep < 0:
            raise ValueError("Number of checkpoints to keep must be positive.")
        rankings = [
            *(self._rank(min_key=key, ckpt_predicate=ckpt_predicate) for key in min_keys),
            *(self._rank(max_key=key, ckpt_predicate=ckpt_predicate) for key in max_keys),
            *(self._rank(key, ckpt_predicate=ckpt_predicate) for key in importance_keys),
        ]
        for checkpoint in ranking.obsolete(rankings, num_to_keep):
            if keep_key is None or not checkpoint.meta.get(keep_key):
                files.delete(Path(checkpoint.path))
                logger.log(verbosity, "Deleted checkpoint in %s", checkpoint.path)

    # ------------------------------------------------------------ finding

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints, in no order."""
        self.writer.wait()
        return self._readable()

    def find_checkpoints(
        self, importance_key: Importance | None = None, max_key: str | None = None, min_key: str | None = None,
        ckpt_predicate: Predicate | None = None, max_num_checkpoints: int | None = None,
    ) -> list[Checkpoint]:
        """Return checkpoints, the most important first, with SpeechBrain's arguments and rules.

        A metric that no checkpoint has is an error that lists the existing ones.
        """
        self.writer.wait()
        ranked = self._rank(importance_key, max_key, min_key, ckpt_predicate)
        metas = [ckpt.meta for ckpt in filter(ckpt_predicate, self._readable())]
        key_error = self._unknown_key([max_key, min_key], metas)
        if key_error is not None:
            raise key_error
        return ranked[:max_num_checkpoints]

    def _rank(self, importance_key: Importance | None = None, max_key: str | None = None, min_key: str | None = None,
              ckpt_predicate: Predicate | None = None) -> list[Checkpoint]:
        return ranking.ranked(filter(ckpt_predicate, self._readable()), importance_key, max_key, min_key)

    def _readable(self) -> list[Checkpoint]:
        readable, unreadable = files.readable_checkpoints(self._list_checkpoint_dirs())
        for path, reason in unreadable.items():
            self._warn_once(f"Skipping the checkpoint {path}: {reason}")
        return readable

    def _unknown_key(self, keys: Iterable[str | None], metas: Sequence[Mapping[str, Any]]) -> CheckpointError | None:
        return ranking.unknown_key(keys, metas, self.checkpoints_dir)

    # ------------------------------------------------------------ recovering

    def recover_if_possible(
        self, importance_key: Importance | None = None, max_key: str | None = None, min_key: str | None = None,
        ckpt_predicate: Predicate | None = None,
    ) -> Checkpoint | None:
        """Load the most important undamaged checkpoint and return it; None if there is no checkpoint at all.

        Rank 0 chooses it for all ranks. For a metric that no checkpoint has, SpeechBrain loads none without a word, and
        recipes that name one by mistake test what they have just trained: so does this, with a warning.
        """
        skipped: dict[Path, str] = {}
        with ranks.failing_together():
            while True:
                chosen = ranks.run_on_main(self._choose, importance_key, max_key, min_key, ckpt_predicate, skipped)
                if chosen is None:
                    return None
                problem = self._try_to_load(chosen)
                if problem is None:
                    return chosen
                self._skip(chosen, problem, skipped)

    def _choose(self, importance_key: Importance | None, max_key: str | None, min_key: str | None,
                ckpt_predicate: Predicate | None, skipped: dict[Path, str]) -> Checkpoint | None:
        """Return the most important checkpoint that looks undamaged; None if there is none, or none has the metric.

        skipped : those that can't be used, with the reason; more are added
        """
        self.writer.wait()
        metas = [ckpt.meta for ckpt in filter(ckpt_predicate, self._readable())]
        unknown = self._unknown_key([max_key, min_key], metas)
        if unknown is not None:
            logger.warning("%s. So no checkpoint is loaded, as in SpeechBrain, and the weights stay as they are: "
                           "after training the last ones, otherwise the initial ones", unknown)
            return None
        for ckpt in self.find_checkpoints(importance_key, max_key, min_key, ckpt_predicate):
            if ckpt.path in skipped:
                continue
            reason = files.damage(ckpt.path) or self._lacks(ckpt)
            if reason is None:
                return ckpt
            self._skip(ckpt, reason, skipped)

        _, unreadable = files.readable_checkpoints(self._list_checkpoint_dirs())
        skipped.update(unreadable)
        if not skipped:
            return None
        reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped.items())
        raise CheckpointError("damaged-checkpoint",
                              f"no checkpoint in {self.checkpoints_dir} can be used ({reasons})",
                              hint="restore one of them, or move them away to start from scratch",
                              file=self.checkpoints_dir)

    def _lacks(self, ckpt: Checkpoint) -> str | None:
        """Return what a checkpoint of SpeechBrain's lacks, which may have been killed while saving; None if nothing."""
        if (ckpt.path / files.SUMS_NAME).exists():
            return None
        missing = [name for name in filter(self._is_required, self.recoverables) if name not in ckpt.paramfiles]
        return f"it holds no {', '.join(missing)}" if missing else None

    def _skip(self, ckpt: Checkpoint, reason: str, skipped: dict[Path, str]) -> None:
        skipped[ckpt.path] = reason
        if ranks.is_main():
            logger.warning("Skipping the checkpoint %s: %s", ckpt.path, reason)

    def _try_to_load(self, ckpt: Checkpoint) -> str | None:
        """Load a checkpoint on all ranks; return why it could not be loaded on one of them, the same on all.

        Only without checksums does loading show damage; with them it is an error.
        """
        problem: str | None = None
        try:
            self._call_load_hooks(ckpt)
        except NotLoaded as error:
            if (ckpt.path / files.SUMS_NAME).exists():
                raise
            problem = str(error)
        return next(filter(None, ranks.gather_objects(problem)), None)

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load a given checkpoint."""
        reason = files.damage(Path(checkpoint.path))
        if reason is not None:
            raise CheckpointError("damaged-checkpoint", f"the checkpoint {checkpoint.path} can't be used: {reason}",
                                  file=checkpoint.path)
        self._call_load_hooks(checkpoint)

    def _is_required(self, name: str) -> bool:
        return not (self.allow_partial_load or self.optional_recoverables.get(name) or "dataloader" in name)

    def _call_load_hooks(self, checkpoint: Checkpoint) -> None:
        path = Path(checkpoint.path)
        files.wait_for(path, VISIBLE_WITHIN if ranks.world_size() > 1 else 0)
        logger.info("Loading a checkpoint from %s", path)
        for name, obj in self.recoverables.items():
            file = checkpoint.paramfiles.get(name)
            if file is not None:
                hook = loading_hook(obj, self.custom_load_hooks.get(name))
                load_recoverable(obj, name, file, hook, checkpoint.meta.get("end-of-epoch", True))
            elif self._is_required(name):
                raise CheckpointError(
                    "no-saved-state",
                    f"the checkpoint {path} has no state for {name!r}, only for "
                    f"{', '.join(sorted(checkpoint.paramfiles)) or 'nothing'}",
                    hint=f"add {name!r} with optional_load=True to continue without its state",
                    file=path, key=name)
            elif not self.allow_partial_load:
                logger.warning("%s has no state for %r, which keeps its initial state", path, name)


class _Save:
    """One save on all ranks, in named steps.

    1. ``begin``, on rank 0: makes a hidden folder; without one, no rank saves;
    2. ``Checkpointer._collect``, on all ranks: collects states, and runs hooks that write to that folder; if one of
       them finds its disk full, rank 0 gives the folder up (``refuse``);
    3. ``write``, on rank 0: writes the states and publishes the folder, now or in the background;
    4. ``raise_key_error``, on all ranks: a key that no checkpoint has is an error only now. The epoch is saved, and
       nothing was deleted by that key.

    tidy : called on rank 0 after saving, to delete other checkpoints
    keys : meta keys that ``tidy`` uses
    """

    def __init__(self, checkpointer: Checkpointer, meta: dict[str, Any], end_of_epoch: bool, name: str | None,
                 verbosity: int, tidy: Callable[[], None] | None = None, keys: Sequence[str] = ()):
        self.checkpointer = checkpointer
        self.meta = meta
        self.end_of_epoch = end_of_epoch
        self.name = name
        self.verbosity = verbosity
        self.tidy = tidy
        self.keys = keys
        self.pending: PendingCheckpoint | None = None  # stays None on the other ranks
        self.key_error: CheckpointError | None = None

    def run(self) -> Checkpoint | None:
        """Save; return the checkpoint on rank 0, and None elsewhere or after a warning."""
        checkpointer = self.checkpointer
        with ranks.failing_together():
            folder, self.key_error = ranks.run_on_main(self.begin)
            if folder is None:
                return None
            disk_error = checkpointer._collect(folder, self.pending, "all" if checkpointer.asynchronous else None)
            if disk_error is not None:
                ranks.run_on_main(self.refuse, disk_error)
                return None
            is_saved = self.write_now_or_later()
            if self.key_error is not None:
                self.raise_key_error(self.key_error)
        return self.pending.result if self.pending is not None and is_saved else None

    def begin(self) -> tuple[Path | None, CheckpointError | None]:
        """Return the hidden folder, None if the disk is full, and the error for a key that no checkpoint has."""
        checkpointer = self.checkpointer
        checkpointer.writer.wait()
        for message in unsaved_state(checkpointer.recoverables):
            checkpointer._warn_once(message)
        metas = [self.meta, *(earlier.meta for earlier in checkpointer._readable())]
        key_error = checkpointer._unknown_key(self.keys, metas)
        meta = {**checkpointer._standard_meta(self.end_of_epoch), **plain(self.meta)}
        if self.name is None:
            path = checkpointer._new_checkpoint_dirpath()
        else:
            path = checkpointer._custom_checkpoint_dirpath(self.name)

        self.pending = PendingCheckpoint(path, meta, self.end_of_epoch, self.verbosity)
        try:
            self.pending.begin()
        except OSError as error:
            self.refuse(error)
            return None, key_error
        return self.pending.folder, key_error

    def refuse(self, error: OSError) -> None:
        """Give the folder up: a warning, or an error if this save was important."""
        assert self.pending is not None, "this rank writes"
        self.checkpointer._handle_failure(self.pending, error)

    def write_now_or_later(self) -> bool:
        """Have rank 0 write; return False if that has failed already, and it was only a warning."""
        if not self.checkpointer.asynchronous:
            return ranks.run_on_main(self.write)
        if self.pending is not None:
            self.checkpointer.writer.start(self.write)
        return True

    def write(self) -> bool:
        """Write and publish, then delete others, unless the key that decides which is unknown."""
        assert self.pending is not None, "this rank writes"
        return self.checkpointer._finish(self.pending, None if self.key_error else self.tidy)

    def raise_key_error(self, key_error: CheckpointError) -> None:
        """Raise it once nothing is being written any more."""
        ranks.run_on_main(self.checkpointer.writer.wait)
        ranks.raise_on_main(key_error)
