"""SpeechBrain's Brain, which trains the same on any number of devices and survives failures."""

from __future__ import annotations

import contextlib
import logging
import math
import os
import time
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, ClassVar

import speechbrain as sb
import torch
import yaml
from speechbrain.core import Stage
from speechbrain.utils.autocast import AMPConfig, TorchAutocast
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from speechbrain.utils.run_opts import RunOptions

from sbkit.compat import loaders
from sbkit.compat.hooks import BrainHooks, objectives_of
from sbkit.compat.script_loop import ScriptTrainer
from sbkit.data.loader import plain_worker_errors
from sbkit.errors import SbkitError, first_line
from sbkit.nn import attention_kernel, guard, sync_batch_norm
from sbkit.nn.accelerate import accelerate, compile_kernels
from sbkit.nn.fast.norm import flatten_norms
from sbkit.nn.finite import keep_finite
from sbkit.nn.tf32 import allow_tf32
from sbkit.recipe.parts import ParameterGroups, trained_parts
from sbkit.recipe.speed import Utilisation
from sbkit.recipe.values import unwrapped
from sbkit.system import memory
from sbkit.system.console import outlast_terminal
from sbkit.system.cores import limit_torch_threads
from sbkit.train import compiling, options, precision, rates, rng, script_start
from sbkit.train.batches import DataSource, MicroBatch
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.adapted import Adapted
from sbkit.train.distributed import ranks, sharding
from sbkit.train.distributed.exchange import GradientExchange
from sbkit.train.distributed.parallel import Replicated, Sharded, Single
from sbkit.train.forward_state import restoring
from sbkit.train.freezing import Freezing
from sbkit.train.keys import ScriptKeys, TrainKeys
from sbkit.train.memory.oom import is_out_of_memory, oom_as_user_error, release
from sbkit.train.monitor.display import StageDisplay
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.optim import fused
from sbkit.train.state import TrainState, state_view
from sbkit.train.step import Loss, StepResult, is_last, losses_in_fp32, one_number, skips_itself, update
from sbkit.train.trainer import Trainer

logger = logging.getLogger(__name__)


