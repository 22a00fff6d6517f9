"""The files of a recipe as trees in which every key and value has its file, line and column."""

from __future__ import annotations

import functools
import itertools
import re
from collections import deque
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml import nodes as yaml_nodes
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError, YAMLStreamError
from ruamel.yaml.reader import ReaderError

from sbkit.errors import SbkitError, first_line
from sbkit.recipe.report import COMMAND_LINE, ERROR, WARNING, Finding, did_you_mean

BASE = "recipe"
INCLUDE = "!include:"
#: Tags that may stand alone, or with a mapping of arguments (of overrides for an include).
TAKES_PARTS = ("!new:", "!name:", "!apply:", "!applyref:", INCLUDE)
REFERENCE = re.compile(r"<[^>]*>")
#: How deep lists and mappings may be nested; in recipes that people write it is about a dozen.
MAX_DEPTH = 100
_YAML_TAG = "tag:yaml.org,2002:"
_LINE = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_MERGE = _YAML_TAG + "merge"
_PLAIN_TAGS = frozenset(_YAML_TAG + kind for kind in (
    "null", "bool", "int", "float", "str", "seq", "map", "timestamp", "binary", "omap", "set"))


class _Unknown:
    """The value of a node that isn't known before the recipe is built."""

    def __repr__(self) -> str:
        return "a value known later"


UNKNOWN = _Unknown()


def first_key(reference: str) -> str:
    """The top-level key of a reference such as ``<key[part].attribute>``."""
    return reference.strip("<>").partition(".")[0].partition("[")[0]


def own_name(key: str) -> str:
    """The name of a key for messages: without ``recipe``, since keys under it are keys of the recipe."""
    while key.startswith(f"{BASE}."):
        key = key.removeprefix(f"{BASE}.")
    return key


@dataclass(frozen=True)
class Place:
    """The place where something is written; by default the command line."""

    file: str = COMMAND_LINE
    line: int = 0
    column: int = 0

    def __str__(self) -> str:
        return f"{Path(self.file).name}:{self.line}" if self.line else self.file


