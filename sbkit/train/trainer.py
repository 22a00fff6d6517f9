"""The training loop: an optimizer step, an epoch of them, and what all ranks decide between two steps.

``Trainer.train_step`` is one step, read from top to bottom. ``Trainer.train_epoch`` is the loop around it: the epoch's
micro-batches, the step, and what is due after it. Nothing in a step waits for the device: the values that the host
needs, a step's loss among them, are copied in the background and read one step later.
"""

from __future__ import annotations

import contextlib
import logging
import math
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import speechbrain as sb
import torch
import torch.distributed as dist
from speechbrain.core import INTRA_EPOCH_CKPT_FLAG, Stage

from sbkit.data.batch import as_planned
from sbkit.errors import SbkitError
from sbkit.nn import guard
from sbkit.nn.peek import Peek
from sbkit.system import memory
from sbkit.train import bad_batch, loaders, rng
from sbkit.train.averaging import EMA
from sbkit.train.bad_batch import KeptBatch
from sbkit.train.batches import DataSource, MicroBatch, Objectives, Outputs, rows
from sbkit.train.checkpoint.files import locked_for_training
from sbkit.train.distributed import parallel, ranks
from sbkit.train.distributed.exchange import GradientExchange
from sbkit.train.distributed.parallel import Buffers
from sbkit.train.distributed.sharding import ShardedModules
from sbkit.train.freezing import Freezing
from sbkit.train.graphs import MicroStep, StepGraphs
from sbkit.train.keys import ScriptKeys
from sbkit.train.memory.oom import is_out_of_memory, release
from sbkit.train.monitor.display import Progress
from sbkit.train.monitor.timing import EVERY, FIRST, StepTimes
from sbkit.train.precision import Scaler
from sbkit.train.rates import Rate, base_lr
from sbkit.train.signals import Stopped, StopSignals
from sbkit.train.state import TrainState
from sbkit.train.step import (
    Loss,
    StepResult,
    as_loss,
    gradients,
    is_last,
    losses_in_fp32,
    one_number,
    rescale_kept,
    update,
    write_rates,
)

logger = logging.getLogger(__name__)

#: What any rank may ask for with a step, so that all ranks do it at the same step: to stop, to save, and to agree anew
#: on the parameters whose gradients are exchanged.
FLAGS = ("stop", "save", "parameters")
#: Time for the other ranks to end a trial of a batch that doesn't fit on one of them.
TRIAL_SECONDS = 60.0


class NotFinite(SbkitError, ValueError):
    """Raised when losses or gradients were NaN or infinite in more than ``nonfinite_patience`` steps of an epoch."""

    exit_code = 1


class Computed(NamedTuple):
    """What a recipe's Brain computed from a batch, and its loss as sums."""

    outputs: Outputs
    objectives: Objectives
    loss: Loss


