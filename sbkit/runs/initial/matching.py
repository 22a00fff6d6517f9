"""Matches a source's tensors with a model's: by name, by shape, and by token for tensors with a row per token."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sbkit.errors import SbkitError
from sbkit.nn.adapters import LORA, is_added, with_product
from sbkit.nn.pretrained import Encoder, Head, networks
from sbkit.nn.pretrained.source import Settings
from sbkit.recipe.parts import ParameterGroups
from sbkit.recipe.report import listed
from sbkit.runs.initial.files import counting_modules, statistics_names
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
        self.found = self._found()
        self.merged = merge(self.theirs, self.found, modules, source.lora_scale)
        self.found = {path: name for path, name in self.found.items() if name in self.theirs}
        self.left, self.left_there = self._left(leave)
        self._check_encoders()
        self._check_heads()
        self._check_places()
        tabled = {id(tensor) for tensor in tables.tensors} if tables is not None else set()
        self.with_rows = [path for path in self.taken() if id(self.own[path]) in tabled]
        self.counted = self._counted()

    # ------------------------------------------------------------ by name

    def _found(self) -> dict[str, str]:
        """The source's name for each of the model's tensors that it has."""
        by_recipe = {path: next((name for name in self.parts.names(path) if name in self.theirs), None)
                     for path in self.own}
        best = {path: name for path, name in by_recipe.items() if name is not None}
        if self.source.names is None or not best:  # a single file may be of any part of a model
            for naming in self._namings():
                found = {path: name for path in self.own if (name := naming(path)) in self.theirs and name is not None}
                best = max(best, found, key=len)
        if not self.theirs:
            raise SbkitError(f"init_from: {self.source.description} has no weights",
                             hint="name another one, or its run")
        if not best:
            raise SbkitError(f"init_from: no tensor of {self.source.description} has a name of this model's: it has "
                             f"{listed(self.theirs, limit=3)}, the model "
                             f"{listed(map(self.parts.name, self.own), limit=3)}",
                             hint="is it a model of the same kind? its recipe's keys and this one's should be the same")
        return best

    def _namings(self) -> Iterator[Callable[[str], str | None]]:
        """Yield naming schemes of files: by the recipe's key, by the path, or by the path in some part of the model."""
        yield self.parts.name
        yield lambda path: path
        for above in dict.fromkeys(_heads(self.parts, self.own)):
            def below(path: str, above: str = above) -> str | None:
                return next((name.removeprefix(above) for name in self.parts.names(path) if name.startswith(above)),
                            None)

            yield below

    def _left(self, leave: Sequence[str]) -> tuple[set[str], set[str]]:
        """The paths of tensors that aren't taken, and the source's names; a pattern without a match is refused."""
        left: set[str] = set()
        there: set[str] = set()
        beyond = ParameterGroups.of_names(self.theirs)
        for pattern in leave:
            paths, names = self.parts.matching(pattern), beyond.matching(pattern)
            if not paths and not names:
                raise SbkitError(f"init_leave: nothing is named {pattern!r}", hint=self.parts.suggestion(pattern))
            left |= paths
            there |= names
        return left, there

    # ------------------------------------------------------------ checks beyond names

    def _check_encoders(self) -> None:
        """Refuse a pretrained encoder of another kind: weights of the same name and shape may mean something else."""
        for above, module in self.modules.named_modules():
            paths = [path for path in self.own if path.startswith(f"{above}.")]
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
            self._check_language(key, module, there, paths)
            self._check_rest(module, paths)

    def _check_heads(self) -> None:
        """Refuse a head if only the source's or only the model's has a convolution: the weights depend on it."""
        for above, module in self.modules.named_modules():
            if not isinstance(module, Head) or f"{above}.weight" not in self.taken():
                continue
            there = self.theirs.get(self.found[f"{above}.weight"].removesuffix("weight") + "conv.weight")
            if (there is None) != (module.conv is None):
                key, kernel = self._key(above), 0 if there is None else there.shape[2]
                raise SbkitError(f"init_from: {key} of {self.source.description} has {'a' if kernel else 'no'} "
                                 f"convolution, but this recipe's has {'none' if kernel else 'one'}",
                                 hint=f"keep that head: --head_kernel {kernel}; or start a new one: --init_leave "
                                      f'"[{key}]"')

    def _check_language(self, key: str, encoder: Encoder, there: Settings | None, paths: Iterable[str]) -> None:
        """Refuse adapters of another language than the recipe's, which they would replace."""
        wanted, had = encoder.adapter_language, None if there is None else there.adapter_language
        taken = set(self.taken()).intersection(paths)
        if wanted in (None, had) or not any(".adapter_layer." in path for path in taken):
            return
        whose = f"the adapters of {had}" if had else "its own adapters"
        raise SbkitError(
            f"init_from: {key or 'the encoder'} of {self.source.description} has {whose}, but adapter_language is "
            f"{wanted}",
            hint=f"take those of {wanted} from {encoder.source}: --init_leave \"['*.adapter_layer.*']\"; or keep "
                 "these: --adapter_language null")

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
        """Refuse tensors of a ModuleList that are named by numbers, unless it is clear which module each belongs to."""
        for above, here in self._lists():
            tails = [(path.removeprefix(above), self.found[path]) for path in self.taken() if path.startswith(above)]
            numbered = {(name.removesuffix(tail), tail.partition(".")[0]) for tail, name in tails
                        if f".{name}".endswith(f".{tail}")}
            for before in {before for before, _ in numbered}:
                there = _entries(self.theirs, before)
                unsure = {place for each, place in numbered if each == before and here.keys() != there.keys()
                          and _ambiguous(place, here, there)}
                other = {place for place in here.keys() & there.keys() if not here[place] & there[place]}
                paths = [path for path in self.own if path.startswith(above) and path not in self.left
                         and path.removeprefix(above).partition(".")[0] in unsure | other]
                if paths:
                    self._refuse_places(there, above, paths)

    def _refuse_places(self, there: Iterable[str], above: str, paths: Sequence[str]) -> None:
        keys = {path.removeprefix(above).partition(".")[0]: self._key(path) for path in self.own
                if path.startswith(above)}
        raise SbkitError(f"init_from: {self.source.description} names its parts by numbers ({listed(sorted(there))}), "
                         f"and here {listed(f'{place} is {key}' for place, key in keys.items())}: it is unknown "
                         f"which of them is {listed(dict.fromkeys(map(self._key, paths)))}",
                         hint="name the folder of its run, checkpoint or bundle, whose recipe has their names, or "
                              f"{self._leaving(paths)}")

    def _key(self, path: str) -> str:
        return self.parts.name(path).partition(".")[0]

    def _lists(self) -> Iterator[tuple[str, dict[str, set[str]]]]:
        """Yield the prefix of each ModuleList of the recipe, and the tensors of each of its entries."""
        for path, module in self.modules.named_modules():
            if isinstance(module, (nn.ModuleList, nn.Sequential)) and \
                    any(not self.parts.name(f"{path}.{place}").endswith(f".{place}") for place in range(len(module))):
                yield f"{path}.", _entries(self.own, f"{path}.")

    def _counted(self) -> dict[str, dict[str, str]]:
        """The source's names for the running statistics of the model's normalisations, by the module's path."""
        found = {}
        for path, _ in counting_modules(self.modules):
            heads = [name.removesuffix(".count") for name in self.parts.names(f"{path}.count")]
            for names in map(statistics_names, heads):
                if self.theirs.keys() >= set(names.values()) and not self.left_there.intersection(names.values()):
                    found[path] = names
                    break
        return found

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
        rows = self._rows(self.with_rows)
        self._check_shapes(rows)
        for path in self.taken():
            self._fill(path, rows)
        return self._outcomes(rows)

    def _outcomes(self, rows: Mapping[str, list[int]] | None) -> list[ParameterOutcome]:
        outcomes = [self._outcome(path, rows) for path in self.own]
        outcomes += [ParameterOutcome(self.parts.name(path), sum(self.theirs[name].numel() for name in names.values()),
                                   TAKEN, "running statistics") for path, names in self.counted.items()]
        known = {*self.found.values(), *(name for names in self.counted.values() for name in names.values())}
        surplus = [ParameterOutcome(name, tensor.numel(), LEFT, "init_leave" if name in self.left_there else
                                    "not in this model") for name,
                   tensor in self.theirs.items() if name not in known]
        return [*outcomes, *surplus,
                *(ParameterOutcome(name, 0, LEFT, why) for name, why in self.source.no_tensors.items())]

    def statistics(self) -> dict[str, dict[str, torch.Tensor]]:
        """The argument of ``load_statistics``, on every rank."""
        return {path: {own: self.theirs[name] for own, name in names.items()} for path, names in self.counted.items()}

    def taken(self) -> list[str]:
        """The paths of the tensors that get values or rows from the source."""
        return [path for path in self.found if path not in self.left]

    def _fill(self, path: str, rows: Mapping[str, list[int]]) -> None:
        own, theirs = self.own[path], self.theirs[self.found[path]]
        if path not in rows:
            own.copy_(theirs)
            return
        kept = [(here, there) for here, there in enumerate(rows[path]) if there >= 0]
        here, there = (torch.tensor([pair[i] for pair in kept]) for i in (0, 1))
        own[here.to(own.device)] = theirs[there].to(own.device, own.dtype)

    def _outcome(self, path: str, rows: Mapping[str, list[int]] | None) -> ParameterOutcome:
        """rows : of tensors with a row for each token, as ``_rows`` gives them; None before the corpus is prepared"""
        own, name = self.own[path], self.parts.name(path)
        if path in self.left or path not in self.found:
            why = "init_leave" if path in self.left else "not in the source"
            if id(own) in self.pretrained:
                return ParameterOutcome(name, own.numel(), KEPT, f"as pretrained: {why}")
            return ParameterOutcome(name, own.numel(), REINITIALISED, why)
        return ParameterOutcome(name, own.numel(), TAKEN, self._which_rows(path, rows))

    def _which_rows(self, path: str, rows: Mapping[str, list[int]] | None) -> str:
        if path not in self.with_rows:
            return ""
        if rows is None and self.source.has_tokenizer:
            return "rows of tokens that both have"
        if not rows or path not in rows:
            return "rows in their order: the source has no tokenizer"
        count, known = len(rows[path]), sum(there >= 0 for there in rows[path])
        return f"for {known} of {count} tokens, {count - known} are reinitialised" if known < count else \
            f"for all {count} tokens"

    def _rows(self, paths: Sequence[str]) -> dict[str, list[int]]:
        """The source's row for each row of tensors with a row per token; empty if unknown."""
        if not paths or self.tables is None:
            return {}
        if not self.source.has_tokenizer and all(self._fits(path) for path in paths):
            if self.source.lost_tokenizer is not None:
                logger.warning("init_from: %s names the tokenizer %s, which doesn't exist: token rows are copied in "
                               "order, as if both had the same", self.source.description,
                               self.source.lost_tokenizer)
            return {}
        rows = self.tables.vocabulary().rows_in(self._their_tokens(paths))
        return dict.fromkeys(paths, rows)

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

    def _fits(self, path: str) -> bool:
        return self.theirs[self.found[path]].shape == self.own[path].shape

    def _check_shapes(self, rows: Collection[str]) -> None:
        """Raise one error for all tensors that don't fit."""
        wrong = []
        for path in self.taken():
            here, there = self.own[path].shape, self.theirs[self.found[path]].shape
            if (here[1:], len(there)) != (there[1:], len(here)) if path in rows else here != there:
                wrong.append(path)
        if not wrong:
            return
        lines = [f"{self.parts.name(path)}: {_shape(self.theirs[self.found[path]])} there, {_shape(self.own[path])} "
                "here" for path in wrong[:_LISTED]]
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