@dataclass(eq=False)
class Node:
    """A scalar, list or mapping of a YAML."""

    value: Any  # as its tag says
    """A Python value, a list of Nodes or a dict of Nodes; ``UNKNOWN`` if it is known only when the recipe is built."""
    place: Place
    key: str
    """Its full name for messages, such as ``CNN.strides[0]``."""
    tag: str = ""
    """``!new:torch.nn.Linear``, ``!ref``, ...; empty for plain data."""
    quoted: bool = False
    computed: bool = False
    """Whether it was computed from references, or given on the command line."""
    key_places: dict[Any, Place] = field(default_factory=dict)
    """Places of the keys of a mapping."""
    wrong: bool = False
    """Whether a mistake in it is reported already."""
    source: Node | None = None
    """The scalar that it is a reference to."""
    dotted: bool = False
    """Whether it is a mapping of parts that were given one by one, as by ``--a.b 1``."""
    whole: bool = False
    """Whether it is a plain mapping that replaces the whole value it overrides, since it was written as a reference."""
    comments: dict[Any, tuple[list[str], str]] = field(default_factory=dict)
    """Comments by key or index: the lines above it, and what is behind it; under None the lines at a file's end."""

    def __post_init__(self) -> None:
        self.key = own_name(self.key)

    def at(self, *keys: str) -> Any:  # as the text says
        """The value under a key, or under keys in one another; None if there is none."""
        value = self.value
        for key in keys:
            value = value[key].value if isinstance(value, dict) and key in value else None
        return value

    def place_of(self, key: object) -> Place:
        """The place of one of its keys; its own place if there is none."""
        return self.key_places.get(key, self.place)

    def key_of(self, key: object) -> str:
        """The full name of one of its keys or items."""
        if isinstance(self.value, list):
            return f"{self.key}[{key}]"
        return f"{self.key}.{key}" if self.key else str(key)

    def origin_of(self, key: object) -> tuple[Place, str]:
        """The place and full name of what gives one of its keys or items its value.

        That is what its reference names, if that is no object, and another file or the command line gave it; otherwise
        the key or item.
        """
        child = self.value.get(key) if isinstance(self.value, dict) else None
        while child is not None and child.source is not None:
            child = child.source
        here = self.place_of(key)
        own = child is None or bool(child.tag) or child.place.file == here.file
        return (here, self.key_of(key)) if child is None or own else (child.place, child.key)

    def culprit(self, named: Collection[object] = ()) -> tuple[Place, str]:
        """The place and full name to blame for an error of the whole, which names some of its keys.

        One key alone is to blame. Of several, and if none is named, it is those that the command line gave, or else a
        file other than its own; if there are none of these either, it is itself to blame.
        """
        keys = named or (self.value if isinstance(self.value, dict) else ())
        found = list(dict.fromkeys(map(self.origin_of, keys)))
        if len(named) == 1:
            return found[0]
        given = [each for each in found if each[0].file != self.place.file]
        given = [each for each in given if each[0].file == COMMAND_LINE] or given
        return (self.place, self.key) if not given else given[0] if len(given) == 1 else (given[0][0], self.key)

    def culprit_by(self, message: str) -> tuple[Place, str]:
        """The place and full name to blame for an error whose message mentions some of its keys."""
        words = set(re.split(r"[\s'`:\[\]]+", message))
        return self.culprit([key for key in self.value if key in words] if isinstance(self.value, dict) else ())

    def blame(self, key: object) -> Place:
        """Mark the value of a key as wrong; return the place to blame.

        That is the key, or what its reference names, if another file or the command line gave that. The value that a
        reference names is marked too, so that it is reported only once.
        """
        self.wrong = True
        child = self.value.get(key) if isinstance(self.value, dict) else None
        if child is None:
            return self.place_of(key)
        source = child.source or child
        child.wrong = source.wrong = True
        here = self.place_of(key)
        return here if source.place.file == here.file else source.place

    @property
    def spoilt(self) -> bool:
        """Whether it can't be built, because of a mistake in it, or in its source, that is reported already."""
        return self.wrong or self.value is UNKNOWN or (self.source is not None and self.source.spoilt)

    @property
    def scalar(self) -> bool:
        return not isinstance(self.value, (dict, list))

    def items(self) -> list[tuple[Any, Node]]:
        """The nodes directly inside it, by key or index."""
        if isinstance(self.value, dict):
            return list(self.value.items())
        return list(enumerate(self.value)) if isinstance(self.value, list) else []

    def children(self) -> list[Node]:
        """The same without these."""
        return [child for _, child in self.items()]

    def walk(self) -> Iterator[Node]:
        """The node itself and all nodes inside it, each once."""
        seen, stack = set(), [self]
        while stack:
            node = stack.pop()
            if id(node) in seen:
                continue
            seen.add(id(node))
            yield node
            stack.extend(reversed(node.children()))

    def texts(self) -> dict[str, str]:
        """Each tag and value inside it as text, by full name; what has several names, by the shortest one only."""
        found: dict[str, str] = {}
        waiting, seen = deque([("", self)]), set[int]()
        while waiting:
            name, node = waiting.popleft()
            if id(node) in seen:
                continue
            seen.add(id(node))
            value = "null" if node.value is None else str(node.value) if node.scalar else ""
            if said := f"{node.tag} {value}".strip():
                found[name] = said
            in_list = isinstance(node.value, list)
            waiting.extend((f"{name}[{key}]" if in_list else f"{name}.{key}".lstrip("."), child)
                           for key, child in node.items())
        return found


class Findings(list[Finding]):
    """A list of findings, with a method to add each kind."""

    def error(self, code: str, place: Place, key: str, message: str, suggestion: str = "") -> None:
        """Add a finding that would end or spoil a run."""
        self.append(Finding(ERROR, code, place.file, place.line, key, message, suggestion, place.column))

    def warning(self, code: str, place: Place, key: str, message: str, suggestion: str = "") -> None:
        """Add a finding that may be a mistake."""
        self.append(Finding(WARNING, code, place.file, place.line, key, message, suggestion, place.column))

    def as_error(self, otherwise: str = "") -> SbkitError:
        """All errors in one; ``otherwise`` is the message if there are none."""
        errors = [finding for finding in self if finding.severity == ERROR]
        message = "; ".join(f"{each.where}: {each.key and f'{each.key}: '}{each.message}" for each in errors)
        return SbkitError(message or otherwise, hint="; ".join(dict.fromkeys(
            each.suggestion for each in errors if each.suggestion)) or None)


