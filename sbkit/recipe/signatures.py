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
from collections.abc import Callable, Mapping
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
    target, used = None, 0
    for i in range(1, len(parts) + 1):
        module = ".".join(parts[:i])
        try:
            target, used = importlib.import_module(module), i
        except ModuleNotFoundError as error:
            if error.name is not None and (module == error.name or module.startswith(f"{error.name}.")):
                break
            raise LookupError(f"importing {module} fails: {first_line(error)}", f"install {error.name}") from error
        except Exception as error:  # a module can raise anything when it is imported
            raise LookupError(f"importing {module} fails: {summary(error)}", "") from error
    if target is None:
        if hasattr(builtins, parts[0]):
            target = builtins
        else:
            near = did_you_mean(parts[0], [*sys.stdlib_module_names, *COMMON], 0.8)
            near = None if near == parts[0] else near
            raise LookupError(f"there is no module {parts[0]}", f"did you mean {near}?" if near else "is it installed?")
    for i in range(used, len(parts)):
        try:
            target = getattr(target, parts[i])
        except AttributeError:
            owner = ".".join(parts[:i]) or "Python"
            known = [*dir(target), *getattr(target, "__all__", ())]  # these may be imported on first use
            if inspect.ismodule(target):  # modules of a package that aren't imported yet
                known += [path.stem for folder in getattr(target, "__path__", None) or ()
                          for path in pathlib.Path(folder).glob("*") if path.is_dir() or path.suffix == ".py"]
            near = did_you_mean(parts[i], [each for each in known if each.isidentifier() and each[0] != "_"])
            hint = f"did you mean {owner}.{near}?" if near else ""
            raise LookupError(f"{owner} has no {parts[i]}", hint) from None
        except Exception as error:  # SpeechBrain imports some modules lazily, and that can fail
            raise LookupError(f"importing {'.'.join(parts[: i + 1])} fails: {first_line(error)}", "") from error
        if packages is not None:
            home = target.__name__ if inspect.ismodule(target) else getattr(target, "__module__", None)
            _check_allowed(home, packages)
    return target


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


def bind(target: Callable[..., Any], node: Node, findings: Findings, partial: bool = False) -> None:
    """Add findings about arguments of a node that don't suit the signature of what it calls.

    partial: more arguments are given later, so none is missing (``!name:``)
    """
    try:
        signature = inspect.signature(target)
    except (ValueError, TypeError):  # C functions may have none
        return
    name = getattr(target, "__name__", str(target))
    positional, named = arguments(node)
    parameters = signature.parameters
    kinds = inspect.Parameter
    by_place = [p for p in parameters.values() if p.kind in (kinds.POSITIONAL_ONLY, kinds.POSITIONAL_OR_KEYWORD)]
    rest = next((p for p in parameters.values() if p.kind is kinds.VAR_POSITIONAL), None)
    by_name = {p.name: p for p in parameters.values() if p.kind in (kinds.KEYWORD_ONLY, kinds.POSITIONAL_OR_KEYWORD)}
    takes_any = any(p.kind is kinds.VAR_KEYWORD for p in parameters.values())
    hints = _hints(target)

    if len(positional) > len(by_place) and rest is None:
        hint = f"it takes {listed(p.name for p in by_place)}" if by_place else ""
        if len(by_place) == 1 and re.search("Iterable|Sequence|[Ll]ist", str(by_place[0].annotation)):
            hint = f"{by_place[0].name} is itself a list: write [[a, b]], or put a second - before the first item"
        findings.wrong(node, "too-many-arguments",
                       f"{name} takes at most {counted(len(by_place), 'argument')}, and gets {len(positional)}", hint)
    filled = set()
    for i, value in enumerate(positional):
        parameter = by_place[i] if i < len(by_place) else rest
        if parameter is not None:
            filled.add(parameter.name)
            _compare(name, parameter, hints, value, node, i, findings)
    for key, value in named.items():
        if key in filled and key in by_name:
            findings.error("argument-twice", node.place_of(key), node.key_of(key), f"{name} gets {key} twice")
            findings.mark(node)
        elif key in by_name:
            filled.add(key)
            _compare(name, by_name[key], hints, value, node, key, findings)
        elif not takes_any:
            near = did_you_mean(str(key), [n for n in by_name if n not in named]) or did_you_mean(str(key), by_name)
            findings.error("unknown-argument", node.place_of(key), node.key_of(key),
                           f"{name} has no argument {key}",
                           f"did you mean {near}?" if near else f"it takes {listed(by_name)}" if by_name else
                           "it takes none")
            findings.mark(node)
            if near:
                filled.add(near)  # misspelt rather than missing
        else:
            near = did_you_mean(str(key), [n for n in by_name if n not in named], cutoff=0.85)
            if near:
                findings.warning("unknown-argument", node.place_of(key), node.key_of(key),
                                 f"{name} has no argument {key} itself and passes it on", f"did you mean {near}?")
    check_choices(target, named, node, findings)
    missing = [p.name for p in (*by_place, *by_name.values()) if p.default is kinds.empty and p.name not in filled]
    missing = list(dict.fromkeys(missing))
    if missing and not partial:
        findings.wrong(node, "missing-argument",
                       f"{name} lacks the argument{'s' if len(missing) > 1 else ''} {', '.join(missing)}",
                       f"add {', '.join(f'{name}: VALUE' for name in missing)}")


