"""Opens the source of a run's initial weights: its tensors by name, and their tokenizer."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from speechbrain.dataio.encoder import CTCTextEncoder
from speechbrain.utils.checkpoints import METAFNAME, PARAMFILE_EXT, Checkpoint

from sbkit.data.piece_model import piece_model
from sbkit.data.tokens import Tokenizer
from sbkit.errors import SbkitError, first_line
from sbkit.nn.pretrained.source import Settings
from sbkit.recipe import load
from sbkit.recipe.source import Node
from sbkit.runs import restore
from sbkit.runs.initial.files import (
    STATISTICS,
    by_parts,
    looks_like_tensors,
    plain_state,
    tensors_in,
)
from sbkit.runs.initial.names import SavedNames, encoders, wrapped
from sbkit.score.metric import Metric, Order
from sbkit.score.run_files import RECIPE
from sbkit.score.weights import BEST_CHECKPOINT, LAST, Average, ChosenWeights, Mean
from sbkit.system import untrusted
from sbkit.train.averaging import averaged_state, weights_in
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.adapted import BASE, base_file, read_base
from sbkit.train.checkpoint.files import damage

logger = logging.getLogger(__name__)

KINDS = "a run, a checkpoint, a bundle, a folder for EncoderASR, a CTC model of transformers, or a .safetensors file"
#: The format of a bundle, and the file that names it; models of transformers have a file of the same name.
_BUNDLE, _CONFIG, _MAX_BYTES = "sbkit bundle", "config.json", 1 << 24
_WEIGHTS = "model.safetensors"  # of bundles with the recipe's names of tensors
_TOKENIZERS = ("tokenizer.ckpt", "tokenizer.model")  # of bundles and of SpeechBrain's folders
_OTHER = "no tensors in its file"
_SPECIAL = ("blank", "bos", "eos")
#: SentencePiece's names for a CTCTextEncoder's special labels.
_NAMES = {"unk": "<unk>", "bos": "<s>", "eos": "</s>"}


class TokenRows(NamedTuple):
    """The token of each id."""

    pieces: Sequence[str]
    roles: dict[str, int]
    """The ids of special tokens by their roles, such as ``blank``, whatever their text."""

    def rows_in(self, other: TokenRows) -> list[int]:
        """The id of each token in another vocabulary; -1 if that lacks it. Case is ignored if that has only capitals.

        >>> TokenRows(["_", "b", "a"], {"blank": 0}).rows_in(TokenRows(["<unk>", "a", "c"], {"blank": 0}))
        [0, -1, 1]
        """
        mine, theirs = ({place: role for role, place in each.roles.items()} for each in (self, other))
        places = {piece: place for place, piece in enumerate(other.pieces) if place not in theirs}
        if not any(len(piece) == 1 and piece.islower() for piece in places):
            places = {piece.lower(): place for piece, place in places.items()} | places
        return [other.roles.get(mine[place], -1) if place in mine else places.get(piece, -1)
                for place, piece in enumerate(self.pieces)]


class TokenTables(NamedTuple):
    """The tensors of a model that have a row for each token, and the tokens of the rows."""

    tensors: Sequence[torch.Tensor]
    vocabulary: Callable[[], TokenRows]
    """Called once the corpus is prepared."""


def label_rows(encoder: CTCTextEncoder) -> TokenRows:
    """Return the token of each id of a CTCTextEncoder, with SentencePiece's names for special ones."""
    roles = {role: encoder.lab2ind[label] for role in ("blank", *_NAMES)
             if (label := getattr(encoder, f"{role}_label", None)) in encoder.lab2ind}
    names = {place: _NAMES[role] for role, place in roles.items() if role in _NAMES}
    return TokenRows([names.get(i, str(encoder.ind2lab.get(i, "")).replace(" ", "▁"))
                      for i in range(len(encoder.ind2lab))], roles)