# -------------------------------------------------------------------------------------------------- files


class ShallowComposer(Composer):
    """A composer with a limit on nesting; ruamel's own descends as deep as a text has brackets."""

    depth = 0

    def compose_node(self, parent: yaml_nodes.Node | None, index: object) -> yaml_nodes.Node:
        if self.depth == MAX_DEPTH:
            raise ComposerError(None, None, f"it is nested too deeply, more than {MAX_DEPTH} levels",
                                self.parser.peek_event().start_mark)
        self.depth += 1
        try:
            return super().compose_node(parent, index)
        finally:
            self.depth -= 1


@functools.lru_cache(maxsize=16)
def _compose(text: str) -> yaml_nodes.Node | None:
    """Parse a text, once for all that are based on it; what is returned is only read."""
    yaml = YAML(pure=True)
    yaml.Composer = ShallowComposer
    return yaml.compose(text)


def read_file(path: Path, findings: Findings, prefix: str = "") -> Node | None:
    """Read a YAML as a tree of Nodes; nothing is imported or resolved. None, with a finding, if it can't be read."""
    name, text = str(path), ""
    try:
        text = path.read_text(encoding="utf-8")
        tree = _compose(text)
        root = None
        if isinstance(tree, yaml_nodes.MappingNode):
            root = _Converter(name, text, findings).node(tree, prefix)
            root.comments[None] = _comment_lines(reversed(text.splitlines())), ""
    except MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name)
        problem = (error.problem or error.context or str(error)).strip()
        if glued := _glued_colon(text, place.line):
            place, problem = Place(name, *glued), "no space behind the colon"
        findings.error("syntax", place, "", f"this is not valid YAML: {problem}", _advice(problem, text, place.line))
        return None
    except (UnicodeDecodeError, ReaderError) as error:
        findings.error("syntax", Place(name), "", f"this is not UTF-8 text: {first_line(error)}",
                       "save the file as UTF-8")
        return None
    except OSError as error:
        findings.error("no-file", Place(name), "", f"cannot be read: {error.strerror}")
        return None
    except (YAMLError, YAMLStreamError) as error:
        findings.error("syntax", Place(name), "", f"this is not valid YAML: {error}")
        return None
    if root is None:
        findings.error("syntax", Place(name, 1, 1), "", "a recipe is made of lines `key: value`, this file isn't")
        return None
    if text.startswith("%"):
        findings.error("syntax", Place(name, 1, 1), "", "a recipe takes no directives", "remove the lines down to ---")
    for key in root.value:
        if not isinstance(key, str):
            findings.error("syntax", root.place_of(key), str(key), f"the key {key!r} is not text", f'write "{key}":')
    return root


def _comment_lines(upwards: Iterable[str]) -> list[str]:
    """The comments and empty lines above a line, given from there upwards."""
    found = itertools.takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), upwards)
    return [line.strip() for line in found][::-1]


def _glued_colon(text: str, line: int) -> tuple[int, int] | None:
    """The line and column of a ``key:value`` without a space, in the line where reading failed or the one above."""
    for number, written in list(enumerate(text.splitlines(), 1))[max(line - 2, 0) : line]:
        if match := re.match(r"\s*(?:- +)?\w+:(?![ \n]|$|//)", written):
            return number, match.end()
    return None


