"""Checks names and arguments in a recipe against the Python objects they name, which are imported but not called."""

from __future__ import annotations

import builtins
import collections.abc
import contextlib
import importlib
import inspect
import os
import pathlib
import re
import sys
import types
import typing
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from sbkit.errors import first_line, summary
from sbkit.recipe.choices import check_choices
from sbkit.recipe.keys import words
from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.source import UNKNOWN, Findings, Node
from sbkit.recipe.values import TRUTHS, is_tuple, looks_like_number, static
from sbkit.system.console import counted

COMMON = ("torch", "torchaudio", "speechbrain", "sbkit", "transformers", "numpy")
#: Ends of the names of arguments that take a class, although they are often annotated with the type of its objects.
_FACTORIES = ("class", "cls", "type", "factory", "fn", "module")


# ---------------------------------------------------------------------------------------------- names


class ForbiddenImport(LookupError):
    """Raised for a name of, or through, an object in a package that must not be imported."""


def locate(name: str, packages: tuple[str, ...] | None = None) -> Any:  # an object of any type
    """The object with a dotted name; LookupError has a message and a hint if there is none.

    packages : the packages that each part of the name must belong to (``torch.os.system`` doesn't); otherwise
        ``ForbiddenImport`` is raised, and no other package is imported

    >>> locate("collections.OrderedDict")
    <class 'collections.OrderedDict'>
    >>> locate("collections.OrderdDict")
    Traceback (most recent call last):
    LookupError: ('collections has no OrderdDict', 'did you mean collections.OrderedDict?')
    """
    parts = name.split(".")
    if not all(part.isidentifier() for part in parts):
        raise LookupError(f"{name!r} is not the name of a class or function", "write it as module.Class")
    if packages is not None:
        _check_allowed(parts[0], packages)
        if any(part.startswith("_") for part in parts):
            raise ForbiddenImport("names that begin with _ are not looked up")
    target, used = _imported(parts)
    for i in range(used, len(parts)):
        try:
            target = getattr(target, parts[i])
        except AttributeError:
            owner = ".".join(parts[:i]) or "Python"
            near = did_you_mean(parts[i], [known for known in _names_in(target)
                                           if known.isidentifier() and not known.startswith("_")])
            hint = f"did you mean {owner}.{near}?" if near else ""
            raise LookupError(f"{owner} has no {parts[i]}", hint) from None
        except Exception as error:  # SpeechBrain imports some modules lazily, and that can fail
            raise LookupError(f"importing {'.'.join(parts[: i + 1])} fails: {first_line(error)}", "") from error
        if packages is not None:
            home = target.__name__ if inspect.ismodule(target) else getattr(target, "__module__", None)
            _check_allowed(home, packages)
    return target


def _imported(parts: Sequence[str]) -> tuple[Any, int]:
    """The innermost module of a dotted name, and the number of parts that name it; with none it is ``builtins``."""
    target = None
    used = 0
    for count in range(1, len(parts) + 1):
        module = ".".join(parts[:count])
        try:
            target = importlib.import_module(module)
            used = count
        except ModuleNotFoundError as error:
            is_this = error.name is not None and (module == error.name or module.startswith(f"{error.name}."))
            if is_this:  # the other parts are attributes
                break
            raise LookupError(f"importing {module} fails: {first_line(error)}", f"install {error.name}") from error
        except Exception as error:  # a module can raise anything when it is imported
            raise LookupError(f"importing {module} fails: {summary(error)}", "") from error
    if target is not None:
        return target, used
    if hasattr(builtins, parts[0]):
        return builtins, 0
    near = did_you_mean(parts[0], [*sys.stdlib_module_names, *COMMON], 0.8)
    hint = f"did you mean {near}?" if near and near != parts[0] else "is it installed?"
    raise LookupError(f"there is no module {parts[0]}", hint)


def _names_in(target: object) -> list[str]:
    """The names of what an object has, and of a package's modules, which may not be imported yet."""
    names = [*dir(target), *getattr(target, "__all__", ())]  # the second may be imported on first use
    if inspect.ismodule(target):
        for folder in getattr(target, "__path__", None) or ():
            names += [path.stem for path in pathlib.Path(folder).glob("*") if path.is_dir() or path.suffix == ".py"]
    return names


def _check_allowed(module: object, packages: tuple[str, ...]) -> None:
    if str(module).partition(".")[0] not in packages:
        raise ForbiddenImport(f"it is not in {', '.join(packages[:-1])} or {packages[-1]}, so it is not imported")


