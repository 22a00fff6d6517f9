"""The files of a recipe, read as trees with the place of each key and value, and the files they are based on."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import os
import re
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml import nodes as yaml_nodes
from ruamel.yaml.composer import Composer, ComposerError
from ruamel.yaml.error import MarkedYAMLError, StreamMark, YAMLError, YAMLStreamError
from ruamel.yaml.reader import ReaderError

from sbkit.errors import SbkitError, first_line
from sbkit.recipe.source import BASE, INCLUDE, REFERENCE, Findings, Node, Place

Files = list[tuple[Path, Node]]
#: Keys, and what has the same value in a recipe without references.
COPIED = {"number_of_epochs": r"epoch_counter\.limit", "data_folder": r"corpus\.source",
          "language": r"corpus\.language", "seed": r"__set_seed\[0\]|.*\.seed"}
#: How deep lists and mappings may be nested; in recipes that people write it is about a dozen.
MAX_DEPTH = 100
_YAML_TAG = "tag:yaml.org,2002:"
_LINE = re.compile("\r\n|[\n\r\x85\u2028\u2029]")
_MERGE = _YAML_TAG + "merge"
_PLAIN_TAGS = frozenset(_YAML_TAG + kind for kind in (
    "null", "bool", "int", "float", "str", "seq", "map", "timestamp", "binary", "omap", "set"))


def chain(path: Path, findings: Findings, prefix: str = "") -> Files:
    """The file of a recipe and those it is based on, each with its unresolved tree; empty if it can't be read.

    findings : gets mistakes in this file; those in the others are reported when they are included
    prefix : the key that this file is included under, for messages
    """
    files: Files = []
    seen: set[Path] = set()
    root = read_file(path, findings, prefix)
    while root is not None and path.resolve() not in seen:
        seen.add(path.resolve())
        files.append((path, root))
        base = root.value.get(BASE)
        if base is None or not base.tag.startswith(INCLUDE):
            break
        path = included_path(base.tag, path)
        root = read_file(path, Findings())
    return files


def levels(files: Files) -> Iterator[tuple[Path, Node]]:
    """The mappings with keys of a recipe, each with its file; the first one with a key decides its value.

    Each file has its own keys, and then those under ``recipe``, which override keys of the file it is based on.
    """
    for path, root in files:
        level: Node | None = root
        while level is not None and isinstance(level.value, dict):
            yield path, level
            level = level.value.get(BASE)


def keys(files: Files) -> list[Any]:
    """The keys of all files of a recipe, including repeated ones."""
    return [key for _, level in levels(files) for key in level.value]


def written(key: str, files: Files) -> str:
    """The file and line where a key gets its value, ``ctc.yaml:72``; the recipe's file if none has it."""
    return next((f"{path}:{level.place_of(key).line}" for path, level in levels(files) if key in level.value),
                str(files[0][0]))


def referred(files: Files) -> set[str]:
    """The parts of all references: ``a`` and ``b`` of ``<a[b]>``."""
    texts = [str(node.value) for _, root in files for node in _references(root)]
    return {part for text in texts for match in REFERENCE.findall(text) for part in re.split(r"[<>\[\].]", match)}


def check_shadowed(files: Files, findings: Findings) -> None:
    """Report keys beside ``recipe`` that an included file has as well and refers to.

    References of that file find its own key, so the one beside ``recipe`` would change nothing there.
    """
    for i, (_, root) in enumerate(files[:-1]):
        below = files[i + 1:]
        for key in root.value:
            if key == BASE or not any(key in level.value for _, level in levels(below)):
                continue
            reference = re.compile(rf"<{re.escape(str(key))}[\[.>]")
            blind = next((path for path, other in below
                          if any(reference.search(str(node.value)) for node in _references(other))), None)
            if blind is not None:
                findings.error("shadowed", root.place_of(key), str(key),
                               f"it is beside `{BASE}`, so references in {blind.name} don't see it",
                               f"indent it, as one of the keys under `{BASE}`")


def included_path(tag: str, path: Path) -> Path:
    """The file that a tag ``!include:FILE`` in the file ``path`` names."""
    return Path(os.path.normpath(path.parent / tag[len(INCLUDE):]))


def _references(root: Node) -> list[Node]:
    return [node for node in root.walk() if node.tag in ("!ref", "!copy") and node.scalar]


# ---------------------------------------------------------------------------------------------- reading one


class ShallowComposer(Composer):
    """A composer with a limit on nesting; ruamel's own has none."""

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
    """Parse a text; cached for all recipes that are based on it, so the result must not be changed."""
    yaml = YAML(pure=True)
    yaml.Composer = ShallowComposer
    return yaml.compose(text)