def _advice(problem: str, text: str, line: int) -> str:
    if "nested too deeply" in problem:
        return "is a bracket repeated?"
    if "\\t" in problem or "tab" in problem:
        return "indent with spaces, YAML takes no tabs"
    if "space behind the colon" in problem:
        return "write `key: value`"
    if problem.startswith("expected ' '"):
        tag = re.search(r"!\w+", text.splitlines()[line - 1])
        return f"write a space behind the tag: {tag[0] if tag else '!ref'} <key>"
    if "another document" in problem:
        return "remove the line --- above it"
    if "mapping values are not allowed" in problem:
        return "a value with a colon needs quotes; or is the line above indented differently?"
    if "expected <block end>" in problem or "could not find expected ':'" in problem:
        return "compare its indentation with the lines above"
    if "character '>'" in problem or "character '<'" in problem:
        return "a reference with brackets of its own needs a line of its own: - !ref <key[part]>"
    if "',' or ']'" in problem or "',' or '}'" in problem:
        return "a bracket is not closed"
    return ""


class _Converter:
    """Converts nodes of ruamel.yaml to Nodes."""

    def __init__(self, file: str, text: str, findings: Findings):
        self.file, self.lines, self.findings = file, _LINE.split(text), findings
        self.known: dict[int, Node] = {}  # an alias becomes the same Node as its anchor
        self.constructor = YAML(typ="safe", pure=True).constructor

    def place(self, mark: StreamMark) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1)

    def node(self, raw: Any, key: str) -> Node:  # one of ruamel's: of those, only scalars have a style
        if id(raw) in self.known:
            return self.known[id(raw)]
        tag = str(raw.tag or "").replace("!tuple", "")  # ruamel adds it once HyperPyYAML has loaded something
        node = Node(None, self.place(raw.start_mark), key, "" if tag in _PLAIN_TAGS else tag.replace(_YAML_TAG, "!!"))
        self.known[id(raw)] = node
        if str(raw.tag).endswith("!tuple") and not isinstance(raw, yaml_nodes.ScalarNode):
            self.findings.error("tuple-as-text", node.place, key, "!tuple takes a text such as (3, 4)",
                                "write (3, 4), or a list without the tag")
            node.wrong = True
        if isinstance(raw, yaml_nodes.MappingNode):
            node.value = self.mapping(raw, node)
        elif isinstance(raw, yaml_nodes.SequenceNode):
            node.value = [self.node(item, f"{key}[{i}]") for i, item in enumerate(raw.value)]
            for i, item in enumerate(raw.value):
                self.keep_comments(node, i, item, item)
        else:
            node.quoted = raw.style is not None
            node.value = raw.value if node.tag or not raw.tag.startswith(_YAML_TAG) else self.scalar(raw)
        return node

    def keep_comments(self, node: Node, key: object, first: Any, value: Any) -> None:  # ruamel's, as above
        """Remember the comments of what begins a line: those above it, and the one behind it."""
        start = first.start_mark
        if self.lines[start.line][:start.column].strip("- "):
            return
        one_line = isinstance(value, yaml_nodes.ScalarNode) or value.flow_style
        end = value.end_mark if one_line else value.start_mark
        if end.line != start.line:
            end = first.end_mark if first is not value else start
        behind = re.search(r"(?:^|\s)(#.*)", self.lines[start.line][end.column:])
        above = _comment_lines(self.lines[line] for line in range(start.line - 1, -1, -1))
        if above or behind:
            node.comments[key] = above, behind[1] if behind else ""

    def scalar(self, raw: yaml_nodes.Node) -> object:
        try:
            return self.constructor.construct_object(raw)
        except (ValueError, YAMLError):  # 2020-13-45 looks like a date
            return raw.value

    def mapping(self, raw: yaml_nodes.MappingNode, node: Node) -> dict[Any, Node]:
        own: dict[Any, Node] = {}
        merged: dict[Any, Node] = {}
        for raw_key, raw_value in raw.value:
            place = self.place(raw_key.start_mark)
            if raw_key.tag == _MERGE:
                for part in raw_value.value if isinstance(raw_value, yaml_nodes.SequenceNode) else [raw_value]:
                    if isinstance(part, yaml_nodes.MappingNode):
                        merged = {**self.node(part, node.key).value, **merged}
                continue
            if not isinstance(raw_key, yaml_nodes.ScalarNode):
                self.findings.error("syntax", place, node.key, "a list or mapping can't be a key",
                                    "write a text as key; braces in a value need quotes")
                continue
            key = self.scalar(raw_key)
            if key in own:
                first = node.place_of(key).line
                self.findings.error("duplicate-key", place, node.key_of(key),
                                    f"this key is in line {first} already", "remove one of the two")
                continue
            node.key_places[key] = place
            own[key] = self.node(raw_value, f"{node.key}.{key}" if node.key else str(key))
            self.keep_comments(node, key, raw_key, raw_value)
        return {**merged, **own}


