"""SpeechBrain's Brain, which trains the same on any number of devices and survives failures."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import speechbrain as sb
import torch
import yaml
from speechbrain.core import Stage
from speechbrain.utils.autocast import AMPConfig, TorchAutocast
from speechbrain.utils.checkpoints import mark_as_loader, mark_as_saver, register_checkpoint_hooks
from speechbrain.utils.run_opts import RunOptions
from torch.optim import Optimizer

from sbkit.compat import loaders, script_loop, script_run
from sbkit.compat.drawn_ahead import SpeechBrainDrawnAhead
from sbkit.compat.evaluation_pass import evaluation_pass
from sbkit.compat.hooks import BrainHooks, objectives_of
from sbkit.compat.script_record import ScriptRecord
from sbkit.compat.wrapping import share_training
from sbkit.data.loader import plain_worker_errors
from sbkit.errors import SbkitError, first_line
from sbkit.nn import attention_kernel
from sbkit.nn.accelerate import accelerate, compile_kernels
from sbkit.nn.fast.norm import flatten_norms
from sbkit.nn.tf32 import allow_tf32
from sbkit.recipe.parts import ParameterGroups, trained_parts
from sbkit.recipe.speed import Utilisation
from sbkit.system import disk
from sbkit.system.console import outlast_terminal
from sbkit.system.cores import limit_torch_threads
from sbkit.train import compiling, options, precision, rate_factors, rng, script_start
from sbkit.train.batches import DataSource, MicroBatch
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.distributed import ranks, sharding
from sbkit.train.forward_state import restoring
from sbkit.train.freezing import Freezing
from sbkit.train.keys import ScriptKeys, TrainKeys
from sbkit.train.loss import Loss, losses_in_fp32, one_number
from sbkit.train.memory.oom import is_out_of_memory, oom_as_user_error, release
from sbkit.train.monitor.metrics import MetricsLog
from sbkit.train.optim import fused
from sbkit.train.optimizer_trial import mistakes_of
from sbkit.train.results import StepResult
from sbkit.train.state import TrainState, state_view
from sbkit.train.trainer import Trainer
from sbkit.train.update import skips_itself

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
    step = state_view("batches_in_epoch")
    optimizer_step = state_view("optimizer_step")
    nonfinite_count = state_view("failed_in_epoch")
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
        self.rank = ranks.rank()
        self.device_type = device.type
        limit_torch_threads()
        super().__init__(
            modules=options.check_modules(modules), opt_class=options.check_opt_class(opt_class), hparams=hparams,
            run_opts=options.hide_fp16(run_opts, hparams, device.type),
            checkpointer=Checkpointer.adopt(checkpointer, asynchronous=True),
        )
        if hparams is None:
            self.hparams = SimpleNamespace()
        self.keys = type(self).Keys.read(vars(self.hparams))
        if self.profiler is not None:
            self.profiler = self._profiler_without_stacks()
        self._prepare_layers()
        self._choose_precision(*options.precisions(run_opts, hparams))

        self.compiled = False
        self.latest_loader: DataSource | None = None
        """Of the latest validation or test: ``sbkit.export`` compares on it."""
        self.utilisation: Utilisation | None = None
        """With it, each epoch of ``fit`` reports the share of the device's peak FLOPs that it used."""
        logs = not self.debug and script_run.current() is None
        self.metrics_log = MetricsLog.of(self.keys, vars(self.hparams)) if logs else None
        self._rng = rng.RngState(int(self.keys.seed or 0), lambda: self.optimizer_step, device,
                                 SpeechBrainDrawnAhead(self.layer_roots, device))
        self._rate_factors: dict[str, float] = {}
        """The factors of parameters by path, once there are optimizers."""
        self.overridden_methods = script_loop.overridden_methods(type(self), Brain)
        """The methods of SpeechBrain's step that the class overrides."""
        self.trainer = self._make_trainer(device)
        self._save_with_checkpoints()

    def _profiler_without_stacks(self) -> torch.profiler.profile:
        """SpeechBrain's own records Python's stacks, which takes longer than what it measures."""
        schedule = torch.profiler.schedule(wait=0, warmup=self.profile_warmup, active=self.profile_steps, repeat=1)
        folder = os.path.join(self.hparams.output_folder, "profiler_logs")
        return torch.profiler.profile(schedule=schedule, record_shapes=True,
                                      on_trace_ready=torch.profiler.tensorboard_trace_handler(folder))

    def _prepare_layers(self) -> None:
        allow_tf32(self.keys.tf32)
        for module in self.layer_roots:
            flatten_norms(module)
            if self.keys.accelerate:
                accelerate(module)

    def _choose_precision(self, training: str, evaluation: str) -> None:
        self.precision, self.eval_precision = training, evaluation
        # An autocast without a type, as of fp32, does nothing.
        self.training_ctx = TorchAutocast(self.device_type, dtype=AMPConfig.from_name(training).dtype)
        self.evaluation_ctx = TorchAutocast(self.device_type, dtype=AMPConfig.from_name(evaluation).dtype)
        self.scaler = precision.Scaler(self.device_type, enabled=training == "fp16")
        if training == "fp16" and self.device_type == "cpu":
            logger.warning("fp16 is meant for GPUs; this run trains in fp16 on a CPU, as requested")

    def _make_trainer(self, device: torch.device) -> Trainer:
        parts = ParameterGroups(self.modules, vars(self.hparams))
        parts.values_by_path(self.keys.learning_rates or {}, "learning_rates")  # fails now if a name fits nothing
        if self._scales_rates and type(self).init_optimizers is not Brain.init_optimizers:
            raise SbkitError("own-optimizers",
                             f"{type(self).__name__} creates its own optimizers, so learning_rates and layer_decay "
                             "would have no effect", hint="remove them from the recipe")
        objects: dict[str, Any] = {
            "hooks": BrainHooks(self),
            "device": device,
            "state": self.train_state,
            # What trains later is frozen in ``fit``, so that the cost estimate counts it.
            "freezing": Freezing(self.modules, parts, self.keys.freeze),
            "generators": self._rng,
            "precision": precision.Scaled(self.scaler) if self.scaler.is_enabled() else precision.Unscaled(device),
            "moving_average": self.keys.moving_average}
        if self.overridden_methods:
            return script_loop.ScriptTrainer(self, self.overridden_methods, **objects)
        return Trainer(**objects)

    def _save_with_checkpoints(self) -> None:
        """Have checkpoints hold what training needs besides the recipe's recoverables."""
        if self.checkpointer is None:
            return
        recoverables = {"rng": self._rng, "metrics": self.metrics_log, "ema": self.trainer.moving_average,
                        "scaler": self.scaler if self.scaler.is_enabled() else None}
        for name, recoverable in recoverables.items():
            if recoverable is not None:
                self.checkpointer.add_recoverable(name, recoverable, optional_load=True)

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
        self.trainer.freezing.apply(self.optimizer_step)
        self._wrap_distributed()
        self.init_optimizers()
        parts = ParameterGroups(self.modules, vars(self.hparams))
        table = trained_parts(parts, self.trainer.freezing.until, self._rate_factors, self.peak_rate)
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
        factors = parts.values_by_path(self.keys.learning_rates or {}, "learning_rates")
        if self.keys.layer_decay != 1:
            for path, depth in rate_factors.depths(self, parts).items():
                factors[path] = factors.get(path, 1.0) * self.keys.layer_decay ** depth
        return {path: float(factor) for path, factor in factors.items() if factor != 1}

    @staticmethod
    def optimizer_mistakes(opt_class: Callable[..., Optimizer]) -> Iterator[tuple[str, str]]:
        """Yield what an optimizer of the user's own does wrong, each with the remedy."""
        return mistakes_of(opt_class)

    def stacked_layers(self) -> Sequence[torch.nn.Module] | None:
        """Return the layers that ``layer_decay`` counts; None: the list of equal layers with the most parameters."""
        return None

    def _compile(self) -> None:
        """Compile layers in place for ``--compile`` (see ``compiling``); leave ``--jit`` to SpeechBrain."""
        if not self.compile:
            try:
                super()._compile()
            except Exception as error:
                raise SbkitError("compile-failed",
                                 f"--jit: torch.jit can't compile a module: {first_line(error).rstrip('.:')}",
                                 hint="try --compile instead", key="jit") from error
            return
        self.compiled = compiling.compile_blocks(
            self.modules, self.compile_module_keys, self.device, mode=self.compile_mode,
            fullgraph=self.compile_using_fullgraph) > 0

    def _wrap_distributed(self) -> None:
        """Give all ranks the same weights, and the trainer what keeps them the same."""
        if self.data_parallel_backend:
            super()._wrap_distributed()
        share_training(self)
        self._rng.seed_rank()  # only now: all ranks have rank 0's weights

    def init_optimizers(self) -> None:
        """Create the optimizers as SpeechBrain does, in torch's fused implementation if there is one."""
        plain = self.opt_class
        self.opt_class = None if plain is None else fused(plain)
        if self._scales_rates and self.opt_class is not None:
            self._rate_factors = self.rate_factors()
            self.opt_class = rate_factors.grouped(self.opt_class, self._rate_factors,
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

    # SpeechBrain's step. Scripts override these two and call ``super()``, so they must be methods of this class; what
    # they do is in ``script_loop``, since ``fit`` calls them only if a part of the step is overridden.

    def fit_batch(self, batch: MicroBatch) -> torch.Tensor:
        """Train on one batch as SpeechBrain does, and return its detached loss (see ``script_loop.fit_batch``)."""
        return script_loop.fit_batch(self, batch)

    def optimizers_step(self) -> None:
        """Update the weights as SpeechBrain does; ``fit_batch`` calls it (see ``script_loop.optimizers_step``)."""
        script_loop.optimizers_step(self)

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
            one_number(loss, "compute_objectives", only_tensor=True)
            return loss.detach()

    def loss_of(self, batch: MicroBatch) -> Loss:
        """Return the loss of a training batch, without backward or update, and without changing the Brain."""
        return self.trainer.parallel.loss_of(batch).loss

    def try_batch(self, batch: MicroBatch) -> bool:
        """Take a step on this micro-batch alone; return False, without an update, if it did not fit into memory."""
        try:
            self.trainer.train_step(iter([(batch, True)]))
            self.trainer.receive_results()
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
        wanted = vars(type(self)).get("capturable", False) if self.keys.graphs is None else self.keys.graphs
        changes_what_is_exchanged = self.keys.fsdp or self.find_unused_parameters
        return bool(wanted) and not (ranks.world_size() > 1 and changes_what_is_exchanged)

    @contextlib.contextmanager
    def restoring(self) -> Iterator[None]:
        """Undo on exit all changes by computing losses and gradients.

        These are gradients, state that layers update in forward, a task's attributes, such as a running mean, and
        random number generators.
        """
        attributes = self.__dict__.copy()
        try:
            with restoring(self.layer_roots, self.device):
                yield
        finally:
            self.__dict__.clear()
            self.__dict__.update(attributes)

    # ------------------------------------------------------------ training

    def fit(self, epoch_counter: Iterable[int], train_set: DataSource, valid_set: DataSource | None = None,
            progressbar: bool | None = None, train_loader_kwargs: dict[str, Any] | None = None,
            valid_loader_kwargs: dict[str, Any] | None = None) -> None:
        """Train and validate for each epoch of ``epoch_counter``; see SpeechBrain's ``Brain.fit``."""
        again = script_run.current()
        if again is not None:
            again.fit(self, valid_set, dict(valid_loader_kwargs or {}))
            return
        if self.test_only:
            logger.info("Test only mode, skipping training and validation stages.")
            if self.checkpointer is not None and not self.checkpointer.list_checkpoints() and ranks.is_main():
                logger.warning("There is no checkpoint in %s, so the model is tested with its initial weights",
                               self.checkpointer.checkpoints_dir)
            return
        outlast_terminal()
        with ranks.failing_together(), oom_as_user_error(self.device), plain_worker_errors(), self.trainer.fitting():
            self._record_script()
            train_set = loaders.resolve_loader(self, train_set, Stage.TRAIN, train_loader_kwargs or {})
            valid_set = loaders.resolve_loader(self, valid_set, Stage.VALID,
                                               {"ckpt_prefix": None, **(valid_loader_kwargs or {})})
            self.on_fit_start()
            if self.opt_class is self.optimizers_dict is None and not self.overridden_methods:
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
                logger.warning("Nothing is left to train: all epochs are done. Set a larger number of epochs to train "
                               "further")
            if self.checkpointer is not None:
                self.checkpointer.wait()

    def _record_script(self) -> None:
        """Record how this script was started, so that ``sbkit export`` can run it again."""
        if self.debug or not isinstance(self.keys, ScriptKeys) or not ranks.is_main():
            return
        record = ScriptRecord.of_this_process()
        folder = self.run_folder
        if record is None or folder is None:
            return
        try:
            record.write(folder)
        except OSError as error:
            logger.warning("%s. sbkit export can't run this script again", disk.explain(error, folder))

    @property
    def run_folder(self) -> Path | None:
        """The output folder, by the recipe or else the checkpoints, which lie in it; None if neither is there."""
        if self.keys.output_folder is not None:
            return Path(self.keys.output_folder)
        return None if self.checkpointer is None else Path(self.checkpointer.checkpoints_dir).parent

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
        self.latest_loader = valid_set
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
        again = script_run.current()
        if again is not None:
            again.evaluate(self, test_set, dict(test_loader_kwargs or {}), {"max_key": max_key, "min_key": min_key})
        outlast_terminal()
        with ranks.failing_together(), oom_as_user_error(self.device), plain_worker_errors(), self.trainer.evaluating():
            test_set = loaders.resolve_loader(self, test_set, Stage.TEST,
                                              {**(test_loader_kwargs or {}), "ckpt_prefix": None})
            self.latest_loader = test_set
            self.on_evaluate_start(max_key=max_key, min_key=min_key)
            self.open_stage(Stage.TEST)
            enable = (not self.noprogressbar if progressbar is None else progressbar) and ranks.is_main()
            with torch.no_grad():
                loss = self.pass_over(test_set, Stage.TEST, "test", enable)
                self.close_stage(Stage.TEST, loss)
            self.step = 0
            return loss

    def pass_over(self, loader: DataSource, stage: Stage, name: str, show: bool) -> float:
        """Evaluate each batch of a loader, and return the average loss (see ``evaluation_pass``)."""
        return evaluation_pass(self, loader, stage, name, show)

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