def read_file(path: Path, findings: Findings, prefix: str = "") -> Node | None:
    """Read a YAML as a tree of Nodes; nothing is imported or resolved. None, with a finding, if it can't be read."""
    name = str(path)
    text = ""
    try:
        text = path.read_text(encoding="utf-8")
        root = _tree_of(text, name, findings, prefix)
    except MarkedYAMLError as error:
        _report_syntax(error, name, text.splitlines(), findings)
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


def _tree_of(text: str, name: str, findings: Findings, prefix: str) -> Node | None:
    """The tree of a text of YAML; None if that isn't a mapping."""
    tree = _compose(text)
    if not isinstance(tree, yaml_nodes.MappingNode):
        return None
    root = _Converter(name, text, findings).node(tree, prefix)
    root.comments[None] = _comment_lines(reversed(text.splitlines())), ""
    return root


def _report_syntax(error: MarkedYAMLError, name: str, lines: Sequence[str], findings: Findings) -> None:
    """Report what is no YAML, in the words of ruamel or better ones, with what to do about it."""
    mark = error.problem_mark or error.context_mark
    if error.problem == "could not find expected ':'":
        mark = error.context_mark  # the key without one; ruamel's problem is where it gave up
    place = Place(name, mark.line + 1, mark.column + 1) if mark else Place(name)
    problem = (error.problem or error.context or str(error)).strip()
    for number in range(max(place.line - 1, 1), min(place.line, len(lines)) + 1):  # where it failed, or above
        glued = re.match(r"\s*(?:- +)?\w+:(?![ \n]|$|//)", lines[number - 1])
        if glued:
            place = Place(name, number, glued.end())
            problem = "no space after the colon"
            break
    if problem.startswith("expected ' '"):
        tag = re.search(r"!\w+", lines[place.line - 1])
        advice = f"write a space after the tag: {tag[0] if tag else '!ref'} <key>"
    else:
        advice = next((hint for parts, hint in _ADVICE.items() if any(part in problem for part in parts)), "")
    findings.error("syntax", place, "", f"this is not valid YAML: {problem}", advice)


def _comment_lines(upwards: Iterable[str]) -> list[str]:
    """The comments and empty lines above a line; ``upwards`` begins with the nearest."""
    above = itertools.takewhile(lambda line: not line.strip() or line.lstrip().startswith("#"), upwards)
    return [line.strip() for line in above][::-1]


#: What to do about a problem of the YAML, by parts of ruamel's messages.
_ADVICE = {
    ("nested too deeply",): "is a bracket repeated?",
    ("\\t", "tab"): "indent with spaces, YAML takes no tabs",
    ("space after the colon",): "write `key: value`",
    ("another document",): "remove the line --- above it",
    ("mapping values are not allowed",):
        "a value with a colon needs quotes; or is the line above indented differently?",
    ("could not find expected ':'",): "write `key: value`, or compare its indentation with the lines above",
    ("expected <block end>",): "compare its indentation with the lines above",
    ("character '>'", "character '<'"): "write a reference with brackets in a separate line: - !ref <key[part]>",
    ("',' or ']'", "',' or '}'"): "a bracket is not closed",
}


class _Converter:
    def __init__(self, file: str, text: str, findings: Findings):
        self.file = file
        self.lines = _LINE.split(text)
        self.findings = findings
        self.converted: dict[int, Node] = {}  # by the id of ruamel's node: an alias becomes the same Node as its anchor
        self.constructor = YAML(typ="safe", pure=True).constructor

    def place(self, mark: StreamMark) -> Place:
        return Place(self.file, mark.line + 1, mark.column + 1)

    def node(self, raw: Any, key: str) -> Node:  # one of ruamel's: of those, only scalars have a style
        if id(raw) in self.converted:
            return self.converted[id(raw)]
        tag = str(raw.tag or "").replace("!tuple", "")  # ruamel adds it once HyperPyYAML has loaded something
        tag = "" if tag in _PLAIN_TAGS else tag.replace(_YAML_TAG, "!!")
        place = self.place(raw.start_mark)
        if isinstance(raw, yaml_nodes.ScalarNode):
            quoted = raw.style is not None and not str(raw.tag).endswith("!tuple")  # a text in quotes is no tuple
            value = raw.value if tag or not str(raw.tag).startswith(_YAML_TAG) else self.scalar(raw)
            node = Node(value, place, key, tag, quoted)
        elif isinstance(raw, yaml_nodes.MappingNode):
            node = Node({}, place, key, tag)
        else:
            node = Node([], place, key, tag)
        self.converted[id(raw)] = node  # before it is filled, since an alias inside it may name it
        if str(raw.tag).endswith("!tuple") and not isinstance(raw, yaml_nodes.ScalarNode):
            self.findings.wrong(node, "tuple-as-text", "!tuple takes a text such as (3, 4)",
                                "write (3, 4), or a list without the tag")
        if isinstance(raw, yaml_nodes.MappingNode):
            node.value.update(self.mapping(raw, node))
        elif isinstance(raw, yaml_nodes.SequenceNode):
            node.value.extend(self.node(item, f"{key}[{i}]") for i, item in enumerate(raw.value))
            for i, item in enumerate(raw.value):
                self.keep_comments(node, i, item, item)
        return node

    def keep_comments(self, node: Node, key: object, first: Any, value: Any) -> None:  # ruamel's, as above
        """Store the comments of a key or item that begins a line: those above it, and the one after it."""
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
        """The children of a mapping; its own keys come after those that it merges, and replace them."""
        own: dict[Any, Node] = {}
        merged: dict[Any, Node] = {}
        for raw_key, raw_value in raw.value:
            place = self.place(raw_key.start_mark)
            if raw_key.tag == _MERGE:
                merged = {**self.merged(raw_value, node.key), **merged}
                continue
            if not isinstance(raw_key, yaml_nodes.ScalarNode):
                self.findings.error("syntax", place, node.key, "a list or mapping can't be a key",
                                    "write the key as text; braces in a value need quotes")
                continue
            key = self.scalar(raw_key)
            if key in own:
                first = node.place_of(key).line
                self.findings.error("duplicate-key", place, node.key_of(key),
                                    f"this key is already in line {first}", "remove one of the two")
                continue
            node.key_places[key] = place
            own[key] = self.node(raw_value, f"{node.key}.{key}" if node.key else str(key))
            self.keep_comments(node, key, raw_key, raw_value)
        return {**merged, **own}

    def merged(self, raw: Any, key: str) -> dict[Any, Node]:  # one of ruamel's nodes
        """The children of the mappings that ``<<`` names; of an equal key that of the first."""
        merged: dict[Any, Node] = {}
        for part in raw.value if isinstance(raw, yaml_nodes.SequenceNode) else [raw]:
            if isinstance(part, yaml_nodes.MappingNode):
                merged = {**self.node(part, key).value, **merged}
        return merged


