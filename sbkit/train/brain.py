"""The run: SpeechBrain's Brain, the same on any number of devices, and one that survives."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import speechbrain as sb
import torch
import yaml
from speechbrain.core import Stage
from speechbrain.dataio.dataloader import LoopedLoader
from speechbrain.utils.autocast import AMPConfig, TorchAutocast
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from speechbrain.utils.run_opts import RunOptions
from torch.utils.data import DataLoader

from sbkit.errors import SbkitError
from sbkit.train import options, parallel, ranks, rng
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.display import StageDisplay
from sbkit.train.step import Facts, Loss, Scaler, Step, as_loss, fused
from sbkit.train.timing import StepBudget

logger = logging.getLogger(__name__)

#: What any rank may raise and all ranks act on together, at the same step.
FLAGS = ("stop", "save")


class NotFinite(SbkitError, ValueError):
    """Losses or gradients stayed NaN or infinite for longer than ``nonfinite_patience``."""

    exit_code = 1


@register_checkpoint_hooks
class Brain(sb.core.Brain):
    """A drop-in for ``speechbrain.core.Brain``: the same constructor, hooks, flags and files.

    What is different:

    - ``compute_objectives`` may return ``sbkit.Loss(total, count)`` instead of a scalar. The gradient of an
      optimizer step is then that of the mean over the whole step, over ranks and micro-batches.
    - ``fit`` also takes a train set with ``.at(epoch, step)`` (``sbkit.data.loader.TrainLoader``), which says
      itself where an optimizer step ends, and evaluation sets that yield only this rank's share
      (``sbkit.data.loader.EvalLoader``).
    - The losses that ``fit_batch`` and ``evaluate_batch`` return stay on the device. So nothing waits for it.
    - What ``compute_objectives`` gets is fp32 whatever ``precision`` is, and it runs under autocast as it
      does in SpeechBrain: a layer called there computes in ``precision``, a loss in fp32.

    Options beside SpeechBrain's, from ``hparams``:

    share_validation : bool
        Ordinary datasets are validated whole by every rank, as in SpeechBrain, because recipes
        compute their metrics on each rank. True: shared out; gather what you report with ``self.gather``.
    """

    def __init__(
        self, modules: Mapping[str, torch.nn.Module] | None = None,
        opt_class: Callable[..., torch.optim.Optimizer] | None = None, hparams: Mapping[str, Any] | None = None,
        run_opts: RunOptions | Mapping[str, Any] | None = None, checkpointer: Any = None,
    ):
        self._average = _Mean()
        run_opts, hparams = options.clean(run_opts, hparams)
        self._find_unused = (options.pick(run_opts, hparams, "find_unused_parameters")
                             if options.given(run_opts, hparams, "find_unused_parameters") else True)
        device = torch.device(options.pick(run_opts, hparams, "device"))
        ranks.init(device, options.pick(run_opts, hparams, "distributed_backend"))
        super().__init__(
            modules=options.check_modules(modules), opt_class=opt_class, hparams=hparams,
            run_opts=options.hide_fp16(run_opts, hparams, device.type),
            checkpointer=Checkpointer.adopt(checkpointer),
        )
        if hparams is None:
            self.hparams = SimpleNamespace()
        self._set_precision(run_opts, hparams)
        self.rank = ranks.rank()
        self.nonfinite_count = 0
        self._epoch_step = 0  # optimizer steps done of this epoch
        self._epoch: int | None = None
        self._plan_driven = False
        self._last_batch: int | None = None  # number of the last batch of an epoch, when known beforehand
        self._parallel: parallel.Alone | None = None
        self._steps = Step(torch.device(self.device), scaler=self.scaler, flags=FLAGS)
        self._found: SimpleNamespace = SimpleNamespace(outputs=None, loss=None, raw=None)
        self._named_unreached = self._checked_equal = False
        self._budget = StepBudget(self.device)

    # ---------------------------------------------------------------- setting up

    def _set_precision(self, run_opts: Any, hparams: dict | None) -> None:
        """Autocast and loss scaling for any device, from any of its names."""
        self.precision, self.eval_precision = options.precisions(run_opts, hparams)
        kind = torch.device(self.device).type
        for name in ("precision", "eval_precision"):
            if getattr(self, name) == "fp16" and not options.fp16_works(kind):
                raise SbkitError(f"{name} is fp16, but this torch has no fp16 autocast on {kind}", hint="use bf16")
        self.device_type = kind
        self.training_ctx = _autocast(kind, self.precision)
        self.evaluation_ctx = _autocast(kind, self.eval_precision)
        self.scaler = Scaler(kind, enabled=self.precision == "fp16")
        if self.checkpointer is not None and self.scaler.is_enabled():
            self.checkpointer.add_recoverable("scaler", self.scaler, optional_load=True)

    def _wrap_distributed(self) -> None:
        """Wrap all modules at once (see ``parallel``)."""
        if self.data_parallel_backend:
            super()._wrap_distributed()
        parallel.convert_batch_norm(self.modules, torch.device(self.device))
        shell = parallel.Shell(self.modules, self._forward)
        trained = any(p.requires_grad for p in self.modules.parameters())
        if ranks.world_size() == 1 or not trained:
            self._parallel = parallel.Alone(shell)
        elif self._own_fit_batch:
            self._parallel = parallel.Hooked(shell)
        else:
            self._parallel = parallel.Wrapped(shell, self._find_unused)
        self._steps = Step(torch.device(self.device), self._parallel.world, self.scaler, FLAGS)

    @property
    def _own_fit_batch(self) -> bool:
        return type(self).fit_batch is not Brain.fit_batch

    def init_optimizers(self) -> None:
        """As SpeechBrain's, with the fused form of ``opt_class`` where torch has one."""
        plain, self.opt_class = self.opt_class, self.opt_class and fused(self.opt_class)
        try:
            super().init_optimizers()
        finally:
            self.opt_class = plain

    def _active_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.optimizers_dict is not None:
            return list(self.freeze_optimizers(self.optimizers_dict).values())
        return [self.optimizer] if self.opt_class is not None else []

    # ---------------------------------------------------------------- one batch

    def _forward(self, batch: Any) -> torch.Tensor:
        """Forward and loss of one training batch; leaves what it found in ``self._found``."""
        with self.training_ctx:
            with self._budget("forward"):
                outputs = self.compute_forward(batch, Stage.TRAIN)
            with self._budget("loss"):
                raw = self.compute_objectives(self._in_fp32(outputs, self.training_ctx), batch, Stage.TRAIN)
        loss = as_loss(raw, getattr(batch, "weight", 1.0))
        self._found = SimpleNamespace(outputs=outputs, raw=raw, loss=loss)
        return loss.total

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """One micro-batch; the last one of its step also updates. Returns the detached loss, on the device."""
        last = self._closes_step(batch)
        weight = getattr(batch, "weight", 1.0)
        self.on_fit_batch_start(batch, last)
        with self.no_sync(not last):
            state = rng.capture(self.device)
            total = self._shell(batch)
            found = self._found
            loss = found.loss._replace(total=total)
            self._steps.add(loss, (batch, state))
            if last:
                self._steps.announce(self._flags())
            with self._budget("backward"), _zeroed_if(weight == 0, self.modules):
                if last:
                    self._budget.exposed_all_reduce(total)
                self._steps.scaled(loss).backward()
        if last:
            self._step_optimizers()
        self.on_fit_batch_end(batch, found.outputs, found.raw, last)
        return loss.detach().mean

    def _shell(self, batch: Any) -> torch.Tensor:
        return self._parallel(batch) if self._parallel is not None else self._forward(batch)

    def _closes_step(self, batch: Any) -> bool:
        if self.step == self._last_batch:
            return True
        if self._plan_driven:
            return batch.last
        return self.step % self.grad_accumulation_factor == 0

    def _step_optimizers(self) -> None:
        with self._budget("optimizer"):
            if type(self).optimizers_step is not Brain.optimizers_step:
                self._steps.normalise(self._active_optimizers())
            self.optimizers_step()

    def optimizers_step(self) -> None:
        """Clip all gradients together and update, unless something is not finite; then forget gradients."""
        optimizers = self._active_optimizers()
        if not optimizers:
            self._steps.reset()
            return
        if not self._named_unreached:
            self._name_unreached()
        self._steps.update(optimizers, self.max_grad_norm)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1
        self._epoch_step += 1

    def _name_unreached(self) -> None:
        self._named_unreached = True
        names = parallel.unreached(self.modules)
        if names:
            logger.warning("The loss does not reach these parameters, so they are not trained: %s",
                           ", ".join(names))

    @contextlib.contextmanager
    def no_sync(self, use: bool = True) -> Iterator[None]:
        """Within it, gradients are accumulated on each rank and not averaged over ranks."""
        with self._parallel.no_sync() if use and self._parallel is not None else contextlib.nullcontext():
            yield

    def _in_fp32(self, value: Any, ctx: TorchAutocast) -> Any:
        """Half-precision tensors inside lists, tuples and dicts as fp32, where autocast is on."""
        return _upcast(value) if isinstance(ctx.context, torch.autocast) else value

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> torch.Tensor | Loss:
        """Loss of one batch: detached, on the device, a ``Loss`` where ``compute_objectives`` returns one."""
        with self.evaluation_ctx:
            outputs = self._in_fp32(self.compute_forward(batch, stage=stage), self.evaluation_ctx)
            loss = self.compute_objectives(outputs, batch, stage=stage)
        return loss.detach()

    # ---------------------------------------------------------------- an epoch

    def fit(
        self, epoch_counter: Iterable[int], train_set: Any, valid_set: Any = None,
        progressbar: bool | None = None, train_loader_kwargs: dict | None = None,
        valid_loader_kwargs: dict | None = None,
    ) -> None:
        """Train and validate for each epoch that ``epoch_counter`` gives; see SpeechBrain's ``Brain.fit``.

        train_set : Dataset, DataLoader or a loader with ``.at(epoch, step)``
        valid_set : Dataset, DataLoader or a loader of this rank's share
        """
        if self.test_only:
            logger.info("Test only mode, skipping training and validation stages.")
            return
        if self._optimizer_step_limit_exceeded:
            return
        with ranks.failing_together():
            self._plan_driven = hasattr(train_set, "at")
            if not self._plan_driven:
                train_set = self._loader(train_set, Stage.TRAIN, train_loader_kwargs or {})
            if valid_set is not None:
                kwargs = {"ckpt_prefix": None, **(valid_loader_kwargs or {})}
                valid_set = self._loader(valid_set, Stage.VALID, kwargs)
            self.on_fit_start()
            self._buffers = parallel.Buffers(self.modules)
            enable = (not self.noprogressbar if progressbar is None else progressbar) and ranks.is_main()
            for epoch in epoch_counter:
                self._fit_train(train_set=train_set, epoch=epoch, enable=enable)
                self._fit_valid(valid_set=valid_set, epoch=epoch, enable=enable)
                if self._optimizer_step_limit_exceeded or (self.debug and epoch == self.debug_epochs):
                    break

    def _loader(self, dataset: Any, stage: Stage, kwargs: dict) -> Iterable:
        """A DataLoader, made here if only a dataset was given."""
        if isinstance(dataset, (DataLoader, LoopedLoader)) or _is_own(dataset):
            return dataset
        return self.make_dataloader(dataset, stage=stage, **kwargs)

    def _fit_train(self, train_set: Any, epoch: int, enable: bool) -> None:
        self._epoch = epoch
        self.on_stage_start(Stage.TRAIN, epoch)
        self.modules.train()
        self.zero_grad()
        self.nonfinite_count = 0
        batches, steps = self._train_batches(train_set, epoch)
        self._saved_at, self._batches_since_save = time.monotonic(), 0
        if self.profiler is not None:
            self.profiler.start()
        self._budget.reset()
        display = StageDisplay(
            f"train {epoch}", steps, initial=self._epoch_step if self._plan_driven else self.step, show=enable,
            budget=self._budget, scale=ranks.world_size(), colour=self.tqdm_barcolor["train"].lower() or None,
        )
        with self._budget.active(), display:
            for batch in self._timed(batches):
                if self._optimizer_step_limit_exceeded:
                    logger.info("Train iteration limit exceeded")
                    break
                self.step += 1
                self._batches_since_save += 1
                before = self.optimizer_step
                loss = self.fit_batch(batch)
                if self._own_fit_batch or type(self).update_average is not sb.core.Brain.update_average:
                    self.avg_train_loss = self.update_average(_one_number(loss), self.avg_train_loss)
                self._show(display, batch, stepped=self.optimizer_step > before)
                self._profile()
                if self.debug and self.step == self.debug_batches:
                    break
                if self.optimizer_step > before or self._own_fit_batch:
                    self._after_step()
        if self._steps.started:
            self._step_leftovers()
        self._act_on(self._steps.facts(wait=True))
        self.zero_grad(set_to_none=True)
        self._buffers.look()
        self._buffers.sync()
        parallel.assert_ranks_equal(self.modules, f"after epoch {epoch}")
        if enable:
            logger.info("epoch %s: %s", epoch, self._budget.line())
        self.on_stage_end(Stage.TRAIN, self.avg_train_loss, epoch)
        self.avg_train_loss = 0.0
        self.step = self._epoch_step = 0

    def _train_batches(self, train_set: Any, epoch: int) -> tuple[Iterable, int | None]:
        """The epoch's batches from where it stands, and how many the bar counts to."""
        self._last_batch = self.debug_batches if self.debug else None
        if self._plan_driven:
            batches = train_set.at(epoch, self._epoch_step)
            to_device = getattr(train_set, "to_device", None)
            return to_device(batches, self.device) if to_device else batches, train_set.steps(epoch)
        for sampler in {id(s): s for s in (self.train_sampler, getattr(train_set, "batch_sampler", None),
                                           getattr(train_set, "sampler", None))}.values():
            if hasattr(sampler, "set_epoch"):
                sampler.set_epoch(epoch)
        try:
            length = len(train_set)
        except TypeError:  # an IterableDataset
            return train_set, None
        self._last_batch = min(length, self._last_batch or length)
        return train_set, length

    def _timed(self, batches: Iterable) -> Iterator:
        """The same batches; the time spent waiting for each is counted as "data"."""
        iterator = iter(batches)
        while True:
            with self._budget("data"):
                batch = next(iterator, _END)
            if batch is _END:
                return
            yield batch

    def _step_leftovers(self) -> None:
        """An accumulation that the end of the epoch cut short is a step too."""
        if self._parallel is not None:
            self._parallel.finish()
        self._step_optimizers()

    def _after_step(self) -> None:
        """What all ranks do together between two optimizer steps."""
        if not self._checked_equal:
            self._checked_equal = True
            self._buffers.look()
            parallel.assert_ranks_equal(self.modules, "after the first step")
        self._buffers.sync()
        self._budget.step()
        flags = self._act_on(self._steps.facts())
        if self._own_fit_batch:
            flags = ranks.any_of(self._flags())
        due = 0 < self.ckpt_interval_steps <= self._batches_since_save
        if self.checkpointer is not None and (due or flags["save"]):
            self._act_on(self._steps.facts(wait=True))
            self._save_intra_epoch_ckpt()
            self._saved_at, self._batches_since_save = time.monotonic(), 0

    def _flags(self) -> dict[str, bool]:
        """What this rank has to tell the others at this step."""
        minutes = (time.monotonic() - self._saved_at) / 60
        return {"stop": False, "save": ranks.is_main() and 0 < self.ckpt_interval_minutes < minutes}

    def _act_on(self, facts: list[Facts]) -> dict[str, bool]:
        """Count the losses of finished steps, see to what was not finite, tell which flags were raised."""
        flags = dict.fromkeys(FLAGS, False)
        for fact in facts:
            if math.isfinite(fact.total):
                self._average.add(fact.total, fact.count)
            if fact.to_blame:
                self._not_finite(fact)
            for name, raised in fact.flags.items():
                flags[name] |= raised > 0
        return flags

    def _not_finite(self, fact: Facts) -> None:
        self.nonfinite_count += 1
        what = "gradient" if math.isfinite(fact.total) else "loss"
        logger.warning("Step %d was skipped: its %s is not finite (%d of %d that are put up with).",
                       fact.number, what, self.nonfinite_count, self.nonfinite_patience)
        if self.nonfinite_count > self.nonfinite_patience:
            ranks.raise_on_main(NotFinite(
                f"the {what} was not finite in {self.nonfinite_count} steps of this epoch",
                hint="nonfinite_patience sets how many are put up with"))

    def _show(self, display: StageDisplay, batch: Any, stepped: bool) -> None:
        optimizers = list((self.optimizers_dict or {}).values())
        display.update(
            int(stepped) if self._plan_driven else 1,
            loss=lambda: self._average.value, lr=optimizers[0].param_groups[0]["lr"] if optimizers else None,
            seconds=getattr(batch, "seconds", 0.0), padded_seconds=getattr(batch, "padded_seconds", 0.0),
        )

    def _profile(self) -> None:
        if self.profiler is None:
            return
        self.profiler.step()
        if self.profiler.step_num > self.tot_prof_steps:
            logger.info("The profiler finished, training is stopped.")
            self.profiler.stop()
            raise SystemExit(0)

    # ---------------------------------------------------------------- validation and test

    def _fit_valid(self, valid_set: Any, epoch: int, enable: bool) -> None:
        if valid_set is None:
            return
        self.on_stage_start(Stage.VALID, epoch)
        with torch.no_grad():
            loss = self._evaluate(valid_set, Stage.VALID, f"valid {epoch}", enable)
            self.step = 0
            self.on_stage_end(Stage.VALID, loss, epoch)

    def evaluate(
        self, test_set: Any, max_key: str | None = None, min_key: str | None = None,
        progressbar: bool | None = None, test_loader_kwargs: dict | None = None,
    ) -> float:
        """Load the best checkpoint and go through ``test_set`` once; returns the average loss.

        test_set : Dataset, DataLoader or a loader of this rank's share
        max_key, min_key : key of the checkpoints' meta file whose highest or lowest value is the best
        """
        with ranks.failing_together():
            test_set = self._loader(test_set, Stage.TEST, {**(test_loader_kwargs or {}), "ckpt_prefix": None})
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            self.on_stage_start(Stage.TEST, epoch=None)
            enable = (not self.noprogressbar if progressbar is None else progressbar) and ranks.is_main()
            with torch.no_grad():
                loss = self._evaluate(test_set, Stage.TEST, "test", enable)
                self.on_stage_end(Stage.TEST, loss, None)
            self.step = 0
            return loss

    def _evaluate(self, loader: Iterable, stage: Stage, name: str, enable: bool) -> float:
        """Average loss over a set. No rank waits for another inside, so shares may differ in size."""
        self.modules.eval()
        own, average = _is_own(loader), 0.0
        sums = torch.zeros(2, device=self.device)
        custom = type(self).update_average is not sb.core.Brain.update_average
        total = len(loader) if hasattr(loader, "__len__") else None
        self.step = 0
        with StageDisplay(name, total, show=enable,
                          colour=self.tqdm_barcolor[stage.name.lower()].lower() or None) as display:
            for batch in self._on_device(loader) if own else loader:
                self.step += 1
                loss = self.evaluate_batch(batch, stage=stage)
                if custom:
                    average = self.update_average(_one_number(loss), average)
                else:
                    sums += _finite_sums(loss, self.device)
                display.update(seconds=getattr(batch, "seconds", 0.0))
                if self.debug and self.step == self.debug_batches:
                    break
        if custom:
            return average
        if own:
            ranks.meet(name)
            sums = ranks.sum_across(sums)
        total_loss, count = sums.tolist()
        return total_loss / count if count else 0.0

    def _on_device(self, loader: Iterable) -> Iterator:
        for batch in loader:
            yield batch.to(self.device) if hasattr(batch, "to") else batch

    def gather(self, rows: Iterable) -> list:
        """Every rank's rows, one list, the same on every rank; all ranks must call it."""
        return [row for part in ranks.gather_objects(list(rows)) for row in part]

    # ---------------------------------------------------------------- what is saved

    @property
    def avg_train_loss(self) -> float:
        """Mean training loss of this epoch so far, over all ranks; reading it waits for the device."""
        pending = self._steps.peek() if hasattr(self, "_steps") else []
        return self._average.value_with([(f.total, f.count) for f in pending])

    @avg_train_loss.setter
    def avg_train_loss(self, value: float) -> None:
        self._average.set(float(value))

    @mark_as_saver
    def _save(self, path: str | os.PathLike) -> None:
        """SpeechBrain's keys, and below them what going on exactly needs."""
        state = {
            "step": self.step, "avg_train_loss": self.avg_train_loss, "optimizer_step": self.optimizer_step,
            "epoch_step": self._epoch_step, "loss_sums": [self._average.total, self._average.count],
            "nonfinite_count": self.nonfinite_count,
        }
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump(state, out)

    @mark_as_loader
    def _recover(self, path: str | os.PathLike, end_of_epoch: bool) -> None:
        with open(path, encoding="utf-8") as file:
            state = yaml.safe_load(file)
        self.optimizer_step = state.get("optimizer_step", state["step"])
        self.step = self._epoch_step = 0
        self.avg_train_loss = 0.0
        if end_of_epoch:
            return
        self.step = state["step"]
        self.avg_train_loss = state["avg_train_loss"]
        self._epoch_step = state.get("epoch_step", 0)
        if "loss_sums" in state:
            self._average.total, self._average.count = state["loss_sums"]
        self.nonfinite_count = state.get("nonfinite_count", 0)


