"""Keys of a recipe, declared by a class with type, range, default and a description, and read once at load."""

from __future__ import annotations

import ast
import collections.abc
import contextlib
import dataclasses
import functools
import importlib
import inspect
import sys
import types
import typing
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

from sbkit.errors import SbkitError
from sbkit.recipe.values import unwrapped

K = TypeVar("K", bound="Keys")
#: Types of sbkit.tasks, which this package must not import.
TaskClass = Any  # the class under ``brain``
Task = Any  # an object of that class
TaskKeys = Any  # an object of its Keys
#: A hint for a missing key that a run needs.
COMPLETE = "hparams/ has a complete recipe for each task"
#: What to do with a recipe that names no task.
SCRIPT = ("if a SpeechBrain script trains it, replace sb.Brain by sbkit.Brain there and start that "
          "(docs/tutorials/speechbrain.md)")
#: The problem of a needed key that is null, as the end of a sentence.
NULL = "is null, and a run needs it"
#: Types of scalars: one, and several.
_SCALARS = {int: ("a whole number", "whole numbers"), float: ("a number", "numbers"),
            bool: ("true or false", "true or false"), str: ("a text", "texts"), type: ("a class", "classes")}
#: Words for classes by their names.
_CLASSES = {"NoneType": "null", "Path": "a path", "PathLike": "a path", "Callable": "a function or class"}
_LISTS = (list, tuple, collections.abc.Sequence)
_MAPPINGS = (dict, collections.abc.Mapping)


def is_task(brain: object) -> bool:
    """Whether a class under ``brain``, or an object of it, is a task; a script's Brain makes no dummy batches."""
    return hasattr(brain, "dummy_batch")


def key(what: str, default: object = dataclasses.MISSING,
        allowed: Container[object] | None = None) -> Any:  # of the field's type, as dataclasses.field says too
    """Declare a field of ``Keys``.

    what : a description in one line
    default : its value in recipes that lack it; a key without a default is needed
    allowed : the allowed values; by default all of its type
    """
    return dataclasses.field(default=default, metadata={"what": what, "allowed": allowed})


#: What to do where a class is only named.
ONLY_NAMED = "write !new: instead of !name:"


class Problem(NamedTuple):
    key: str
    """The key that is wrong."""
    message: str
    hint: str


class Declared(NamedTuple):
    name: str
    what: str
    kind: str
    """Its annotation as text."""
    hint: object
    """Its annotation as a type; ``Any`` where that can't be evaluated."""
    allowed: Container[object] | None
    default: object
    needed: bool
    """Whether a recipe must have it, because it has no default."""
    by: str
    """The name of the class that declares it."""
    module: str
    """The module of that class."""

    def problem(self, value: object) -> str:
        """The problem of a value, as the end of a sentence; empty if it is allowed."""
        if value is None:
            return "" if self.optional else f"is null, and must be {self.wanted}"
        if value not in self.allowed if self.allowed is not None else not _fits(self.hint, value):
            return f"is {_shown(value)}, and must be {self.wanted}"
        return ""

    @property
    def optional(self) -> bool:
        """Whether it may be ``null``: by its annotation, by its default, or because any object may be its value."""
        return _is_any(self.hint) or type(None) in _options(self.hint) or (not self.needed and self.default is None)

    @property
    def built(self) -> bool:
        """Whether it must be an object or null: its annotation names a class, and no scalar type."""
        scalars = {"Any", "object", *(kind.__name__ for kind in _SCALARS)}
        return _is_any(self.hint) and scalars.isdisjoint(each.strip() for each in self.kind.split("|"))

    @property
    def wanted(self) -> str:
        """The allowed values in words; empty if any object is allowed."""
        if self.allowed is not None:
            return str(self.allowed)
        options = (each for each in _options(self.hint) if each is not type(None))
        return "" if _is_any(self.hint) else " or ".join(map(words, options))

    @property
    def plain(self) -> list[type]:
        """Its scalar types; empty if other types are allowed as well."""
        options = [each for each in _options(self.hint) if each is not type(None)]
        return options if all(each in _SCALARS for each in options) else []


