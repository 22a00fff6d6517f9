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
from sbkit.recipe.parts import ParameterGroups
from sbkit.recipe.report import listed
from sbkit.runs.initial.files import STATISTICS, counting_modules
from sbkit.runs.initial.source import TokenRows, TokenTables, WeightSource

logger = logging.getLogger(__name__)

TAKEN, REINITIALISED, KEPT, LEFT = "taken", "reinitialised", "kept", "left there"
_LISTED, _SHORT = 20, 6  # tensors of another shape in an error, and modules in its hint
_FIELDS = 4  # differences of two encoders' configs in an error


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
        self.own = modules.state_dict(keep_vars=True)
        self.parts = ParameterGroups(modules, recipe, self.own)
        self.source, self.tables = source, tables
        self.theirs = source.tensors(shapes)
        if not self.theirs:
            raise SbkitError(f"init_from: {source.description} has no weights", hint="name another one, or its run")
        self.found: dict[str, str] = {}
        """The source's name for each of the model's tensors that it has, by path."""
        named = self.theirs
        # Without a recipe, a file's name is that of the object whose tensors it has, as in SpeechBrain's checkpoints.
        for before in ["", *(f"{file.stem}." for file in source.files.values() if source.names is None)]:
            theirs = {f"{before}{name}": value for name, value in named.items()}
            found = {path: name for path in self.own for name in reversed(self.parts.names(path)) if name in theirs}
            if len(found) > len(self.found):
                self.theirs, self.found = theirs, found
        if not self.found:
            raise SbkitError(f"init_from: no tensor of {source.description} has a name of this model's: it has "
                             f"{listed(self.theirs, limit=3)}, the model "
                             f"{listed(map(self.parts.name, self.own), limit=3)}",
                             hint="is it a model of the same kind? its recipe's keys and this one's should be the same")
        self.merged = merge(self.theirs, self.found, modules, source.lora_scale)
        self.found = {path: name for path, name in self.found.items() if name in self.theirs}
        self.left: set[str] = set()
        """The paths of tensors that aren't taken, because of ``leave``."""
        self.left_there: set[str] = set()
        """The source's names of those."""
        beyond = ParameterGroups(nn.ModuleDict(), {}, self.theirs)
        for pattern in leave:
            paths, names = self.parts.matching(pattern), beyond.matching(pattern)
            if not paths and not names:
                raise SbkitError(f"init_leave: nothing is named {pattern!r}", hint=self.parts.suggestion(pattern))
            self.left |= paths
            self.left_there |= names
        self._check_encoders()
        self._check_places()
        tabled = {id(tensor) for tensor in tables.tensors} if tables is not None else set()
        self.with_rows = [path for path in self.taken() if id(self.own[path]) in tabled]
        self.counted: dict[str, dict[str, str]] = {}
        """The source's names for the running statistics of the model's normalisations, by the module's path."""
        for path, _ in counting_modules(modules):
            heads = [name.removesuffix(".count") for name in self.parts.names(f"{path}.count")]
            for head in heads:
                there = {name: f"{head}.{name}" for name in sorted(STATISTICS)}
                if self.theirs.keys() >= set(there.values()) and not self.left_there.intersection(there.values()):
                    self.counted.setdefault(path, there)

    # ------------------------------------------------------------ checks beyond names

    def _check_encoders(self) -> None:
        """Refuse an encoder or a head of another kind: weights of the same name and shape may mean something else."""
        for above, module in self.modules.named_modules():
            paths = [path for path in self.own if path.startswith(f"{above}.")]
            if isinstance(module, Head) and f"{above}.weight" in self.taken():
                conv = self.theirs.get(self.found[f"{above}.weight"].removesuffix("weight") + "conv.weight")
                if (conv is None) != (module.conv is None):
                    key, kernel = self.parts.name(above).partition(".")[0], 0 if conv is None else conv.shape[2]
                    raise SbkitError(f"init_from: {key} of {self.source.description} has {'a' if kernel else 'no'} "
                                     f"convolution, but this recipe's has {'none' if kernel else 'one'}",
                                     hint=f"keep that head: --head_kernel {kernel}; or start a new one: --init_leave "
                                          f'"[{key}]"')
            if not isinstance(module, Encoder):
                continue
            if self.left.issuperset(paths):
                self._check_rest(module, paths)
                continue
            keys = [name.removesuffix(".") for name in self.parts.names(f"{above}.")]
            key, there = next(((key, self.source.encoders[key]) for key in keys if key in self.source.encoders),
                              ("", None))
            differing = [] if there is None else networks.differences(module.settings, there)
            if there is not None and differing:
                raise SbkitError(f"init_from: {key} of {self.source.description} is another pretrained encoder "
                                 f"({there.source}) than this recipe's ({module.source}): "
                                 f"{listed(differing, limit=_FIELDS)}",
                                 hint="give the recipe the encoder that it was trained from, or keep this one's "
                                      f'pretrained weights: --init_leave "[{key}]"')
            # Adapters of another language would replace the recipe's.
            wanted, had = module.adapter_language, None if there is None else there.adapter_language
            taken = set(self.taken()).intersection(paths)
            if wanted not in (None, had) and any(".adapter_layer." in path for path in taken):
                whose = f"the adapters of {had}" if had else "its own adapters"
                raise SbkitError(
                    f"init_from: {key or 'the encoder'} of {self.source.description} has {whose}, but adapter_language "
                    f"is {wanted}",
                    hint=f"take those of {wanted} from {module.source}: --init_leave \"['*.adapter_layer.*']\"; or "
                         "keep these: --adapter_language null")
            self._check_rest(module, paths)

    def _check_rest(self, encoder: Encoder, paths: Iterable[str]) -> None:
        """Refuse a missing pretrained encoder if some tensors can come only from it."""
        taken, own = set(self.taken()), encoder.state_dict(keep_vars=True)
        free = {id(own[name]) for name in own if is_added(name) or name in encoder.dispensable}
        rest = [path for path in paths if path not in taken and id(self.own[path]) not in free]
        if not rest:
            return
        try:
            encoder.compare()
        except SbkitError as error:
            why = "init_leave" if self.left.issuperset(rest) else f"{self.source.description} lacks them"
            raise SbkitError(f"init_from: {len(rest)} tensors of the pretrained encoder have to come from its source "
                             f"({why}), such as {self.parts.name(rest[0])}, and {error.message}",
                             hint=error.hint) from error

    def _check_places(self) -> None:
        """Refuse tensors that a source names by their numbers in a list, unless its list has the same entries."""
        for above, module in self.modules.named_modules():
            keys = [self.parts.name(f"{above}.{place}") for place in range(len(module))] \
                if isinstance(module, (nn.ModuleList, nn.Sequential)) else []
            if all(key.endswith(f".{place}") for place, key in enumerate(keys)):
                continue  # numbers are all that the recipe has, too
            here, tails = _entries(self.own, f"{above}."), {
                path: path.removeprefix(f"{above}.") for path in self.taken() if path.startswith(f"{above}.")}
            numbered = {path: self.found[path].removesuffix(tail) for path, tail in tails.items()
                        if f".{self.found[path]}".endswith(f".{tail}")}
            for before in dict.fromkeys(numbered.values()):
                there = _entries(self.theirs, before)
                if here.keys() == there.keys() and all(here[place] & there[place] for place in here):
                    continue
                paths = [path for path, each in numbered.items() if each == before]
                raise SbkitError(
                    f"init_from: {self.source.description} names its parts by numbers ({listed(sorted(there))}), and "
                    f"here {listed(f'{place} is {key}' for place, key in enumerate(keys))}: it is unknown which is "
                    "which",
                    hint="name the folder of its run, checkpoint or bundle, whose recipe has their names, or "
                         f"{self._leaving(paths)}")

    # ------------------------------------------------------------ copying

    def check(self) -> list[ParameterOutcome]:
        """Refuse tensors that don't fit, and predict the other outcomes; token rows need the vocabulary first."""
        self._check_shapes(self.with_rows)
        if self.with_rows and self.source.has_tokenizer:
            self._their_tokens(self.with_rows)
        return self._outcomes(None)

    @torch.no_grad()
    def fill(self) -> list[ParameterOutcome]:
        """Copy the source's tensors into the model; nothing is copied if one doesn't fit."""
        rows: dict[str, list[int]] = {}  # the source's row for each row of tensors with a row per token, if known
        if self.with_rows and self.tables is not None:
            if self.source.has_tokenizer or any(self.theirs[self.found[path]].shape != self.own[path].shape
                                                for path in self.with_rows):
                of_tokens = self.tables.vocabulary().rows_in(self._their_tokens(self.with_rows))
                rows = dict.fromkeys(self.with_rows, of_tokens)
            elif self.source.lost_tokenizer is not None:
                logger.warning("init_from: %s names the tokenizer %s, which doesn't exist: token rows are copied in "
                               "order, as if both had the same", self.source.description, self.source.lost_tokenizer)
        self._check_shapes(rows)
        for path in self.taken():
            own, theirs = self.own[path], self.theirs[self.found[path]]
            if path not in rows:
                own.copy_(theirs)
                continue
            kept = [(here, there) for here, there in enumerate(rows[path]) if there >= 0]
            here, there = (torch.tensor([pair[i] for pair in kept]) for i in (0, 1))
            own[here.to(own.device)] = theirs[there].to(own.device, own.dtype)
        return self._outcomes(rows)

    def _outcomes(self, rows: Mapping[str, list[int]] | None) -> list[ParameterOutcome]:
        """rows : of tensors with a row for each token, as in ``fill``; None before the corpus is prepared"""
        outcomes = []
        for path, own in self.own.items():
            what, why = TAKEN, ""
            if path in self.left or path not in self.found:
                what, why = REINITIALISED, "init_leave" if path in self.left else "not in the source"
                if id(own) in self.pretrained:
                    what, why = KEPT, f"as pretrained: {why}"
            elif path in self.with_rows and rows is None and self.source.has_tokenizer:
                why = "rows of tokens that both have"
            elif path in self.with_rows and path not in (rows or {}):
                why = "rows in their order: the source has no tokenizer"
            elif rows and path in rows:
                count, lost = len(rows[path]), sum(there < 0 for there in rows[path])
                why = f"for {count - lost} of {count} tokens, {lost} are reinitialised" if lost else \
                    f"for all {count} tokens"
            outcomes.append(ParameterOutcome(self.parts.name(path), own.numel(), what, why))
        outcomes += [ParameterOutcome(self.parts.name(path), sum(self.theirs[name].numel() for name in names.values()),
                                   TAKEN, "running statistics") for path, names in self.counted.items()]
        known = {*self.found.values(), *(name for names in self.counted.values() for name in names.values())}
        surplus = [ParameterOutcome(name, tensor.numel(), LEFT, "init_leave" if name in self.left_there else
                                    "not in this model") for name,
                   tensor in self.theirs.items() if name not in known]
        return [*outcomes, *surplus,
                *(ParameterOutcome(name, 0, LEFT, why) for name, why in self.source.no_tensors.items())]

    def taken(self) -> list[str]:
        """The paths of the tensors that get values or rows from the source."""
        return [path for path in self.found if path not in self.left]

    def _their_tokens(self, paths: Sequence[str]) -> TokenRows:
        """The tokens of the rows of the source's tensors; raises if they are unknown."""
        try:
            theirs = self.source.vocabulary()
        except SbkitError as error:
            sizes = dict.fromkeys(f"{self.parts.name(path)}: {len(self.theirs[self.found[path]])} there, "
                                  f"{len(self.own[path])} here" for path in paths)
            raise SbkitError(f"init_from: {error.message}, so it is unknown which token each row stands for "
                             f"({'; '.join(sizes)})", hint=self._leaving(paths)) from error
        wrong = [path for path in paths if len(self.theirs[self.found[path]]) != len(theirs.pieces)]
        if wrong:
            raise SbkitError(f"init_from: {self.parts.name(wrong[0])} of {self.source.description} has "
                             f"{len(self.theirs[self.found[wrong[0]]])} rows, but its tokenizer "
                             f"{len(theirs.pieces)} entries", hint=self._leaving(wrong))
        return theirs

    def _check_shapes(self, rows: Collection[str]) -> None:
        """Raise one error for all tensors that don't fit."""
        wrong = []
        for path in self.taken():
            mine, its = self.own[path].shape, self.theirs[self.found[path]].shape
            if (mine[1:], len(its)) != (its[1:], len(mine)) if path in rows else mine != its:
                wrong.append(path)
        if not wrong:
            return
        lines = []
        for path in wrong[:_LISTED]:
            there, here = ("x".join(map(str, tensor.shape)) or "a number"
                           for tensor in (self.theirs[self.found[path]], self.own[path]))
            lines.append(f"{self.parts.name(path)}: {there} there, {here} here")
        more = f"\n  and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise SbkitError(f"init_from: {len(wrong)} tensors of {self.source.description} have another shape:\n  "
                         + "\n  ".join(lines) + more,
                         hint=f"give the recipe the sizes that it was trained with, or {self._leaving(wrong)}")

    def _leaving(self, paths: Sequence[str]) -> str:
        """The hint for leaving these out: their modules, by at most two parts of their names."""
        modules = [self.parts.name(path).split(".")[:-1] or [self.parts.name(path)] for path in paths]
        children: dict[str, set[str]] = {}
        for path in self.own:
            words = self.parts.name(path).split(".")
            children.setdefault(words[0], set()).add(words[1] if len(words) > 1 else "")
        near = dict.fromkeys(".".join(words[:2 if len(children[words[0]]) > 1 else 1]) for words in modules)
        names = near if len(near) <= _SHORT else dict.fromkeys(words[0] for words in modules)
        return f'reinitialise them: --init_leave "[{", ".join(names)}]"'


