"""SpeechBrain's Checkpointer, with safe writes: each checkpoint is complete or absent, and damaged ones are skipped.

``Checkpointer`` finds, loads and deletes checkpoints. All else has a file of its own:

===============  =======================================================================
``saver``        how a checkpoint is written, on which rank and in which order
``pending``      a checkpoint that is being written, and the thread that writes it
``files``        folders of checkpoints on disk
``hooks``        the functions that save and load an object
``snapshot``     copies of states, for writing them later
``state``        loading them
``ranking``      which checkpoint is the most important
===============  =======================================================================
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from speechbrain.utils import checkpoints as stock
from speechbrain.utils.checkpoints import Checkpoint, ckpt_recency
from speechbrain.utils.distributed import get_rank
from speechbrain.utils.epoch_loop import EpochCounter

from sbkit.train.checkpoint import files, ranking
from sbkit.train.checkpoint.files import CheckpointError
from sbkit.train.checkpoint.hooks import Hook, loading_hook, unsaved_state
from sbkit.train.checkpoint.pending import BackgroundWriter
from sbkit.train.checkpoint.ranking import Importance
from sbkit.train.checkpoint.saver import Contents, Destination, Save, Saver
from sbkit.train.checkpoint.state import NotLoaded, load_recoverable
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

#: Meta key of a checkpoint that ``save_and_keep_only`` never deletes.
KEEP = "keep"
#: Seconds until a network disk shows another node's folder.
VISIBLE_WITHIN = 30
#: The folder of a checkpoint that is held is hidden, and is named after this one.
_HELD_NAME = f"{stock.CKPT_PREFIX}+held"

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
        """Turn SpeechBrain's checkpointer into one of this class in place; return it.

        A new object would not do: the recipe's hparams and the script have references to this one, and add recoverables
        to it, or save with it.
        """
        if old is None:
            return None
        if isinstance(old, cls):
            old.asynchronous = asynchronous
            return old
        old.__class__ = cls._safe_version_of(type(old))
        old._set_up(asynchronous)
        return old

    @classmethod
    def _safe_version_of(cls, kind: type[stock.Checkpointer]) -> type[Checkpointer]:
        """Return the class that saves safely and does all else as ``kind``.

        For SpeechBrain's own that is this one. A subclass in a recipe, ``class Mine(Checkpointer)``, keeps what it
        overrides: it becomes ``class Mine(Mine, sbkit.Checkpointer)``, whose ``super()`` calls reach this class first.
        """
        if kind is stock.Checkpointer:
            return cls
        return type(kind.__name__, (kind, cls), {})

    def _set_up(self, asynchronous: bool) -> None:
        self.asynchronous = asynchronous
        self.saver = Saver()
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
        return self.saver.save(self._new_save(dict(meta or {}), end_of_epoch, name, verbosity))

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

        def delete_others() -> None:
            self._delete(num_to_keep, min_keys, max_keys, importance_keys, ckpt_predicate, verbosity, keep_key=KEEP)

        save = self._new_save(meta, end_of_epoch, name, verbosity)
        save.delete_others = delete_others
        save.deciding_keys = (*min_keys, *max_keys)
        self.saver.save(save)

    def hold(self, meta: Mapping[str, Any]) -> None:
        """Hold the present state for a mid-epoch checkpoint that ``publish`` may write later.

        Tensors are not copied, so nothing may change them until ``publish`` or ``drop``. A full disk is no error.
        """
        self.saver.hold(self._contents(), self.checkpoints_dir / _HELD_NAME, meta)

    def publish(self) -> Checkpoint | None:
        """Write and publish the held state, delete earlier ones, and return the checkpoint; None if nothing is held.

        Only the main process holds anything.
        """

        def delete_earlier(meta_of_held: Mapping[str, Any]) -> None:
            self._delete(1, (), (), [ckpt_recency], lambda ckpt: meta_of_held.keys() <= ckpt.meta.keys(), logging.DEBUG)

        return self.saver.publish(functools.partial(self._destination, None), delete_earlier)

    def drop(self) -> None:
        """Discard the held state, if there is one."""
        self.saver.drop()

    @property
    def writer(self) -> BackgroundWriter:
        """What writes in the background."""
        return self.saver.writer

    def wait(self) -> Checkpoint | None:
        """Wait until nothing is being written; return the last checkpoint, or None if the disk was full.

        Raises an error that occurred in the background.
        """

        def last() -> Checkpoint | None:
            self.writer.wait()
            return self.saver.last_saved

        return ranks.run_on_main(last)

    def _new_save(self, meta: Mapping[str, Any], end_of_epoch: bool, name: str | None, verbosity: int) -> Save:
        return Save(self._contents(), functools.partial(self._destination_of_save, name), meta, end_of_epoch, verbosity,
                    in_background=self.asynchronous)

    def _contents(self) -> Contents:
        return Contents(self.recoverables, self.custom_save_hooks)

    def _destination_of_save(self, name: str | None) -> Destination:
        """Return where to save; warn before that of what the recoverables leave out."""
        for message in unsaved_state(self.recoverables):
            self._warn_once(message)
        return self._destination(name)

    def _destination(self, name: str | None) -> Destination:
        earlier = self._readable()
        path = self._new_checkpoint_dirpath() if name is None else self._custom_checkpoint_dirpath(name)
        return Destination(path, earlier)

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