def arguments(node: Node) -> tuple[list[Node], dict[Any, Node]]:
    """The positional and named arguments of a node, as HyperPyYAML takes them from a list or a mapping."""
    if isinstance(node.value, list):
        return node.value, {}
    if isinstance(node.value, dict):
        named = ("_args", "_kwargs") if node.tag.startswith("!applyref:") else (
            "args", "kwds") if node.tag.startswith("!!python/object/apply:") else ()
        if named and set(node.value) == set(named):
            args, kwargs = (node.value[name].value for name in named)
            return (args if isinstance(args, list) else []), (kwargs if isinstance(kwargs, dict) else {})
        return [], node.value
    return [], {}


def _compare(name: str, parameter: inspect.Parameter, hints: Mapping[str, Any], value: Node, node: Node,
             key: object, findings: Findings) -> None:
    """Compare an argument with its annotation, or without one with the type of its default."""
    given = static(value)
    if given is UNKNOWN or findings.unusable(value) or (given == parameter.default and not isinstance(given, Node)):
        return
    hint = hints.get(parameter.name)
    wanted = None
    if hint is not None:
        if not fits(hint, value) and not (value.tag.startswith("!name:") and parameter.name.endswith(_FACTORIES)):
            wanted = words(hint)
    elif isinstance(given, str) and isinstance(parameter.default, (bool, int, float)):
        if (not value.quoted and given in TRUTHS) or looks_like_number(given):
            wanted = f"{words(type(parameter.default))} (by default {parameter.default})"
    elif given == "None" and parameter.default is None and not value.quoted:
        wanted = "null or a value"
    if wanted is None:
        return
    message = f"{name}'s {parameter.name} must be {wanted}, not {_shown(given)}"
    if isinstance(given, (int, float)) and fits(hint, Node(str(given), value.place, value.key, quoted=True)):
        place = node.place_of(key) if isinstance(key, str) else value.place
        findings.warning("wrong-type", place, node.key_of(key), message, f'write "{given}"')
        return
    place = findings.blame(node, key) if isinstance(key, str) else value.place
    fix = _fix(given, hint, value)
    if isinstance(given, Node) and isinstance(given.value, list):
        null = next((item for item in given.value if item.scalar and item.value is None and not item.tag), None)
        if null is not None:
            source = null.key if null.source is None else null.source.key
            message = f"{name}'s {parameter.name} has {source}, which is null"
            fix = "leave it out, or name what takes its place"
            if re.fullmatch(r"(\w+)\.(\w+)", written := node.key_of(key)):
                fix += ", {}: {{{}: [!ref <KEY>]}}".format(*written.split("."))
            if written.startswith("opt_class."):
                fix += f", or take another class than {name}"
    findings.error("wrong-type", place, node.key_of(key), message, fix)
    findings.mark(node)
    findings.mark(value)


