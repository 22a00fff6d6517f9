"""Resolves references, copies and includes of a recipe as HyperPyYAML does, and finds all mistakes in them.

It differs from HyperPyYAML in two ways, so that a recipe can replace any part of the one it is based on:

- HyperPyYAML merges a mapping into the value that it overrides, and keeps that value's tag. Here a value with a tag
  (``!new:``, ``!name:``, ``!apply:``, ``!ref``, ...) replaces the whole value; a plain mapping changes parts of it, or
  adds arguments to an object without any.
- A reference under an ``!include:``, if its key isn't in its own file, means a key of the included file.
"""

from __future__ import annotations

import ast
import dataclasses
import operator
import re
import textwrap
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.errors import summary
from sbkit.recipe.files import chain, check_shadowed, included_path, keys, refer_again
from sbkit.recipe.files import referred as referred_in
from sbkit.recipe.names import check_overrides, declared_in
from sbkit.recipe.overrides import from_python, override, with_full_keys
from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.signatures import arguments, locate
from sbkit.recipe.source import BASE, INCLUDE, REFERENCE, UNKNOWN, Findings, Node, Place
from sbkit.recipe.values import data

PLACEHOLDER = "!PLACEHOLDER"
_APPLYREF = "!applyref:"
_OPERATIONS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
               ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.Mod: operator.mod}
_LONGEST = 10_000  # characters of a text with resolved references, each of which can double it


class Resolved(NamedTuple):
    """A recipe with includes read, overrides applied and references replaced by their targets."""

    root: Node | None
    """The recipe as one tree, in which references to the same target are the same Node; None if it can't be read."""
    referred: frozenset[str] = frozenset()
    """The keys that references name, those in replaced values included: such a key isn't a mistake."""


def resolve(path: Path, overrides: Mapping[str, Any], findings: Findings, packages: tuple[str, ...] | None = None,
            call: bool = False) -> Resolved:
    """Parse the files of a recipe and resolve it.

    packages : packages that may be imported to find the keys that the task declares; None: all
    call : call functions of ``!applyref:``; otherwise their results, and texts that contain them, are unknown
    """
    files = chain(path, findings)
    if not files:
        return Resolved(None)
    overrides = with_full_keys(overrides, keys(files))
    first, root = files[0]
    root = refer_again(first, root, overrides)
    files[0] = first, root
    unknown = check_overrides(files, overrides, findings, packages)
    known = {key: from_python(value, key) for key, value in overrides.items() if key not in unknown}
    override_node = Node(known, Place(), "")
    declared = declared_in(files, overrides, packages)
    referred = frozenset(referred_in([*files, (path, override_node)]))
    override(files, override_node, findings, declared)
    check_shadowed(files, findings)
    _Resolver(root, path, findings, (path.resolve(),), declared, call).walk(root)
    _report_cycles(root, findings)
    return Resolved(root, referred)


def flatten(root: Node) -> Node:
    """The tree with the keys of the recipe and those it is based on at one level, in the order in which they are built.

    Its own values win, each where the key is first.
    """
    base = root.value.get(BASE)
    if base is None or not isinstance(base.value, dict):
        return root
    below = flatten(base)
    in_order = dict[Any, Node]()
    for key, node in root.value.items():
        if key == BASE:
            in_order |= below.value
        else:
            in_order[key] = node
    # The base's value of a key that comes before it has just replaced the recipe's own.
    in_order |= {key: node for key, node in root.value.items() if key != BASE}
    return dataclasses.replace(root, value=in_order, key_places={**below.key_places, **root.key_places},
                               comments={**below.comments, **root.comments})