# ---------------------------------------------------------------------------------------------- overrides


def from_python(value: Any, key: str, place: Place = Place()) -> Node:  # ruamel's scalars have a tag and a value
    """Convert a value from the command line, or from a program, to a Node."""
    tag = getattr(getattr(value, "tag", None), "value", None) or ""
    if isinstance(value, Mapping):
        node = Node({}, place, key, tag, dotted=type(value) is dict)
        node.value = {k: from_python(v, f"{key}.{k}", place) for k, v in value.items()}
        return node
    if isinstance(value, (list, tuple)):
        return Node([from_python(v, f"{key}[{i}]", place) for i, v in enumerate(value)], place, key, tag)
    if tag:
        return Node(value.value, place, key, tag.replace("!tuple", ""))
    return Node(_plain(value), place, key, computed=True)


def _plain(value: object) -> object:
    """A plain Python value, without ruamel's information on how it was written."""
    for kind in (bool, int, float, str):
        if isinstance(value, kind):
            return value if kind is bool else kind(value)
    return value if value is None else str(value) if not isinstance(value, (bytes,)) else value


def override(root: Node, given: Node, findings: Findings, declared: Collection[str] = ()) -> None:
    """Apply overrides to a tree: a plain mapping changes parts of a value, anything else replaces it.

    declared : keys that aren't misspelt even if the tree doesn't have them
    """
    for key, new in given.value.items():
        target = root.value.get(key)
        if target is None or new.tag or new.whole or not isinstance(new.value, dict):
            if key not in declared:
                _report_typo(root, key, new, findings)
            root.value[key] = new
            root.key_places[key] = given.place_of(key)
        elif isinstance(target.value, dict):
            override(target, new, findings, declared)
        elif target.tag.startswith(TAKES_PARTS) and target.value in ("", None):
            places = {part: new.place_of(part) for part in new.value}
            root.value[key] = Node(new.value, target.place, target.key, target.tag, key_places=places)
        elif not new.dotted and target.scalar and not target.tag:
            root.value[key] = new
            root.key_places[key] = given.place_of(key)
        else:
            findings.error("override-structure", new.place, target.key,
                           f"{target.key} has no parts that could be set one by one ({target.place})", _advise(target))


def _advise(target: Node) -> str:
    """A hint how to override a value without named parts."""
    if target.tag in ("!ref", "!copy"):
        return f"it is {target.tag} {target.value}: set the parts of that, or replace {target.key} whole"
    if isinstance(target.value, list) and target.tag:
        return "its arguments are a list: write them there as key: value, or replace it whole"
    if target.value is None:
        return "it is null: give it a value, or !new:CLASS and its arguments"
    return f"give {target.key} one value"


def _report_typo(root: Node, key: object, new: Node, findings: Findings) -> None:
    """Report a key that is added to a mapping and is similar to one that it has."""
    if key in root.value or not isinstance(key, str) or root.tag.startswith(("!new:", "!name:", "!apply", INCLUDE)):
        return  # arguments are compared with the signature, and overrides of an included file with that file
    written = [k for k in root.value if isinstance(k, str) and root.place_of(k).file != COMMAND_LINE]
    options = [k for k in written if root.value[k].tag or not new.tag]
    near = did_you_mean(key, options, cutoff=0.85)
    if near and not re.search(r"\d", key):  # layer1 beside layer2 is no typo
        findings.error("unknown-override", new.place, root.key_of(key),
                       f"{root.key or 'the recipe'} has no key {key} to override", f"did you mean {near}?")