def kind_wanted(kind: str, target: object) -> str:
    """A suggestion if a tag doesn't suit what it names, such as ``!new:`` for a function; otherwise empty."""
    if kind == "!new" and not inspect.isclass(target):
        return "write !apply: to call it, or !name: to pass it on" if callable(target) else "!new: takes a class"
    if kind in ("!apply", "!applyref") and not inspect.isroutine(target):
        return "write !new: to build one" if inspect.isclass(target) else f"{kind}: takes a function"
    if kind == "!module" and not inspect.ismodule(target):
        return "write !name: to pass it on"
    return ""


def kind_of(target: object) -> str:
    """What an object is, in words."""
    if inspect.isclass(target):
        return "a class"
    if inspect.ismodule(target):
        return "a module"
    return "a function" if inspect.isroutine(target) else f"a {type(target).__name__}"


# ---------------------------------------------------------------------------------------------- arguments


class _Parameters:
    """The parameters of a signature, by how they can be given."""

    def __init__(self, signature: inspect.Signature):
        kinds = inspect.Parameter
        every = list(signature.parameters.values())
        self.by_place = [p for p in every if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
        self.by_name = {p.name: p for p in every if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)}
        self.more_by_place = next((p for p in every if p.kind is kinds.VAR_POSITIONAL), None)
        """``*args``, if it takes any number of them."""
        self.takes_any_name = any(p.kind is kinds.VAR_KEYWORD for p in every)

    def at(self, index: int) -> inspect.Parameter | None:
        """The parameter that the argument at an index goes to, None if there is none."""
        return self.by_place[index] if index < len(self.by_place) else self.more_by_place

    def missing(self, filled: Container[str]) -> list[str]:
        """The names of parameters that need a value and got none."""
        needed = [p.name for p in (*self.by_place, *self.by_name.values()) if p.default is inspect.Parameter.empty]
        return list(dict.fromkeys(name for name in needed if name not in filled))

    def similar(self, key: object, named: Container[object], cutoff: float = 0.6) -> str | None:
        """The parameter of a similar name that isn't given."""
        return did_you_mean(str(key), [name for name in self.by_name if name not in named], cutoff)


def bind(target: Callable[..., Any], node: Node, findings: Findings, partial: bool = False) -> None:
    """Add findings about arguments of a node that don't suit the signature of what it calls.

    partial: more arguments are given later, so none is missing (``!name:``)
    """
    try:
        parameters = _Parameters(inspect.signature(target))
    except (ValueError, TypeError):  # C functions may have none
        return
    name = getattr(target, "__name__", str(target))
    positional, named = arguments(node)
    hints = _hints(target)

    if len(positional) > len(parameters.by_place) and parameters.more_by_place is None:
        _report_too_many(name, len(positional), parameters.by_place, node, findings)
    filled = set()
    for i, value in enumerate(positional):
        parameter = parameters.at(i)
        if parameter is not None:
            filled.add(parameter.name)
            _compare(name, parameter, hints, value, node, i, findings)

    for key, value in named.items():
        if key in filled and key in parameters.by_name:
            findings.error("argument-twice", node.place_of(key), node.key_of(key), f"{name} gets {key} twice")
            findings.mark(node)
        elif key in parameters.by_name:
            filled.add(key)
            _compare(name, parameters.by_name[key], hints, value, node, key, findings)
        elif parameters.takes_any_name:
            near = parameters.similar(key, named, cutoff=0.85)
            if near:
                findings.warning("unknown-argument", node.place_of(key), node.key_of(key),
                                 f"{name} has no argument {key} itself and passes it on", f"did you mean {near}?")
        else:
            near = _report_unknown(name, key, named, parameters, node, findings)
            if near:
                filled.add(near)  # misspelt rather than missing

    check_choices(target, named, node, findings)
    missing = parameters.missing(filled)
    if missing and not partial:
        findings.wrong(node, "missing-argument",
                       f"{name} lacks the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
                       f"add {', '.join(f'{name}: VALUE' for name in missing)}")


def _report_too_many(name: str, count: int, by_place: Sequence[inspect.Parameter], node: Node,
                     findings: Findings) -> None:
    hint = f"it takes {listed(p.name for p in by_place)}" if by_place else ""
    if len(by_place) == 1 and re.search("Iterable|Sequence|[Ll]ist", str(by_place[0].annotation)):
        hint = f"{by_place[0].name} is itself a list: write [[a, b]], or put a second - before the first item"
    findings.wrong(node, "too-many-arguments",
                   f"{name} takes at most {counted(len(by_place), 'argument')}, and gets {count}", hint)


def _report_unknown(name: str, key: object, named: Container[object], parameters: _Parameters, node: Node,
                    findings: Findings) -> str | None:
    """Report an argument that a function doesn't have; return the one that was probably meant."""
    near = parameters.similar(key, named) or did_you_mean(str(key), parameters.by_name)
    if near:
        hint = f"did you mean {near}?"
    elif parameters.by_name:
        hint = f"it takes {listed(parameters.by_name)}"
    else:
        hint = "it takes none"
    findings.error("unknown-argument", node.place_of(key), node.key_of(key), f"{name} has no argument {key}", hint)
    findings.mark(node)
    return near