class _Resolver:
    """Resolves one file from top to bottom, replacing nodes on the way, as HyperPyYAML does."""

    def __init__(self, root: Node, path: Path, findings: Findings, inside: tuple[Path, ...],
                 declared: Collection[str], call: bool):
        self.root = root
        self.path = path
        self.findings = findings
        self.inside = inside  # the files that are being resolved, from the recipe to this one
        self.declared = declared
        self.call = call
        self.seen: dict[Node, Node] = {}

    def walk(self, node: Node, included: bool = False) -> Node:
        """Resolve the children of a node, then the node itself.

        included : the node is under an include, so references to keys of that file are not resolved here
        """
        if node in self.seen:  # shared, or circular
            return self.seen[node]
        self.seen[node] = node
        included = included or node.tag.startswith(INCLUDE)
        for key, child in node.items():
            node.value[key] = self.walk(child, included)
        left_to_included = self._resolve_own_keys(node) if included else None
        resolved = left_to_included or self._replace(node)
        if included and resolved is not node and not resolved.scalar:
            resolved = self.walk(resolved)  # it may be further below, where it would be skipped as visited
        if included and node.tag and not resolved.tag and isinstance(resolved.value, dict):
            resolved = self.findings.replaced(resolved, whole=True)
        self.seen[node] = resolved
        return resolved

    def _replace(self, node: Node) -> Node:
        if self.findings.is_reported(node):
            return self._unknown(node)
        if node.tag in ("!ref", "!copy"):
            return self._replace_reference(node)
        if node.tag == PLACEHOLDER:
            return self._error("placeholder", node, "you must set this value (!PLACEHOLDER)",
                               "write it into the YAML" if "[" in node.key else f"set it: --{node.key} VALUE")
        if node.tag.startswith(INCLUDE):
            return self._include(node)
        if self.call and node.tag.startswith(_APPLYREF):
            return self._call(node)
        return node

    def _replace_reference(self, node: Node) -> Node:
        if not node.scalar:
            return self._error("bad-ref", node, f"{node.tag} takes a text such as <key>, not a list or mapping")
        target = self._resolve_text(str(node.value), node, ())
        if target.scalar and not target.tag and not self.findings.is_reported(target):
            target = dataclasses.replace(target, reference=str(node.value))
        return target

    def _include(self, node: Node) -> Node:
        """The resolved tree of an included file, with the values under the ``!include:`` in it."""
        path = included_path(node.tag, self.path)
        if path.resolve() in self.inside:
            return self._error("circular-include", node, f"{path} includes itself",
                               " -> ".join(p.name for p in (*self.inside, path)))
        if not path.is_file():
            near = did_you_mean(path.name, [p.name for p in path.parent.glob("*.y*ml")])
            return self._error("no-file", node, f"there is no file {path}", f"did you mean {near}?" if near else
                               f"it is searched from {self.path}: copy what that includes with it, or change the "
                               f"path; `sbkit new FOLDER` writes recipes of one's own with all that they include")
        before = len(self.findings)
        files = chain(path, self.findings, prefix="" if node.key == BASE else node.key)
        if not files:
            return self._unknown(node)
        root = files[0][1]
        if isinstance(node.value, dict):
            override(files, node, self.findings, self.declared)
        _Resolver(root, path, self.findings, (*self.inside, path.resolve()), self.declared, self.call).walk(root)
        if any(finding.code == "syntax" for finding in self.findings[before:]):
            self.findings.mark(root)
        return self.findings.copied(root)  # HyperPyYAML reads each include separately, so nothing in it is shared

    def _call(self, node: Node) -> Node:
        """The result of the function of an ``!applyref:``."""
        try:
            args, kwargs = arguments(node)
            called = locate(node.tag[len(_APPLYREF):])
            result = called(*map(data, args), **{key: data(kwargs[key]) for key in kwargs})
        except Exception as error:  # a function can raise anything
            return self._error("not-built", node, f"{node.tag} fails: {summary(error)}")
        return from_python(result, node.key, node.place)

    def _resolve_own_keys(self, node: Node) -> Node | None:
        """A reference under an include with only the keys of this file resolved, which the included file can't see.

        The rest is resolved there: if this file has ``depth: 3`` and that one ``layers``, ``!ref <depth> * <layers>``
        becomes ``!ref 3 * <layers>``. None if it has no keys of the included file, so that all of it is resolved here.
        """
        if node.tag not in ("!ref", "!copy") or not node.scalar:
            return None
        text = str(node.value)
        references = set(REFERENCE.findall(text))
        of_this_file = {reference for reference in references
                        if re.split(r"[.\[]", reference.strip("<>"))[0] in self.root.value}
        if of_this_file == references:
            return None
        for reference in of_this_file:
            value = self._as_text(reference, node)
            if value is None:
                return self._unknown(node)
            text = text.replace(reference, value)
        return Node(text, node.place, node.key, node.tag)

    # ------------------------------------------------------------ references
    #
    # ``_resolve_text`` looks at what is written, and ``_use_target`` at what that names. For example:
    #
    #     rate: 0.002
    #     half: !ref <rate> / 2
    #     layer: !new:Layer
    #     start: !ref <half>
    #     again: !ref <layer>
    #
    # half     _resolve_text("<rate> / 2"): a reference within a text, so ``_as_text`` puts 0.002 there;
    #          _resolve_text("0.002 / 2"): no reference, so this text is the result, and ``compute`` makes 0.001 of it
    # start    _resolve_text("<half>"): one reference and nothing else, so ``_find`` looks for its node;
    #          _use_target(half): resolved already, as it is above, and a plain value, which ``start`` gets a copy of
    # again    _resolve_text("<layer>") likewise;
    #          _use_target(layer): an object, so ``again`` is the same node, and one object is built for both

    def _resolve_text(self, text: str, node: Node, seen: tuple[str, ...]) -> Node:
        """The node that takes the place of a reference with this text: a new one, or that of an object it names.

        seen : the texts that have led to this one
        """
        if not REFERENCE.search(text):
            plain_text = Node(text, node.place, node.key)
            if not seen and "<" in text:
                self._error("bad-ref", node, f"the bracket of {text!r} is not closed", "write <key>")
                self.findings.mark(plain_text)
            elif not seen and text in self.root.value:
                self._error("bad-ref", node, f"this is not a reference, but the text {text!r}",
                            f"write {node.tag} <{text}>")
                self.findings.mark(plain_text)
            return plain_text
        if len(seen) > 50:  # circular, which is reported elsewhere
            return self._unknown(node)
        seen = (*seen, text)
        if REFERENCE.fullmatch(text):
            target = self._find(text, node)
            return self._unknown(node) if target is None else self._use_target(target, node, seen)
        pieces: list[str] = []
        end = 0
        for match in REFERENCE.finditer(text):
            value = self._as_text(match[0], node)
            if value is None:
                return self._unknown(node)
            pieces += [text[end : match.start()], value]
            end = match.end()
        whole = "".join([*pieces, text[end:]])
        if len(whole) > _LONGEST:
            return self._error("bad-ref", node,
                               f"with its references resolved, this text has more than {_LONGEST} characters")
        inner = self._resolve_text(whole, node, seen)
        if isinstance(inner.value, str) and not inner.tag:
            try:
                inner = Node(compute(inner.value), node.place, node.key)
            except (ArithmeticError, ValueError) as error:
                shown = textwrap.shorten(inner.value, 80, placeholder=" ...")
                return self._error("bad-ref", node, f"{shown} can't be computed: {error}")
        if inner.scalar and not inner.tag:  # anything else is shared with what it is a reference to
            inner = self.findings.replaced(inner, computed=True)
        return inner

    def _use_target(self, target: Node, node: Node, seen: tuple[str, ...]) -> Node:
        """The node that takes the place of a reference to ``target``, which ``node`` holds."""
        named = target.value[0] if target.tag == "!apply:getattr" else target
        if named.tag in ("!ref", "!copy") or named.tag.startswith(INCLUDE):  # not replaced yet: it is further below
            if self._report_circle(named, node):
                return self._unknown(node)
            return self._error("later-ref", node,
                               f"{named.key} is itself a reference, and it is further below ({named.place})",
                               f"move {named.key} above {node.key}: a recipe is read from top to bottom")
        if target.tag == PLACEHOLDER or target.value is UNKNOWN:
            return self._unknown(node)
        if isinstance(target.value, str) and not target.tag and REFERENCE.search(target.value):
            return self._resolve_text(target.value, node, seen)
        if node.tag == "!copy":
            if any(inner.tag in ("!ref", "!copy") for inner in target.walk()):
                return self._error("later-ref", node,
                                   f"{target.key} contains references and is further below",
                                   "move it above the copy")
            return self.findings.copied(target)
        if target.scalar and not target.tag:
            return Node(target.value, node.place, node.key, quoted=target.quoted, computed=target.computed,
                        source=target)
        return target

    def _find(self, reference: str, node: Node, quietly: bool = False) -> Node | None:
        """The node of ``<key[part].attribute>`` in this file, as in HyperPyYAML's ``deref``; None if it is missing."""
        reference, _, attribute = reference.strip("<>").partition(".")
        branch = self.root
        for i, part in enumerate(reference.split("[")):
            part = part.strip("]")
            if not isinstance(branch.value, dict) or part not in branch.value:
                if not quietly:
                    self._report_missing(reference, part, branch if i else self.root, node)
                return None
            branch = branch.value[part]
        if attribute and node.tag != "!copy":
            name = Node(attribute, node.place, f"{node.key}[1]")
            return Node([branch, name], node.place, node.key, "!apply:getattr")
        return branch

    def _as_text(self, match: str, node: Node) -> str | None:
        """The value of a reference within a text, as text; None if it is unknown, or wrong, which is then reported."""
        target = self._find(match, node)
        if target is None or target.tag == PLACEHOLDER or target.value is UNKNOWN:
            return None
        if target.tag in ("!ref", "!copy"):
            return None if self._report_circle(target, node) else str(target.value)
        if target.tag.startswith(_APPLYREF):
            return None  # known only when the recipe is built
        if target.tag or not target.scalar:
            kind = "a list" if isinstance(target.value, list) else "a mapping"
            self._error("bad-ref", node, f"{match} is {target.tag or kind}, which can't be part of a text",
                        f"refer to one of its values, or write {node.tag} {match} alone")
            return None
        if target.value is None and not {"brain", BASE}.isdisjoint(self.root.value):  # a script may not read the text
            self.findings.warning("null-in-text", node.place, node.key, f"{match} is null, so this becomes "
                                  f"{str(node.value).replace(match, 'None')!r}", f"give {match.strip('<>')} a value")
        return str(target.value)

    # ------------------------------------------------------------ mistakes

    def _report_missing(self, reference: str, part: str, branch: Node, node: Node) -> None:
        name = reference or "<>"
        if isinstance(branch.value, list):
            self._error("dangling-ref", node, f"there is no <{name}>: {branch.key} is a list, and a reference takes no "
                        "index", "give the item its own key and refer to that")
            return
        children = branch.value if isinstance(branch.value, dict) else {}
        options = [str(key) for key in children]
        # Itself would be no help, and nobody refers to what is empty, such as the base's learning_rates.
        likely = [str(key) for key, child in children.items() if key != node.key and child.value not in ({}, [])]
        near = did_you_mean(part, likely, 0.75)
        base = self.root.value.get(BASE)
        if base is not None and base is not branch and isinstance(base.value, dict) and part in base.value:
            suggestion = f"it is under `{BASE}`: write <{BASE}[{part}]>"
        elif base is not None and base.tag.startswith(INCLUDE):
            included = base.tag[len(INCLUDE):]
            if near:
                suggestion = f"did you mean <{reference.replace(part, near)}>?"
            elif branch is base:
                suggestion = f"write <{part}>, a key of {included}"
            else:
                top = re.split(r"[.\[]", node.key)[0]
                suggestion = f"references see {included} under `{BASE}` only: indent {top}, as one of the keys there"
        elif near:
            suggestion = f"did you mean <{reference.replace(part, near)}>?"
        else:
            suggestion = f"{branch.key} has {listed(options)}" if branch.key and options else "define that key"
        self._error("dangling-ref", node, f"there is no <{name}>", suggestion)

    def _report_circle(self, target: Node, node: Node) -> bool:
        """Report a circle of references that begins with ``target``; return whether there is one."""
        path = [node]  # each refers to the next one
        targets_of = [iter([target])]  # for each node of the path, those of its targets that are still to be followed
        harmless = set[Node]()
        while targets_of:
            following = next(targets_of[-1], None)
            if following is None:
                targets_of.pop()
                harmless.add(path.pop())
            elif following in path:
                circle = [*path[path.index(following):], following]
                if not self.findings.is_reported(following):
                    self._error("circular-ref", following,
                                f"this reference is circular: {' -> '.join(n.key for n in circle)}",
                                f"give {following.key} a value")
                for part in path:
                    self.findings.mark(part)
                return True
            elif following not in harmless:
                path.append(following)
                is_reference = following.tag in ("!ref", "!copy")
                names = REFERENCE.findall(str(following.value)) if is_reference else []
                targets = [self._find(name, following, quietly=True) for name in names]
                targets_of.append(iter([target for target in targets if target is not None]))
        return False

    def _error(self, code: str, node: Node, message: str, suggestion: str = "") -> Node:
        """Report a mistake; return the unknown node that replaces this one."""
        self.findings.error(code, node.place, node.key, message, suggestion)
        return self._unknown(node)

    def _unknown(self, node: Node) -> Node:
        unknown = Node(UNKNOWN, node.place, node.key)
        self.findings.mark(unknown)
        return unknown