@dataclass
class WeightSource:
    """A source of weights, which ``tensors`` reads."""

    description: str
    """For messages, such as "the run results/demo"."""
    files: dict[str, Path] = field(default_factory=dict)
    """Files of weights, by their names in the recipe that saved them."""
    names: SavedNames | None = None
    """Names of tensors in that recipe, if it is known."""
    checkpointer: Checkpointer | None = None
    average: Average = field(default_factory=Mean)
    order: Order = field(default_factory=Order)
    """With a checkpointer: the average of its checkpoints that is taken, and their ranking."""
    run: Path | None = None
    """With a checkpointer: the run's folder."""
    tokenizer: Path | None = None
    lost_tokenizer: Path | None = None
    """The tokenizer that its recipe names, if the file is missing."""
    roles: dict[str, int] = field(default_factory=dict)
    encoders: dict[str, Settings] = field(default_factory=dict)
    """The configs of its pretrained encoders, by the recipe's key, if it saved them."""
    no_tensors: dict[str, str] = field(default_factory=dict)
    """Files without tensors, and a note on each; known once the tensors are read."""

    def tensors(self, shapes: bool = False) -> dict[str, torch.Tensor]:
        """All tensors, by their names in the recipe, or else in the file.

        shapes : on the meta device, without reading values
        """
        states = {name: state for name, path in self.files.items() if (state := self._state(name, path, shapes))}
        if self.names is None:
            if any(BASE in state for state in states.values()):
                raise SbkitError(f"init_from: {self.description} has adapters but not the model that they adapt: "
                                 "only the recipe of its run says how they fit together",
                                 hint="name the run's folder, or the checkpoint in it")
            parts = {name: by_parts(self.files[name], state) for name, state in states.items()}
            found = next(iter(parts.values())) if len(parts) == 1 else \
                {f"{name}.{key}": value for name, state in parts.items() for key, value in state.items()}
        else:
            found = {full: value for name, state in states.items() if not self.names.is_moving_average(name)
                     for full, value in self._named(name, state, shapes).items()}
            alone = not found
            for name in filter(self.names.is_moving_average, states):  # it replaces the weights that were averaged
                state = states[name]
                weights = weights_in(state)  # the state itself if it is an average of several
                if weights is not state and not state["updates"]:
                    weights = {}
                moving = self._named(name, weights, shapes)
                found |= {full: value for full, value in moving.items() if alone or full in found}
        return {name: value.to("meta") for name, value in found.items()} if shapes else found

    def lora_scale(self, layer: str) -> float | None:
        """The scale of a layer's LoRA; None if it is unknown."""
        return self.names.lora_scale(layer) if self.names is not None else None

    def _state(self, name: str, path: Path, shapes: bool) -> dict[str, Any]:
        if self.checkpointer is None:
            state = tensors_in(path, lazily=shapes)
            if state is not None:
                return state
            if len(self.files) == 1:
                raise SbkitError(f"init_from: {path} has no state dict of tensors",
                                 hint="save model.state_dict(), best as .safetensors")
            self.no_tensors[name] = _OTHER
            return {}
        state = plain_state(path, lazily=shapes) or {}  # files without tensors have no weights
        if state and self.average.several and not shapes and set(state) != STATISTICS:
            state, used = averaged_state(self.checkpointer, name, self.average, **self.order)
            self.description = self.describe_average(len(used))
        return state

    def _named(self, name: str, state: Mapping[str, Any], shapes: bool) -> dict[str, torch.Tensor]:
        """A state by the recipe's names, with the base of an adapted model."""
        assert self.names is not None
        own = {key: value for key, value in state.items() if key != BASE}
        found = self.names.named(name, own)
        if BASE in state and not self.names.is_moving_average(name):
            hashed = state[BASE]
            folders = [self.files[name].parent.parent, Path(self.names.base_folder(name))]
            path = next((file for folder in folders if (file := base_file(folder, hashed)).is_file()), None)
            if path is None:
                raise SbkitError(f"init_from: {self.description} has adapters, but the model that they were trained "
                                 f"with doesn't exist: {base_file(folders[0], hashed)}",
                                 hint="copy it from where the run was")
            found |= self.names.named_base(name, (tensors_in(path) or {}) if shapes else read_base(path, hashed))
        return found

    def describe_average(self, count: int) -> str:
        """Describe the average of a run's checkpoints, of which there may be fewer than requested."""
        few = f" instead of {self.average.count}: there are no more" if count < self.average.count else ""
        return f"the run {self.run} ({self.average.describe(count)}{few})"

    @property
    def has_tokenizer(self) -> bool:
        """Whether the tokens of its rows are known."""
        return self.tokenizer is not None

    def piece_model(self) -> bytes | None:
        """The SentencePiece model of its tokens; None without a tokenizer."""
        if self.tokenizer is None:
            return None
        if (labels := self._labels()) is not None:
            if "blank" not in labels.roles:
                raise SbkitError(f"{self.tokenizer} has no blank, which a run needs", hint="write init_tokenizer: new")
            order = sorted(range(len(labels.pieces)), key=lambda place: place != labels.roles["blank"])
            return piece_model([labels.pieces[place] for place in order],
                               {new for new, place in enumerate(order) if place in labels.roles.values()})
        Tokenizer(self.tokenizer.parent, model=self.tokenizer).load()  # an error before anything is written
        return self.tokenizer.read_bytes()

    def vocabulary(self) -> TokenRows:
        """The token of each row of its head; raises if they are unknown."""
        if self.tokenizer is None:
            lost = f": {self.lost_tokenizer} doesn't exist" if self.lost_tokenizer is not None else ""
            raise SbkitError(f"{self.description} has no tokenizer{lost}")
        if (labels := self._labels()) is not None:
            return labels
        tokenizer = Tokenizer(self.tokenizer.parent, model=self.tokenizer).load()
        ids = {"blank": tokenizer.blank_id, "bos": tokenizer.bos_id, "eos": tokenizer.eos_id} | self.roles
        return TokenRows(tokenizer.pieces(), {role: place for role, place in ids.items() if place >= 0})

    def _labels(self) -> TokenRows | None:
        """The tokens of its tokenizer if that is a CTCTextEncoder; None otherwise."""
        assert self.tokenizer is not None
        with untrusted.open_regular(self.tokenizer) as file:
            if file.read(1) not in (b"'", b'"'):
                return None
        encoder = CTCTextEncoder()
        try:
            encoder.load(self.tokenizer)
        except Exception as error:  # the file may have any text
            raise SbkitError(f"{self.tokenizer} can't be read as a CTCTextEncoder: {first_line(error)}",
                             hint="give the tokenizer.ckpt that SpeechBrain's encoder saved, or leave the head out: "
                             '--init_leave "[ctc_lin]"') from error
        found = label_rows(encoder)
        return found._replace(roles=found.roles | self.roles)


