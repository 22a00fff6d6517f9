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
    code: str = "clash"
    """By default that of keys that can't be combined."""

    @property
    def text(self) -> str:
        """The message, which names the key."""
        return self.message if self.message.startswith(f"{self.key} ") else f"{self.key}: {self.message}"


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
        allowed = _fits(self.hint, value) if self.allowed is None else value in self.allowed
        return "" if allowed else f"is {_shown(value)}, and must be {self.wanted}"

    @property
    def optional(self) -> bool:
        """Whether it may be ``null``: by its annotation, by its default, or because any object may be its value."""
        return _is_any(self.hint) or type(None) in _options(self.hint) or (not self.needed and self.default is None)

    @property
    def built(self) -> bool:
        """Whether it must be an object or null: its annotation names a class, and no scalar type."""
        scalars = {"Any", "object", *(kind.__name__ for kind in _SCALARS)}
        return _is_any(self.hint) and scalars.isdisjoint(name.strip() for name in self.kind.split("|"))

    @property
    def classes(self) -> tuple[type, ...]:
        """The classes that its annotation names; empty if it also names what is no class, such as ``Any``."""
        options = _options(_checked_type(self.hint, self.kind, self.module))
        classes = [typing.get_origin(option) or option for option in options if option is not type(None)]
        if any(option in (Any, object) or not isinstance(option, type) for option in classes):
            return ()
        return tuple(classes)

    @property
    def wanted(self) -> str:
        """The allowed values in words; empty if any object is allowed."""
        if self.allowed is not None:
            return str(self.allowed)
        options = (option for option in _options(self.hint) if option is not type(None))
        return "" if _is_any(self.hint) else " or ".join(map(words, options))

    @property
    def plain(self) -> list[type]:
        """Its scalar types; empty if other types are allowed as well."""
        options = [option for option in _options(self.hint) if option is not type(None)]
        return options if all(option in _SCALARS for option in options) else []


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
        problems = cls.wrong(hparams)
        if problems:
            raise SbkitError(problems[0].code, "; ".join(problem.message for problem in problems),
                             hint=problems[0].hint, key=problems[0].key)
        keys = object.__new__(cls)
        values = {}
        for name, declared in cls.declared().items():
            if name in hparams:
                values[name] = hparams[name]
            elif not declared.needed:
                values[name] = declared.default
        for name in values.keys() - cls.built_later:
            object.__setattr__(keys, name, values[name])
        return keys

    @classmethod
    def wrong(cls, hparams: Mapping[str, Any]) -> list[Problem]:
        """The problems of single keys."""
        problems = ((name, declared.problem(hparams[name]))
                    for name, declared in cls.declared().items() if name in hparams)
        return [Problem(name, f"{name} {problem}", "docs/reference/keys.md says what each key may be", "bad-value")
                for name, problem in problems if problem]

    @classmethod
    def misfits(cls, hparams: Mapping[str, Any]) -> list[Problem]:
        """Return a problem for each object that a recipe built of another class than declared.

        A class of the user's own may do as well. That of an installed package must have all public methods of the
        declared one, and one of sbkit's, such as the pretrainer of an encoder, some.
        """
        problems = []
        for name, declared in cls.declared().items():
            value = hparams.get(name)
            if value is None or not declared.built:
                continue
            classes = declared.classes
            if not classes or isinstance(value, classes):
                continue
            misfit = _misfit(value, classes)
            if misfit is not None:
                what, hint = misfit
                problems.append(Problem(name, f"it is {what}, and must be {declared.what}", hint, "wrong-class"))
        return problems

    @classmethod
    def null(cls, hparams: Mapping[str, Any]) -> list[Problem]:
        """Return a problem for each needed key that the recipe sets to null.

        ``read`` accepts them: a Brain for a part of a run, such as a trial of batch sizes, needs no checkpointer.
        """
        return [Problem(name, f"{name} {NULL}", COMPLETE, "missing-key") for name, declared in cls.declared().items()
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
                raise SbkitError("missing-key", f"the recipe has no {name}: {type(self).declared()[name].what}",
                                 hint=COMPLETE, key=name)
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
        if not isinstance(node, ast.If) or getattr(node.test, "id", "") != "TYPE_CHECKING":
            continue
        for statement in node.body:
            if isinstance(statement, ast.ImportFrom) and statement.module:
                source = importlib.import_module(statement.module)
                scope |= {name.asname or name.name: getattr(source, name.name) for name in statement.names}
    try:
        return typing.get_type_hints(types.SimpleNamespace(__annotations__={"it": kind}), scope)["it"]
    except Exception:  # an annotation can raise anything when it is evaluated
        return Any


# ---------------------------------------------------------------------------------------------- objects


def _misfit(value: object, classes: tuple[type, ...]) -> tuple[str, str] | None:
    """What a value is instead of an object of these classes, and what to do; None if it will do as well."""
    if isinstance(value, (functools.partial, type)):  # only named: it is judged by the class that it names
        named: Any  # a class, a function, or what else a recipe names
        named, _ = unwrapped(value)
        if not isinstance(named, type) or issubclass(named, classes) or _will_do(named, named, classes):
            return "only named, not built", ONLY_NAMED
        return _other_class(named)
    if isinstance(value, (Mapping, list, tuple, str, int, float)):
        what = "a mapping" if isinstance(value, Mapping) else _shown(value)
        return what, "write !new: and that class after the key, with its arguments below it"
    if _will_do(value, type(value), classes):
        return None
    return _other_class(type(value))


def _other_class(cls: type) -> tuple[str, str]:
    return f"of {cls.__module__}.{cls.__qualname__}", "docs/reference/keys.md says what each key may be"


def _will_do(value: object, cls: type, classes: tuple[type, ...]) -> bool:
    """Whether an object of a class, or the class itself, may be used like one of the declared ``classes``."""
    package = cls.__module__.partition(".")[0]
    file = getattr(sys.modules.get(package), "__file__", None)
    is_installed = not file or "site-packages" in file  # what is built in has no file
    if package != "sbkit" and not is_installed:
        return True  # a class of the user's own, who knows what it is for
    enough = any if package == "sbkit" else all
    for declared_class in classes:
        names = [name for name in vars(declared_class) if not name.startswith("_")]
        if names and enough(hasattr(value, name) for name in names):
            return True
    return False


# ---------------------------------------------------------------------------------------------- types


def _options(kind: object) -> tuple[Any, ...]:
    """The members of a union; the type itself otherwise."""
    return typing.get_args(kind) if typing.get_origin(kind) in (typing.Union, types.UnionType) else (kind,)


def _is_any(kind: object) -> bool:
    """Whether any object is allowed, by the type or by a member of a union; classes aren't compared."""
    compared = {type(None), typing.Literal, *_SCALARS, *_LISTS, *_MAPPINGS}
    return any((typing.get_origin(option) or option) not in compared for option in _options(kind))


def _fits(kind: object, value: object) -> bool:
    """Whether a value has a type, with all elements of lists and mappings; a bool is no number."""
    options = _options(kind)
    if len(options) > 1:
        return any(_fits(option, value) for option in options)
    if _is_any(kind):
        return True
    if kind is type(None):
        return value is None
    if kind in _SCALARS:
        if isinstance(value, bool):
            return kind is bool
        return isinstance(value, (int, float) if kind is float else kind)

    origin = typing.get_origin(kind) or kind
    inner = typing.get_args(kind)
    if origin is typing.Literal:
        return any(type(value) is type(constant) and value == constant for constant in inner)
    if origin in _MAPPINGS:
        if not isinstance(value, Mapping):
            return False
        return not inner or all(_fits(inner[0], name) and _fits(inner[1], item) for name, item in value.items())
    if not isinstance(value, (list, tuple)):
        return False
    if origin is tuple and inner and inner[-1] is not Ellipsis:
        return len(value) == len(inner) and all(map(_fits, inner, value))
    return not inner or all(_fits(inner[0], item) for item in value)


def words(kind: object, many: bool = False) -> str:
    """A type in words: ``a list of whole numbers``."""
    options = _options(kind)
    if len(options) > 1:
        return " or ".join(dict.fromkeys(words(option, many) for option in options))
    if kind in _SCALARS:
        return _SCALARS[kind][many]
    origin = typing.get_origin(kind) or kind
    inner = typing.get_args(kind)
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
