"""The training step: forward and backward for each micro-batch, then one update."""

from __future__ import annotations

from collections.abc import Callable

import torch

from sbkit.errors import SbkitError
from sbkit.train import rng
from sbkit.train.averaging import EMA
from sbkit.train.compiling import CudaGraphs
from sbkit.train.diagnose.culprit import Suspect
from sbkit.train.distributed.parallel import Alone, Buffers, Shell, tell_unreached, zeroed_if
from sbkit.train.forward_state import ForwardState
from sbkit.train.freezing import Freezing
from sbkit.train.hooks import Steps
from sbkit.train.monitor.timing import StepBudget
from sbkit.train.objective import Objective
from sbkit.train.rates import Rate, scheduled
from sbkit.train.state import Overrides, TrainState
from sbkit.train.step import Loss, Step

#: Flags that any rank may raise with a step, so that all ranks act on them at the same step.
FLAGS = ("stop", "save", "look", "graph")


class Stepper:
    """Computes optimizer steps.

        stepper.backward(batch, last=False)     # each micro-batch
        stepper.backward(batch, last=True)      # also exchanges gradients, sums and flags between ranks
        stepper.update()                        # normalise, clip and update, unless something is not finite

    Arguments
    ---------
    hooks : the Brain's methods, which a recipe may override
    state : counters of the run
    overrides : the methods that the recipe overrides
    ema : a moving average of the weights, updated after each step
    flags : returns the flags that this rank raises with a step
    freezing : which parameters train
    """

    def __init__(self, hooks: Steps, state: TrainState, overrides: Overrides, ema: EMA | None,
                 flags: Callable[[], dict[str, bool]], freezing: Freezing):
        self.hooks, self.state, self.overrides, self.ema, self.flags = hooks, state, overrides, ema, flags
        self.freezing = freezing
        self._unreached: set[str] = set()  # parameters that were warned of
        self.budget, self.graphs = StepBudget(self.device), CudaGraphs()
        self.objective = Objective(hooks, self.budget)
        self.buffers = Buffers(self.modules)
        self.start(Alone(self.shell()))

    @property
    def modules(self) -> torch.nn.ModuleDict:
        return self.hooks.modules

    @property
    def device(self) -> torch.device:
        return torch.device(self.hooks.device)

    def shell(self) -> Shell:
        """Return one module that holds all modules, with the objective as its forward."""
        return Shell(self.modules, self.objective)

    def start(self, wrap: Alone) -> None:
        """Use these wrapped modules for the steps that follow."""
        self.wrap = wrap
        self.steps = Step(self.device, wrap.world, self.hooks.scaler, FLAGS)
        self.forward_state = ForwardState(self.modules)

    @property
    def learning_rate(self) -> Rate | None:
        optimizers = list((self.hooks.optimizers_dict or {}).values())
        return scheduled(optimizers[0].param_groups[0]) if optimizers else None

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """Return the optimizers that are not frozen."""
        if self.hooks.optimizers_dict is not None:
            return list(self.hooks.freeze_optimizers(self.hooks.optimizers_dict).values())
        return [self.hooks.optimizer] if self.hooks.opt_class is not None else []

    def thaw(self) -> None:
        """Unfreeze what is due to train from the next step on. Call it between two steps."""
        if not self.freezing.at(self.state.optimizer_step):
            return
        self.freezing.train()
        if self.ema is not None:
            self.ema.follow()
        self.wrap.renew()
        self.state.first_step_checked = False

    # ------------------------------------------------------------ a micro-batch

    def backward(self, batch: object, last: bool, *, share: float = 1.0,
                 generators: dict[str, torch.Tensor] | None = None) -> Loss:
        """Compute the loss and the gradients of a micro-batch, or of a share of one.

        last : whether it is the last of its step
        """
        if not self.steps.started:
            self.forward_state.keep()
        with self.hooks.no_sync(not last):
            generators = rng.capture(self.device) if generators is None else generators  # to look at a culprit again
            total = self.wrap.module(batch)
            if not total.requires_grad:
                raise SbkitError("the loss depends on no parameter that trains", hint="freeze less of the model")
            loss = self.objective.loss._replace(total=total)
            if share != 1.0 and not isinstance(self.objective.found.objectives, Loss):  # a mean over the batch
                loss = loss._replace(total=total * share, count=loss.count * share)
            self.steps.add(loss, Suspect(batch, generators))
            if last:
                self.steps.announce(self.flags())
            with self.budget("backward"), zeroed_if(loss.weightless, self.modules):
                if last:
                    self.budget.exposed_all_reduce(loss.total)
                scaled = self.steps.scaled(loss)
                scaled.backward()
                self.wrap.complete(scaled)
                if not last:
                    self.graphs.keep_gradients(self.modules)
        return loss

    def exchange(self) -> None:
        """Exchange sums and gradients between ranks, for a step that ended inside ``no_sync``."""
        self.steps.announce(self.flags())
        self.wrap.finish()

    def forget(self) -> None:
        """Discard the unfinished step: its gradients, its sums and the state that its forwards changed."""
        self.hooks.zero_grad(set_to_none=True)
        self.steps.reset()
        self.forward_state.put_back()
        self.objective.forget()

    # ------------------------------------------------------------ the update

    def update(self) -> None:
        """Call the Brain's ``optimizers_step``, which is ``apply`` unless the recipe overrides it."""
        with self.budget("optimizer"):
            if self.overrides.optimizers_step:
                self.steps.normalise(self.optimizers())
            self.hooks.optimizers_step()
        if self.steps.started:  # the recipe's own optimizers_step did not call apply
            self.steps.passed()
            self.state.epoch_step += 1

    def apply(self) -> None:
        """Normalise and clip all gradients together and update, unless something is not finite."""
        optimizers, state = self.optimizers(), self.state
        if not optimizers:
            self.steps.reset()
            return
        if not state.first_step_checked:
            tell_unreached(self.modules, vars(self.hooks.hparams), self._unreached)
            if not state.graph_changes:
                self.wrap.note_unreached()
        self.steps.number = state.optimizer_step
        skipped = self.steps.update(optimizers, self.hooks.max_grad_norm)
        self.forward_state.put_back(skipped)
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        self.wrap.settle()
        if self.ema is not None:
            self.ema.update(skipped)
        state.optimizer_step += 1
        state.epoch_step += 1