def _heads(parts: ParameterGroups, paths: Iterable[str]) -> Iterator[str]:
    """Everything that stands before a dot in the names of tensors, with that."""
    for path in paths:
        for name in parts.names(path):
            words = name.split(".")
            yield from (f"{'.'.join(words[:count])}." for count in range(1, min(len(words), 3)))


def _entries(names: Iterable[str], before: str) -> dict[str, set[str]]:
    """What the tensors of each entry of a list are called in it, by its number."""
    found: dict[str, set[str]] = {}
    for name in names:
        place, _, rest = name.removeprefix(before).partition(".")
        if name.startswith(before) and place.isdigit():
            found.setdefault(place, set()).add(rest)
    return found


def _ambiguous(place: str, here: Mapping[str, set[str]], there: Mapping[str, set[str]]) -> bool:
    """Whether, by the names of their tensors, an entry of the source could be another one of the model, or vice versa.

    >>> _ambiguous("1", {"0": {"conv"}, "1": {"w"}, "2": {"w"}}, {"0": {"conv"}, "1": {"w"}})
    True
    """
    def fit(one: set[str], other: set[str]) -> bool:
        return one <= other or other <= one

    return any(fit(there[place], names) for each, names in here.items() if each != place) or \
        any(fit(names, here[place]) for each, names in there.items() if each != place)


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


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
        if _is_own(layer, theirs, paths, modules, scale):
            continue
        weight = theirs.get(f"{layer}.weight")
        if scale is None or weight is None:
            missing = "the weight that it was added to" if weight is None else "a recipe with its scale"
            raise SbkitError(f"init_from: the source has a LoRA for {layer}, but not {missing}",
                             hint="name the folder of the run that trained it")
        theirs[f"{layer}.weight"] = with_product(weight, theirs.pop(layer + _UP), theirs.pop(layer + _DOWN), scale)
        merged.add(f"{layer}.weight")
    return merged


def _is_own(layer: str, theirs: Mapping[str, torch.Tensor], paths: Mapping[str, str], modules: nn.Module,
            scale: float | None) -> bool:
    """Whether the model's layer has the same LoRA, which can be taken unmerged."""
    for name in (layer + _DOWN, layer + _UP):
        path = paths.get(name)
        if path is None or modules.get_parameter(path).shape != theirs[name].shape:
            return False
    own = modules.get_submodule(paths[layer + _DOWN].removesuffix(_DOWN))
    return scale is None or scale == getattr(own, "lora_scale", None)
