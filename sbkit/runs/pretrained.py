"""Pretrained weights of a recipe's ``pretrainer``: fetched by one rank, loaded by all, before the Brain is built.

The recipe declares it as in SpeechBrain:

    pretrainer: !new:speechbrain.utils.parameter_transfer.Pretrainer
        collect_in: !ref <save_folder>/pretrained
        loadables: {encoder: !ref <Transformer>}
        paths: {encoder: /models/ours/encoder.ckpt}

``paths`` are files, URLs or ``owner/model/file`` on the Hugging Face Hub. Files of weights are read as tensors only,
so that no code in them can run; files with a custom loader or hook are read by that code.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Iterable, Mapping
from typing import Any

from speechbrain.utils.checkpoints import (
    DEFAULT_LOAD_HOOKS,
    DEFAULT_TRANSFER_HOOKS,
    get_default_hook,
    hook_on_loading_state_dict_checkpoint,
    torch_parameter_transfer,
    torch_recovery,
)
from speechbrain.utils.parameter_transfer import Pretrainer
from torch import nn

from sbkit.errors import SbkitError, summary
from sbkit.nn.adapters import is_added
from sbkit.recipe.ownership import missing_weights, saved_by
from sbkit.train.checkpoint.hooks import Hook
from sbkit.train.checkpoint.state import differences, load_file, load_state
from sbkit.train.distributed import ranks

logger = logging.getLogger(__name__)

_NAMED = 5  # parameters that a warning lists


def fetch(pretrainer: Pretrainer | None) -> dict[str, str]:
    """Fetch all files of a pretrainer on one rank, so that ``load`` finds them; returns their paths by name."""
    return _collect(pretrainer) if pretrainer is not None and _needed(pretrainer, ()) else {}


def load(pretrainer: Pretrainer | None, filled: Collection[int] = ()) -> None:
    """Fetch on one rank and load on each everything except modules that are filled otherwise.

    filled : ids of tensors that get their values from a checkpoint or from ``init_from``
    """
    needed = _needed(pretrainer, filled)
    if pretrainer is None or not needed:
        return
    paths = ranks.run_on_main(_collect, pretrainer)
    for name, obj in needed.items():
        _load(obj, name, paths[name], pretrainer.custom_hooks.get(name))
    if ranks.is_main():
        logger.info("Pretrained: %s", ", ".join(f"{name} from {paths[name]}" for name in needed))


def loaded_ids(pretrainer: Pretrainer | None, filled: Collection[int] = ()) -> set[int]:
    """The ids of the tensors that ``load`` fills: its modules, without adapters and what the files lack."""
    modules = [obj for obj in _needed(pretrainer, filled).values() if isinstance(obj, nn.Module)]
    return {id(tensor) for module in modules for name, tensor in module.state_dict(keep_vars=True).items()
            if not is_added(name) and name not in getattr(module, "reinitialised", ())}


def saved_ids(objects: Iterable[object]) -> set[int]:
    """The ids of the tensors that a checkpoint of these objects fills."""
    return {tensor for obj in objects for tensor in saved_by(obj)}


def _needed(pretrainer: Pretrainer | None, filled: Collection[int]) -> dict[str, Any]:
    """The objects that the pretrainer must load: those that aren't filled otherwise."""
    if pretrainer is None:
        return {}
    unfilled = {}
    for name, obj in pretrainer.loadables.items():
        if not pretrainer.is_loadable(name):
            continue
        tensors: list[object] = []  # without those that pretrained weights need not have
        if isinstance(obj, nn.Module):
            tensors = [tensor for key, tensor in obj.state_dict(keep_vars=True).items()
                       if not is_added(key) and key not in getattr(obj, "dispensable", ())]
        if not tensors or any(id(tensor) not in filled for tensor in tensors):
            unfilled[name] = obj
    return unfilled


