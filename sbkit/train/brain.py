"""The run: SpeechBrain's Brain, the same on any number of devices, and one that survives."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any, ClassVar

import speechbrain as sb
import torch
import yaml
from speechbrain.core import Stage
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from speechbrain.utils.run_opts import RunOptions

from sbkit.nn import attention_kernel
from sbkit.nn.accelerate import accelerate, compile_kernels
from sbkit.system.cores import keep_to_usable_cores
from sbkit.train import compiling, loaders, options, precision, rng
from sbkit.train.between import FLAGS, Between
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.diagnose.culprit import Suspect
from sbkit.train.distributed import parallel, ranks, sharding
from sbkit.train.epoch import train
from sbkit.train.evaluation import evaluate, validate
from sbkit.train.forward_state import ForwardState
from sbkit.train.keys import TrainKeys
from sbkit.train.memory.oom import Parts, told
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.monitor.progress import Progress
from sbkit.train.monitor.tally import Mean
from sbkit.train.monitor.timing import StepBudget, profiler
from sbkit.train.monitor.utilisation import Utilisation
from sbkit.train.optim import fused, skips_itself
from sbkit.train.signals import StopSignals
from sbkit.train.step import Facts, Loss, Step, as_loss

logger = logging.getLogger(__name__)


@register_checkpoint_hooks
class Brain(sb.core.Brain):
    """A drop-in for ``speechbrain.core.Brain``: the same constructor, hooks, flags and files.

    What is different for who writes a recipe:

    - ``compute_objectives`` may return ``sbkit.Loss(total, count)`` instead of a scalar. The gradient of an
      optimizer step is then that of the mean over the whole step, over ranks and micro-batches.
    - ``fit`` also takes a train set with ``.at(epoch, step)`` and ``.steps(epoch)``
      (``sbkit.data.loader.TrainLoader``), which says itself where an optimizer step ends, and evaluation
      sets that yield this rank's share only (``EvalLoader``); ``self.gather`` collects what they report.
    - ``fit_batch`` and ``evaluate_batch`` return losses that stay on the device, so nothing waits for it.
    - ``compute_objectives`` gets fp32 whatever ``precision`` is, and runs under autocast as in SpeechBrain:
      a layer called there computes in ``precision``, a loss in fp32.
    - A step whose loss or gradient is not finite changes nothing, on all ranks alike.
    - On several ranks a step sees the same utterances as on one, and its gradient differs by rounding and by what is
      masked at random: each rank draws for itself on its device and by numpy (dropout, SpecAugment). Python's
      ``random``, and beside a card torch on the host, give all ranks the same: for what all must decide alike.

    What it reads of ``hparams`` beside SpeechBrain's is in ``self.keys`` (see ``sbkit.train.keys``). Unless
    ``share_validation`` is true, every rank evaluates all of an ordinary dataset, as in SpeechBrain, because recipes
    compute their metrics on each rank.
    """

    Keys: ClassVar[type[TrainKeys]] = TrainKeys

    def __init__(
        self, modules: Mapping[str, torch.nn.Module] | None = None,
        opt_class: Callable[..., torch.optim.Optimizer] | None = None,
        hparams: Mapping[str, Any] | None = None, run_opts: RunOptions | Mapping[str, Any] | None = None,
        checkpointer: Any = None,
    ):
        self._average = Mean()
        run_opts, hparams = options.clean(run_opts, hparams)
        device = torch.device(options.pick(run_opts, hparams, "device"))
        ranks.init(device, options.pick(run_opts, hparams, "distributed_backend"))
        keep_to_usable_cores()
        super().__init__(
            modules=options.check_modules(modules), opt_class=opt_class, hparams=hparams,
            run_opts=precision.hide_fp16(run_opts, hparams, device.type),
            checkpointer=Checkpointer.adopt(checkpointer, asynchronous=True),
        )
        if hparams is None:
            self.hparams = SimpleNamespace()
        if self.profiler is not None:
            self.profiler = profiler(self.profile_warmup, self.profile_steps, self.hparams.output_folder)
        self.keys = type(self).Keys.read(vars(self.hparams))
        if self.keys.accelerate:
            accelerate(self.modules)
            for features in (value for value in vars(self.hparams).values() if isinstance(value, torch.nn.Module)):
                accelerate(features)  # which have no weights, and so aren't among the modules
        self.rank, self.device_type = ranks.rank(), device.type
        self._find_unused_given = options.given(run_opts, hparams, "find_unused_parameters")
        self._find_unused = self.find_unused_parameters or not self._find_unused_given
        self.precision, self.eval_precision = precision.chosen(run_opts, hparams)
        self.training_ctx = precision.autocast(device.type, self.precision)
        self.evaluation_ctx = precision.autocast(device.type, self.eval_precision)
        self.scaler = precision.Scaler(device.type, enabled=self.precision == "fp16")
        self.nonfinite_count = 0
        self._epoch: Any = None
        self._epoch_step = 0  # optimizer steps done in this epoch
        self._epoch_steps: int | None = None  # that its plan has
        self._last_batch: int | None = None  # the number of an epoch's last batch, where it is known
        self._parallel: parallel.Alone | None = None
        self._steps = Step(device, scaler=self.scaler, flags=FLAGS)
        self._forward_state = ForwardState(self.modules)
        self._buffers = parallel.Buffers(self.modules)
        self._found = SimpleNamespace(outputs=None, raw=None, loss=None)
        self._plan_driven = self._first_step_checked = self._told_dropped = self._validates = self.compiled = False
        self._graph_changes = False  # from step to step, so that each backward looks for what it does not reach
        self._graphs = compiling.CudaGraphs()
        self._budget = StepBudget(device)
        self._progress: Progress | None = None
        self.utilisation: Utilisation | None = None
        """Set before ``fit``, each epoch says how much of the device's arithmetic it used."""
        self._between = Between(self)
        self._parts = Parts(self)
        ema = self.keys.ema
        self._ema = ema if getattr(ema, "decay", 1) > 0 else None
        self._rng = rng.RngState(int(self.keys.seed or 0), lambda: self.optimizer_step, device)
        self.metrics_log = None if self.debug else MetricsLog.of(self.keys)
        self._add_recoverables()

    def _add_recoverables(self) -> None:
        if self.checkpointer is None:
            return
        extra = {"rng": self._rng, "metrics": self.metrics_log, "ema": self._ema,
                 "scaler": self.scaler if self.scaler.is_enabled() else None}
        for name, obj in extra.items():
            if obj is not None:
                self.checkpointer.add_recoverable(name, obj, optional_load=True)

    # ------------------------------------------------------------ setting up

    def on_fit_start(self) -> None:
        """Compile, wrap, make optimizers, go on from the newest checkpoint; as SpeechBrain does."""
        if self.device_type == "cpu":
            compile_kernels(self.modules)
        if ranks.is_main():
            attention_kernel.tell([self.modules], torch.device(self.device), self.precision,
                                  self.keys.accelerate)
        self._compile()
        self._wrap_distributed()
        self.init_optimizers()
        sharding.save_as_if_whole(self.checkpointer)
        if self.checkpointer is not None and self.checkpointer.recover_if_possible() is None:
            for written in self.checkpointer.recoverables.values():
                if hasattr(written, "start_afresh"):
                    written.start_afresh()

    def _compile(self) -> None:
        """``--compile`` in place and by layers (see ``compiling``); ``--jit`` as SpeechBrain does it."""
        if not self.compile:
            super()._compile()
            return
        self.compiled = compiling.compile_blocks(
            self.modules, self.compile_module_keys, self.device, mode=self.compile_mode,
            fullgraph=self.compile_using_fullgraph) > 0
        if self.compiled:
            self._graphs.look(self.device, self.compile_mode)

    def _wrap_distributed(self) -> None:
        """Wrap all modules at once (see ``parallel`` and ``sharding``)."""
        if self.data_parallel_backend:
            super()._wrap_distributed()
        if self._parallel is not None:  # of an earlier fit
            self._parallel.close()
        self._parallel = sharding.wrap(self, self._forward)
        self._steps = Step(torch.device(self.device), self._parallel.world, self.scaler, FLAGS)
        self._forward_state = ForwardState(self.modules)
        self._rng.part()  # now that all have rank 0's weights
        self._parts.begin()

    @property
    def _own_fit_batch(self) -> bool:
        return type(self).fit_batch is not Brain.fit_batch

    @property
    def _averages_itself(self) -> bool:
        return type(self).update_average is not sb.core.Brain.update_average

    @property
    def averages_weights(self) -> bool:
        """A moving average of the weights is what is validated, tested and shipped."""
        return self._ema is not None

    @property
    def _averages_batches(self) -> bool:
        """The training loss is made of what ``fit_batch`` returns, as in SpeechBrain, not of exact sums."""
        return self._own_fit_batch or self._averages_itself

    def init_optimizers(self) -> None:
        """As SpeechBrain's, with the fused form of ``opt_class`` where torch has one."""
        plain, self.opt_class = self.opt_class, self.opt_class and fused(self.opt_class)
        try:
            super().init_optimizers()
        finally:
            self.opt_class = plain
        if self.opt_class is not None and self.device_type != "cpu" and not skips_itself(self.optimizer):
            logger.info("%s can't skip a step on %s by itself, so the host waits for the device once in each step; "
                        "AdamW, Adam and SGD can", type(self.optimizer).__name__, self.device)

    def _active_optimizers(self) -> list[torch.optim.Optimizer]:
        if self.optimizers_dict is not None:
            return list(self.freeze_optimizers(self.optimizers_dict).values())
        return [self.optimizer] if self.opt_class is not None else []

    # ------------------------------------------------------------ one batch

    def fit_batch(self, batch: Any) -> torch.Tensor:
        """One micro-batch; the last of its step also updates. Gives the detached loss, on the device."""
        last = self._closes_step(batch)
        self.on_fit_batch_start(batch, last)
        loss = self._parts.run(batch, last)
        found = self._found  # of a micro-batch in parts: of the last part
        if last:
            self._update()
        self.on_fit_batch_end(batch, found.outputs, found.raw, last)
        return loss.detach().mean

    def try_batch(self, batch: Any) -> bool:
        """Take a step on this micro-batch alone; False where memory did not suffice for it in one piece."""
        return self._parts.fits(batch)

    def _backward(self, batch: Any, last: bool, share: float = 1.0, generators: Any = None) -> Loss:
        """Forward, loss and gradients of a micro-batch, or of a share of one."""
        if not self._steps.started:
            self._forward_state.keep()
        with self.no_sync(not last):
            # so that a culprit can be looked at again
            generators = rng.capture(self.device) if generators is None else generators
            total = self._forward(batch) if self._parallel is None else self._parallel(batch)
            loss = self._found.loss._replace(total=total)
            if share != 1.0 and not isinstance(self._found.raw, Loss):  # a mean over the batch
                loss = loss._replace(total=total * share, count=loss.count * share)
            self._steps.add(loss, Suspect(batch, generators))
            if last:
                self._steps.announce(self._between.flags())
            with self._budget("backward"), parallel.zeroed_if(loss.weightless, self.modules):
                if last:
                    self._budget.exposed_all_reduce(loss.total)
                scaled = self._steps.scaled(loss)
                scaled.backward()
                if self._parallel is not None:
                    self._parallel.complete(scaled)
                if not last:
                    self._graphs.keep_gradients(self.modules)
        return loss

    def _exchange(self) -> None:
        """Sums and gradients of a step whose last backward was within ``no_sync`` go round."""
        self._steps.announce(self._between.flags())
        self._parallel.finish()

    def _forward(self, batch: Any) -> torch.Tensor:
        """The loss of a training batch, to call ``backward`` on."""
        return self.loss_of(batch).total

    def loss_of(self, batch: Any) -> Loss:
        """Forward and loss of a training batch; what else they gave is left in ``self._found``."""
        with self.training_ctx:
            with self._budget("forward"):
                outputs = self.compute_forward(batch, Stage.TRAIN)
            with self._budget("loss"):
                outputs = precision.losses_in_fp32(outputs, self.training_ctx)
                raw = self.compute_objectives(outputs, batch, Stage.TRAIN)
        loss = as_loss(raw, getattr(batch, "weight", 1.0))
        self._found = SimpleNamespace(outputs=outputs, raw=raw, loss=loss)
        return loss

    @contextlib.contextmanager
    def untouched(self) -> Iterator[None]:
        """Within it, losses and their gradients may be computed on stand-ins, and nothing of that is left: no gradient,
        nothing that a layer keeps of a forward, no random number drawn."""
        generators, found = rng.capture(self.device), self._found
        held = [self.modules, *(value for value in vars(self.hparams).values() if isinstance(value, torch.nn.Module))]
        before = {module: {name: dict(value) if name in ("_parameters", "_buffers") else value
                           for name, value in vars(module).items()} for root in held for module in root.modules()}
        try:
            yield
        finally:
            for module, attributes in before.items():
                vars(module).clear()
                vars(module).update(attributes)
            rng.restore(generators, self.device)
            self.modules.zero_grad(set_to_none=True)
            self._found = found

    def _closes_step(self, batch: Any) -> bool:
        if self.step == self._last_batch:
            return True
        return batch.last if self._plan_driven else self.step % self.grad_accumulation_factor == 0

    def _update(self) -> None:
        with self._budget("optimizer"):
            if type(self).optimizers_step is not Brain.optimizers_step:
                self._steps.normalise(self._active_optimizers())
            self.optimizers_step()
        if self._steps.started:  # the recipe's own optimizers_step, all by itself
            self._steps.passed()
            self._epoch_step += 1

    def optimizers_step(self) -> None:
        """Divide and clip all gradients together and update, unless something is not finite."""
        optimizers = self._active_optimizers()
        if not optimizers:
            self._steps.reset()
            return
        if not self._first_step_checked:
            parallel.tell_unreached(self.modules, vars(self.hparams))
            if self._parallel is not None and not self._graph_changes:
                self._parallel.note_unreached()
        self._steps.number = self.optimizer_step
        skipped = self._steps.update(optimizers, self.max_grad_norm)
        self._forward_state.put_back(skipped)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        if self._parallel is not None:
            self._parallel.settle()
        if self._ema is not None:
            self._ema.update(skipped)
        self.optimizer_step += 1
        self._epoch_step += 1

    @contextlib.contextmanager
    def no_sync(self, use: bool = True) -> Iterator[None]:
        """Within it, gradients are accumulated on each rank and not averaged over ranks."""
        with self._parallel.no_sync() if use and self._parallel is not None else contextlib.nullcontext():
            yield

    @torch.no_grad()
    def evaluate_batch(self, batch: Any, stage: Stage) -> torch.Tensor | Loss:
        """The loss of a batch as ``compute_objectives`` gives it, detached, on the device."""
        with self.evaluation_ctx:
            outputs = precision.losses_in_fp32(self.compute_forward(batch, stage=stage), self.evaluation_ctx)
            return self.compute_objectives(outputs, batch, stage=stage).detach()

    # ------------------------------------------------------------ training

    def fit(
        self, epoch_counter: Iterable[int], train_set: Any, valid_set: Any = None,
        progressbar: bool | None = None, train_loader_kwargs: dict | None = None,
        valid_loader_kwargs: dict | None = None,
    ) -> None:
        """Train and validate for each epoch of ``epoch_counter``; see SpeechBrain's ``Brain.fit``."""
        if self.test_only:
            logger.info("Test only mode, skipping training and validation stages.")
            return
        with (ranks.failing_together(), told(self.device), StopSignals() as self._between.signals,
              self._between.letting_go()):
            self._plan_driven = loaders.is_plan_driven(train_set)
            train_set = self._loader(train_set, Stage.TRAIN, train_loader_kwargs)
            valid_loader_kwargs = {"ckpt_prefix": None, **(valid_loader_kwargs or {})}
            valid_set = self._loader(valid_set, Stage.VALID, valid_loader_kwargs)
            self.on_fit_start()
            self._buffers = parallel.Buffers(self.modules)
            self._first_step_checked = False
            self._validates = valid_set is not None
            enable = (not self.noprogressbar if progressbar is None else progressbar) and ranks.is_main()
            for epoch in epoch_counter:
                self._fit_train(train_set=train_set, epoch=epoch, enable=enable)
                self._fit_valid(valid_set=valid_set, epoch=epoch, enable=enable)
                if self._optimizer_step_limit_exceeded or (self.debug and epoch == self.debug_epochs):
                    break
            if self.checkpointer is not None:
                self.checkpointer.wait()

    def _loader(self, dataset: Any, stage: Stage, kwargs: dict | None) -> Any:
        return loaders.made(self, dataset, stage, kwargs or {})

    @property
    def _shares_validation(self) -> bool:
        return self.keys.share_validation

    def _fit_train(self, train_set: Any, epoch: Any, enable: bool) -> None:
        train(self, train_set, epoch, enable)

    @property
    def _learning_rate(self) -> Any:
        optimizers = list((self.optimizers_dict or {}).values())
        return optimizers[0].param_groups[0]["lr"] if optimizers else None

    def _count_in(self, fact: Facts) -> None:
        """A step's values have come from the device."""
        if not self._averages_batches:
            self._average.add(fact.total, fact.count)
        self._progress.step(fact, self._learning_rate)
        self.on_step_known(fact)

    def on_step_known(self, facts: Facts) -> None:
        """Called with each optimizer step's losses and norm, the same on all ranks, once they have come to the host."""

    # ------------------------------------------------------------ validation and test

    def _fit_valid(self, valid_set: Any, epoch: Any, enable: bool) -> None:
        if valid_set is not None:
            validate(self, valid_set, epoch, enable)

    def evaluate(
        self, test_set: Any, max_key: str | None = None, min_key: str | None = None,
        progressbar: bool | None = None, test_loader_kwargs: dict | None = None,
    ) -> float:
        """Load the best checkpoint and go through ``test_set`` once; gives the average loss."""
        with ranks.failing_together(), told(self.device):
            signals, self._between.signals = self._between.signals, None  # only fit catches them
            test_set = self._loader(test_set, Stage.TEST, {**(test_loader_kwargs or {}), "ckpt_prefix": None})
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            self.on_stage_start(Stage.TEST, epoch=None)
            enable = (not self.noprogressbar if progressbar is None else progressbar) and ranks.is_main()
            with torch.no_grad():
                loss = evaluate(self, test_set, Stage.TEST, "test", enable)
                self.on_stage_end(Stage.TEST, loss, None)
            self.step, self._between.signals = 0, signals
            return loss

    def gather(self, rows: Iterable) -> list:
        """Every rank's rows in one list, the same on every rank; all ranks must call it."""
        return [row for part in ranks.gather_objects(list(rows)) for row in part]

    # ------------------------------------------------------------ what is saved

    @property
    def avg_train_loss(self) -> float:
        """Mean training loss of the epoch so far, over all ranks; reading it waits for the device."""
        pending = self._steps.peek() if hasattr(self, "_steps") and not self._averages_batches else []
        return self._average.value((fact.total, fact.count) for fact in pending)

    @avg_train_loss.setter
    def avg_train_loss(self, value: float) -> None:
        self._average.set(float(value))

    @mark_as_saver
    def _save(self, path: str | os.PathLike) -> None:
        """SpeechBrain's three keys, and what going on exactly needs."""
        state = {
            "step": self.step, "avg_train_loss": self.avg_train_loss, "optimizer_step": self.optimizer_step,
            "epoch_step": self._epoch_step, "epoch_steps": self._epoch_steps,
            "loss_sums": [self._average.total, self._average.count],
            "nonfinite_count": self.nonfinite_count, "graph_changes": self._graph_changes, **self._parts.state_dict(),
        }
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump(state, out)

    @mark_as_loader
    def _recover(self, path: str | os.PathLike, end_of_epoch: bool) -> None:
        with open(path, encoding="utf-8") as file:
            state = yaml.safe_load(file)
        self.optimizer_step = state.get("optimizer_step", state["step"])
        self._parts.load_state_dict(state)
        self._graph_changes = state.get("graph_changes", False)
        if end_of_epoch:
            state = {"step": 0, "avg_train_loss": 0.0}
        self.step, self._epoch_step = state["step"], state.get("epoch_step", 0)
        self._epoch_steps = state.get("epoch_steps")
        self.nonfinite_count = state.get("nonfinite_count", 0)
        self.avg_train_loss = state["avg_train_loss"]
        self._average.total, self._average.count = state.get("loss_sums", (0.0, 0.0))
