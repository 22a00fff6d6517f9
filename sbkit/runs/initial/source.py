"""What a path holds that a run can start from: its tensors by name, and the tokenizer that goes with them."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from ruamel.yaml import YAML
from speechbrain.utils.checkpoints import METAFNAME, PARAMFILE_EXT, Checkpoint

from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError
from sbkit.recipe import load
from sbkit.runs import restore
from sbkit.runs.initial.files import plain_state, tensors_in
from sbkit.runs.initial.names import SavedNames
from sbkit.runs.initial.vocabulary import Vocabulary
from sbkit.runs.layout import RECIPE
from sbkit.train.averaging import average, weights_in
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.files import damage

logger = logging.getLogger(__name__)

KINDS = "a run, a checkpoint, a bundle, a folder for EncoderASR, or a .safetensors file"
#: The file that says that a folder is a bundle, and the tokenizers of bundles and of SpeechBrain's folders.
_BUNDLE, _TOKENIZERS = "config.json", ("tokenizer.ckpt", "tokenizer.model")
_SPECIAL = ("blank", "bos", "eos")


@dataclass
class Source:
    """Where weights come from; they are read by ``tensors``."""

    told: str
    """Which that is, in words."""
    files: dict[str, Path] = field(default_factory=dict)
    """Of weights, by what they are called in the recipe that wrote them."""
    names: SavedNames | None = None
    """Of what they hold, where there is that recipe."""
    shelf: Checkpointer | None = None
    mean_of: int = 1
    order: Mapping[str, Any] = field(default_factory=dict)
    """With a shelf: the mean of how many of its checkpoints, and which are the best."""
    tokenizer: Path | None = None
    roles: dict[str, int] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """All tensors, by the names that the recipe has for them, or by those in the file."""
        states = {name: self._state(name, path) for name, path in self.files.items()}
        known = {name: state for name, state in states.items() if state}
        self._put_averages(known)
        if self.names is None:
            return next(iter(known.values())) if len(known) == 1 else \
                {f"{name}.{key}": value for name, state in known.items() for key, value in state.items()}
        return {full: value for name, state in known.items() for full, value in self.names.named(name, state).items()}

    def _state(self, name: str, path: Path) -> dict[str, Any]:
        if self.shelf is not None and self.mean_of > 1:
            return average(self.shelf, name, self.mean_of, **self.order)[0]
        if self.shelf is None:
            return tensors_in(path)
        state = plain_state(path)  # a checkpoint's: what isn't tensors is something else than weights
        return state if state is not None else {}

    def _put_averages(self, states: dict[str, Any]) -> None:
        """A moving average takes the place of the weights that it is of."""
        for name in [name for name in states if self.names is not None and self.names.averaged(name)]:
            kept = states.pop(name)
            if not kept["updates"]:  # it has not begun
                continue
            mean = dict(weights_in(kept))
            of = self.names.averaged(name) if self.names is not None else ""
            if of in states and states[of].keys() == mean.keys():
                states[of] = mean

    def vocabulary(self) -> Vocabulary:
        """What each row of its head stands for; an error says why nobody knows."""
        if self.tokenizer is None:
            raise SbkitError(f"{self.told} has no tokenizer")
        tokenizer = Tokenizer(self.tokenizer.parent, model=self.tokenizer).load()
        ids = {"blank": tokenizer.blank_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id} | self.roles
        return Vocabulary(tokenizer.pieces(), {role: place for role, place in ids.items() if place >= 0})


def find(path: str | Path, checkpoint: str, mean_of: int, metric: Any) -> Source:
    """What a path holds, with nothing read that is large.

    checkpoint, mean_of : as ``restore.take_weights`` takes them, of a run
    metric : by which the best checkpoint is chosen
    """
    path = Path(path).expanduser()
    if path.is_file():
        return Source(f"the file {path}", {"": path})
    if not path.is_dir():
        raise SbkitError(f"init_from: {path} is not there", hint=f"name {KINDS}")
    if (path / METAFNAME).is_file():
        return _of_checkpoint(path, metric)
    if (path / RECIPE).is_file():
        tree = load.read_plain(path / RECIPE)
        if "checkpointer" in load.flatten(tree):
            return _of_run(path, checkpoint, mean_of, metric)
        return _of_speechbrain(path)
    if any(path.glob("CKPT+*")) and (path.parent / RECIPE).is_file():
        return _of_run(path.parent, checkpoint, mean_of, metric)
    if (path / _BUNDLE).is_file():
        raise SbkitError(f"init_from: the bundle {path} has graphs alone, and no weights that could train on",
                         hint="export it with --formats speechbrain as well, or name the run that it came from")
    raise SbkitError(f"init_from: {path} is none of what a run can start from", hint=f"name {KINDS}")


# ------------------------------------------------------------ a run


def _of_run(run: Path, checkpoint: str, mean_of: int, metric: Any) -> Source:
    tree = _moved(run)
    folder = Path(str(tree["checkpointer"].get("checkpoints_dir", run / "save")))
    if not folder.is_dir():
        raise SbkitError(f"init_from: the run {run} holds no checkpoint", hint="has it saved one yet?")
    shelf = Checkpointer(str(folder))
    order = restore.order_of(shelf, metric, checkpoint, asked=f"init_checkpoint: {restore.LAST}")
    if mean_of == 1:
        chosen = _chosen(shelf, checkpoint, order)
        said = "".join(f", {name} {value:.4g}" for name, value in chosen.meta.items() if name == metric.name)
        return _saved(f"the run {run} ({Path(chosen.path).name}{said})", chosen, tree, shelf)
    if checkpoint not in (restore.BEST, restore.LAST):
        raise SbkitError(f"init_average is of the best or the last checkpoints, not of {checkpoint}")
    first = shelf.find_checkpoints(**order)[0]
    made = _saved(f"the run {run} (the mean of {mean_of} checkpoints)", first, tree, shelf)
    made.mean_of, made.order = mean_of, order
    return made


def _of_checkpoint(path: Path, metric: Any) -> Source:
    """Of a run where its recipe lies above; else whatever tensors its files hold."""
    run = next((above for above in list(path.absolute().parents)[:2] if (above / RECIPE).is_file()), None)
    if run is not None:
        return _of_run(run, path.absolute().name, 1, metric)
    _refuse_damaged(path)
    files = {file.name.removesuffix(PARAMFILE_EXT): file for file in sorted(path.glob(f"*{PARAMFILE_EXT}"))}
    files = {name: file for name, file in files.items() if plain_state(file) is not None}
    if not files:
        raise SbkitError(f"init_from: the checkpoint {path} holds no weights")
    return Source(f"the checkpoint {path}", files)


def _chosen(shelf: Checkpointer, checkpoint: str, order: Mapping[str, Any]) -> Checkpoint:
    if checkpoint not in (restore.BEST, restore.LAST):
        found = restore.named(shelf, checkpoint)
        _refuse_damaged(Path(found.path))
        return found
    reasons = []
    for each in shelf.find_checkpoints(**order):
        reason = damage(Path(each.path))
        if reason is None:
            return each
        reasons.append(f"{Path(each.path).name}: {reason}")
        logger.warning("init_from: passing over %s: %s", each.path, reason)
    raise SbkitError(f"init_from: all checkpoints of {shelf.checkpoints_dir} are damaged: {'; '.join(reasons)}")


def _refuse_damaged(path: Path) -> None:
    reason = damage(path)
    if reason is not None:
        raise SbkitError(f"init_from: the checkpoint {path} is damaged: {reason}",
                         hint="name another one, or copy it again")


def _saved(told: str, chosen: Checkpoint, tree: Mapping[str, Any], shelf: Checkpointer) -> Source:
    names = SavedNames(tree, tree["checkpointer"].get("recoverables") or {})
    files = {name: Path(path) for name, path in chosen.paramfiles.items() if names.is_module(name) or
             names.averaged(name)}
    if not files:
        raise SbkitError(f"init_from: {chosen.path} holds no weights that its recipe names under modules")
    roles = {role: tree[f"{role}_index"] for role in _SPECIAL if isinstance(tree.get(f"{role}_index"), int)}
    return Source(told, files, names, shelf, tokenizer=_tokenizer_of_run(tree), roles=roles)


def _moved(run: Path) -> dict[str, Any]:
    """The recipe of a run as text, with its folder where it is now."""
    tree = load.read_plain(run / RECIPE)
    return load.flatten(YAML().load(restore.moved(tree, restore.output_folder(tree, run / RECIPE), str(run))))


def _tokenizer_of_run(tree: Mapping[str, Any]) -> Path | None:
    node = tree.get("tokenizer")
    if not isinstance(node, Mapping):
        return None
    if node.get("model"):
        path = Path(str(node["model"]))
    else:
        size = "all" if node.get("vocab_size") is None else node["vocab_size"]
        path = Path(str(node.get("folder"))) / f"{size}_{node.get('model_type', 'unigram')}.model"
    return path if path.is_file() else None


# ------------------------------------------------------------ a folder for EncoderASR, a bundle


def _of_speechbrain(folder: Path) -> Source:
    """The files that the recipe's pretrainer would load, by the modules that it would load them into."""
    path = folder / RECIPE
    tree = load.flatten(YAML().load(load.merged(path, {})))
    pretrainer = tree.get("pretrainer")
    loadables = pretrainer.get("loadables") if isinstance(pretrainer, Mapping) else None
    if not isinstance(pretrainer, Mapping) or not isinstance(loadables, Mapping):
        raise SbkitError(f"init_from: {path} is no run's, and has no pretrainer that says where weights are",
                         hint=f"name {KINDS}")
    bundle = (folder / _BUNDLE).is_file()
    names = SavedNames(tree, loadables, {"layers": "encoder"} if bundle else {})
    paths = pretrainer.get("paths") or {}
    wanted = [name for name in loadables if names.is_made(name) and "tokenizer" not in name]
    files = {name: found for name in wanted if (found := _beside(folder, name, paths.get(name))) is not None}
    missing = [name for name in wanted if name not in files]
    if missing:
        raise SbkitError(f"init_from: {folder} lacks {', '.join(f'{name}{PARAMFILE_EXT}' for name in missing)}, which "
                         "its pretrainer loads", hint="download or copy all of it")
    tokenizer = next((folder / name for name in _TOKENIZERS if (folder / name).is_file()), None)
    return Source(f"the {'bundle' if bundle else 'folder'} {folder}", files, names, tokenizer=tokenizer)


def _beside(folder: Path, name: str, said: Any) -> Path | None:
    tried = [folder / f"{name}{PARAMFILE_EXT}", *([folder / Path(str(said)).name] if said else [])]
    return next((path for path in tried if path.is_file()), None)