@dataclasses.dataclass(kw_only=True)
class Keys:
    """The keys that a class reads from a recipe. Derived classes declare fields with ``key``.

    >>> @dataclasses.dataclass(kw_only=True)
    ... class Mine(Keys):
    ...     width: int = key("width of the layers", 64, range(1, 1000))
    >>> Mine.read({"width": 128, "something": "else"}).width
    128
    """

    built_later: typing.ClassVar[frozenset[str]] = frozenset()
    """Keys that ``read`` leaves out, because properties of a derived class build them (``sbkit.recipe.on_demand``)."""

    @classmethod
    def read(cls: type[K], hparams: Mapping[str, Any]) -> K:
        """Read the keys from ``hparams``, with defaults for those it lacks; an error names all wrong values at once."""
        if wrong := cls.wrong(hparams):
            raise SbkitError("; ".join(problem.message for problem in wrong), hint=wrong[0].hint)
        keys = object.__new__(cls)
        known = cls.declared().values()
        values = {declared.name: declared.default for declared in known if not declared.needed}
        values |= {declared.name: hparams[declared.name] for declared in known if declared.name in hparams}
        for name in values.keys() - cls.built_later:
            object.__setattr__(keys, name, values[name])
        return keys

    @classmethod
    def wrong(cls, hparams: Mapping[str, Any]) -> list[Problem]:
        """The problems of single keys."""
        problems = ((name, declared.problem(hparams[name]))
                    for name, declared in cls.declared().items() if name in hparams)
        return [Problem(name, f"{name} {problem}", "docs/reference/keys.md says what each key may be")
                for name, problem in problems if problem]

    @classmethod
    def misfits(cls, hparams: Mapping[str, Any]) -> list[Problem]:
        """Return a problem for each object that a recipe built of another class than declared.

        A class of the user's own may do as well. That of an installed package must have all public methods of the
        declared one, and one of sbkit's, such as the pretrainer of an encoder, some.
        """
        problems = []
        for name, known in cls.declared().items():
            value = hparams.get(name)
            declared = _options(_checked_type(known.hint, known.kind, known.module))
            kinds = [typing.get_origin(kind) or kind for kind in declared if kind is not type(None)]
            if value is None or not known.built or any(
                    kind in (Any, object) or not isinstance(kind, type) for kind in kinds):
                continue
            if any(isinstance(value, kind) for kind in kinds):
                continue
            named = isinstance(value, (functools.partial, type))
            made: Any = unwrapped(value)[0]  # what it makes, if it is only named, may be of another class
            plain = named or isinstance(value, (Mapping, list, tuple, str, int, float))
            package = (made if named else type(value)).__module__.partition(".")[0]
            place = getattr(sys.modules.get(package), "__file__", None) or "site-packages"  # built in
            of_the_user = package != "sbkit" and "site-packages" not in place
            enough = any if package == "sbkit" else all
            methods = [[each for each in vars(kind) if each[0] != "_"] for kind in kinds]
            alike = any(names and enough(hasattr(made, each) for each in names) for names in methods)
            fits = not isinstance(made, type) or issubclass(made, tuple(kinds)) or alike or of_the_user
            only_named = named and fits
            if not plain and (of_the_user or alike):
                continue
            kind = made if named else type(value)
            if plain and not named:
                what = "a mapping" if isinstance(value, Mapping) else _shown(value)
                hint = "write !new: and that class after the key, with its arguments below it"
            elif only_named:
                what = "only named, not built"
                hint = ONLY_NAMED
            else:
                what = f"of {kind.__module__}.{kind.__qualname__}"
                hint = "docs/reference/keys.md says what each key may be"
            problems.append(Problem(name, f"it is {what}, and must be {known.what}", hint))
        return problems

    @classmethod
    def null(cls, hparams: Mapping[str, Any]) -> list[Problem]:
        """Return a problem for each needed key that the recipe sets to null.

        ``read`` accepts them: a Brain for a part of a run, such as a trial of batch sizes, needs no checkpointer.
        """
        return [Problem(name, f"{name} {NULL}", COMPLETE) for name, declared in cls.declared().items()
                if declared.needed and declared.optional and name in hparams and hparams[name] is None]

    def class_of(self, name: str) -> type:
        """The class of a key's value; an object isn't built for that (``sbkit.recipe.on_demand``)."""
        return type(getattr(self, name))

    def clashes(self) -> Iterator[Problem]:
        """The problems of combined keys, each of which is right by itself; for derived classes to override."""
        yield from self.clashes_of_the_corpus()

    def clashes_of_the_corpus(self) -> Iterator[Problem]:
        """Those of ``clashes`` that change how a corpus is prepared, found without building the model."""
        yield from ()

    def missing(self) -> Iterator[Problem]:
        """The keys whose values need what isn't installed on this machine; for derived classes to override."""
        yield from ()

    if not typing.TYPE_CHECKING:  # a type checker finds undeclared keys itself

        def __getattr__(self, name: str) -> NoReturn:
            """Raise an error for a needed key that the recipe lacks; Python calls this only for missing attributes."""
            if name in type(self).declared():
                raise SbkitError(f"the recipe has no {name}: {type(self).declared()[name].what}",
                                 hint=COMPLETE)
            raise AttributeError(f"{type(self).__name__} declares no key {name}")

    @classmethod
    @functools.cache
    def declared(cls) -> Mapping[str, Declared]:
        """The declarations of all keys by name, those of base classes first."""
        declarations = {}
        for field in dataclasses.fields(cls):
            by = next(base for base in reversed(cls.__mro__) if field.name in inspect.get_annotations(base))
            needed = field.default is dataclasses.MISSING
            hint: object = Any  # for a name that only type checkers import
            scope = vars(sys.modules[by.__module__]) if by.__module__ in sys.modules else {}
            with contextlib.suppress(Exception):  # an annotation can raise anything when it is evaluated
                hint = typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": field.type}), scope)["it"]
            declarations[field.name] = Declared(
                name=field.name, what=field.metadata.get("what", ""), kind=_written(field.type), hint=hint,
                allowed=field.metadata.get("allowed"), default=None if needed else field.default, needed=needed,
                by=by.__name__, module=by.__module__)
        return types.MappingProxyType(declarations)

    @classmethod
    def needed(cls) -> Iterator[str]:
        """The names of the keys that have no default."""
        return (declared.name for declared in cls.declared().values() if declared.needed)


