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
from sbkit.train.averaging import weights_in
from sbkit.train.checkpoint import Checkpointer
from sbkit.train.checkpoint.adapted import BASE, base_file, read_base
from sbkit.train.checkpoint.files import damage
from sbkit.train.checkpoint_average import averaged_state

logger = logging.getLogger(__name__)

KINDS = "a run, a checkpoint, a bundle, a folder for EncoderASR, a CTC model of transformers, or a .safetensors file"
#: The format of a bundle, and the file that names it; models of transformers have a file of the same name.
_BUNDLE = "sbkit bundle"
_CONFIG = "config.json"
_MAX_BYTES = 1 << 24
_WEIGHTS = "model.safetensors"  # of bundles with the recipe's names of tensors
_TOKENIZERS = ("tokenizer.ckpt", "tokenizer.model")  # of bundles and of SpeechBrain's folders
_NO_TENSORS = "no tensors in its file"
_ROLES = ("blank", "bos", "eos")
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
        role_of = {token_id: role for role, token_id in self.roles.items()}
        special = set(other.roles.values())
        id_of = {piece: token_id for token_id, piece in enumerate(other.pieces) if token_id not in special}
        has_small_letters = any(len(piece) == 1 and piece.islower() for piece in id_of)
        if not has_small_letters:
            id_of = {piece.lower(): token_id for piece, token_id in id_of.items()} | id_of
        rows = []
        for token_id, piece in enumerate(self.pieces):
            if token_id in role_of:
                rows.append(other.roles.get(role_of[token_id], -1))
            else:
                rows.append(id_of.get(piece, -1))
        return rows


class TokenTables(NamedTuple):
    """The tensors of a model that have a row for each token, and the tokens of the rows."""

    tensors: Sequence[torch.Tensor]
    vocabulary: Callable[[], TokenRows]
    """Called once the corpus is prepared."""


