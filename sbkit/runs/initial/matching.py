"""What of a source goes where in a model: by name, by shape, and by token where a tensor has a row for each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from sbkit.errors import SbkitError
from sbkit.recipe.parts import Parts
from sbkit.recipe.report import listed
from sbkit.runs.initial.source import Source
from sbkit.runs.initial.vocabulary import TokenTables

TAKEN, ANEW, LEFT = "taken", "drawn anew", "left there"
_LISTED, _SHORT = 20, 6  # tensors of another shape that an error names, modules that its hint does


class Fate(NamedTuple):
    """What becomes of a tensor, of the model or of the source."""

    name: str
    """As the recipe calls it."""
    numbers: int
    what: str
    why: str = ""


class Match:
    """A source beside a model: ``fill`` copies what fits, and says what became of each tensor.

    Arguments
    ---------
    modules, recipe : the model, and objects of its recipe by key
    source : what it starts from
    leave : patterns of what isn't taken
    tables : which tensors have a row for each token
    """

    def __init__(self, modules: nn.Module, recipe: Mapping[str, Any], source: Source, leave: Sequence[str] = (),
                 tables: TokenTables | None = None):
        self.own = modules.state_dict(keep_vars=True)
        self.parts = Parts(modules, recipe, self.own)
        self.source, self.tables = source, tables
        self.theirs = source.tensors()
        self.found = self._found()
        self.left = self._left(leave)

    # ------------------------------------------------------------ by name

    def _found(self) -> dict[str, str]:
        """The name in the source of each of the model's tensors that is there."""
        by_recipe = {path: next((name for name in self.parts.names(path) if name in self.theirs), None)
                     for path in self.own}
        best = {path: name for path, name in by_recipe.items() if name is not None}
        if self.source.names is None or not best:  # a file alone may have been saved of any part
            for naming in self._namings():
                found = {path: name for path in self.own if (name := naming(path)) in self.theirs and name is not None}
                best = max(best, found, key=len)
        if not best:
            raise SbkitError(f"init_from: nothing in {self.source.told} is called as a part of this model: it has "
                             f"{_some(self.theirs)}, and here are {_some(map(self.parts.called, self.own))}",
                             hint="is it a model of the same kind? its recipe's keys and this one's should be the same")
        return best

    def _namings(self) -> Iterator[Callable[[str], str | None]]:
        """What a file may call a tensor: by its key, by its path, or by its path below some part of the model."""
        yield self.parts.called
        yield lambda path: path
        for above in dict.fromkeys(_heads(self.parts, self.own)):
            def below(path: str, above: str = above) -> str | None:
                return next((name.removeprefix(above) for name in self.parts.names(path) if name.startswith(above)),
                            None)

            yield below

    def _left(self, leave: Sequence[str]) -> set[str]:
        """The paths of what isn't to be taken; a pattern that fits nothing, here or there, is refused."""
        left: set[str] = set()
        beyond = Parts.of_names(self.theirs)
        for pattern in leave:
            paths = self.parts.matching(pattern)
            if not paths and not beyond.matching(pattern):
                raise SbkitError(f"init_leave: nothing is called {pattern!r}", hint=self.parts.near(pattern))
            left |= paths
        return left

    # ------------------------------------------------------------ what is copied

    @torch.no_grad()
    def fill(self) -> list[Fate]:
        """Copy into the model what fits; nothing is copied where something doesn't."""
        tables = {id(tensor) for tensor in self.tables.tensors} if self.tables is not None else set()
        with_rows = [path for path in self._wanted() if id(self.own[path]) in tables]
        rows = self._rows(with_rows)
        self._check_shapes(rows)
        fates = [self._fill(path, rows) for path in self.own]
        surplus = [Fate(name, tensor.numel(), LEFT, "nothing here is called so") for name, tensor in self.theirs.items()
                   if name not in set(self.found.values())]
        return [*fates, *surplus]

    def _wanted(self) -> list[str]:
        return [path for path in self.found if path not in self.left]

    def _fill(self, path: str, rows: Mapping[str, list[int]]) -> Fate:
        own, name = self.own[path], self.parts.called(path)
        if path in self.left:
            return Fate(name, own.numel(), ANEW, "init_leave")
        if path not in self.found:
            return Fate(name, own.numel(), ANEW, "it isn't there")
        theirs = self.theirs[self.found[path]]
        if path not in rows:
            own.copy_(theirs)
            return Fate(name, own.numel(), TAKEN)
        kept = [(here, there) for here, there in enumerate(rows[path]) if there >= 0]
        here, there = (torch.tensor([pair[i] for pair in kept]) for i in (0, 1))
        own[here.to(own.device)] = theirs[there].to(own.device, own.dtype)
        missing = len(own) - len(kept)
        return Fate(name, own.numel(), TAKEN, f"for {len(kept)} of {len(own)} tokens, {missing} are drawn anew"
                    if missing else f"for all {len(own)} tokens")

    def _rows(self, paths: Sequence[str]) -> dict[str, list[int]]:
        """Of tensors with a row for each token, which row each comes from; empty where nobody knows."""
        if not paths or self.tables is None:
            return {}
        if self.source.tokenizer is None and all(self._fits(path) for path in paths):
            return {}  # taken as they are
        try:
            theirs = self.source.vocabulary()
        except SbkitError as error:
            sizes = dict.fromkeys(f"{self.parts.called(path)}: {len(self.theirs[self.found[path]])} there, "
                                  f"{len(self.own[path])} here" for path in paths)
            raise SbkitError(f"init_from: {error.message}, so nobody knows which token each row stands for "
                             f"({'; '.join(sizes)})", hint=self._leaving(paths)) from error
        wrong = [path for path in paths if len(self.theirs[self.found[path]]) != len(theirs.pieces)]
        if wrong:
            raise SbkitError(f"init_from: {self.parts.called(wrong[0])} of {self.source.told} has "
                             f"{len(self.theirs[self.found[wrong[0]]])} rows, and its tokenizer "
                             f"{len(theirs.pieces)} entries", hint=self._leaving(wrong))
        rows = self.tables.vocabulary.rows_in(theirs)
        return dict.fromkeys(paths, rows)

    def _fits(self, path: str) -> bool:
        return self.theirs[self.found[path]].shape == self.own[path].shape

    def _check_shapes(self, rows: Mapping[str, list[int]]) -> None:
        """All that don't fit at once."""
        wrong = []
        for path in self._wanted():
            here, there = self.own[path].shape, self.theirs[self.found[path]].shape
            if (here[1:], len(there)) != (there[1:], len(here)) if path in rows else here != there:
                wrong.append(path)
        if not wrong:
            return
        told = [f"{self.parts.called(path)}: {_shape(self.theirs[self.found[path]])} there, {_shape(self.own[path])} "
                "here" for path in wrong[:_LISTED]]
        more = f"\n  and {len(wrong) - _LISTED} more" if len(wrong) > _LISTED else ""
        raise SbkitError(f"init_from: {len(wrong)} tensors of {self.source.told} are of another shape:\n  "
                         + "\n  ".join(told) + more,
                         hint=f"give the recipe the sizes that it was trained with, or {self._leaving(wrong)}")

    def _leaving(self, paths: Sequence[str]) -> str:
        """How to go without these: the modules that they are in, at most two words of each."""
        modules = [self.parts.called(path).split(".")[:-1] or [self.parts.called(path)] for path in paths]
        children: dict[str, set[str]] = {}
        for path in self.own:
            words = self.parts.called(path).split(".")
            children.setdefault(words[0], set()).add(words[1] if len(words) > 1 else "")
        near = dict.fromkeys(".".join(words[:2 if len(children[words[0]]) > 1 else 1]) for words in modules)
        names = near if len(near) <= _SHORT else dict.fromkeys(words[0] for words in modules)
        return f'draw them anew: --init_leave "[{", ".join(names)}]"'


def _heads(parts: Parts, paths: Mapping[str, Any]) -> Iterator[str]:
    """Everything that stands before a dot in the names of tensors, with that."""
    for path in paths:
        for name in parts.names(path):
            words = name.split(".")
            yield from (f"{'.'.join(words[:count])}." for count in range(1, min(len(words), 3)))


def _shape(tensor: torch.Tensor) -> str:
    return "x".join(map(str, tensor.shape)) or "a number"


def _some(names: Any) -> str:
    return listed(list(names), most=3)