class _Mean:
    """A mean of sums, which a recipe may also set."""

    def __init__(self):
        self.total = self.count = self._set = 0.0

    def add(self, total: float, count: float) -> None:
        self.total += total
        self.count += count

    def set(self, value: float) -> None:
        self.total = self.count = 0.0
        self._set = value

    @property
    def value(self) -> float:
        return self.total / self.count if self.count else self._set

    def value_with(self, more: list[tuple[float, float]]) -> float:
        more = [(t, c) for t, c in more if math.isfinite(t)]
        total, count = self.total + sum(t for t, _ in more), self.count + sum(c for _, c in more)
        return total / count if count else self._set


_END = object()


def _autocast(device_type: str, precision: str) -> TorchAutocast:
    return TorchAutocast(device_type=device_type, dtype=AMPConfig.from_name(precision).dtype)


def _is_own(loader: Any) -> bool:
    """A loader that is neither torch's nor a dataset: it yields this rank's share."""
    return not isinstance(loader, (DataLoader, LoopedLoader, torch.utils.data.Dataset)) and (
        hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"))


def _zeroed_if(condition: bool, modules: torch.nn.Module) -> contextlib.AbstractContextManager:
    return parallel.gradients_zeroed(modules) if condition else contextlib.nullcontext()


def _one_number(loss: Any) -> torch.Tensor:
    loss = loss.mean if isinstance(loss, Loss) else loss
    return loss if isinstance(loss, torch.Tensor) else torch.tensor(float(loss))


def _finite_sums(loss: Any, device: str) -> torch.Tensor:
    """(total, count) of a batch, or zeros where its loss is not finite, without waiting for the device."""
    loss = loss if isinstance(loss, Loss) else Loss(_one_number(loss), 1.0)
    total = loss.total.detach().to(device=device, dtype=torch.float32).reshape(())
    count = loss.count.to(total).reshape(()) if isinstance(loss.count, torch.Tensor) \
        else torch.full_like(total, loss.count)
    both = torch.stack([total, count])
    return torch.where(torch.isfinite(total), both, torch.zeros_like(both))


def _upcast(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in (torch.float16, torch.bfloat16) else value
    if isinstance(value, dict):
        return type(value)((k, _upcast(v)) for k, v in value.items()) if type(value) is dict else value
    if type(value) in (list, tuple):
        return type(value)(_upcast(v) for v in value)
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_upcast(v) for v in value))
    return value