#: Tags that take positional and named arguments together, and the keys under which they have them.
_ARGUMENTS_OF = {"!applyref:": ("_args", "_kwargs"), "!!python/object/apply:": ("args", "kwds")}


def arguments(node: Node) -> tuple[list[Node], dict[Any, Node]]:
    """The positional and named arguments of a node, as HyperPyYAML takes them from a list or a mapping."""
    if isinstance(node.value, list):
        return node.value, {}
    if not isinstance(node.value, dict):
        return [], {}
    for tag, keys in _ARGUMENTS_OF.items():
        if node.tag.startswith(tag) and set(node.value) == set(keys):
            positional, named = (node.value[key].value for key in keys)
            return (positional if isinstance(positional, list) else []), (named if isinstance(named, dict) else {})
    return [], node.value


def _compare(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any], value: Node, node: Node,
             key: object, findings: Findings) -> None:
    """Compare an argument with its annotation, or without one with the type of its default."""
    plain = static(value)
    if plain is UNKNOWN or findings.unusable(value):
        return
    if plain == parameter.default and not isinstance(plain, Node):
        return
    hint = hints.get(parameter.name)
    wanted = _wanted(parameter, hint, value)
    if wanted is None:
        return
    message = f"{name}'s {parameter.name} must be {wanted}, not {_shown(plain)}"

    is_number = isinstance(plain, (int, float))
    if is_number and fits(hint, Node(str(plain), value.place, value.key, quoted=True)):  # a name, such as 1e3
        place = node.place_of(key) if isinstance(key, str) else value.place
        findings.warning("wrong-type", place, node.key_of(key), message, f'write "{plain}"')
        return

    place = findings.blame(node, key) if isinstance(key, str) else value.place
    fix = _fix(plain, hint, value)
    null = _null_in(plain)
    if null is not None:
        source = null if null.source is None else null.source
        message = f"{name}'s {parameter.name} has {source.key}, which is null"
        fix = "leave it out, or name what takes its place"
        written = node.key_of(key)
        if re.fullmatch(r"(\w+)\.(\w+)", written):
            fix += ", {}: {{{}: [!ref <KEY>]}}".format(*written.split("."))
        if written.startswith("opt_class."):
            fix += f", or take another class than {name}"
    findings.error("wrong-type", place, node.key_of(key), message, fix)
    findings.mark(node)
    findings.mark(value)


def _wanted(parameter: inspect.Parameter, hint: object, value: Node) -> str | None:
    """What an argument must be instead of this value, in words; None if the value may be right.

    hint : the parameter's annotation as a type; None if it has none
    """
    plain = static(value)
    if hint is not None:
        is_factory = value.tag.startswith("!name:") and parameter.name.endswith(_FACTORIES)
        return None if is_factory or fits(hint, value) else words(hint)
    if isinstance(plain, str) and isinstance(parameter.default, (bool, int, float)):
        is_truth = plain in TRUTHS and not value.quoted
        if is_truth or looks_like_number(plain):
            return f"{words(type(parameter.default))} (by default {parameter.default})"
        return None
    if plain == "None" and parameter.default is None and not value.quoted:
        return "null or a value"
    return None


def _null_in(plain: object) -> Node | None:
    """The first item of a list that is null."""
    items = plain.value if isinstance(plain, Node) and isinstance(plain.value, list) else []
    return next((item for item in items if item.scalar and item.value is None and not item.tag), None)


def _shown(plain: object) -> str:
    """A value, as ``static`` has it, in words."""
    if isinstance(plain, Node):
        if plain.tag or isinstance(plain.value, dict):
            return plain.tag or "a mapping"
        is_plain = all(item.scalar and not item.tag for item in plain.value)
        return f"the list {[item.value for item in plain.value]}" if is_plain else "a list"
    if plain is None:
        return "null"
    if isinstance(plain, str):
        return f"the text {plain!r}"
    kind = type(plain).__name__
    return f"{plain!r} ({'an' if kind == 'int' else 'a'} {kind})"


