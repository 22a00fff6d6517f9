"""Matches a source's tensors with a model's: by name, by shape, and by token for tensors with a row per token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sbkit.errors import SbkitError
from sbkit.nn.adapters import LORA, is_added, with_product
from sbkit.nn.pretrained import Encoder, Head, networks
from sbkit.nn.pretrained.source import Settings
from sbkit.recipe.parts import ParameterGroups
from sbkit.recipe.report import listed
from sbkit.runs.initial.files import STATISTICS, counting_modules
from sbkit.runs.initial.source import TokenRows, TokenTables, WeightSource

logger = logging.getLogger(__name__)

TAKEN = "taken"
REINITIALISED = "reinitialised"
KEPT = "kept"
LEFT = "left there"
_MAX_SHAPES = 20  # tensors of another shape in an error
_MAX_MODULES = 6  # modules in its hint
_MAX_FIELDS = 4  # differences of two encoders' configs in an error
_ROWS_IN_ORDER = "rows in their order: the source has no tokenizer"


class ParameterOutcome(NamedTuple):
    """The outcome for a tensor of the model or of the source."""

    name: str
    """Its name in the recipe."""
    numbers: int
    what: str
    why: str = ""


class Match:
    """A source and a model: ``fill`` copies matching tensors and returns all outcomes; ``check`` predicts them.

    modules, recipe : the model, and objects of its recipe by key
    source : of the initial weights
    leave : patterns of tensors that aren't taken
    tables : tensors with a row for each token
    shapes : read only names and shapes, for ``check``
    """

    pretrained: Collection[int] = ()
    """The ids of tensors with values of a pretrained model."""

    def __init__(self, modules: nn.Module, recipe: Mapping[str, Any], source: WeightSource, leave: Sequence[str] = (),
                 tables: TokenTables | None = None, shapes: bool = False):
        self.modules = modules
        self.source = source
        self.tables = tables
        self.model_tensors = modules.state_dict(keep_vars=True)
        self.parts = ParameterGroups(modules, recipe, self.model_tensors)

        self.source_tensors, self.source_names = self._match_names(source.tensors(shapes))
        """The source's tensors by name, and its name for each of the model's tensors that it has, by path."""
        self.merged = merge(self.source_tensors, self.source_names, modules, source.lora_scale)
        """The source's names of the weights into which a LoRA was merged, because this model doesn't have that."""
        self.source_names = {path: name for path, name in self.source_names.items() if name in self.source_tensors}

        self.left_paths, self.left_names = self._matching_patterns(leave)
        """The model's paths and the source's names of tensors that aren't taken, because of ``leave``."""
        self._check_layers()
        self._check_numbered_names()

        table_ids = {id(tensor) for tensor in tables.tensors} if tables is not None else set()
        self.token_tables = [path for path in self.taken() if id(self.model_tensors[path]) in table_ids]
        """The paths of the taken tensors that have a row for each token."""
        self.statistics = self._match_statistics()
        """The source's names for the running statistics of the model's normalisations, by the module's path."""

    # ------------------------------------------------------------ names

    def _match_names(self, tensors: Mapping[str, torch.Tensor]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
        """Return the source's tensors by the names that fit this model best, and its name for each of the model's
        tensors that it has, by path; raises if it has none of them."""
        if not tensors:
            raise SbkitError("no-weights", f"init_from: {self.source.description} has no weights",
                             hint="name another one, or its run", key="init_from")
        prefixes = [""]
        if self.source.names is None:
            # Without a recipe, a file's name is that of the object whose tensors it has, as in SpeechBrain's
            # checkpoints.
            prefixes += [f"{file.stem}." for file in self.source.files.values()]

        best_tensors: dict[str, torch.Tensor] = {}
        best_names: dict[str, str] = {}
        for prefix in prefixes:
            named = {f"{prefix}{name}": tensor for name, tensor in tensors.items()}
            names = {}
            for path in self.model_tensors:
                name = next((name for name in self.parts.names(path) if name in named), None)
                if name is not None:
                    names[path] = name
            if len(names) > len(best_names):
                best_tensors = named
                best_names = names
        if not best_names:
            model_names = map(self.parts.name, self.model_tensors)
            raise SbkitError("no-matching-weights",
                             f"init_from: no tensor of {self.source.description} has a name of this model's: it has "
                             f"{listed(tensors, limit=3)}, the model {listed(model_names, limit=3)}",
                             hint="is it a model of the same kind? its recipe's keys and this one's should be the same",
                             key="init_from")
        return best_tensors, best_names

    def _matching_patterns(self, patterns: Iterable[str]) -> tuple[set[str], set[str]]:
        """The model's paths and the source's names of the tensors that ``init_leave`` names."""
        source_parts = ParameterGroups(nn.ModuleDict(), {}, self.source_tensors)
        left_paths: set[str] = set()
        left_names: set[str] = set()
        for pattern in patterns:
            paths = self.parts.matching(pattern)
            names = source_parts.matching(pattern)
            if not paths and not names:
                raise SbkitError("unknown-module",
                                 f"init_leave: nothing is named {pattern!r}",
                                 hint=self.parts.suggestion(pattern),
                                 key="init_leave", value=pattern)
            left_paths |= paths
            left_names |= names
        return left_paths, left_names

    def _match_statistics(self) -> dict[str, dict[str, str]]:
        """The source's names for running statistics of which it has all values, by value, by the module's path."""
        matched: dict[str, dict[str, str]] = {}
        for path, _ in counting_modules(self.modules):
            for count_name in self.parts.names(f"{path}.count"):
                prefix = count_name.removesuffix(".count")
                names = {value: f"{prefix}.{value}" for value in sorted(STATISTICS)}
                if self.source_tensors.keys() >= set(names.values()) and self.left_names.isdisjoint(names.values()):
                    matched.setdefault(path, names)
        return matched

    def taken(self) -> list[str]:
        """The paths of the tensors that get values or rows from the source."""
        return [path for path in self.source_names if path not in self.left_paths]

    def _source_tensor(self, path: str) -> torch.Tensor:
        """The source's tensor for the model's tensor with this path."""
        return self.source_tensors[self.source_names[path]]

    # ------------------------------------------------------------ checks beyond names

    def _check_layers(self) -> None:
        """Refuse an encoder or a head of another kind: weights of the same name and shape may mean something else."""
        for module_path, module in self.modules.named_modules():
            if isinstance(module, Head):
                self._check_head(module_path, module)
            if isinstance(module, Encoder):
                self._check_encoder(module_path, module)

    def _check_head(self, module_path: str, head: Head) -> None:
        """Refuse a head with a convolution for one without, and the other way round."""
        weight_path = f"{module_path}.weight"
        if weight_path not in self.taken():
            return
        conv_name = self.source_names[weight_path].removesuffix("weight") + "conv.weight"
        source_conv = self.source_tensors.get(conv_name)
        if (source_conv is None) == (head.conv is None):
            return
        key = self.parts.name(module_path).partition(".")[0]
        kernel = 0 if source_conv is None else source_conv.shape[2]
        raise SbkitError("init-mismatch",
                         f"init_from: {key} of {self.source.description} has {'a' if kernel else 'no'} convolution, "
                         f"but this recipe's has {'none' if kernel else 'one'}",
                         hint=f'keep that head: --head_kernel {kernel}; or start a new one: --init_leave "[{key}]"',
                         key="init_from")

    def _check_encoder(self, module_path: str, encoder: Encoder) -> None:
        """Refuse weights of another pretrained encoder, or adapters of another language, for this one."""
        paths = [path for path in self.model_tensors if path.startswith(f"{module_path}.")]
        if not self.left_paths.issuperset(paths):
            names = [name.removesuffix(".") for name in self.parts.names(f"{module_path}.")]
            key = next((name for name in names if name in self.source.encoders), "")
            source_settings = self.source.encoders.get(key)
            if source_settings is not None:
                self._check_same_encoder(key, encoder, source_settings)
            taken = set(self.taken())
            if any(".adapter_layer." in path for path in paths if path in taken):
                self._check_adapter_language(key, encoder, source_settings)
        self._check_rest(encoder, paths)

    def _check_same_encoder(self, key: str, encoder: Encoder, source_settings: Settings) -> None:
        differing = networks.differences(encoder.settings, source_settings)
        if differing:
            raise SbkitError("init-mismatch",
                             f"init_from: {key} of {self.source.description} is another pretrained encoder "
                             f"({source_settings.source}) than this recipe's ({encoder.source}): "
                             f"{listed(differing, limit=_MAX_FIELDS)}",
                             hint="give the recipe the encoder that it was trained from, or keep this one's "
                                  f'pretrained weights: --init_leave "[{key}]"', key="init_from")

    def _check_adapter_language(self, key: str, encoder: Encoder, source_settings: Settings | None) -> None:
        """Refuse adapters of another language, which would replace those that the recipe asks for."""
        language = encoder.adapter_language
        source_language = None if source_settings is None else source_settings.adapter_language
        if language is None or language == source_language:
            return
        source_adapters = f"the adapters of {source_language}" if source_language else "its own adapters"
        raise SbkitError(
            "init-mismatch",
            f"init_from: {key or 'the encoder'} of {self.source.description} has {source_adapters}, but "
            f"adapter_language is {language}",
            hint=f"take those of {language} from {encoder.source}: --init_leave \"['*.adapter_layer.*']\"; or "
                 "keep these: --adapter_language null",
            key="init_from")

    def _check_rest(self, encoder: Encoder, paths: Iterable[str]) -> None:
        """Refuse a missing pretrained encoder if some tensors can come only from it."""
        taken = set(self.taken())
        encoder_tensors = encoder.state_dict(keep_vars=True)
        optional = {id(tensor) for name, tensor in encoder_tensors.items()
                    if is_added(name) or name in encoder.dispensable}
        rest = [path for path in paths if path not in taken and id(self.model_tensors[path]) not in optional]
        if not rest:
            return
        try:
            encoder.compare()
        except SbkitError as error:
            why = "init_leave" if self.left_paths.issuperset(rest) else f"{self.source.description} lacks them"
            raise SbkitError(error.code,
                             f"init_from: {len(rest)} tensors of the pretrained encoder have to come from its source "
                             f"({why}), such as {self.parts.name(rest[0])}, and {error.message}",
                             hint=error.hint, key="init_from") from error

    def _check_numbered_names(self) -> None:
        """Refuse tensors that a source names by their numbers in a list, unless its list has the same entries."""
        for module_path, module in self.modules.named_modules():
            if isinstance(module, (nn.ModuleList, nn.Sequential)):
                self._check_numbers_of_list(module_path, module)

    def _check_numbers_of_list(self, list_path: str, layers: nn.ModuleList | nn.Sequential) -> None:
        keys = [self.parts.name(f"{list_path}.{number}") for number in range(len(layers))]
        if all(key.endswith(f".{number}") for number, key in enumerate(keys)):
            return  # numbers are all that the recipe has, too

        # The source's name of the list, for each tensor that it names by the same number as this model.
        list_names = {}
        for path in self.taken():
            if path.startswith(f"{list_path}."):
                numbered = path.removeprefix(f"{list_path}.")
                name = self.source_names[path]
                if f".{name}".endswith(f".{numbered}"):
                    list_names[path] = name.removesuffix(numbered)

        entries = _entries(self.model_tensors, f"{list_path}.")
        for list_name in dict.fromkeys(list_names.values()):
            source_entries = _entries(self.source_tensors, list_name)
            if entries.keys() == source_entries.keys() and all(entries[number] & source_entries[number]
                                                               for number in entries):
                continue
            unclear = [path for path, name in list_names.items() if name == list_name]
            numbers_here = listed(f"{number} is {key}" for number, key in enumerate(keys))
            raise SbkitError(
                "no-matching-weights",
                f"init_from: {self.source.description} names its parts by numbers ({listed(sorted(source_entries))}), "
                f"and here {numbers_here}: it is unknown which is which",
                hint="name the folder of its run, checkpoint or bundle, whose recipe has their names, or "
                     f"{self._hint_to_leave(unclear)}",
                key="init_from")

    # ------------------------------------------------------------ copying

    def check(self) -> list[ParameterOutcome]:
        """Refuse tensors that don't fit, and predict the other outcomes; token rows need the vocabulary first."""
        self._check_shapes(self.token_tables)
        if not self.source.has_tokenizer:
            return self._outcomes(_ROWS_IN_ORDER)
        if self.token_tables:
            self._source_vocabulary()
        return self._outcomes("rows of tokens that both have")

    @torch.no_grad()
    def fill(self) -> list[ParameterOutcome]:
        """Copy the source's tensors into the model; nothing is copied if one doesn't fit."""
        source_rows = self._source_rows()
        if source_rows is None:
            self._check_shapes([])
            for path in self.taken():
                self.model_tensors[path].copy_(self._source_tensor(path))
            return self._outcomes(_ROWS_IN_ORDER)

        self._check_shapes(self.token_tables)
        both_have = [row for row, source_row in enumerate(source_rows) if source_row >= 0]
        here = torch.tensor(both_have, dtype=torch.long)
        there = torch.tensor([source_rows[row] for row in both_have], dtype=torch.long)
        for path in self.taken():
            tensor = self.model_tensors[path]
            source_tensor = self._source_tensor(path)
            if path in self.token_tables:
                tensor[here.to(tensor.device)] = source_tensor[there].to(tensor.device, tensor.dtype)
            else:
                tensor.copy_(source_tensor)

        tokens = len(source_rows)
        lacking = tokens - len(both_have)
        if lacking:
            return self._outcomes(f"for {len(both_have)} of {tokens} tokens, {lacking} are reinitialised")
        return self._outcomes(f"for all {tokens} tokens")

    def _source_rows(self) -> list[int] | None:
        """The source's row for each token of this model, -1 for those that it lacks; None to copy the rows in order."""
        if not self.token_tables:
            return None
        assert self.tables is not None
        other_sizes = any(self._source_tensor(path).shape != self.model_tensors[path].shape
                          for path in self.token_tables)
        if self.source.has_tokenizer or other_sizes:  # without a tokenizer, tables of other sizes are refused
            return self.tables.vocabulary().rows_in(self._source_vocabulary())
        if self.source.lost_tokenizer is not None:
            logger.warning("init_from: %s names the tokenizer %s, which doesn't exist: token rows are copied in "
                           "order, as if both had the same", self.source.description, self.source.lost_tokenizer)
        return None

    def _source_vocabulary(self) -> TokenRows:
        """The tokens of the rows of the source's tensors; raises if they are unknown."""
        try:
            vocabulary = self.source.vocabulary()
        except SbkitError as error:
            sizes = dict.fromkeys(f"{self.parts.name(path)}: {len(self._source_tensor(path))} there, "
                                  f"{len(self.model_tensors[path])} here" for path in self.token_tables)
            raise SbkitError("unknown-tokens",
                             f"init_from: {error.message}, so it is unknown which token each row stands for "
                             f"({'; '.join(sizes)})", hint=self._hint_to_leave(self.token_tables),
                             key="init_from") from error
        tokens = len(vocabulary.pieces)
        wrong = [path for path in self.token_tables if len(self._source_tensor(path)) != tokens]
        if wrong:
            raise SbkitError("unknown-tokens",
                             f"init_from: {self.parts.name(wrong[0])} of {self.source.description} has "
                             f"{len(self._source_tensor(wrong[0]))} rows, but its tokenizer {tokens} entries",
                             hint=self._hint_to_leave(wrong), key="init_from")
        return vocabulary

    def _check_shapes(self, tables: Collection[str]) -> None:
        """Raise one error for all tensors that don't fit.

        tables : the paths of those whose rows are copied one by one, so that their number may differ
        """
        wrong = []
        for path in self.taken():
            here = self.model_tensors[path].shape
            there = self._source_tensor(path).shape
            fits = here == there
            if path in tables:
                fits = len(here) == len(there) and here[1:] == there[1:]
            if not fits:
                wrong.append(path)
        if not wrong:
            return

        lines = []
        for path in wrong[:_MAX_SHAPES]:
            here_text = _shape_text(self.model_tensors[path])
            lines.append(f"{self.parts.name(path)}: {_shape_text(self._source_tensor(path))} there, {here_text} here")
        more = f"\n  and {len(wrong) - _MAX_SHAPES} more" if len(wrong) > _MAX_SHAPES else ""
        raise SbkitError("init-mismatch",
                         f"init_from: {len(wrong)} tensors of {self.source.description} have another shape:\n  "
                         + "\n  ".join(lines) + more,
                         hint=f"give the recipe the sizes that it was trained with, or {self._hint_to_leave(wrong)}",
                         key="init_from")

    # ------------------------------------------------------------ outcomes

    def _outcomes(self, note_on_tables: str) -> list[ParameterOutcome]:
        """The outcomes of all tensors: first the model's, then those that only the source has.

        note_on_tables : which rows the taken tensors with a row for each token get
        """
        outcomes = []
        for path, tensor in self.model_tensors.items():
            what, why = self._outcome_in_model(path, note_on_tables)
            outcomes.append(ParameterOutcome(self.parts.name(path), tensor.numel(), what, why))

        used = set(self.source_names.values())
        for path, names in self.statistics.items():
            numbers = sum(self.source_tensors[name].numel() for name in names.values())
            outcomes.append(ParameterOutcome(self.parts.name(path), numbers, TAKEN, "running statistics"))
            used.update(names.values())

        for name, tensor in self.source_tensors.items():
            if name not in used:
                why = "init_leave" if name in self.left_names else "not in this model"
                outcomes.append(ParameterOutcome(name, tensor.numel(), LEFT, why))
        for name, why in self.source.no_tensors.items():
            outcomes.append(ParameterOutcome(name, 0, LEFT, why))
        return outcomes

    def _outcome_in_model(self, path: str, note_on_tables: str) -> tuple[str, str]:
        """What becomes of one of the model's tensors, and why."""
        if path in self.source_names and path not in self.left_paths:
            return TAKEN, note_on_tables if path in self.token_tables else ""
        why = "init_leave" if path in self.left_paths else "not in the source"
        if id(self.model_tensors[path]) in self.pretrained:
            return KEPT, f"as pretrained: {why}"
        return REINITIALISED, why

    def _hint_to_leave(self, paths: Sequence[str]) -> str:
        """The hint to leave these tensors out: their modules, by at most two parts of their names."""
        children: dict[str, set[str]] = {}
        for path in self.model_tensors:
            key, _, below = self.parts.name(path).partition(".")
            children.setdefault(key, set()).add(below.partition(".")[0])

        modules = []
        keys = []
        for path in paths:
            name = self.parts.name(path)
            module_words = name.split(".")[:-1] or [name]
            key = module_words[0]
            depth = 2 if len(children[key]) > 1 else 1  # a key with only one module is named alone
            modules.append(".".join(module_words[:depth]))
            keys.append(key)
        names = dict.fromkeys(modules)
        if len(names) > _MAX_MODULES:
            names = dict.fromkeys(keys)
        return f'reinitialise them: --init_leave "[{", ".join(names)}]"'


def _shape_text(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _entries(names: Iterable[str], list_name: str) -> dict[str, set[str]]:
    """What the tensors of each entry of a list are called in it, by its number."""
    entries: dict[str, set[str]] = {}
    for name in names:
        number, _, inner_name = name.removeprefix(list_name).partition(".")
        if name.startswith(list_name) and number.isdigit():
            entries.setdefault(number, set()).add(inner_name)
    return entries


_DOWN = f".{LORA}.1.weight"
_UP = f".{LORA}.2.weight"


def merge(source_tensors: dict[str, torch.Tensor], source_names: Mapping[str, str], modules: nn.Module,
          scale_of: Callable[[str], float | None]) -> set[str]:
    """Merge, in place, each LoRA that the model does not have; returns the names of the changed weights.

    source_tensors : by name
    source_names : the source's names of the model's tensors, by path
    modules : the model
    scale_of : the scale of a LoRA of the source, by the name of its layer
    """
    paths = {name: path for path, name in source_names.items()}

    def model_has(layer: str, scale: float | None) -> bool:
        """Whether the model has the same LoRA, which is then taken unmerged."""
        for name in (layer + _DOWN, layer + _UP):
            if name not in paths or modules.get_parameter(paths[name]).shape != source_tensors[name].shape:
                return False
        adapted = modules.get_submodule(paths[layer + _DOWN].removesuffix(_DOWN))
        return scale is None or scale == getattr(adapted, "lora_scale", None)

    merged = set()
    layers = [name.removesuffix(_DOWN) for name in source_tensors if name.endswith(_DOWN)]
    for layer in layers:
        scale = scale_of(layer)
        if model_has(layer, scale):
            continue
        weight = source_tensors.get(f"{layer}.weight")
        if scale is None or weight is None:
            missing = "the weight that it was added to" if weight is None else "a recipe with its scale"
            raise SbkitError("missing-base", f"init_from: the source has a LoRA for {layer}, but not {missing}",
                             hint="name the folder of the run that trained it", key="init_from")
        up = source_tensors.pop(layer + _UP)
        down = source_tensors.pop(layer + _DOWN)
        source_tensors[f"{layer}.weight"] = with_product(weight, up, down, scale)
        merged.add(f"{layer}.weight")
    return merged