def moved(tree: Node, folder: str | Path, but: Container[str] = ()) -> Node:
    """The tree, with the paths in its output folder moved to another folder, except for values of some keys."""
    old = str(tree.value["output_folder"].value).rstrip("/")
    new = str(folder).rstrip("/")
    if old in ("", "."):
        return tree

    def move(node: Node) -> Node:
        is_inside = isinstance(node.value, str) and f"{node.value}/".startswith(f"{old}/")
        if not is_inside or node.key in but:
            return node
        return dataclasses.replace(node, value=new + node.value[len(old):])

    return tree.mapped(move)


def refer_again(path: Path, tree: Node, given: Mapping[str, Any]) -> Node:
    """The recipe that a run wrote, without references, prepared for what the command line gives; any other as it is.

    All paths in its output folder follow another one, and what has a value of ``COPIED`` that value. If the run's
    whole folder was copied or moved, the recipe is of where it is now.
    """
    output = tree.value.get("output_folder")
    if not _is_written_by_run(path) or output is None or not output.scalar or _references(tree):
        return tree
    references = _references_to_copied(tree, given)

    def refer(node: Node) -> Node:
        return Node(references[node], node.place, node.key, "!ref") if node in references else node

    tree = tree.mapped(refer)
    if "output_folder" in given:
        elsewhere = "data_folder", "corpus.source", "init_from", "encoder_source"
        return moved(tree, str(given["output_folder"]), but=elsewhere)
    is_run = (path.parent / "save").is_dir()
    if is_run and path.parent.resolve() != Path(str(output.value)).resolve():
        return moved(tree, path.parent.resolve())
    return tree


def _is_written_by_run(path: Path) -> bool:
    with open(path, encoding="utf-8", errors="replace") as file:
        return file.readline().startswith("# Generated ")


def _references_to_copied(tree: Node, given: Mapping[str, Any]) -> dict[Node, str]:
    """The values that were references to keys which are given now, as far as ``COPIED`` knows, and these references."""
    references: dict[Node, str] = {}
    for key, names in COPIED.items():
        if key not in given or key not in tree.value or not tree.value[key].scalar:
            continue
        value = tree.value[key].value
        equal = [(part, child) for node in tree.walk() for part, child in node.items()
                 if child.scalar and child.value == value and child.key != key]
        if key == "number_of_epochs" and any("epoch" in str(part) for part, _ in equal):
            continue  # such as the epoch_count of a schedule, which would stay
        references.update({child: f"<{key}>" for _, child in equal if re.fullmatch(names, child.key)})
    return references


def refuse_another_run(checkpoints: str | Path, output: str | Path) -> None:
    """Refuse to save into another run than that of the output folder."""
    run = Path(checkpoints).resolve().parent
    if (run / "hyperparams.yaml").is_file() and not run.is_relative_to(Path(output).resolve()):
        raise SbkitError("another-run", f"checkpoints would go into another run, {run}", file=run, hint=(
            "a run's hyperparams.yaml has no references left, so --output_folder doesn't change all folders; train the "
            "recipe that it was made of"))
