"""SpeechBrain's Checkpointer, made safe: each checkpoint is complete or absent, and damaged ones are skipped."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain.utils import checkpoints as stock
from speechbrain.utils.checkpoints import Checkpoint, ckpt_recency
from speechbrain.utils.distributed import get_rank
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.train.checkpoint import files, shelf
from sbkit.train.checkpoint.files import CheckpointError
from sbkit.train.checkpoint.pending import BackgroundWriter
from sbkit.train.checkpoint.saver import SaveContext, Saver
from sbkit.train.checkpoint.shelf import Importance, Predicate
from sbkit.train.checkpoint.state import Hook, NotLoaded, hook_for, load_recoverable, unsaved
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

KEEP = "keep"  # meta key of a checkpoint that save_and_keep_only never deletes
VISIBLE_WITHIN = 30  # seconds until a network disk shows another node's folder


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

    Arguments
    ---------
    checkpoints_dir, recoverables, custom_load_hooks, custom_save_hooks, allow_partial_load
        As in SpeechBrain.
    asynchronous : bool
        Whether a save returns once the state is copied, while a background thread writes it (one write at a time).
        Off by default, so that the checkpoint exists when the call returns, as scripts for SpeechBrain expect;
        ``sbkit.Brain`` turns it on. An error of the thread is raised by the next call, at the latest by ``wait()``.
        At exit, Python waits for the write.
    """

    def __init__(
        self,
        checkpoints_dir: str | os.PathLike[str],
        recoverables: Mapping[str, Any] | None = None,
        custom_load_hooks: Mapping[str, Hook] | None = None,
        custom_save_hooks: Mapping[str, Hook] | None = None,
        allow_partial_load: bool = False,
        asynchronous: bool = False,
    ):
        super().__init__(
            checkpoints_dir, recoverables, custom_load_hooks, custom_save_hooks, allow_partial_load
        )
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
        self._writer = BackgroundWriter()
        self._saver = Saver(self._writer)
        self._warned: set[str] = set()
        if get_rank() in (None, 0):
            for name in files.sweep(self.checkpoints_dir):
                logger.info("Removed %s, which a killed run left in %s", name, self.checkpoints_dir)

    # ------------------------------------------------------------ saving

    def save_checkpoint(
        self, meta: Mapping[str, Any] | None = None, end_of_epoch: bool = True, name: str | None = None,
        verbosity: int = logging.INFO,
    ) -> Checkpoint | None:
        """Save every recoverable; return the checkpoint on rank 0, and None elsewhere or after a warning.

        If ``asynchronous``, the checkpoint is still being written; ``wait`` returns it once it exists.
        """
        return self._saver.save(self._context(), dict(meta or {}), end_of_epoch, name, verbosity,
                                background=self.asynchronous)

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
        if keep_every and end_of_epoch and self._epoch(meta) % keep_every == 0:
            meta[KEEP] = True
        recency = [ckpt_recency] if keep_recent else []
        orders = shelf.orders(min_keys, max_keys, [*importance_keys, *recency])

        def tidy() -> None:
            self._delete(num_to_keep, orders, ckpt_predicate, verbosity, spare=lambda c: c.meta.get(KEEP))

        self._saver.save(self._context(), meta, end_of_epoch, name, verbosity, background=self.asynchronous, tidy=tidy,
                         keys=(*min_keys, *max_keys))

    def wait(self) -> Checkpoint | None:
        """Wait until nothing is being written; return the last checkpoint, or None if the disk was full.

        Raises an error that occurred in the background.
        """
        return ranks.run_on_main(self._saver.wait)

    def raise_pending_error(self) -> None:
        """Raise an error that occurred in the background, on the rank that writes, without waiting."""
        self._writer.raise_pending_error()

    def hold(self, meta: Mapping[str, Any]) -> None:
        """Hold the present state for a mid-epoch checkpoint that ``publish`` may write later.

        Tensors are not copied, so nothing may change them until ``publish`` or ``drop``. A full disk is no error.
        """
        self._saver.hold(self._context(), meta)

    def publish(self) -> Checkpoint | None:
        """Write and publish the held state, and return the checkpoint; None if nothing is held."""
        return self._saver.publish(self._context())

    def drop(self) -> None:
        """Discard the held state, if there is one."""
        self._saver.drop()

    def _context(self) -> SaveContext:
        return SaveContext(self.recoverables, self.custom_save_hooks, self.checkpoints_dir, self._list, self._path,
                           self._warn_once)

    def _path(self, name: str | None) -> Path:
        return self._new_checkpoint_dirpath() if name is None else self._custom_checkpoint_dirpath(name)

    def _epoch(self, meta: Mapping[str, Any]) -> int:
        counters = (obj for obj in self.recoverables.values() if isinstance(obj, EpochCounter))
        epoch = meta.get("epoch", next((counter.current for counter in counters), None))
        if epoch is None:
            raise CheckpointError("keep_every needs the epoch",
                             hint="add the epoch counter to the recoverables, or epoch to meta")
        return int(epoch)

    def unsaved(self, objects: Mapping[str, Any]) -> list[str]:
        """Return the names of objects, such as a recipe's, with state to save that are not among the recoverables."""
        return unsaved(self.recoverables, objects)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            logger.warning(message)

    # ------------------------------------------------------------ deleting

    def delete_checkpoints(
        self, *, num_to_keep: int = 1, min_keys: Sequence[str] | None = None,
        max_keys: Sequence[str] | None = None, importance_keys: Sequence[Importance] = (ckpt_recency,),
        ckpt_predicate: Predicate | None = None, verbosity: int = logging.INFO,
    ) -> None:
        """Delete the least important checkpoints, with SpeechBrain's arguments and rules."""
        orders = shelf.orders(min_keys or (), max_keys or (), importance_keys)

        def delete() -> None:
            self._saver.wait()
            self._delete(num_to_keep, orders, ckpt_predicate, verbosity)

        if num_to_keep < 0:
            raise ValueError("Number of checkpoints to keep must be positive.")
        ranks.run_on_main(delete)

    def _delete(
        self, num_to_keep: int, orders: list[dict[str, Any]], ckpt_predicate: Predicate | None, verbosity: int,
        spare: Predicate | None = None,
    ) -> None:
        if num_to_keep < 0:
            raise ValueError("Number of checkpoints to keep must be positive.")
        ranked = [self._find(ckpt_predicate=ckpt_predicate, **order) for order in orders]
        kept = {ckpt.path for ckpts in ranked for ckpt in ckpts[:num_to_keep]}
        obsolete = {ckpt.path: ckpt for ckpts in ranked for ckpt in ckpts if ckpt.path not in kept}
        for ckpt in obsolete.values():
            if spare is None or not spare(ckpt):
                self._delete_checkpoint(ckpt, verbosity)

    @staticmethod
    def _delete_checkpoint(checkpoint: Checkpoint, verbosity: int = logging.INFO) -> None:
        if not Checkpointer._is_checkpoint_dir(checkpoint.path):
            raise RuntimeError("Checkpoint does not appear valid for deletion.")
        files.retire(Path(checkpoint.path))
        logger.log(verbosity, "Deleted checkpoint in %s", checkpoint.path)

    # ------------------------------------------------------------ finding

    def list_checkpoints(self) -> list[Checkpoint]:
        """Return all checkpoints, in no order."""
        self._saver.wait()
        return self._list()

    def find_checkpoints(
        self, importance_key: Importance | None = None, max_key: str | None = None, min_key: str | None = None,
        ckpt_predicate: Predicate | None = None, max_num_checkpoints: int | None = None,
    ) -> list[Checkpoint]:
        """Return checkpoints, the most important first, with SpeechBrain's arguments and rules.

        A metric that no checkpoint has is an error that lists the existing ones.
        """
        self._saver.wait()
        self._check_key(max_key or min_key, ckpt_predicate)
        return self._find(importance_key, max_key, min_key, ckpt_predicate)[:max_num_checkpoints]

    def _find(
        self, importance_key: Importance | None = None, max_key: str | None = None, min_key: str | None = None,
        ckpt_predicate: Predicate | None = None,
    ) -> list[Checkpoint]:
        return shelf.ranked(self._list(), importance_key, max_key, min_key, ckpt_predicate)

    def _list(self) -> list[Checkpoint]:
        found, unreadable = shelf.readable_checkpoints(self._list_checkpoint_dirs())
        for path, reason in unreadable.items():
            self._warn_once(f"Skipping the checkpoint {path}: {reason}")
        return found

    def _check_key(self, key: str | None, ckpt_predicate: Predicate | None) -> None:
        metas = [ckpt.meta for ckpt in filter(ckpt_predicate, self._list())]
        complaint = shelf.unknown_key(self.checkpoints_dir, [key] if key and metas else [], metas)
        if complaint is not None:
            raise complaint

    # ------------------------------------------------------------ recovering

    def recover_if_possible(
        self, importance_key: Importance | None = None, max_key: str | None = None, min_key: str | None = None,
        ckpt_predicate: Predicate | None = None,
    ) -> Checkpoint | None:
        """Load the most important undamaged checkpoint and return it; None if there is no checkpoint at all.

        Rank 0 chooses it for all ranks.
        """
        skipped: dict[Path, str] = {}

        def choose() -> Checkpoint | None:
            self._saver.wait()
            self._check_key(max_key or min_key, ckpt_predicate)
            for ckpt in self._find(importance_key, max_key, min_key, ckpt_predicate):
                if ckpt.path not in skipped:
                    reason = self._problem(ckpt)
                    if reason is None:
                        return ckpt
                    _skip(skipped, ckpt, reason)
            skipped.update(shelf.readable_checkpoints(self._list_checkpoint_dirs())[1])
            if not skipped:
                return None
            reasons = "; ".join(f"{path.name}: {reason}" for path, reason in skipped.items())
            raise CheckpointError(f"no checkpoint in {self.checkpoints_dir} can be used ({reasons})",
                             hint="restore one of them, or move them away to start from scratch")

        with ranks.failing_together():
            while True:
                chosen = ranks.run_on_main(choose)
                if chosen is None:
                    logger.info("Would load a checkpoint here, but none found yet.")
                    return None
                problem: str | None = None
                try:
                    self._call_load_hooks(chosen)
                except NotLoaded as error:
                    if files.has_sums(chosen.path):
                        raise
                    problem = str(error)  # without checksums, only loading shows damage
                problems = [each for each in ranks.gather_objects(problem) if each]
                if not problems:
                    return chosen
                _skip(skipped, chosen, problems[0])

    def load_checkpoint(self, checkpoint: Checkpoint) -> None:
        """Load a given checkpoint."""
        reason = files.damage(Path(checkpoint.path))
        if reason is not None:
            raise CheckpointError(f"the checkpoint {checkpoint.path} can't be used: {reason}")
        self._call_load_hooks(checkpoint)

    def _problem(self, ckpt: Checkpoint) -> str | None:
        reason = files.damage(ckpt.path)
        if reason is None and not files.has_sums(ckpt.path):  # SpeechBrain may have been killed while writing it
            needed = filter(self._needed, self.recoverables)
            missing = [name for name in needed if name not in ckpt.paramfiles]
            reason = f"it holds no {', '.join(missing)}" if missing else None
        return reason

    def _needed(self, name: str) -> bool:
        return not (self.allow_partial_load or self.optional_recoverables.get(name) or "dataloader" in name)

    def _call_load_hooks(self, checkpoint: Checkpoint) -> None:
        path = Path(checkpoint.path)
        files.wait_for(path, VISIBLE_WITHIN if ranks.world_size() > 1 else 0)
        logger.info("Loading a checkpoint from %s", path)
        for name, obj in self.recoverables.items():
            file = checkpoint.paramfiles.get(name)
            if file is not None:
                hook = hook_for(obj, self.custom_load_hooks.get(name), stock.DEFAULT_LOAD_HOOKS, "load")
                load_recoverable(obj, name, file, hook, checkpoint.meta.get("end-of-epoch", True))
            elif self._needed(name):
                raise CheckpointError(
                    f"the checkpoint {path} holds nothing for {name!r}, only for "
                    f"{', '.join(sorted(checkpoint.paramfiles)) or 'nothing'}",
                    hint=f"add {name!r} with optional_load=True to continue without its state",
                )
            elif not self.allow_partial_load:
                logger.warning("%s holds nothing for %r, which keeps its initial state", path, name)


def _skip(skipped: dict[Path, str], ckpt: Checkpoint, reason: str) -> None:
    skipped[ckpt.path] = reason
    if ranks.is_main():
        logger.warning("Skipping the checkpoint %s: %s", ckpt.path, reason)