@register_checkpoint_hooks
class Brain(sb.core.Brain):
    """A drop-in for ``speechbrain.core.Brain``: the same constructor, hooks, flags and files.

    Differences for recipe authors:

    - ``compute_objectives`` may return ``sbkit.Loss(total, count)`` instead of a scalar. The gradient of an
      optimizer step is then that of the mean over the whole step, over all ranks and micro-batches.
    - ``fit`` also takes a train set with ``.at(epoch, step)`` and ``.steps(epoch)`` whose batches say themselves where
      an optimizer step ends (``sbkit.data.loader.TrainLoader``, ``sbkit.data.batch.PlannedBatch``), and evaluation sets
      that yield only this rank's share (``EvalLoader``). ``self.gather`` collects the results of all ranks.
    - ``fit_batch`` and ``evaluate_batch`` return losses that stay on the device, so the host does not wait for it.
    - ``compute_objectives`` gets fp32 for every ``precision``, and runs under autocast as in SpeechBrain: a layer
      called there computes in ``precision``, a loss in fp32.
    - A step with a loss or gradient that is not finite is skipped on all ranks.
    - On several ranks a step sees the same utterances as on one. Its gradient differs by rounding and by random
      masks: each rank has its own random numbers on its device and in numpy (dropout, SpecAugment). Python's
      ``random``, and torch on the host of a GPU, give the same numbers on all ranks, for decisions that must agree.

    ``self.keys`` has the values of the recipe's keys (see ``sbkit.train.keys``). Unless ``share_validation`` is true,
    every rank evaluates all of an ordinary dataset, as in SpeechBrain, because recipes compute their metrics on each
    rank.
    """

    Keys: ClassVar[type[TrainKeys]] = ScriptKeys
    capturable: ClassVar[bool] = False
    """Whether a step can be captured as a CUDA graph. Each class says so for itself, as an override may need Python."""
    step, optimizer_step, nonfinite_count = map(state_view, ("step", "optimizer_step", "nonfinite_count"))
    opt_class: Callable[..., torch.optim.Optimizer] | None
    profiler: torch.profiler.profile | None

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A script defines its class before it reads its command line, and so before the first error it can make.
        if not cls.__module__.startswith("sbkit."):
            script_start.prepare()

    def __init__(self, modules: Mapping[str, torch.nn.Module] | None = None,
                 opt_class: Callable[..., torch.optim.Optimizer] | None = None,
                 hparams: Mapping[str, Any] | None = None, run_opts: RunOptions | Mapping[str, Any] | None = None,
                 checkpointer: sb.utils.checkpoints.Checkpointer | None = None):
        script_start.prepare()
        self.train_state = TrainState()
        run_opts, hparams = options.clean(run_opts, hparams)
        device = torch.device(options.pick(run_opts, hparams, "device"))
        ranks.init(device, options.pick(run_opts, hparams, "distributed_backend"))
        limit_torch_threads()
        super().__init__(
            modules=options.check_modules(modules), opt_class=options.check_opt_class(opt_class), hparams=hparams,
            run_opts=precision.hide_fp16(run_opts, hparams, device.type),
            checkpointer=Checkpointer.adopt(checkpointer, asynchronous=True),
        )
        if hparams is None:
            self.hparams = SimpleNamespace()
        if self.profiler is not None:
            self.profiler = torch.profiler.profile(  # SpeechBrain's own has Python stacks, too
                schedule=torch.profiler.schedule(wait=0, warmup=self.profile_warmup, active=self.profile_steps,
                                                 repeat=1), record_shapes=True,
                on_trace_ready=torch.profiler.tensorboard_trace_handler(
                    os.path.join(self.hparams.output_folder, "profiler_logs")))
        self.keys = type(self).Keys.read(vars(self.hparams))
        allow_tf32(self.keys.tf32)
        for module in self.layer_roots:
            flatten_norms(module)
            if self.keys.accelerate:
                accelerate(module)
        self.rank, self.device_type = ranks.rank(), device.type
        self.precision, self.eval_precision = precision.chosen(run_opts, hparams)
        self.training_ctx, self.evaluation_ctx = (
            TorchAutocast(device_type=device.type, dtype=AMPConfig.from_name(name).dtype)  # nothing for fp32
            for name in (self.precision, self.eval_precision))
        if self.precision == "fp16" and device.type == "cpu":
            logger.warning("fp16 is meant for GPUs; on this CPU it trains in fp16 all the same")
        self.scaler = precision.Scaler(device.type, enabled=self.precision == "fp16")
        self.compiled = False
        self.utilisation: Utilisation | None = None
        """With it, each epoch of ``fit`` reports the share of the device's peak FLOPs that it used."""
        self.metrics_log = None if self.debug else MetricsLog.of(self.keys, vars(self.hparams))
        self._rng = rng.RngState(int(self.keys.seed or 0), lambda: self.optimizer_step, device, self.layer_roots)
        parts = ParameterGroups(self.modules, vars(self.hparams))
        parts.values_by_path(self.keys.learning_rates or {}, "learning_rates")  # fails now if a name fits nothing
        if self._scales_rates and type(self).init_optimizers is not Brain.init_optimizers:
            raise SbkitError(f"{type(self).__name__} creates its own optimizers, so learning_rates and layer_decay "
                             "would have no effect", hint="remove them from the recipe")
        # What trains later is frozen in ``fit``, so that the cost estimate counts it.
        freezing = Freezing(self.modules, parts, self.keys.freeze)
        self._overridden = [name for name in ("fit_batch", "optimizers_step", "update_average",
                                                  "check_loss_isfinite", "_fit_train")
                            if getattr(type(self), name) is not getattr(Brain, name)]
        scaling = precision.Scaled(self.scaler, device) if self.scaler.is_enabled() else precision.Unscaled(device)
        parts_of_trainer: dict[str, Any] = {
            "hooks": BrainHooks(self), "device": device, "state": self.train_state, "freezing": freezing,
            "generators": self._rng, "precision": scaling, "moving_average": self.keys.moving_average}
        self.trainer = ScriptTrainer(self, self._overridden, **parts_of_trainer) if self._overridden else \
            Trainer(**parts_of_trainer)
        self._factors: dict[str, float] = {}
        extra = {"rng": self._rng, "metrics": self.metrics_log, "ema": self.trainer.moving_average,
                 "scaler": self.scaler if self.scaler.is_enabled() else None}
        for name, obj in extra.items():
            if obj is not None and self.checkpointer is not None:
                self.checkpointer.add_recoverable(name, obj, optional_load=True)

    @property
    def layer_roots(self) -> list[torch.nn.Module]:
        """The modules, and what lies beside them: features have no weights, so they aren't among the modules."""
        return [self.modules, *(value for value in vars(self.hparams).values() if isinstance(value, torch.nn.Module))]

    @property
    def _scales_rates(self) -> bool:
        return bool(self.keys.learning_rates) or self.keys.layer_decay != 1

    # ------------------------------------------------------------ setting up

    def on_fit_start(self) -> None:
        """Compile and wrap the modules, make the optimizers, resume from the newest checkpoint."""
        if self.device_type == "cpu":
            compile_kernels(self.modules)
        if ranks.is_main():
            attention_kernel.log_kernel([self.modules], torch.device(self.device), self.precision, self.keys.accelerate)
        self._compile()
        self.trainer.freezing.update(self.optimizer_step)
        self._wrap_distributed()
        self.init_optimizers()
        self.trainer.set_up(self.trainer.parallel)  # there are optimizers now
        parts = ParameterGroups(self.modules, vars(self.hparams))
        table = trained_parts(parts, self.trainer.freezing.until, self._factors, self.peak_rate)
        if table is not None and ranks.is_main():  # not all learn at one rate
            logger.info("%s", table.text())
        if self.checkpointer is None:
            return
        for name, obj in self.checkpointer.recoverables.items():
            if sharding.is_sharded(obj):  # so that its checkpoints are the same as those of full parameters
                self.checkpointer.custom_save_hooks[name] = sharding.save_full
                self.checkpointer.custom_load_hooks[name] = sharding.load_full
        if self.checkpointer.recover_if_possible() is None:
            for written in self.checkpointer.recoverables.values():
                if hasattr(written, "start_afresh"):
                    written.start_afresh()

    @property
    def peak_rate(self) -> float | None:
        """The highest learning rate of the run, before the factors of parts; None if unknown."""
        rate = self.trainer.learning_rate
        return None if rate is None else float(rate)

    def rate_factors(self) -> dict[str, float]:
        """Return the factors of the learning rate of parameters by path, without factors of 1."""
        if not self._scales_rates:
            return {}
        parts = ParameterGroups(self.modules, vars(self.hparams))
        found = parts.values_by_path(self.keys.learning_rates or {}, "learning_rates")
        if self.keys.layer_decay != 1:
            for path, depth in rates.depths(self, parts).items():
                found[path] = found.get(path, 1.0) * self.keys.layer_decay ** depth
        return {path: float(factor) for path, factor in found.items() if factor != 1}

    def stacked_layers(self) -> Sequence[torch.nn.Module] | None:
        """Return the layers that ``layer_decay`` counts; None: the list of equal layers with the most parameters."""
        return None

    def _compile(self) -> None:
        """Compile layers in place for ``--compile`` (see ``compiling``); leave ``--jit`` to SpeechBrain."""
        if not self.compile:
            try:
                super()._compile()
            except Exception as error:
                raise SbkitError(f"--jit: {first_line(error).rstrip('.:')}", hint="--compile may do") from error
            return
        self.compiled = compiling.compile_blocks(
            self.modules, self.compile_module_keys, self.device, mode=self.compile_mode,
            fullgraph=self.compile_using_fullgraph) > 0

    def _wrap_distributed(self) -> None:
        """Give all ranks the same weights, and the trainer what keeps them the same.

        One exchange or FSDP is around all modules, so ``self.modules.x`` stays the module itself.
        """
        if self.data_parallel_backend:
            super()._wrap_distributed()
        trainer, keys = self.trainer, self.keys
        if trainer.parallel.exchange is not None:  # of an earlier fit
            trainer.parallel.exchange.close()
        trainer.set_up(Single(trainer.compute))
        for name, module in self.modules.items() if ranks.world_size() > 1 else ():
            if any(isinstance(layer, torch.nn.modules.batchnorm._BatchNorm) for layer in module.modules()):
                self.modules[name] = sync_batch_norm.convert(module)  # as SpeechBrain does on a GPU
        for module in self.layer_roots:  # before FSDP, which derives classes too
            keep_finite(module)
        if keys.activation_checkpointing:
            sharding.checkpoint_activations(self.modules, keys.activation_checkpointing)
        trained = [(name, parameter) for name, parameter in self.modules.named_parameters() if parameter.requires_grad]
        if ranks.world_size() > 1 and trained:
            if keys.fsdp:
                saved = [] if self.checkpointer is None else self.checkpointer.recoverables.values()
                optimizer = unwrapped(self.opt_class)[0]
                unshardable = {
                    "a recipe's own fit_batch": "fit_batch" in self._overridden,
                    "ema": trainer.moving_average is not None,
                    "freeze with a number of steps": bool(trainer.freezing.unfreeze_steps),
                    "checkpoints of adapters alone (Adapted)": any(isinstance(each, Adapted) for each in saved),
                    f"the optimizer {getattr(optimizer, '__name__', optimizer)} (AdamW can)":
                        getattr(optimizer, "needs_whole_parameters", False)}
                others = [name for name, there in unshardable.items() if there]
                if others:
                    raise SbkitError(f"fsdp can't be used together with {others[0]}", hint="remove one of them")
            ranks.take_from_main([*self.modules.parameters(), *self.modules.buffers()])
            if keys.fsdp:
                sharded = sharding.ShardedModules(self.modules, trainer.compute, trainer.device, keys.fsdp)
                trainer.set_up(Sharded(sharded))
            else:
                own = bool(self._overridden)  # with several backwards in a step, perhaps, each of other parameters
                exchange = GradientExchange(self.modules.named_parameters(), mean=own,
                                            agree_each_time=own or self.find_unused_parameters)
                trainer.set_up(Replicated(trainer.compute, exchange))
        self._rng.seed_rank()  # only now: all ranks have rank 0's weights

    def init_optimizers(self) -> None:
        """Create the optimizers as SpeechBrain does, in torch's fused implementation if there is one."""
        plain, self.opt_class = self.opt_class, self.opt_class and fused(self.opt_class)
        if self._scales_rates and self.opt_class is not None:
            self._factors = self.rate_factors()
            self.opt_class = rates.grouped(self.opt_class, self._factors,
                                           ParameterGroups(self.modules, vars(self.hparams)))
        try:
            with self.trainer.freezing.all_trainable():
                super().init_optimizers()
        finally:
            self.opt_class = plain
        if self.opt_class is not None and self.device_type != "cpu" and not skips_itself(self.optimizer):
            logger.info("%s can't skip a step on %s by itself, so the host waits for the device in each step; AdamW, "
                        "Adam and SGD avoid this", type(self.optimizer).__name__, self.device)

    # ------------------------------------------------------------ one batch

    def fit_batch(self, batch: MicroBatch) -> torch.Tensor:
        """Train on one batch as SpeechBrain does, and return its detached loss.

        ``fit`` calls it only if a recipe overrides a part of SpeechBrain's step (see ``ScriptTrainer``); otherwise it
        takes whole steps (see ``Trainer.train_step``).
        """
        last = is_last(batch)
        should_step = self.step % self.grad_accumulation_factor == 0 if last is None else last
        self.on_fit_batch_start(batch, should_step)
        with self.no_sync(not should_step):
            outputs, objectives, loss = self.trainer.parallel.loss_of(batch)
            count = torch.as_tensor(loss.count, device=loss.total.device)
            mean = loss.total / count.where(count > 0, 1)  # a dummy batch has no units, and its gradient is 0
            scaled = self.scaler.scale(mean / (self.grad_accumulation_factor if last is None else batch.micros))
            self.check_loss_isfinite(scaled)
            scaled.backward()
        if should_step:
            self.optimizers_step()
        self.on_fit_batch_end(batch, outputs, objectives, should_step)
        return loss.mean.detach()

    def optimizers_step(self) -> None:
        """Clip each optimizer's gradients and update, unless something is not finite; called by ``fit_batch``."""
        eager = self.trainer.eager
        if not self.trainer.hooks.updates_weights:
            return
        scale = self.scaler.factor()
        factor = torch.ones((), device=eager.device) if scale is None else 1 / scale
        optimizers, rates_on_device = eager.prepare_update()
        with eager.keeping_frozen(optimizers):
            _, skipped = update(optimizers, factor, self.max_grad_norm, rates=rates_on_device)
            eager.follow_update(skipped, skipped)
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
        self.optimizer_step += 1

    @contextlib.contextmanager
    def no_sync(self, use: bool = True) -> Iterator[None]:
        """Accumulate gradients on each rank inside this context, without averaging them over ranks."""
        with self.trainer.parallel.accumulating() if use else contextlib.nullcontext():
            yield

    @torch.no_grad()
    def evaluate_batch(self, batch: MicroBatch, stage: Stage) -> torch.Tensor | Loss:
        """Return the detached result of ``compute_objectives`` for a batch, on the device."""
        with self.evaluation_ctx:
            outputs = losses_in_fp32(self.compute_forward(batch, stage=stage), self.evaluation_ctx)
            loss = objectives_of(self, outputs, batch, stage)
            one_number(loss, "compute_objectives", tensor=True)
            return loss.detach()

    def loss_of(self, batch: MicroBatch) -> Loss:
        """Return the loss of a training batch, without backward or update, and without changing the Brain."""
        return self.trainer.parallel.loss_of(batch).loss

    def try_batch(self, batch: MicroBatch) -> bool:
        """Take a step on this micro-batch alone; return False, without an update, if it did not fit into memory."""
        try:
            self.trainer.train_step(iter([(batch, True)]))
            self.trainer.take_results()
            return True
        except Exception as error:
            if not is_out_of_memory(error):
                raise
        self.zero_grad(set_to_none=True)
        release(self.trainer.device)  # outside of the handler, whose frames hold the step's tensors
        return False

    @property
    def captures_steps(self) -> bool:
        """Whether steps are to be captured as CUDA graphs on a GPU: as the recipe, or by default the class says."""
        asked = vars(type(self)).get("capturable", False) if self.keys.graphs is None else self.keys.graphs
        return bool(asked) and not (ranks.world_size() > 1 and (self.keys.fsdp or self.find_unused_parameters))

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Undo on exit all changes by computing losses and gradients.

        These are gradients, state that layers update in forward, a task's attributes, such as a running mean, and
        random number generators.
        """
        own = self.__dict__.copy()
        try:
            with restoring(self.layer_roots, self.device):
                yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(own)

    # ------------------------------------------------------------ training

    def fit(self, epoch_counter: Iterable[int], train_set: DataSource, valid_set: DataSource | None = None,
            progressbar: bool | None = None, train_loader_kwargs: dict[str, Any] | None = None,
            valid_loader_kwargs: dict[str, Any] | None = None) -> None:
        """Train and validate for each epoch of ``epoch_counter``; see SpeechBrain's ``Brain.fit``."""
        if self.test_only:
            logger.info("Test only mode, skipping training and validation stages.")
            if self.checkpointer is not None and not self.checkpointer.list_checkpoints() and ranks.is_main():
                logger.warning("There is no checkpoint in %s, so a test is of a model that learnt nothing here",
                               self.checkpointer.checkpoints_dir)
            return
        outlast_terminal()
        with ranks.failing_together(), oom_as_user_error(self.device), plain_worker_errors(), self.trainer.fitting():
            train_set = loaders.resolve_loader(self, train_set, Stage.TRAIN, train_loader_kwargs or {})
            valid_set = loaders.resolve_loader(self, valid_set, Stage.VALID,
                                               {"ckpt_prefix": None, **(valid_loader_kwargs or {})})
            self.on_fit_start()
            if self.opt_class is self.optimizers_dict is None and not self._overridden:
                logger.warning("Nothing is trained: opt_class is None, and init_optimizers sets no optimizers_dict")
            self.trainer.begin_fit(validates=valid_set is not None)
            enable = (not self.noprogressbar if progressbar is None else progressbar) and ranks.is_main()
            epoch = None
            for epoch in epoch_counter:
                with self.trainer.keeping_epoch(epoch):
                    self._fit_train(train_set=train_set, epoch=epoch, enable=enable)
                    self._fit_valid(valid_set=valid_set, epoch=epoch, enable=enable)
                if self._optimizer_step_limit_exceeded or (self.debug and epoch == self.debug_epochs):
                    break
            if epoch is None and ranks.is_main() and not getattr(epoch_counter, "should_stop", False):
                logger.warning("Nothing is left to train: all epochs are done; a larger number of them trains on")
            if self.checkpointer is not None:
                self.checkpointer.wait()

    def _fit_train(self, train_set: DataSource, epoch: int, enable: bool) -> None:
        self.trainer.train_epoch(train_set, epoch, enable)

    def on_step_known(self, result: StepResult) -> None:
        """Handle the losses and gradient norm of an optimizer step, the same on all ranks, once the host knows them."""

    # ------------------------------------------------------------ around the hooks
    # A task, which is between this class and a recipe's, overrides these, so that a recipe's hooks replace nothing and
    # need not call super().

    def open_step(self, number: int) -> None:
        """Prepare the optimizer step of this number, counted from 1; called before the first and after each."""

    def write_numbers(self, number: int) -> None:
        """Write the numbers that kernels of this optimizer step read, and that depend on it (``DeviceNumbers``)."""

    def graph_key(self) -> Hashable:
        """Return what decides, besides the shapes of a training batch, which kernels the next step has."""
        return ()

    def end_step(self, number: int) -> None:
        """End the optimizer step of this number, whose result is not known yet, before the next one is opened."""

    def close_step(self, result: StepResult) -> None:
        """Process the result of a step."""
        self.on_step_known(result)

    def open_stage(self, stage: Stage, epoch: int | None = None) -> None:
        """Begin a stage."""
        self.on_stage_start(stage, epoch)

    def close_batch(self, batch: MicroBatch, stage: Stage) -> None:
        """Process an evaluated batch."""

    def close_stage(self, stage: Stage, loss: float, epoch: int | None = None) -> None:
        """End a stage, with its average loss."""
        self.on_stage_end(stage, loss, epoch)

    # ------------------------------------------------------------ validation and test

    @torch.no_grad()
    def _fit_valid(self, valid_set: DataSource | None, epoch: int, enable: bool) -> None:
        """Validate and call the hooks around it; a run that should stop saves the end of the training instead."""
        if valid_set is None:
            return
        self.open_stage(Stage.VALID, epoch)
        loss = self.pass_over(valid_set, Stage.VALID, f"valid {epoch}", enable)
        self.step = 0
        ranks.barrier("validated")
        if ranks.any_of({"stop": self.trainer.asked_to_stop})["stop"]:
            self.train_state.back_to_training()
            self.trainer.save_and_stop()
        self.close_stage(Stage.VALID, loss, epoch)

    def evaluate(self, test_set: DataSource, max_key: str | None = None, min_key: str | None = None,
                 progressbar: bool | None = None, test_loader_kwargs: dict[str, Any] | None = None) -> float:
        """Load the best checkpoint, evaluate ``test_set`` and return the average loss."""
        outlast_terminal()
        with ranks.failing_together(), oom_as_user_error(self.device), plain_worker_errors(), self.trainer.evaluating():
            test_set = loaders.resolve_loader(self, test_set, Stage.TEST,
                                              {**(test_loader_kwargs or {}), "ckpt_prefix": None})
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            self.open_stage(Stage.TEST)
            enable = (not self.noprogressbar if progressbar is None else progressbar) and ranks.is_main()
            with torch.no_grad():
                loss = self.pass_over(test_set, Stage.TEST, "test", enable)
                self.close_stage(Stage.TEST, loss)
            self.step = 0
            return loss

    def pass_over(self, loader: DataSource, stage: Stage, name: str, show: bool) -> float:
        """Evaluate each batch of a loader, with averaged weights if the run keeps them, and return the average loss.

        Call it without gradients. If the loader yields this rank's share, the average is exact over all ranks. No rank
        waits for another before the end, so shares may differ in size. A stop signal ends the pass early.

        name, show : what to call the progress bar, and whether to show it
        """
        trainer = self.trainer
        if self.device_type == "cpu":
            memory.trim()  # before the loader forks
        self.step, average = 0, 0.0
        share, own_average = loaders.is_share(loader), "update_average" in self._overridden
        sums = torch.zeros(2, device=self.device)  # of losses, and their count: nothing waits for the device
        colour = self.tqdm_barcolor[stage.name.lower()] or None
        display = StageDisplay(name, loaders.length(loader), show=show, colour=colour)
        gathered = trainer.parallel.gathered()
        averaged = contextlib.nullcontext() if trainer.moving_average is None else trainer.moving_average.swapped()
        self.modules.eval()
        # Also layers that only ``hparams`` holds: many recipes leave ``normalize`` out of ``modules``. Its statistics
        # would include dev data, and ranks with shares of different sizes would wait for each other in it.
        held = [layer for root in self.layer_roots[1:] for layer in root.modules() if layer.training]
        with contextlib.ExitStack() as after, gathered, averaged, display:
            for layer in held:
                layer.training = False
                after.callback(setattr, layer, "training", True)
            for batch in loaders.iterator_of(loaders.on_device(loader, loader, self.device) if share else loader):
                if trainer.asked_to_stop:
                    break
                self.step += 1
                loss = self.evaluate_batch(batch, stage=stage)
                self.close_batch(batch, stage)
                if own_average:
                    average = self.update_average(one_number(loss, "evaluate_batch"), average)
                else:
                    loss = loss if isinstance(loss, Loss) else Loss(one_number(loss, "evaluate_batch"), 1.0)
                    total = loss.total.detach().to(sums).reshape(())
                    count = loss.count if isinstance(loss.count, torch.Tensor) else torch.full_like(total, loss.count)
                    sums += torch.where(torch.isfinite(total), torch.stack([total, count.to(total).reshape(())]), 0.0)
                guard.poll()
                display.count(batch)
                if time.monotonic() >= display.draw_at:
                    display.draw()
                if self.debug and self.step == self.debug_batches:
                    break
            guard.poll(wait=True)  # raises now if a label was invalid
        over_ranks = share or self.shares_validation
        if over_ranks:
            ranks.barrier(name)
        if own_average:
            return average
        summed, counted = (ranks.sum_across(sums) if over_ranks else sums).tolist()
        return summed / counted if counted else math.nan  # nothing was counted, such as clips too short for a loss

    @property
    def shares_validation(self) -> bool:
        """Whether each rank evaluates its share of an ordinary dataset, and not all of it."""
        return isinstance(self.keys, ScriptKeys) and self.keys.share_validation

    def gather(self, rows: Iterable[Any]) -> list[Any]:
        """Return the rows of all ranks in one list, on every rank; all ranks must call it."""
        return [row for part in ranks.gather_objects(list(rows)) for row in part]

    # ------------------------------------------------------------ what is saved

    @property
    def avg_train_loss(self) -> float:
        """The mean training loss of the epoch so far, over all ranks; reading it waits for the device."""
        return self.trainer.mean_loss()

    @avg_train_loss.setter
    def avg_train_loss(self, value: float) -> None:
        self.train_state.mean_loss.set(float(value))

    @mark_as_saver
    def _save(self, path: str | os.PathLike[str]) -> None:
        with open(path, "w", encoding="utf-8") as out:
            yaml.safe_dump(self.train_state.state_dict(self.avg_train_loss), out)

    @mark_as_loader
    def _recover(self, path: str | os.PathLike[str], end_of_epoch: bool) -> None:
        with open(path, encoding="utf-8") as file:
            self.train_state.load_state_dict(yaml.safe_load(file), end_of_epoch)