def _fix(plain: object, hint: object, value: Node) -> str:
    """What to write instead of a value of a wrong type; empty if that is unknown.

    plain : the value, as ``static`` has it
    """
    if isinstance(plain, Node):
        if plain.tag.startswith("!name:") and isinstance(hint, type):
            return f"write !new:{plain.tag.removeprefix('!name:')} to build one"
        return ""
    if isinstance(plain, float) and plain.is_integer():
        return f"write {int(plain)}; in a !ref, // divides to a whole number"
    if not isinstance(plain, str):
        return ""
    if plain in TRUTHS and not value.quoted:
        return f"write {TRUTHS[plain]}"
    if plain in ("None", "none"):
        return "write null"
    number = looks_like_number(plain)
    if number:
        at = f" in {value.source.key}" if value.source is not None else ""
        return f"write {number}" + (" without quotes" if number == plain else "") + at
    if is_tuple(plain):
        return f"write [{plain[1:-1]}]"
    if plain.startswith("(") or plain.endswith(")"):
        return "write a list: [a, b]"
    return ""


# ---------------------------------------------------------------------------------------------- types


def _hints(target: Callable[..., Any]) -> dict[str, Any]:
    """The annotations of arguments as types, without those that can't be evaluated."""
    function = target.__init__ if inspect.isclass(target) else target
    if not hasattr(function, "__annotations__"):
        return {}
    try:
        return typing.get_type_hints(function)
    except Exception:  # an annotation that only type checkers can evaluate: the others are still used
        scope = getattr(sys.modules.get(getattr(function, "__module__", "")), "__dict__", {})
        hints: dict[str, Any] = {}
        for name, raw in function.__annotations__.items():
            with contextlib.suppress(Exception):
                hints |= typing.get_type_hints(types.SimpleNamespace(__annotations__={name: raw}), scope)
        return hints


def fits(hint: object, node: Node) -> bool:
    """Whether a value has the type ``hint``; True if that can't be decided."""
    plain = static(node)
    if plain is UNKNOWN:
        return True
    origin = typing.get_origin(hint)
    inner = typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(option, node) for option in inner)
    if origin is typing.Literal:
        return plain in inner
    if origin is typing.Annotated:
        return fits(inner[0], node)
    kind = origin or hint
    if kind is type(None):
        return plain is None
    if not isinstance(kind, type):
        return True
    if plain is None:
        return kind is object
    if isinstance(plain, Node):
        return _node_fits(plain, kind, inner)
    return _scalar_fits(plain, kind, inner)


def _node_fits(node: Node, kind: type, inner: Sequence[object]) -> bool:
    """Whether a list, a mapping or an object has a type.

    inner : the types in the brackets of an annotation
    """
    if isinstance(node.value, list) and not node.tag:
        if kind not in (list, tuple, set, frozenset) and not issubclass(list, kind):
            return False
        of_one_kind = len(inner) == 1 or (len(inner) == 2 and inner[1] is Ellipsis)
        return not of_one_kind or all(fits(inner[0], item) for item in node.value)
    if isinstance(node.value, dict) and not node.tag:
        return issubclass(dict, kind) or kind in (dict, collections.abc.MutableMapping) or kind.__module__ == "typing"
    if node.tag.startswith("!new:"):
        try:
            built = locate(node.tag.removeprefix("!new:"))
        except LookupError:  # reported where the name is checked
            return True
        return not isinstance(built, type) or issubclass(built, kind) or kind in (float, complex) or _duck(kind)
    if node.tag.startswith("!name:"):
        with contextlib.suppress(LookupError, TypeError):  # some Protocols don't support isinstance
            if isinstance(locate(node.tag.removeprefix("!name:")), kind):  # a constant, or a class for a type
                return True
        return kind in (type, object) or kind.__name__ == "Callable" or _duck(kind) or kind.__module__ == "typing"
    return True


def _scalar_fits(value: object, kind: type, inner: Sequence[object]) -> bool:
    """Whether a Python value, which is not None, has a type.

    inner : the types in the brackets of an annotation
    """
    if kind is bool:
        return isinstance(value, bool) or value in (0, 1)
    if kind is float:
        return isinstance(value, (int, float))
    if kind is complex:
        return isinstance(value, (int, float, complex))
    if kind in (str, os.PathLike[str], pathlib.Path) or issubclass(kind, pathlib.PurePath):
        return isinstance(value, str)
    if isinstance(value, tuple):
        return kind is object or issubclass(tuple, kind) or kind in (list, collections.abc.MutableSequence)
    if isinstance(value, str) and kind in (collections.abc.Sequence, collections.abc.Iterable, list, tuple):
        return not inner and kind not in (list, tuple)  # a text as a Sequence[str] would be read letter by letter
    if kind.__module__.split(".")[0] == "torch" and kind.__name__ in ("dtype", "device"):
        return isinstance(value, (str, int))
    return isinstance(value, kind)


def _duck(kind: type) -> bool:
    """Whether an object can have this type without inheriting from it."""
    return getattr(kind, "_is_protocol", False) or kind.__module__ in ("collections.abc", "typing")