def find(path: str | Path, weights: ChosenWeights, metric: Metric) -> WeightSource:
    """Find the source at a path, without reading weights.

    weights : of a run
    metric : chooses the best checkpoint
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise SbkitError(f"init_from: {path} doesn't exist", hint=f"name {KINDS}")
    run = _run_of(path)
    if run is not None:
        return _of_run(run, weights, metric)
    refuse_choice(path, weights)
    if path.is_file():
        description, folder = f"the file {path}", path.absolute().parent
        container = None  # the checkpoint, bundle or folder that it belongs to
        if (folder / METAFNAME).is_file():
            container = _of_checkpoint(folder, metric)
        elif (folder / RECIPE).is_file():
            with contextlib.suppress(SbkitError):  # not a recipe that can be read
                container = _of_speechbrain(folder) if _run_of(folder) is None else None
        held = None if container is None else next(
            (name for name, file in container.files.items() if file.stem == path.stem or file.samefile(path)), None)
        if container is None or held is None:
            return WeightSource(description, {"": path})
        return replace(container, description=description, files={held: path}, no_tensors={})
    if (path / METAFNAME).is_file():
        return _of_checkpoint(path, metric)
    if (path / RECIPE).is_file():
        return _of_speechbrain(path)
    if _config(path).get("format") != _BUNDLE:
        raise SbkitError(f"init_from: {path} is nothing that a run can start from", hint=f"name {KINDS}")
    if not (path / _WEIGHTS).is_file():
        raise SbkitError(f"init_from: the bundle {path} has only graphs, and no weights that can be trained",
                         hint="name the run that it was exported from, or a bundle in SpeechBrain's format")
    return WeightSource(f"the bundle {path}", {"": path / _WEIGHTS})


def _run_of(path: Path) -> Path | None:
    """The folder of the run, given that folder or the one of its checkpoints; None for anything else."""
    if (path / METAFNAME).is_file() or path.is_file():
        return None
    if (path / RECIPE).is_file():
        tree = load.tree(path / RECIPE)
        if "checkpointer" in tree.value and tree.at("checkpointer") is None:
            raise SbkitError(f"init_from: the run {path} saved nothing, because its recipe has checkpointer: null",
                             hint=f"name {KINDS}")
        return path if "checkpointer" in tree.value else None
    return path.parent if any(path.glob("CKPT+*")) and (path.parent / RECIPE).is_file() else None


def refuse_choice(path: Path, weights: ChosenWeights) -> None:
    """Refuse to choose checkpoints if the source is no run."""
    for key, asked, by_default in (("init_average", weights.average, BEST_CHECKPOINT.average),
                                   ("init_checkpoint", weights.checkpoint, BEST_CHECKPOINT.checkpoint)):
        if asked != by_default:
            raise SbkitError(f"{key}: {asked} selects a run's checkpoints, but init_from is {path}, which is no run",
                             hint=f"name the folder of the run, or leave {key} out")


def _config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder, as bundles and models of transformers have it; empty without one."""
    try:
        config = untrusted.read_json(folder / _CONFIG, _MAX_BYTES)
    except (OSError, ValueError):
        return {}
    return config if isinstance(config, dict) else {}