def _written(kind: object) -> str:
    """An annotation as text."""
    if isinstance(kind, str):
        return kind
    if typing.get_origin(kind) in (typing.Union, types.UnionType):
        return " | ".join(map(_written, typing.get_args(kind)))
    if typing.get_args(kind):
        return str(kind).removeprefix("typing.").removeprefix("collections.abc.")
    return "None" if kind is type(None) else getattr(kind, "__name__", str(kind))


@functools.cache
def _checked_type(hint: object, kind: str, module: str) -> Any:  # a type
    """An annotation as a type, with the names that its module imports for type checkers; ``Any`` if it has none."""
    if hint is not Any:
        return hint
    scope = dict(vars(sys.modules[module]))
    for node in ast.walk(ast.parse(inspect.getsource(sys.modules[module]))):
        if isinstance(node, ast.If) and getattr(node.test, "id", "") == "TYPE_CHECKING":
            for each in node.body:
                if isinstance(each, ast.ImportFrom) and each.module:
                    source = importlib.import_module(each.module)
                    scope |= {name.asname or name.name: getattr(source, name.name) for name in each.names}
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": kind}), scope)["it"]
    except Exception:  # an annotation can raise anything when it is evaluated
        return Any


# ---------------------------------------------------------------------------------------------- types


def _options(kind: object) -> tuple[Any, ...]:
    """The members of a union; the type itself otherwise."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_any(kind: object) -> bool:
    """Whether any object is allowed, by the type or by a member of a union; classes aren't compared."""
    known = {type(None), typing.Literal, *_SCALARS, *_LISTS, *_MAPPINGS}
    return any((typing.get_origin(one) or one) not in known for one in _options(kind))


def _fits(kind: object, value: object) -> bool:
    """Whether a value has a type, with all elements of lists and mappings; a bool is no number."""
    if len(options := _options(kind)) > 1:
        return any(_fits(one, value) for one in options)
    if _is_any(kind):
        return True
    if kind is type(None):
        return value is None
    if kind in _SCALARS:
        return isinstance(value, (int, float) if kind is float else kind) and (
            kind is bool or not isinstance(value, bool))
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return any(type(value) is type(one) and value == one for one in inner)
    if origin in _MAPPINGS:
        return isinstance(value, Mapping) and (not inner or all(
            _fits(inner[0], name) and _fits(inner[1], each) for name, each in value.items()))
    if not isinstance(value, (list, tuple)):
        return False
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(_fits, inner, value))
    return not inner or all(_fits(inner[0], each) for each in value)


def words(kind: object, many: bool = False) -> str:
    """A type in words: ``a list of whole numbers``."""
    options = _options(kind)
    if len(options) > 1:
        return " or ".join(dict.fromkeys(words(each, many) for each in options))
    if kind in _SCALARS:
        return _SCALARS[kind][many]
    origin, inner = typing.get_origin(kind) or kind, typing.get_args(kind)
    if origin is typing.Literal:
        return " or ".join(map(str, inner))
    if origin in _MAPPINGS:
        elements = "" if not inner or _is_any(inner[1]) else f" of {words(inner[0], True)} to {words(inner[1], True)}"
        return ("mappings" if many else "a mapping") + elements
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return f"{'lists' if many else 'a list'} of {', '.join(map(words, inner))}"
    if origin in (*_LISTS, collections.abc.Iterable):
        elements = "" if not inner or _is_any(inner[0]) else f" of {words(inner[0], True)}"
        return ("lists" if many else "a list") + elements
    name = getattr(origin, "__name__", str(origin))
    return _CLASSES.get(name, f"{'an' if name[:1].lower() in 'aeio' else 'a'} {name}")


def _shown(value: object) -> str:
    if isinstance(value, str):
        return f"the text {value!r}"
    return repr(value) if isinstance(value, (int, float, bool, list, tuple, dict)) else f"of {type(value).__name__}"
