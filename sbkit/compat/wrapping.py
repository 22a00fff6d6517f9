"""What several ranks need before they train one model: equal weights, batch norms over all of them, and what keeps the
weights equal, an exchange of gradients or FSDP."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.batchnorm import _BatchNorm

from sbkit.errors import SbkitError
from sbkit.nn import sync_batch_norm
from sbkit.nn.finite import keep_finite
from sbkit.recipe.values import unwrapped
from sbkit.train.checkpoint.adapted import Adapted
from sbkit.train.distributed import ranks, sharding
from sbkit.train.distributed.exchange import GradientExchange
from sbkit.train.distributed.parallel import Replicated, Sharded, Single
from sbkit.train.recomputing import checkpoint_activations

Brain = Any  # an sbkit.Brain, whose module imports this one


def share_training(brain: Brain) -> None:
    """Give all ranks the weights of rank 0, and the trainer what keeps them equal.

    One exchange or FSDP is around all modules, so ``brain.modules.x`` stays the module itself. With one rank, only
    layers are prepared.
    """
    trainer = brain.trainer
    keys = brain.keys
    if trainer.parallel.exchange is not None:  # of an earlier fit
        trainer.parallel.exchange.close()
    trainer.share_by(Single(trainer.compute))
    several_ranks = ranks.world_size() > 1
    if several_ranks:
        _synchronise_batch_norms(brain.modules)

    # Before FSDP, which derives classes too.
    for root in brain.layer_roots:
        keep_finite(root)
    if keys.activation_checkpointing:
        checkpoint_activations(brain.modules, keys.activation_checkpointing)

    if not several_ranks or not any(parameter.requires_grad for parameter in brain.modules.parameters()):
        return
    if keys.fsdp:
        _refuse_what_fsdp_lacks(brain)
    ranks.take_from_main([*brain.modules.parameters(), *brain.modules.buffers()])
    if keys.fsdp:
        sharded = sharding.ShardedModules(brain.modules, trainer.compute, trainer.device, keys.fsdp)
        trainer.share_by(Sharded(sharded))
        return
    # A script's own step may have several backwards, each of other parameters.
    own_step = bool(brain.overridden_methods)
    exchange = GradientExchange(brain.modules.named_parameters(), mean=own_step,
                                agree_each_time=own_step or brain.find_unused_parameters)
    trainer.share_by(Replicated(trainer.compute, exchange))


def _synchronise_batch_norms(modules: torch.nn.ModuleDict) -> None:
    for name, module in modules.items():
        if any(isinstance(layer, _BatchNorm) for layer in module.modules()):
            modules[name] = sync_batch_norm.convert(module)  # as SpeechBrain does on a GPU


def _refuse_what_fsdp_lacks(brain: Brain) -> None:
    saved = [] if brain.checkpointer is None else brain.checkpointer.recoverables.values()
    optimizer = unwrapped(brain.opt_class)[0]
    unshardable = {
        "a recipe's own fit_batch": "fit_batch" in brain.overridden_methods,
        "ema": brain.trainer.moving_average is not None,
        "freeze with a number of steps": bool(brain.trainer.freezing.unfreeze_steps),
        "checkpoints of adapters alone (Adapted)": any(isinstance(recoverable, Adapted) for recoverable in saved),
        f"the optimizer {getattr(optimizer, '__name__', optimizer)} (AdamW can)":
            getattr(optimizer, "needs_whole_parameters", False)}
    for name, is_used in unshardable.items():
        if is_used:
            raise SbkitError("conflicting-options",
                             f"fsdp can't be used together with {name}",
                             hint="remove one of them", key="fsdp")