def _collect(pretrainer: Pretrainer) -> dict[str, str]:
    """Fetch all files; returns their paths by name."""
    sources = dict(pretrainer.paths)
    for name, problem, hint in missing_weights(pretrainer):
        what = f"pretrainer: {name}" if name in sources else "pretrainer"
        raise SbkitError("missing-file", f"{what}: {problem}", hint=hint, key="pretrainer")

    wanted = [name for name in pretrainer.loadables if pretrainer.is_loadable(name)]
    folder = pretrainer.collect_in
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        for name in wanted:  # an old link may point to an earlier recipe's file
            link = folder / f"{name}.ckpt"
            if link.is_symlink():
                link.unlink()
    try:
        return {name: str(path) for name, path in pretrainer.collect_files().items()}
    except SbkitError:
        raise
    except Exception as error:  # a network or a hub may raise anything
        raise SbkitError("no-network", f"pretrainer: can't fetch {', '.join(str(sources[name]) for name in wanted)}: "
                         f"{summary(error)}", hint="is the name right, and is the network up?",
                         key="pretrainer") from error
    finally:
        pretrainer.paths = sources  # SpeechBrain replaces them with the paths of the fetched files


def _load(obj: Any, name: str, path: str, of_recipe: Hook | None) -> None:  # obj: whatever the hook takes
    """Load by SpeechBrain's rules: with the recipe's hook, a parameter transfer, or a checkpoint's loader."""
    try:
        _call_hook(obj, name, path, of_recipe)
    except SbkitError as error:
        raise SbkitError(error.code, f"pretrainer: {name}: {error.message}", hint=error.hint,
                         key="pretrainer", file=path) from error
    except Exception as error:  # a file may hold anything
        raise SbkitError("state-not-loaded", f"pretrainer: {path} can't be loaded into {name}: {summary(error)}",
                         key="pretrainer", file=path) from error


def _call_hook(obj: Any, name: str, path: str, of_recipe: Hook | None) -> None:  # as above
    transfer = of_recipe or get_default_hook(obj, DEFAULT_TRANSFER_HOOKS)
    if transfer is torch_parameter_transfer:
        _transfer(obj, name, path)
        return
    if transfer is not None:
        transfer(obj, path)
        return
    load_checkpoint = get_default_hook(obj, DEFAULT_LOAD_HOOKS)
    if load_checkpoint is torch_recovery:
        load_state(obj, path, name)
    elif load_checkpoint is not None:
        load_checkpoint(obj, path, False)
    else:
        raise SbkitError("state-not-loaded", f"there is no known way to load a {type(obj).__name__}",
                         hint=f"give the pretrainer a custom_hooks for {name}", key=name)


def _transfer(module: nn.Module, name: str, path: str) -> None:
    """Load the parameters that a file and a module both have; warn of others, and refuse other shapes."""
    with open(path, "rb") as file:
        if file.read(9)[8:] == b"{":  # after its header's length
            raise SbkitError("state-not-loaded",
                             f"{path} is a safetensors file, as a bundle has",
                             hint="take a checkpoint's "
                             "model.ckpt, or --init_from FOLDER for the weights of a run or a bundle", file=path)
    state = load_file(path)
    own = module.state_dict()
    shared: list[str] = []
    if isinstance(state, Mapping):
        state = hook_on_loading_state_dict_checkpoint(dict(state))
        shared = [key for key in own if key in state]
    if not shared and own:
        raise SbkitError("no-matching-weights",
                         f"{path} has none of the module's parameters: {differences(own, state)}",
                         hint="is it the file of a different layer?", file=path)
    differing = differences({key: own[key] for key in shared}, {key: state[key] for key in shared})
    if differing:
        raise SbkitError("other-model", f"{path} comes from a model of different sizes: {differing}",
                         hint="set the recipe's sizes to those it was trained with", file=path)

    module.load_state_dict(state, strict=False)
    if not ranks.is_main():
        return
    for what, names in ((f"lacks parameters of {name}", own.keys() - set(shared)),
                        (f"has parameters that {name} lacks", state.keys() - set(shared))):
        if names:
            logger.warning("pretrainer: %s %s: %d, such as %s", path, what, len(names),
                           ", ".join(sorted(names)[:_NAMED]))