def _report_cycles(root: Node, findings: Findings) -> None:
    """Report mappings and lists that contain themselves."""
    done: set[Node] = set()
    path: list[Node] = []

    def visit(node: Node) -> None:
        if node in path:
            if not findings.is_reported(node):
                findings.error("circular-ref", node.place, node.key, "it contains a reference to itself",
                               " -> ".join(n.key for n in [*path, node] if n.key))
            findings.mark(node)
            return
        if node in done or node.scalar:
            return
        path.append(node)
        for child in node.children():
            visit(child)
        path.pop()
        done.add(node)

    visit(root)


def compute(text: str) -> object:
    """The result of a reference's text; the text itself if it isn't arithmetic.

    Raises ArithmeticError or ValueError, with the reason, if it can't be computed.
    """
    try:
        tree = ast.parse(text, mode="eval")
        nodes = list(ast.walk(tree))  # a text times a number, or one with a width after %, may fill the memory
        if any(isinstance(node, (ast.Mult, ast.Mod)) for node in nodes) and any(
                isinstance(node, ast.Constant) and isinstance(node.value, (str, bytes)) for node in nodes):
            raise ValueError("a quoted text can't be multiplied")
        _evaluate(tree.body, float)  # nested powers of floats overflow at once, those of ints would fill the memory
        return _evaluate(tree.body, int)
    except (SyntaxError, TypeError):
        return text
    except OverflowError:
        raise OverflowError("the number is too large") from None
    except (RecursionError, MemoryError):
        raise ValueError("it is nested too deeply") from None


def _evaluate(node: ast.expr, whole: Callable[[int], int | float]) -> Any:  # of the type of its constants
    """The result of arithmetic with whole numbers as ``whole`` makes them; TypeError if it is anything else.

    A sign isn't arithmetic, as in HyperPyYAML.
    """
    if isinstance(node, ast.Constant):
        return whole(node.value) if type(node.value) is int else node.value
    if isinstance(node, ast.BinOp) and type(node.op) in _OPERATIONS:
        return _OPERATIONS[type(node.op)](_evaluate(node.left, whole), _evaluate(node.right, whole))
    raise TypeError(f"{type(node).__name__} is not arithmetic")