def _shown(given: object) -> str:
    if isinstance(given, Node):
        if given.tag or isinstance(given.value, dict):
            return given.tag or "a mapping"
        plain = all(item.scalar and not item.tag for item in given.value)
        return f"the list {[item.value for item in given.value]}" if plain else "a list"
    if isinstance(given, str):
        return f"the text {given!r}"
    kind = type(given).__name__
    return f"{given!r} ({'an' if kind == 'int' else 'a'} {kind})" if given is not None else "null"


def _fix(given: object, hint: object, value: Node) -> str:
    if isinstance(given, Node) and given.tag.startswith("!name:") and isinstance(hint, type):
        return f"write !new:{given.tag[len('!name:'):]} to build one"
    if isinstance(given, str):
        if given in TRUTHS and not value.quoted:
            return f"write {TRUTHS[given]}"
        if given in ("None", "none"):
            return "write null"
        number = looks_like_number(given)
        if number:
            at = f" in {value.source.key}" if value.source is not None else ""
            return f"write {number}" + (" without quotes" if number == given else "") + at
        if is_tuple(given):
            return f"write [{given[1:-1]}]"
        if given.startswith("(") or given.endswith(")"):
            return "write a list: [a, b]"
    if isinstance(given, float) and given.is_integer():
        return f"write {int(given)}; in a !ref, // divides to a whole number"
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
    given = static(node)
    if given is UNKNOWN:
        return True
    origin, inner = typing.get_origin(hint), typing.get_args(hint)
    if origin in (typing.Union, types.UnionType):
        return any(fits(one, node) for one in inner)
    if origin is typing.Literal:
        return given in inner
    if origin is typing.Annotated:
        return fits(inner[0], node)
    kind = origin or hint
    if kind is type(None):
        return given is None
    if not isinstance(kind, type):
        return True
    if given is None:
        return kind is object
    if isinstance(given, Node):
        if isinstance(given.value, list) and not given.tag:
            if kind in (list, tuple, set, frozenset) or issubclass(list, kind):
                of_one_kind = inner[:1] if len(inner) == 1 or (len(inner) == 2 and inner[1] is Ellipsis) else ()
                return all(fits(of_one_kind[0], item) for item in given.value) if of_one_kind else True
            return False
        if isinstance(given.value, dict) and not given.tag:
            return issubclass(dict, kind) or kind in (dict, collections.abc.MutableMapping) \
                or kind.__module__ == "typing"
        if given.tag.startswith("!new:"):
            try:
                built = locate(given.tag[len("!new:"):])
            except LookupError:
                return True
            return not isinstance(built, type) or issubclass(built, kind) or kind in (float, complex) or _duck(kind)
        if given.tag.startswith("!name:"):
            with contextlib.suppress(LookupError, TypeError):  # some Protocols don't support isinstance
                if isinstance(locate(given.tag[len("!name:"):]), kind):  # a constant, or a class for a type
                    return True
            return kind in (type, object) or kind.__name__ == "Callable" or _duck(kind) or kind.__module__ == "typing"
        return True
    if kind is bool:
        return isinstance(given, bool) or given in (0, 1)
    if kind is float:
        return isinstance(given, (int, float))
    if kind is complex:
        return isinstance(given, (int, float, complex))
    if kind in (str, os.PathLike[str], pathlib.Path) or issubclass(kind, pathlib.PurePath):
        return isinstance(given, str)
    if isinstance(given, tuple):
        return kind is object or issubclass(tuple, kind) or kind in (list, collections.abc.MutableSequence)
    if isinstance(given, str) and kind in (collections.abc.Sequence, collections.abc.Iterable, list, tuple):
        return not inner and kind not in (list, tuple)  # a text as a Sequence[str] would be read letter by letter
    if kind.__module__.split(".")[0] == "torch" and kind.__name__ in ("dtype", "device"):
        return isinstance(given, (str, int))
    return isinstance(given, kind)


def _duck(kind: type) -> bool:
    """Whether an object can have this type without inheriting from it."""
    return getattr(kind, "_is_protocol", False) or kind.__module__ in ("collections.abc", "typing")