class Trainer:
    """Trains the modules of a Brain.

    brain : its hooks and options, as SpeechBrain documents them
    generators : the random number generators, as restored from a checkpoint
    write : saves a checkpoint in the middle of an epoch
    recipe_steps : the methods of SpeechBrain's step that the recipe overrides; if any, its loop is followed
    """

    def __init__(self, brain: sb.Brain, state: TrainState, ema: EMA | None, freezing: Freezing,
                 generators: rng.RngState, write: Callable[[], None], recipe_steps: Collection[str] = ()):
        self.brain, self.state, self.ema, self.freezing = brain, state, ema, freezing
        self.modules: torch.nn.ModuleDict = brain.modules
        self.device = torch.device(brain.device)
        self.times = StepTimes(self.device)
        self.graphs = StepGraphs(brain, self.device, self._micro_step, self._update)
        self.buffers = Buffers(self.modules)
        self.signals: StopSignals | None = None
        self._generators, self._write, self._recipe_steps = generators, write, recipe_steps
        self._is_script = isinstance(brain.keys, ScriptKeys)
        self._progress: Progress | None = None
        self._saved_at, self._batches_since = time.monotonic(), 0
        self._unreached: set[str] = set()  # parameters that a warning has named
        # Of steps that the host doesn't know yet: what is being copied, the names of extras, the micro-batches.
        self._pending: list[tuple[Peek, list[str], list[KeptBatch]]] = []
        self._asked: set[str] = set()  # by ranks with steps that have no optimizer, whose values don't wait
        self._timed: StepTimes | None = None  # while a step is timed
        self._no_flags = torch.zeros(len(FLAGS), device=self.device)
        self.lag = 0 if self.device.type == "cpu" else 1
        """Steps whose values are still being copied when the next one is done; on the CPU nothing runs behind."""
        self._scaler: Scaler | None = None  # during a step in fp16
        self._tried = False  # whether the largest micro-batch has been tried
        self.use()

    # ------------------------------------------------------------ setting up

    def use(self, sharded: ShardedModules | None = None, exchange: GradientExchange | None = None) -> None:
        """Train on several ranks by one of the two from now on; on one process by neither."""
        self.sharded, self.exchange, self.world = sharded, exchange, ranks.world_size()
        self.loss_of: Callable[[MicroBatch], Computed] = self.compute if sharded is None else sharded.loss_of
        self.graphs.reset(exchange, sharded is not None)

    @contextlib.contextmanager
    def fitting(self) -> Iterator[None]:
        """Catch signals inside this context; an error discards the held state, as this process may start again."""
        checkpointer = self.brain.checkpointer
        lock: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
        if checkpointer is not None and self._is_script and ranks.is_main():  # `sbkit train` locks the whole folder
            lock = locked_for_training(checkpointer.checkpoints_dir)
        with lock, StopSignals() as self.signals:
            try:
                yield
            except BaseException:
                if self.brain.checkpointer is not None:  # a script's on_fit_start may have set it
                    self.brain.checkpointer.drop()
                raise

    @contextlib.contextmanager
    def evaluating(self) -> Iterator[None]:
        """Don't stop the evaluation inside this context after a signal: only ``fit`` has something to save."""
        signals, self.signals = self.signals, None
        try:
            yield
        finally:
            self.signals = signals

    @property
    def asked_to_stop(self) -> bool:
        """Whether this rank has received a stop signal."""
        return self.signals is not None and self.signals.signum is not None

    @property
    def learning_rate(self) -> Rate | None:
        optimizers = list((self.brain.optimizers_dict or {}).values())
        return base_lr(optimizers[0].param_groups[0]) if optimizers else None

    @property
    def has_optimizers(self) -> bool:
        """Whether steps update anything; SpeechBrain counts them also while ``freeze_optimizers`` returns ``{}``."""
        return self.brain.optimizers_dict is not None or self.brain.opt_class is not None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are not frozen."""
        if self.brain.optimizers_dict is not None:
            return list(self.brain.freeze_optimizers(self.brain.optimizers_dict).values())
        return [self.brain.optimizer] if self.brain.opt_class is not None else []

    # ------------------------------------------------------------ a step

    def compute(self, batch: MicroBatch) -> Computed:
        """Run forward and loss of a training batch."""
        brain, timed = self.brain, self._timed
        with brain.training_ctx:
            outputs = brain.compute_forward(batch, Stage.TRAIN)
            if timed:
                timed.mark("forward")
            outputs = losses_in_fp32(outputs, brain.training_ctx)
            objectives = brain.compute_objectives(outputs, batch, Stage.TRAIN)
        return Computed(outputs, objectives, as_loss(objectives, as_planned(batch).weight))

    def train_step(self, micro_batches: Iterable[tuple[MicroBatch, bool]]) -> bool:
        """Take one optimizer step; return False if there was no micro-batch left.

        micro_batches : each with whether it is the last of its step; those of later steps are not taken
        """
        brain, state, device, exchange = self.brain, self.state, self.device, self.exchange
        scaler = self._scaler = brain.scaler if brain.scaler.is_enabled() else None
        sums: torch.Tensor | None = None
        work: dist.Work | None = None
        names: list[str] = []
        kept: list[KeptBatch] = []
        timed = self._timed = self.times if state.optimizer_step % EVERY == FIRST else None
        if timed:
            timed.begin()
        batch: MicroBatch = None
        last = False
        for batch, last in micro_batches:
            if timed:
                timed.mark("data")
            brain.on_fit_batch_start(batch, last)
            kept.append(KeptBatch(batch, rng.capture(device)))  # for `sbkit rerun`, if something is not finite
            replayed = self.graphs.micro_step(batch) if self.graphs.enabled else None  # with its backward
            if replayed is not None:
                row, extras, outputs, objectives = replayed
                if timed:
                    timed.mark("backward")
            else:
                if exchange is not None:
                    exchange.armed = last  # gradients of earlier micro-batches accumulate on this rank
                outputs, objectives, loss = self.loss_of(batch)
                if not loss.total.requires_grad:
                    raise SbkitError("the loss depends on no trainable parameter", hint="freeze and detach less")
                if timed:
                    timed.mark("loss")
                row, extras = self._row(loss)
            if sums is not None and extras != names:
                raise SbkitError(f"the micro-batches of one step return different extras: {extras} and {names}",
                                 hint="return the same names each time")
            names = extras
            sums = row if sums is None else sums + row
            if last:  # their exchange overlaps with backward
                sums = torch.cat([sums, self._flags()])
                work = dist.all_reduce(sums, async_op=True) if self.world > 1 else None
            if replayed is None:
                total = loss.total if scaler is None or scaler.sum_scale is None else \
                    scaler.scale(loss.total * scaler.sum_scale)
                none = not isinstance(loss.count, torch.Tensor) and loss.count == 0  # a stand-in: no data for this rank
                with parallel.zeroed(self.modules) if none else contextlib.nullcontext():
                    total.backward()
                if timed:
                    timed.mark("backward")
            elif last and exchange is not None:
                exchange.finish()
            if last:
                break
            brain.on_fit_batch_end(batch, outputs, objectives, last)
            outputs = objectives = None  # the next micro-batch needs their memory
            if replayed is None:
                del loss, total
        if sums is None:
            return False
        if not last:  # the epoch ended within an accumulation of which nobody knew the length
            sums = torch.cat([sums, self._flags()])
            if self.world > 1:
                dist.all_reduce(sums)
            if exchange is not None:
                exchange.finish()
        optimizers = self.optimizers()  # now: freeze_optimizers may depend on what hooks and the forward did
        if not self.has_optimizers:  # a recipe that only reads gradients, so the host may wait
            if work is not None:
                work.wait()
            total, count, *rest = sums.tolist()
            state.average.add(total, count)
            self._asked |= _raised(rest[2 * len(names):])
            state.epoch_step += 1
            if last:
                brain.on_fit_batch_end(batch, outputs, objectives, last)
            return True
        if not state.first_step_checked:
            parallel.warn_unreached(self.modules, vars(brain.hparams), self._unreached)
        if work is not None:
            work.wait()
        rates = write_rates(optimizers, device)  # now, after all hooks
        if self.ema is not None:
            self.ema.count_update()
        values = self.graphs.update(optimizers, sums, rates) if self.graphs.enabled else None
        if values is None:
            scale = brain.scaler.gradient_scale()
            values = self._update(optimizers, sums, rates)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            if len(optimizers) < len(brain.optimizers_dict or ()):
                if exchange is not None:  # the next sum over ranks includes what frozen optimizers keep
                    torch._foreach_div_(gradients(brain.optimizers_dict.values()), self.world)
                rescale_kept(brain.optimizers_dict.values(), brain.scaler, scale)
        state.optimizer_step += 1
        state.epoch_step += 1
        self._pending.append((Peek(values), names, kept))
        if timed:
            timed.mark("optimizer")
            self._timed = None
        if last:
            brain.on_fit_batch_end(batch, outputs, objectives, last)
        return True

    def _row(self, loss: Loss) -> tuple[torch.Tensor, list[str]]:
        """Return the loss, its count, then sum and count of each extra, and the names of these.

        They are summed over micro-batches and ranks without leaving the device. ``take_results`` reads them in this
        order, behind the four values of the update.
        """
        extras = loss.extras or {}
        names = sorted(extras)
        row = torch.stack([
            value.detach().reshape(()).to(device=self.device, dtype=torch.float32) if isinstance(value, torch.Tensor)
            else torch.full((), float(value), dtype=torch.float32, device=self.device)  # tensor() copies from the host
            for pair in ((loss.total, loss.count), *(extras[name] for name in names)) for value in pair])
        # The scale of sums is of the step before; the first step has none, so ranks exchange its counts.
        if self._scaler is not None and self._scaler.sum_scale is None:
            self._scaler.follow_count(ranks.sum_across(row[1]) / ranks.world_size())
        return row, names

    def _micro_step(self, batch: MicroBatch) -> MicroStep:
        """Compute a micro-batch, from the batch to gradients, for a graph."""
        timed, self._timed = self._timed, None
        outputs, objectives, loss = self.compute(batch)
        row, names = self._row(loss)
        total, scaler = loss.total, self._scaler
        if scaler is not None and scaler.sum_scale is not None:
            total = scaler.scale(total * scaler.sum_scale)
        total.backward()
        self._timed = timed
        return MicroStep(row, names, outputs, objectives)

    def _update(self, optimizers: Sequence[torch.optim.Optimizer], sums: torch.Tensor,
                rates: Sequence[Sequence[torch.Tensor] | None]) -> torch.Tensor:
        """Update by the gradients of a step, and return what the host reads later; nothing here waits for the device.

        One factor for all gradients: the mean over the whole step, without the loss scale, clipped.
        """
        brain, scaler = self.brain, self._scaler
        count, divided = sums[1], 1 if self.sharded is None else self.world  # FSDP's gradients are means
        factor = torch.where(count > 0, divided / count, torch.zeros_like(count))  # 0: stand-ins alone
        scale, sum_scale = (None, None) if scaler is None else (scaler.factor(), scaler.sum_scale)
        if scale is not None and sum_scale is not None:
            factor = factor / sum_scale / scale
        finite, counted = torch.isfinite(sums[0]), count > 0
        norm, skipped = update(optimizers, factor, brain.max_grad_norm, finite & counted, rates)
        # A step that counts nothing is not taken either, as weights would decay and move by momentum; it didn't fail.
        failed = torch.where(counted, skipped, (~finite).to(skipped))
        ones = torch.ones((), device=self.device)
        values = torch.cat([torch.stack([norm.float(), failed, ones if scale is None else scale.float(),
                                         ones if sum_scale is None else sum_scale]), sums])
        if scaler is not None:
            scaler.adjust(failed)
            scaler.follow_count(count / self.world)
        if self.ema is not None:
            self.ema.update(skipped)
        return values

    def _flags(self) -> torch.Tensor:
        """Return what this rank asks for with a step: a 1 on the device for each of ``FLAGS`` that it raises."""
        minutes = self.brain.ckpt_interval_minutes if self.brain.checkpointer is not None else 0
        stop = self.asked_to_stop
        save = minutes > 0 and time.monotonic() - self._saved_at > 60 * minutes and ranks.is_main()
        changed = self.exchange is not None and bool(self.exchange.changed or self.exchange.missed)
        if not (stop or save or changed):
            return self._no_flags
        return torch.tensor([stop, save, changed], dtype=torch.float32, device=self.device)

    # ------------------------------------------------------------ an epoch

    def begin_fit(self, validates: bool) -> None:
        """Begin a ``fit``; ``validates``: whether each epoch ends with a validation."""
        self.brain.open_step(self.state.optimizer_step + 1)
        self.buffers = Buffers(self.modules)
        self.state.first_step_checked, self.state.validates = False, validates
        self._tried = False
        if self.exchange is not None and self.state.graph_changes:
            self.exchange.reset(agree_each_time=True)

    def train_epoch(self, train_set: DataSource, epoch: int, show: bool) -> None:
        """Train the rest of an epoch; ``show``: whether to show a progress bar."""
        brain, state = self.brain, self.state
        state.epoch = epoch
        brain.open_stage(Stage.TRAIN, epoch)
        self.freezing.train()
        brain.zero_grad()
        batches, begun, total = self._batches(train_set, epoch)
        if not self._tried:
            self._tried = True
            self._try_largest(train_set, epoch)
        self._saved_at, self._batches_since = time.monotonic(), 0
        if brain.profiler is not None:
            brain.profiler.start()
        self.times.reset()
        progress = self._progress = Progress(
            f"train {epoch}", total, initial=begun, show=show, times=self.times, metrics=brain.metrics_log,
            epoch=epoch, interval=brain.keys.log_interval, colour=brain.tqdm_barcolor["train"] or None,
            # A second of audio takes fewer FLOPs while parts are frozen that will train.
            utilisation=None if any(turn > state.optimizer_step for turn in self.freezing.unfreeze_steps)
            else brain.utilisation, compiled=brain.compiled)
        if not state.step:
            state.began = time.monotonic()
        with progress:
            train = self._follow_recipe if self._recipe_steps else self._train
            train(self._micro_batches(batches, progress), progress, train_set, epoch)
            self.take_results(wait=True)
            progress.show(state.average.known(), self.learning_rate)
        guard.poll(wait=True)  # before a model that learnt from an invalid label is saved
        brain.zero_grad(set_to_none=True)
        self.buffers.detect_changes()
        parallel.assert_ranks_equal(self.modules, f"after epoch {epoch}")
        if state.validates and brain.checkpointer is not None and self.sharded is None:
            # Saved if a signal arrives or an error before the epoch ends: a resumed run then repeats what follows, from
            # ``on_stage_end`` on, with the same random numbers. Of a sharded model this would take a complete save.
            brain.checkpointer.hold({INTRA_EPOCH_CKPT_FLAG: True})
        loss = self.average_loss()
        if not (self._recipe_steps or state.average.count) and state.epoch_step:
            logger.warning("Nothing was trained in epoch %d: every loss had a count of 0, or was not finite", epoch)
        progress.close(loss, state.optimizer_step, state.began)
        brain.close_stage(Stage.TRAIN, loss, epoch)
        state.end_training()

    def _train(self, micro_batches: Iterator[tuple[MicroBatch, bool]], progress: Progress, train_set: DataSource,
               epoch: int) -> None:
        """Take the epoch's steps, and do what is due after each."""
        brain, state = self.brain, self.state
        while not self._begin_step(train_set, epoch):
            before = state.optimizer_step
            if not self.train_step(micro_batches):
                return
            if state.optimizer_step > before:  # there is an optimizer
                brain.open_step(state.optimizer_step + 1)
            self._between_steps(self.take_results(), progress)

    def _micro_batches(self, batches: Iterable[Any], progress: Progress) -> Iterator[tuple[MicroBatch, bool]]:
        """Yield the epoch's micro-batches, each with whether its step ends with it."""
        brain, state = self.brain, self.state
        iterator = loaders.iterator_of(batches)
        self._generators.restore()  # after that: starting workers draws random numbers
        for batch in iterator:
            state.step += 1
            self._batches_since += 1
            planned = is_last(batch)
            last = state.step % brain.grad_accumulation_factor == 0 if planned is None else planned
            last = last or state.step == state.last_batch
            progress.count(batch, 1 if planned is None else int(last))
            yield batch, last
            if brain.debug and state.step == brain.debug_batches:
                return

    def _follow_recipe(self, micro_batches: Iterator[tuple[MicroBatch, bool]], progress: Progress,
                       train_set: DataSource, epoch: int) -> None:
        """Go through the epoch as SpeechBrain's own loop does, for a recipe that overrides a method of the step.

        The recipe decides when a step ends and how losses are divided. Ranks agree where one ends by
        ``grad_accumulation_factor`` or the plan: gradients of half a step are in no checkpoint.
        """
        brain, state = self.brain, self.state
        while not self._begin_step(train_set, epoch):
            batch, last = next(micro_batches, (None, False))
            if batch is None:
                return
            before, failures = state.optimizer_step, state.nonfinite_count
            loss = one_number(brain.fit_batch(batch), "fit_batch")
            looks = state.nonfinite_count > failures or "check_loss_isfinite" in self._recipe_steps
            if "fit_batch" in self._recipe_steps and not (looks or torch.isfinite(loss)):
                state.nonfinite_count += 1
                told = f"batch {state.step} has the loss {loss.item()}, number {state.nonfinite_count} of epoch {epoch}"
                if state.nonfinite_count > brain.nonfinite_patience:
                    raise NotFinite(told, hint=f"nonfinite_patience allows {brain.nonfinite_patience}")
                logger.warning("%s (nonfinite_patience allows %d)", told, brain.nonfinite_patience)
            brain.avg_train_loss = brain.update_average(loss, brain.avg_train_loss)
            state.epoch_step += last
            if state.optimizer_step > before:
                brain.open_step(state.optimizer_step + 1)
            if last:
                raised = ranks.any_of(dict(zip(FLAGS, self._flags().tolist(), strict=True)))
                self._between_steps({name for name, number in raised.items() if number}, progress)

    def _begin_step(self, train_set: DataSource, epoch: int) -> bool:
        """Thaw what trains from this step on; return True if the run has taken as many steps as it may."""
        state, limit, thaws_at = self.state, self.brain.optimizer_step_limit, self.freezing.next_change
        if limit is not None and state.optimizer_step >= limit:
            logger.info("Train iteration limit exceeded")
            return True
        if thaws_at is not None and state.optimizer_step >= thaws_at:
            self.freezing.update(state.optimizer_step)
            self.freezing.train()
            if self.ema is not None:
                self.ema.track_trainable()
            if self.exchange is not None:
                self.exchange.reset()
            self.graphs.reset(self.exchange)
            state.first_step_checked = False
            self._try_largest(train_set, epoch)
        return False

    def _between_steps(self, asked: set[str], progress: Progress) -> None:
        """Do what is due between two steps, and what any rank has asked for with a step before."""
        brain, state = self.brain, self.state
        if not state.first_step_checked:
            state.first_step_checked = True
            self.buffers.detect_changes()
            parallel.assert_ranks_equal(self.modules, "after the first step")
        elif self.buffers.changing:
            self.buffers.sync()
        guard.poll()
        if time.monotonic() >= progress.due:
            progress.show(state.average.known(), self.learning_rate)
        due = 0 < brain.ckpt_interval_steps <= self._batches_since
        if "parameters" in asked and self.exchange is not None and not self.exchange.agree_each_time:
            self.exchange.reset(agree_each_time=True)
            self.graphs.reset(self.exchange)
            state.graph_changes = True
            if ranks.is_main():
                logger.warning("The loss uses other parameters than in the first step. From now on ranks agree in each "
                               "step on those that have gradients, which makes it wait for the device; with "
                               "--find_unused_parameters they do so from the first step")
        if "stop" in asked:
            self.save_and_stop()
        if brain.checkpointer is not None and (due or "save" in asked):
            self._save()
        if brain.checkpointer is not None and brain.checkpointer.writer.failed:
            brain.checkpointer.writer.wait()  # raises now, and not an epoch later
        if brain.profiler is not None:
            brain.profiler.step()
            if brain.profiler.step_num > brain.tot_prof_steps:
                logger.info("The profiler finished, training is stopped.")
                brain.profiler.stop()
                ranks.end_together()  # another rank may still be writing its trace

    def _batches(self, train_set: DataSource, epoch: int) -> tuple[Iterable[Any], int, int | None]:
        """Return the epoch's remaining batches; for the progress bar what is done, and the total if it is known."""
        brain, state = self.brain, self.state
        state.last_batch = brain.debug_batches if brain.debug else None
        if loaders.has_plan(train_set):
            begun, steps = state.epoch_steps, train_set.steps(epoch)
            if state.epoch_step and begun not in (None, steps):
                logger.warning(
                    "Epoch %s started with %d steps and now has %d: the recipe, the corpus, the device or --compile "
                    "(with round_seconds) has changed. Some utterances of this epoch are used twice or not at all.",
                    epoch, begun, steps)
            state.epoch_steps = steps
            batches = train_set.at(epoch, min(state.epoch_step, steps))
            return loaders.on_device(batches, train_set, brain.device), state.epoch_step, steps
        loaders.set_epoch(epoch, brain.train_sampler, train_set)
        length = loaders.length(train_set)
        if length is not None:
            length += state.step - loaders.first_batch(train_set, state.step)
            state.last_batch = min(length, state.last_batch or length)
        return train_set, state.step, length

    # ------------------------------------------------------------ what fits into memory

    def _try_largest(self, train_set: DataSource, epoch: int) -> None:
        """End the run with one message if a micro-batch of its plan doesn't fit into memory, hours before it comes.

        All ranks try the largest of any rank, so they decide alike. Nothing that training depends on is changed. On a
        CPU there is nothing to find out, unless the memory of this process is limited.
        """
        if not hasattr(train_set, "largest") or not (self.device.type == "cuda" or memory.bounded()):
            return
        problem = ""

        def failed(batch: MicroBatch) -> bool:
            fits = self.fits(batch)
            # Others may wait for this rank within the model, where they can't learn that it failed: it ends the run.
            if not ranks.barrier("tried", None if fits else TRIAL_SECONDS):
                raise SbkitError(problem, hint="set max_batch_seconds to less (sbkit tune finds the limit), or try "
                                               "activation_checkpointing", exit_code=1)
            return ranks.any_of({"failed": not fits})["failed"]

        for batch in train_set.largest(epoch):
            problem = f"out of memory on {self.device} with the run's largest micro-batch: {len(batch.ids)} " \
                      f"utterances, {batch.padded_seconds:.0f} s with padding ({batch.ids[0]} and others)"
            if not failed(batch):
                continue
            size = len(batch) // 2
            while size > 1 and failed(rows(batch, 0, size)):
                size //= 2
            hint = f"set max_batch_seconds to {size * batch.padded_seconds / len(batch):.0f} (sbkit tune finds the " \
                   "exact limit), or try activation_checkpointing"
            if size < 2:
                hint = "set max_batch_seconds to less: a single utterance fits at most, so leave out long ones " \
                       "(max_duration), or try activation_checkpointing"
            ranks.raise_on_main(SbkitError(problem, hint=hint, exit_code=1))

    def fits(self, batch: MicroBatch) -> bool:
        """Return whether forward and backward of a micro-batch fit into memory, beside the optimizer's states."""
        try:
            with self.brain.restoring(), self.brain.no_sync():
                known = set().union(*(optimizer.state for optimizer in self.optimizers()))
                # Two tensors for each parameter, as Adam has them.
                held = [torch.empty_like(p) for p in self.modules.parameters()
                        if p.requires_grad and p not in known for _ in range(2)]
                batch = batch.to(self.device)
                self.brain.on_fit_batch_start(batch, True)  # in which a recipe may prepare what its forward needs
                self.loss_of(batch).loss.total.backward()
                del held
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        release(self.device)  # outside of the handler, whose frames hold the step's tensors
        return False

    # ------------------------------------------------------------ what the host learns of steps

    def take_results(self, wait: bool = False) -> set[str]:
        """Take in the steps whose values have arrived, all but the newest or all with ``wait``.

        This depends only on the number of steps, so all ranks get the same steps at the same point. Returns what any
        rank asked for with them.
        """
        state, brain = self.state, self.brain
        asked, self._asked = self._asked, set()
        while len(self._pending) > (0 if wait else self.lag):
            late = len(self._pending) - 1
            arrived, names, kept = self._pending.pop(0)
            norm, skipped, scale, sum_scale, total, count, *rest = arrived.numpy().tolist()
            extras = {name: (rest[2 * i], rest[2 * i + 1]) for i, name in enumerate(names)}
            flags = rest[2 * len(names):]
            result = StepResult(total, count, norm, skipped > 0, scale, sum_scale, extras, kept,
                                number=state.optimizer_step - late, late=late)
            state.average.add(result.total, result.count)
            if self._progress is not None:
                self._progress.step(result)
            brain.close_step(result)
            if result.failed:
                state.nonfinite_count += 1
                what = "gradient" if math.isfinite(result.total) else "loss"
                report = f"its {what} is not finite (with fsdp, a rank can't examine it alone)"
                if self.sharded is None:
                    report = bad_batch.report(brain, brain.keys.output_folder or ".", result, state.epoch)
                if ranks.is_main():
                    logger.warning("Step %d was skipped, number %d in this epoch (nonfinite_patience allows %d):\n%s",
                                   result.number, state.nonfinite_count, brain.nonfinite_patience, report)
                if state.nonfinite_count > brain.nonfinite_patience:
                    ranks.raise_on_main(NotFinite(
                        f"the {what} of {state.nonfinite_count} steps of this epoch was not finite",
                        hint="see the reports above; nonfinite_patience sets how many are allowed"))
            asked |= _raised(flags)
        return asked

    def average_loss(self) -> float:
        """Return the mean training loss of the epoch so far, over all ranks; waits for the device."""
        return self.state.average.value(arrived.numpy().tolist()[4:6] for arrived, *_ in self._pending)

    # ------------------------------------------------------------ saving and leaving

    def _save(self) -> None:
        """Save a checkpoint in the middle of the epoch, after recording all steps so far."""
        self.take_results(wait=True)
        if self._progress is not None:
            self._progress.show(self.state.average.known(), self.learning_rate)
        guard.poll(wait=True)  # raises now if a label was invalid, so that nothing learnt from it is saved
        self.buffers.detect_changes()
        self._write()
        self._saved_at, self._batches_since = time.monotonic(), 0

    @contextlib.contextmanager
    def keeping_epoch(self, epoch: int) -> Iterator[None]:
        """Save what an epoch trained if its validation fails, or a recipe's own ``on_stage_end``."""
        checkpointer = self.brain.checkpointer
        try:
            yield
        except (Exception, ranks.PeerFailed):
            with contextlib.suppress(Exception):  # the first error is what counts
                if checkpointer is not None and checkpointer.publish() is not None:
                    logger.warning("Epoch %d's training is saved: the same command goes on with its validation.", epoch)
            raise
        finally:
            if checkpointer is not None:
                checkpointer.drop()

    def save_and_stop(self) -> None:
        """Save a checkpoint and end the run, after a signal to any rank."""
        own = None if self.signals is None else self.signals.signum
        signum = next(each for each in ranks.gather_objects(own) if each is not None)
        saved, checkpointer = None, self.brain.checkpointer
        if checkpointer is not None:
            saved = ranks.run_on_main(checkpointer.publish)
            if saved is None:
                self._save()
                saved = checkpointer.wait()
        state = self.state
        place = f"step {state.optimizer_step}" if state.optimizer_step else f"batch {state.step} of epoch {state.epoch}"
        stopped = Stopped.by(signum, place, saved and saved.path)  # a recipe's own step may count none
        if self._is_script and ranks.is_main():
            logger.warning("%s", stopped)  # Python prints nothing
        ranks.raise_on_main(stopped)


def _raised(flags: Sequence[float]) -> set[str]:
    """Return the names of the ``FLAGS`` that any rank has raised."""
    return {name for name, raised in zip(FLAGS, flags, strict=True) if raised}
