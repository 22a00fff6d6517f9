"""Keys of a recipe as a class declares them: each with its type, range, default and one line; read once, at load."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import types
import typing
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeVar

from sbkit.errors import SbkitError
from sbkit.recipe.choices import Allowed

K = TypeVar("K", bound="Keys")
_KINDS = {int: "a whole number", float: "a number", bool: "true or false", str: "a text"}


def key(what: str, default: Any = dataclasses.MISSING, allowed: Allowed | None = None) -> Any:
    """One field of ``Keys``.

    Arguments
    ---------
    what : what the key does, in a line
    default : what it is where a recipe does not say; without one a run can't do without the key
    allowed : the numbers, or other values, that it may be
    """
    return dataclasses.field(default=default, metadata={"what": what, "allowed": allowed})


class Problem(NamedTuple):
    """What is wrong with a recipe's keys, as a sentence."""

    key: str
    """The key to blame."""
    message: str
    hint: str


class Declared(NamedTuple):
    """A key as its class declares it."""

    name: str
    what: str
    kind: str
    """Its annotation."""
    allowed: Allowed | None
    default: Any
    needed: bool
    """There is no default."""
    optional: bool
    """``null`` will do."""
    by: str
    """The class that declares it."""

    def problem(self, value: Any) -> str:
        """What is wrong with a value, as the end of a sentence; empty where nothing is."""
        if value is None:
            return "" if self.optional else f"is null, and must be {self.wanted}"
        if value not in self.allowed if self.allowed is not None else not self._fits(value):
            return f"is {_shown(value)}, and must be {self.wanted}"
        return ""

    @property
    def wanted(self) -> str:
        """What it may be, in words."""
        if self.allowed is not None:
            return str(self.allowed)
        return " or ".join(_KINDS[kind] for kind in self.plain)

    @property
    def plain(self) -> list[type]:
        """Plain types among those of its annotation; none where any object will do."""
        kinds = [part.strip() for part in self.kind.split("|")]
        plain = {kind.__name__: kind for kind in _KINDS}
        return [plain[kind] for kind in kinds if kind in plain] if set(kinds) <= {*plain, "None"} else []

    def _fits(self, value: Any) -> bool:
        plain = self.plain
        if not plain:
            return True
        if isinstance(value, bool):
            return bool in plain
        return isinstance(value, tuple(plain)) or (float in plain and isinstance(value, int))


@dataclasses.dataclass(kw_only=True)
class Keys:
    """What a class reads of a recipe. Derived classes add fields by ``key``.

    >>> @dataclasses.dataclass(kw_only=True)
    ... class Mine(Keys):
    ...     width: int = key("layers are so wide", 64, Range(1, whole=True))
    >>> Mine.read({"width": 128, "something": "else"}).width
    128
    """

    @classmethod
    def read(cls: type[K], hparams: Mapping[str, Any]) -> K:
        """The keys that are among ``hparams``, and the defaults of others; all that is wrong is told at once."""
        if wrong := cls.wrong(hparams):
            raise SbkitError("; ".join(problem.message for problem in wrong), hint=wrong[0].hint)
        found = object.__new__(cls)
        known = cls.declared().values()
        values = {declared.name: declared.default for declared in known if not declared.needed}
        values |= {declared.name: hparams[declared.name] for declared in known if declared.name in hparams}
        for name, value in values.items():
            object.__setattr__(found, name, value)
        return found

    @classmethod
    def wrong(cls, hparams: Mapping[str, Any]) -> list[Problem]:
        """What is wrong with each key by itself."""
        told = ((name, declared.problem(hparams[name])) for name, declared in cls.declared().items() if name in hparams)
        return [Problem(name, f"{name} {problem}", "docs/keys.md says what each key may be")
                for name, problem in told if problem]

    def clashes(self) -> Iterator[Problem]:
        """What is wrong with keys of which each is right by itself; derived classes say it."""
        yield from ()

    def __getattr__(self, name: str) -> Any:
        """Only of what a recipe lacks and must not."""
        if name in type(self).declared():
            raise SbkitError(f"the recipe has no {name}: {type(self).declared()[name].what}",
                             hint="hparams/ has a complete recipe for each task")
        raise AttributeError(f"{type(self).__name__} declares no key {name}")

    @classmethod
    @functools.cache
    def declared(cls) -> Mapping[str, Declared]:
        """All keys, those of its bases first."""
        return types.MappingProxyType({field.name: _declared(cls, field) for field in dataclasses.fields(cls)})

    @classmethod
    def needed(cls) -> Iterator[str]:
        """The keys that a run can't do without."""
        return (declared.name for declared in cls.declared().values() if declared.needed)


def _declared(cls: type[Keys], field: dataclasses.Field[Any]) -> Declared:
    by = next(base for base in reversed(cls.__mro__) if field.name in inspect.get_annotations(base))
    kind = field.type if isinstance(field.type, str) else _written(field.type)
    needed = field.default is dataclasses.MISSING
    return Declared(
        name=field.name, what=field.metadata.get("what", ""), kind=kind, allowed=field.metadata.get("allowed"),
        default=None if needed else field.default, needed=needed, by=by.__name__,
        optional=kind == "Any" or "None" in kind.replace(" ", "").split("|") or (not needed and field.default is None))


def _written(kind: Any) -> str:
    arguments = typing.get_args(kind)
    if arguments and typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(_written, arguments))
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


def _shown(value: Any) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    return repr(value) if isinstance(value, (int, float, bool, list, tuple, dict)) else f"of {type(value).__name__}"