# ------------------------------------------------------------ a run


def _of_run(run: Path, weights: ChosenWeights, metric: Metric) -> WeightSource:
    tree = restore.moved_recipe(run / RECIPE, run)
    folder = Path(str(tree.at("checkpointer", "checkpoints_dir") or run / "save"))
    if not folder.is_dir():
        raise SbkitError(f"init_from: the run {run} has no checkpoint", hint="has it saved one yet?")
    checkpointer = Checkpointer(str(folder))
    order = restore.order_of(checkpointer, metric, weights.checkpoint, requested=f"init_checkpoint: {LAST}")
    if weights.by_name and weights.average.several:
        raise SbkitError(f"init_average averages the best or the last checkpoints, not {weights.checkpoint}")
    chosen = _chosen(checkpointer, weights, order)
    if not weights.average.several:
        score = "".join(f", {name} {value:.4g}" for name, value in chosen.meta.items() if name == metric.name)
        return _saved(f"the run {run} ({Path(chosen.path).name}{score})", chosen, tree, checkpointer)
    source = _saved("", chosen, tree, checkpointer)
    source.average = weights.average
    source.order = order
    source.run = run
    available = len(checkpointer.find_checkpoints(**order))
    source.description = source.describe_average(min(weights.average.count, available))
    return source


def _of_checkpoint(path: Path, metric: Metric) -> WeightSource:
    """A checkpoint of a run, if the run's recipe is found; otherwise the tensors in its files."""
    run = next((above for above in list(path.absolute().parents)[:2] if (above / RECIPE).is_file()), None)
    if run is not None:
        return _of_run(run, ChosenWeights(path.absolute().name), metric)
    _refuse_damaged(path)
    files = {file.name.removesuffix(PARAMFILE_EXT): file for file in sorted(path.glob(f"*{PARAMFILE_EXT}"))
             if file.is_file()}  # a pipe would be waited for
    files = {name: file for name, file in files.items() if plain_state(file) is not None}
    if not files:
        raise SbkitError(f"init_from: the checkpoint {path} has no weights")
    return WeightSource(f"the checkpoint {path}", files)


def _chosen(checkpointer: Checkpointer, weights: ChosenWeights, order: Order) -> Checkpoint:
    """The checkpoint, or the first of those that are averaged."""
    if weights.by_name:
        found = restore.find_checkpoint(checkpointer, weights.checkpoint)
        _refuse_damaged(Path(found.path))
        return found
    reasons = []
    for each in checkpointer.find_checkpoints(**order):
        reason = damage(Path(each.path))
        if reason is None:
            return each
        reasons.append(f"{Path(each.path).name}: {reason}")
        logger.warning("init_from: skipping %s: %s", each.path, reason)
    raise SbkitError(f"init_from: all checkpoints of {checkpointer.checkpoints_dir} are damaged: {'; '.join(reasons)}")