def label_rows(encoder: CTCTextEncoder) -> TokenRows:
    """Return the token of each id of a CTCTextEncoder, with SentencePiece's names for special ones."""
    roles = {}
    for role in ("blank", *_NAMES):
        label = getattr(encoder, f"{role}_label", None)
        if label in encoder.lab2ind:
            roles[role] = encoder.lab2ind[label]
    special_names = {roles[role]: name for role, name in _NAMES.items() if role in roles}

    pieces = []
    for token_id in range(len(encoder.ind2lab)):
        label_text = str(encoder.ind2lab.get(token_id, "")).replace(" ", "▁")
        pieces.append(special_names.get(token_id, label_text))
    return TokenRows(pieces, roles)


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
        states = {}
        for name, path in self.files.items():
            state = self._state(name, path, shapes)
            if state:
                states[name] = state
        tensors = self._named_by_files(states) if self.names is None else self._named_by_recipe(states, shapes)
        return {name: tensor.to("meta") for name, tensor in tensors.items()} if shapes else tensors

    def _named_by_files(self, states: Mapping[str, Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        """The tensors by their names in the file; if there are several files, after the file's own name."""
        if any(BASE in state for state in states.values()):
            raise SbkitError("missing-base",
                             f"init_from: {self.description} has adapters but not the model that they adapt: "
                             "only the recipe of its run says how they fit together",
                             hint="name the run's folder, or the checkpoint in it", key="init_from")
        parts = {name: by_parts(self.files[name], state) for name, state in states.items()}
        if len(parts) == 1:
            (only_part,) = parts.values()
            return only_part
        return {f"{name}.{key}": tensor for name, part in parts.items() for key, tensor in part.items()}

    def _named_by_recipe(self, states: Mapping[str, Mapping[str, Any]], shapes: bool) -> dict[str, torch.Tensor]:
        """The tensors by their names in the recipe; those of a moving average replace the weights it is of."""
        assert self.names is not None
        tensors: dict[str, torch.Tensor] = {}
        for name, state in states.items():
            if not self.names.is_moving_average(name):
                tensors |= self._named(name, state, shapes)

        has_only_averages = not tensors
        for name in filter(self.names.is_moving_average, states):
            state = states[name]
            weights = weights_in(state)  # the state itself if it is an average of several
            if weights is not state and not state["updates"]:
                weights = {}  # nothing was averaged yet
            averaged = self._named(name, weights, shapes)
            tensors |= {key: tensor for key, tensor in averaged.items() if has_only_averages or key in tensors}
        return tensors

    def lora_scale(self, layer: str) -> float | None:
        """The scale of a layer's LoRA; None if it is unknown."""
        return self.names.lora_scale(layer) if self.names is not None else None

    def _state(self, name: str, path: Path, shapes: bool) -> dict[str, Any]:
        if self.checkpointer is None:
            state = tensors_in(path, lazily=shapes)
            if state is not None:
                return state
            if len(self.files) == 1:
                raise SbkitError("no-weights", f"init_from: {path} has no state dict of tensors",
                                 hint="save model.state_dict(), best as .safetensors", file=path, key="init_from")
            self.no_tensors[name] = _NO_TENSORS
            return {}
        state = plain_state(path, lazily=shapes) or {}  # files without tensors have no weights
        if state and self.average.several and not shapes and set(state) != STATISTICS:
            state, used = averaged_state(self.checkpointer, name, self.average, **self.order)
            self.description = self.describe_average(len(used))
        return state

    def _named(self, name: str, state: Mapping[str, Any], shapes: bool) -> dict[str, torch.Tensor]:
        """A state by the recipe's names, with the base of an adapted model."""
        assert self.names is not None
        named = self.names.named(name, {key: value for key, value in state.items() if key != BASE})
        # The file of the averaged model names the base of a moving average, too.
        if BASE in state and not self.names.is_moving_average(name):
            path = self._base_file(name, state[BASE])
            base = (tensors_in(path) or {}) if shapes else read_base(path, state[BASE])
            named |= self.names.named_base(name, base)
        return named

    def _base_file(self, name: str, base_hash: str) -> Path:
        """The file of the model that adapters were trained with: beside the checkpoint, or where the run had it."""
        assert self.names is not None
        beside = base_file(self.files[name].parent.parent, base_hash)
        of_the_run = base_file(Path(self.names.base_folder(name)), base_hash)
        for path in (beside, of_the_run):
            if path.is_file():
                return path
        raise SbkitError("missing-base",
                         f"init_from: {self.description} has adapters, but the model that they were trained with "
                         f"doesn't exist: {beside}", hint="copy it from where the run was",
                         file=beside, key="init_from")

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
        labels = self._labels()
        if labels is not None:
            return self._piece_model_of(labels)
        Tokenizer(self.tokenizer.parent, model=self.tokenizer).load()  # an error before anything is written
        return self.tokenizer.read_bytes()

    def _piece_model_of(self, labels: TokenRows) -> bytes:
        """The SentencePiece model of a CTCTextEncoder's labels, with the blank first, as runs have it."""
        if "blank" not in labels.roles:
            raise SbkitError("unknown-tokens",
                             f"{self.tokenizer} has no blank, which a run needs",
                             hint="write init_tokenizer: new",
                             file=self.tokenizer, key="init_tokenizer")
        blank = labels.roles["blank"]
        order = [blank, *(token_id for token_id in range(len(labels.pieces)) if token_id != blank)]
        special = set(labels.roles.values())
        silent = {place for place, token_id in enumerate(order) if token_id in special}
        return piece_model([labels.pieces[token_id] for token_id in order], silent)

    def vocabulary(self) -> TokenRows:
        """The token of each row of its head; raises if they are unknown."""
        if self.tokenizer is None:
            why = f": {self.lost_tokenizer} doesn't exist" if self.lost_tokenizer is not None else ""
            raise SbkitError("unknown-tokens", f"{self.description} has no tokenizer{why}", key="init_from")
        labels = self._labels()
        if labels is not None:
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
            raise SbkitError("damaged-file",
                             f"{self.tokenizer} can't be read as a CTCTextEncoder: {first_line(error)}",
                             hint="give the tokenizer.ckpt that SpeechBrain's encoder saved, or leave the head out: "
                             '--init_leave "[ctc_lin]"', file=self.tokenizer, key="init_tokenizer") from error
        rows = label_rows(encoder)
        return rows._replace(roles=rows.roles | self.roles)


def find(path: str | Path, weights: ChosenWeights, metric: Metric) -> WeightSource:
    """Find the source at a path, without reading weights.

    weights : of a run
    metric : chooses the best checkpoint
    """
    path = Path(path).expanduser()
    if not path.exists():
        raise SbkitError("no-such-path", f"init_from: {path} doesn't exist", hint=f"name {KINDS}",
                         file=path, key="init_from")
    run = _run_of(path)
    if run is not None:
        return _of_run(run, weights, metric)
    refuse_choice(path, weights)
    if path.is_file():
        return _of_file(path, metric)
    if (path / METAFNAME).is_file():
        return _of_checkpoint(path, metric)
    if (path / RECIPE).is_file():
        return _of_speechbrain(path)
    if _config(path).get("format") != _BUNDLE:
        raise SbkitError("no-weights",
                         f"init_from: {path} has no weights that a run can start from",
                         hint=f"name {KINDS}",
                         file=path, key="init_from")
    if not (path / _WEIGHTS).is_file():
        raise SbkitError("no-weights",
                         f"init_from: the bundle {path} has only graphs, and no weights that can be trained",
                         hint="name the run that it was exported from, or a bundle in SpeechBrain's format",
                         file=path, key="init_from")
    return WeightSource(f"the bundle {path}", {"": path / _WEIGHTS})


def _of_file(path: Path, metric: Metric) -> WeightSource:
    """One file, with the names and the tokenizer of the checkpoint, bundle or folder in which it is, if it is in one.
    """
    description = f"the file {path}"
    container = _container_of(path.absolute().parent, metric)
    if container is not None:
        for name, file in container.files.items():
            if file.stem == path.stem or file.samefile(path):
                return replace(container, description=description, files={name: path}, no_tensors={})
    return WeightSource(description, {"": path})


def _container_of(folder: Path, metric: Metric) -> WeightSource | None:
    """The checkpoint, bundle or folder for EncoderASR; None for any other folder."""
    if (folder / METAFNAME).is_file():
        return _of_checkpoint(folder, metric)
    if (folder / RECIPE).is_file():
        with contextlib.suppress(SbkitError):  # not a recipe that can be read
            return _of_speechbrain(folder) if _run_of(folder) is None else None
    return None


def _run_of(path: Path) -> Path | None:
    """The folder of the run, given that folder or the one of its checkpoints; None for anything else."""
    if (path / METAFNAME).is_file() or path.is_file():
        return None
    if (path / RECIPE).is_file():
        tree = load.tree(path / RECIPE)
        if "checkpointer" in tree.value and tree.at("checkpointer") is None:
            raise SbkitError("no-checkpoint",
                             f"init_from: the run {path} saved nothing, because its recipe has checkpointer: null",
                             hint=f"name {KINDS}", file=path, key="init_from")
        return path if "checkpointer" in tree.value else None
    return path.parent if any(path.glob("CKPT+*")) and (path.parent / RECIPE).is_file() else None


def refuse_choice(path: Path, weights: ChosenWeights) -> None:
    """Refuse to choose checkpoints if the source is no run."""
    choices = {"init_average": (weights.average, BEST_CHECKPOINT.average),
               "init_checkpoint": (weights.checkpoint, BEST_CHECKPOINT.checkpoint)}
    for key, (value, default) in choices.items():
        if value != default:
            raise SbkitError("conflicting-options",
                             f"{key}: {value} selects a run's checkpoints, but init_from is {path}, which is no run",
                             hint=f"name the folder of the run, or leave {key} out", key=key)


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
        raise SbkitError("no-checkpoint", f"init_from: the run {run} has no checkpoint",
                         hint="wait for its first checkpoint, or name another run", file=run, key="init_from")
    checkpointer = Checkpointer(str(folder))
    order = restore.order_of(checkpointer, metric, weights.checkpoint, requested=f"init_checkpoint: {LAST}")
    if weights.by_name and weights.average.several:
        raise SbkitError("conflicting-options",
                         f"init_average averages the best or the last checkpoints, not {weights.checkpoint}",
                         hint="write init_checkpoint: best or last, or leave init_average out", key="init_average")
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
    for folder in list(path.absolute().parents)[:2]:
        if (folder / RECIPE).is_file():
            return _of_run(folder, ChosenWeights(path.absolute().name), metric)
    _refuse_damaged(path)
    files = {}
    for file in sorted(path.glob(f"*{PARAMFILE_EXT}")):
        if file.is_file() and plain_state(file) is not None:  # reading a pipe would wait
            files[file.name.removesuffix(PARAMFILE_EXT)] = file
    if not files:
        raise SbkitError("no-weights", f"init_from: the checkpoint {path} has no weights", file=path, key="init_from")
    return WeightSource(f"the checkpoint {path}", files)


def _chosen(checkpointer: Checkpointer, weights: ChosenWeights, order: Order) -> Checkpoint:
    """The checkpoint, or the first of those that are averaged."""
    if weights.by_name:
        checkpoint = restore.find_checkpoint(checkpointer, weights.checkpoint)
        _refuse_damaged(Path(checkpoint.path))
        return checkpoint
    reasons = []
    for checkpoint in checkpointer.find_checkpoints(**order):
        path = Path(checkpoint.path)
        reason = damage(path)
        if reason is None:
            return checkpoint
        reasons.append(f"{path.name}: {reason}")
        logger.warning("init_from: skipping %s: %s", checkpoint.path, reason)
    raise SbkitError("damaged-checkpoint",
                     f"init_from: all checkpoints of {checkpointer.checkpoints_dir} are damaged: {'; '.join(reasons)}",
                     file=checkpointer.checkpoints_dir, key="init_from")


def _refuse_damaged(path: Path) -> None:
    reason = damage(path)
    if reason is not None:
        raise SbkitError("damaged-checkpoint", f"init_from: the checkpoint {path} is damaged: {reason}",
                         hint="name another one, or copy it again", file=path, key="init_from")


def _saved(description: str, chosen: Checkpoint, tree: Node, checkpointer: Checkpointer) -> WeightSource:
    names = SavedNames(tree, tree.at("checkpointer", "recoverables") or {})
    files = {name: Path(path) for name, path in chosen.paramfiles.items() if names.is_module(name) or
             names.is_moving_average(name)}
    if not files:
        raise SbkitError("no-weights", f"init_from: {chosen.path} has no weights that its recipe names under modules",
                         file=chosen.path, key="init_from")
    roles = {role: index for role in _ROLES if isinstance(index := tree.at(f"{role}_index"), int)}
    source = WeightSource(description, files, names, checkpointer, roles=roles, encoders=encoders(tree))
    tokenizer = _tokenizer_of(tree)
    if tokenizer is not None and tokenizer.is_file():
        source.tokenizer = tokenizer
    else:
        source.lost_tokenizer = tokenizer
    return source


def _tokenizer_of(tree: Node) -> Path | None:
    """The file of a recipe's tokenizer, named as ``Tokenizer`` names it; None without a tokenizer."""
    if not isinstance(tree.at("tokenizer"), dict):
        return None
    model = tree.at("tokenizer", "model")
    if model:
        return Path(str(model))
    folder = tree.at("tokenizer", "folder")
    size = tree.at("tokenizer", "vocab_size")
    kind = tree.at("tokenizer", "model_type")
    return Path(str(folder)) / f"{'all' if size is None else size}_{kind or 'unigram'}.model"


# ------------------------------------------------------------ a folder for EncoderASR, a bundle


def _of_speechbrain(folder: Path) -> WeightSource:
    """The files that the recipe's pretrainer loads, by the names of the modules."""
    tree, loadables, file_names = _pretrainer(folder)
    is_bundle = _config(folder).get("format") == _BUNDLE
    kind = "bundle" if is_bundle else "folder"
    names = SavedNames(tree, loadables, {"layers": "encoder"} if is_bundle else {})

    files = {}
    missing = []
    for name in loadables:
        if not names.is_made(name) or "tokenizer" in name:
            continue
        path = next((folder / file for file in file_names[name] if (folder / file).is_file()), None)
        if path is None:
            missing.append(f"{name}{PARAMFILE_EXT}")
        else:
            files[name] = path
    if missing:
        raise SbkitError("missing-file", f"init_from: {folder} lacks {', '.join(missing)}, which its pretrainer loads",
                         hint="download or copy all of it", file=folder, key="init_from")

    others = [name for name, file in files.items() if not names.is_module(name) and not looks_like_tensors(file)]
    weight_files = {name: file for name, file in files.items() if name not in others}
    tokenizer = next((folder / name for name in _TOKENIZERS if (folder / name).is_file()), None)
    return WeightSource(f"the {kind} {folder}", weight_files, names, tokenizer=tokenizer,
                        encoders=_wrapped_encoder(tree, folder), no_tensors=dict.fromkeys(others, _NO_TENSORS))


def _wrapped_encoder(tree: Node, folder: Path) -> dict[str, Settings]:
    """The config of the pretrained encoder that one of SpeechBrain's wrappers has, if it can be read."""
    name = wrapped(tree)
    if name is None:
        return {}
    try:
        return {"encoder": Settings.of(name)}
    except SbkitError as error:
        logger.warning("init_from: it is unknown whether the encoder of %s is the recipe's: %s", folder, error.message)
        return {}


def pretrained_files(folder: Path) -> list[str]:
    """Return the possible names of the files that the recipe's pretrainer loads."""
    return [file for files in _pretrainer(folder)[2].values() for file in files]


def _pretrainer(folder: Path) -> tuple[Node, dict[str, Node], dict[str, list[str]]]:
    """A recipe, the objects that its pretrainer loads, and the possible names of their files."""
    path = folder / RECIPE
    tree = load.resolved(path, {})
    loadables = tree.at("pretrainer", "loadables")
    if not isinstance(loadables, dict):
        raise SbkitError("no-weights", f"init_from: {path} is not of a run, and has no pretrainer that names weights",
                         hint=f"name {KINDS}", file=path, key="init_from")
    paths = tree.at("pretrainer", "paths") or {}
    file_names = {}
    for name in loadables:
        file_names[name] = [f"{name}{PARAMFILE_EXT}"]
        address = paths.get(name)
        if address is not None and address.value:
            file_names[name].append(Path(str(address.value)).name)
    return tree, loadables, file_names