def _entries(names: Iterable[str], before: str) -> dict[str, set[str]]:
    """What the tensors of each entry of a list are called in it, by its number."""
    found: dict[str, set[str]] = {}
    for name in names:
        place, _, rest = name.removeprefix(before).partition(".")
        if name.startswith(before) and place.isdigit():
            found.setdefault(place, set()).add(rest)
    return found


_DOWN, _UP = f".{LORA}.1.weight", f".{LORA}.2.weight"


def merge(theirs: dict[str, torch.Tensor], found: Mapping[str, str], modules: nn.Module,
          scale_of: Callable[[str], float | None]) -> set[str]:
    """Merge, in place, each LoRA that the model does not have; returns the names of the changed weights.

    theirs : the source's tensors
    found : the source's names of the model's tensors
    modules : the model
    scale_of : the scale of a LoRA of the source, by the name of its layer
    """
    paths = {name: path for path, name in found.items()}
    merged = set()
    for layer in [name.removesuffix(_DOWN) for name in theirs if name.endswith(_DOWN)]:
        scale = scale_of(layer)
        names = (layer + _DOWN, layer + _UP)
        if all(name in paths and modules.get_parameter(paths[name]).shape == theirs[name].shape for name in names):
            own = modules.get_submodule(paths[layer + _DOWN].removesuffix(_DOWN))
            if scale is None or scale == getattr(own, "lora_scale", None):
                continue  # the model has the same LoRA, which is taken unmerged
        weight = theirs.get(f"{layer}.weight")
        if scale is None or weight is None:
            missing = "the weight that it was added to" if weight is None else "a recipe with its scale"
            raise SbkitError(f"init_from: the source has a LoRA for {layer}, but not {missing}",
                             hint="name the folder of the run that trained it")
        theirs[f"{layer}.weight"] = with_product(weight, theirs.pop(layer + _UP), theirs.pop(layer + _DOWN), scale)
        merged.add(f"{layer}.weight")
    return merged