def _refuse_damaged(path: Path) -> None:
    reason = damage(path)
    if reason is not None:
        raise SbkitError(f"init_from: the checkpoint {path} is damaged: {reason}",
                         hint="name another one, or copy it again")


def _saved(description: str, chosen: Checkpoint, tree: Node, checkpointer: Checkpointer) -> WeightSource:
    names = SavedNames(tree, tree.at("checkpointer", "recoverables") or {})
    files = {name: Path(path) for name, path in chosen.paramfiles.items() if names.is_module(name) or
             names.is_moving_average(name)}
    if not files:
        raise SbkitError(f"init_from: {chosen.path} has no weights that its recipe names under modules")
    roles = {role: place for role in _SPECIAL if isinstance(place := tree.at(f"{role}_index"), int)}
    tokenizer = None
    if isinstance(tree.at("tokenizer"), dict):
        model, where, size, kind = (tree.at("tokenizer", name) for name in ("model", "folder", "vocab_size",
                                                                            "model_type"))
        tokenizer = Path(str(model)) if model else \
            Path(str(where)) / f"{'all' if size is None else size}_{kind or 'unigram'}.model"
    found = tokenizer if tokenizer is not None and tokenizer.is_file() else None
    return WeightSource(description, files, names, checkpointer, tokenizer=found,
                        lost_tokenizer=None if found else tokenizer, roles=roles, encoders=encoders(tree))


# ------------------------------------------------------------ a folder for EncoderASR, a bundle


def _of_speechbrain(folder: Path) -> WeightSource:
    """The files that the recipe's pretrainer loads, by the names of the modules."""
    tree, loadables, loaded = _pretrainer(folder)
    bundle = _config(folder).get("format") == _BUNDLE
    names = SavedNames(tree, loadables, {"layers": "encoder"} if bundle else {})
    wanted = [name for name in loadables if names.is_made(name) and "tokenizer" not in name]
    found = {name: next((path for file in loaded[name] if (path := folder / file).is_file()), None) for name in wanted}
    files = {name: path for name, path in found.items() if path is not None}
    missing = [name for name in wanted if name not in files]
    if missing:
        raise SbkitError(f"init_from: {folder} lacks {', '.join(f'{name}{PARAMFILE_EXT}' for name in missing)}, which "
                         "its pretrainer loads", hint="download or copy all of it")
    tokenizer = next((folder / name for name in _TOKENIZERS if (folder / name).is_file()), None)
    held = {}
    if (inner := wrapped(tree)) is not None:
        try:
            held = {"encoder": Settings.of(inner)}
        except SbkitError as error:
            logger.warning("init_from: it is unknown whether the encoder of %s is the recipe's: %s", folder,
                           error.message)
    others = [name for name, file in files.items() if not names.is_module(name) and not looks_like_tensors(file)]
    return WeightSource(f"the {'bundle' if bundle else 'folder'} {folder}",
                        {name: file for name, file in files.items() if name not in others}, names, tokenizer=tokenizer,
                        encoders=held, no_tensors=dict.fromkeys(others, _OTHER))


def pretrained_files(folder: Path) -> list[str]:
    """Return the possible names of the files that the recipe's pretrainer loads."""
    return [file for files in _pretrainer(folder)[2].values() for file in files]


def _pretrainer(folder: Path) -> tuple[Node, dict[str, Node], dict[str, list[str]]]:
    """A recipe, the objects that its pretrainer loads, and the possible names of their files."""
    path = folder / RECIPE
    tree = load.resolved(path, {})
    loadables = tree.at("pretrainer", "loadables")
    if not isinstance(loadables, dict):
        raise SbkitError(f"init_from: {path} is not of a run, and has no pretrainer that names weights",
                         hint=f"name {KINDS}")
    paths = (tree.at("pretrainer", "paths") or {}).items()
    names = {name: [Path(str(path.value)).name] for name, path in paths if path.value}
    return tree, loadables, {name: [f"{name}{PARAMFILE_EXT}", *names.get(name, [])] for name in loadables}
