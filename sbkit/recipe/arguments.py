"""The command line of a run: a recipe, SpeechBrain's flags, and ``--key value`` for any key of the recipe."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib
import logging
import os
import re
import sys
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from sbkit.errors import SbkitError
from sbkit.recipe import files
from sbkit.recipe.files import Files
from sbkit.recipe.overrides import NoValue, full_key, unknown_key, with_full_keys
from sbkit.recipe.report import did_you_mean, listed
from sbkit.recipe.run_options import RUN_OPTIONS
from sbkit.recipe.source import BASE, INCLUDE, Findings

if TYPE_CHECKING:
    from speechbrain.utils.run_opts import RunOptions

    from sbkit.recipe.keys import Keys

logger = logging.getLogger(__name__)

#: Beginnings of values that may continue in the next word, as in ``--betas [0.9, 0.98]``.
_OPENS = ("[", "{", "(", "!", "'", '"')
#: The package of sbkit's tasks.
TASKS = "sbkit.tasks"
#: An option as it is written, such as ``--schedule.warmup=0.1``: a key, parts of it with their dots, and the rest.
_OPTION = re.compile(r"--(?P<key>[\w-]+)(?P<parts>(?:\.[\w-]*)*)(?P<rest>.*)", re.DOTALL)
_FLOAT = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+")


@dataclass(frozen=True)
class CommandLine:
    """A parsed command line: a recipe, options of the run, and overrides of the recipe's keys."""

    path: Path
    run_opts: RunOptions
    overrides: Mapping[str, Any] = field(default_factory=dict)
    check: bool = True


def read_words(words: Sequence[str], options: Sequence[str], keys: bool = True, task: bool = False) -> list[str]:
    """Refuse wrong words, and paths and keys that they name, before torch is imported, which takes seconds.

    Returns the words with hyphens and underscores as the recipe and the options have them.

    options : the names of the command's own options
    keys : whether to refuse unknown keys; the check reports them with all else
    task : whether to refuse a recipe without a task, and a corpus that isn't there
    """
    if all(word.startswith("-") for word in words):
        _raise("required: param_file")
    if words[0].startswith("-"):
        return list(words)  # which word is the recipe isn't known yet: the next one may be this option's value
    read = Words.read(words, options)
    if task:
        read.refuse_without_task()
    if keys and read.task_is_of_sbkit:
        if task:
            read.refuse_missing_corpus()
        read.refuse_unknown_keys()
    return read.spelled


@dataclass(frozen=True)
class Words:
    """The words of a command that names a recipe first, and what is wrong with them that the recipe's text shows."""

    spelled: list[str]
    """The words with hyphens and underscores as the recipe and the options have them."""
    elsewhere: set[str]
    """The keys among them that are neither a key of the recipe nor an option of the command."""
    recipe: Files
    command_options: Collection[str]

    @classmethod
    def read(cls, words: Sequence[str], options: Sequence[str]) -> Words:
        """Read words, the first of which is a recipe; ``options`` are the names of the command's own options."""
        recipe = files.chain(locate(words[0]), Findings())
        command_options = ("no-check", *options)
        speller = _Speller(recipe, command_options)
        spelled = [words[0], *map(speller.spelled, words[1:])]
        return cls(spelled, speller.elsewhere, recipe, command_options)

    @property
    def task_is_of_sbkit(self) -> bool:
        """Whether the recipe's task is one of sbkit's; only the class itself can tell the keys of any other."""
        return "brain" not in self.elsewhere and _brain(self.recipe).startswith(f"{TASKS}.")

    @functools.cached_property
    def recipe_keys(self) -> set[str]:
        return {str(key) for key in files.keys(self.recipe)}

    @functools.cached_property
    def overrides(self) -> dict[str, Any]:
        """The values of keys; none if a word can't be read, which is reported when they are parsed again for the run.
        """
        try:
            return with_full_keys(parse_overrides(self.spelled[1:]), self.recipe_keys)
        except SbkitError:
            return {}

    def refuse_without_task(self) -> None:
        """Refuse a recipe that names no task."""
        _refuse_without_task(self.spelled[0], self.recipe, {*self.recipe_keys, *self.elsewhere})

    def refuse_missing_corpus(self) -> None:
        """Refuse a corpus that isn't there."""
        _refuse_missing_corpus(self.overrides.get("data_folder"))

    def refuse_unknown_keys(self) -> None:
        """Refuse keys that neither the recipe nor its task has."""
        new = {full_key(key, self.recipe_keys) for key in self.elsewhere} - self.recipe_keys
        if not new:
            return  # before the task's package is imported
        keys_of_task = _declared(_brain(self.recipe))
        if keys_of_task is None:
            return
        declared = {*keys_of_task, *RUN_OPTIONS}
        unknown = {key: self.overrides.get(key) for key in sorted(new - declared)}
        if unknown:
            known = {*self.recipe_keys, *declared, *self.command_options} - {"param_file"}
            _refuse_unknown(self.recipe, unknown, known)


class _Speller:
    """Writes words with hyphens and underscores as a recipe and a command have them.

    A key as the recipe has it stays. Otherwise hyphens become underscores, except in the command's own options:
    with the keys ``lr`` and ``schedule``, and the option ``no-run``, ``--min-steps`` becomes ``--min_steps``,
    ``--no_run`` becomes ``--no-run``, and ``--schedule.max-rise-per-step=1`` ``--schedule.max_rise_per_step=1``.
    """

    def __init__(self, recipe: Files, command_options: Collection[str]):
        self.recipe_keys = {str(key) for key in files.keys(recipe)}
        self.nested_keys = {
            key for _, root in recipe for node in root.walk() if isinstance(node.value, dict) for key in node.value}
        self.options_by_underscored = {option.replace("-", "_"): option for option in command_options}
        self.elsewhere = set[str]()
        """The keys so far that are neither of the recipe nor of the command."""

    def spelled(self, word: str) -> str:
        option = _OPTION.fullmatch(word)
        if option is None:
            return word  # a value
        parts = ".".join(map(self._spelled_part, option["parts"].split(".")))
        return f"--{self._spelled_key(option['key'])}{parts}{option['rest']}"

    def _spelled_key(self, key: str) -> str:
        if key in self.recipe_keys:
            return key
        underscored = key.replace("-", "_")
        if underscored in self.options_by_underscored:
            return self.options_by_underscored[underscored]
        self.elsewhere.add(underscored)
        return underscored

    def _spelled_part(self, part: str) -> str:
        underscored = part.replace("-", "_")
        return underscored if underscored in self.nested_keys else part


def _refuse_without_task(name: str, recipe: Files, known: Container[str]) -> None:
    """Refuse a recipe that names no task.

    known : the keys of the recipe and of the command line
    """
    if not recipe or "brain" in known:
        return
    _, last = recipe[-1]
    if BASE in last.value and last.value[BASE].tag.startswith(INCLUDE):  # a base that can't be read may have it
        return
    from sbkit.recipe.keys import COMPLETE, SCRIPT

    raise SbkitError("missing-key", f"{name} lacks brain", file=name, key="brain",
                     hint=f"{SCRIPT}; otherwise, {COMPLETE}")


def _brain(recipe: Files) -> str:
    """The name of the class under ``brain``; empty if the recipe names none."""
    tag = next((str(level.value["brain"].tag) for _, level in files.levels(recipe) if "brain" in level.value), "")
    return tag.removeprefix("!name:") if tag.startswith("!name:") else ""


def _declared(brain: str) -> list[str] | None:
    """The names of the keys that one of sbkit's tasks declares: its package has them as ``Keys``, without torch."""
    package = ".".join(brain.split(".")[:TASKS.count(".") + 2])
    try:
        keys: type[Keys] = importlib.import_module(package).Keys
    except (ImportError, AttributeError):  # there is no such task, which is reported with all other mistakes
        return None
    return [field.name for field in dataclasses.fields(keys)]


def _refuse_missing_corpus(source: object) -> None:
    """Refuse a corpus on the command line that isn't there."""
    if not isinstance(source, (str, Mapping)):
        return
    from sbkit.data.sources import check_exists

    try:
        check_exists(source)
    except SbkitError as error:
        raise SbkitError(error.code, f"--data_folder: {error.message}", hint=error.hint, file=error.file,
                         line=error.line, key="data_folder", value=error.value) from None


def _refuse_unknown(recipe: Files, unknown: Mapping[str, object], known: Collection[str]) -> NoReturn:
    """Refuse keys, which have these values, that neither the recipe nor its task knows; ``known`` are those that are.
    """
    problems = {key: unknown_key(recipe, key, value, known) for key, value in unknown.items()}
    if len(problems) == 1:
        [(key, (message, hint))] = problems.items()
        raise SbkitError("unknown-override", f"--{key}: {message}", hint=hint, file=recipe[0][0], key=key)
    hints = dict.fromkeys(hint for _, hint in problems.values())
    if len(hints) > 1:
        hints = dict.fromkeys(f"--{key}: {hint}" for key, (_, hint) in problems.items())
    raise SbkitError("unknown-override", f"{recipe[0][0]} has no keys {', '.join(problems)}", hint="; ".join(hints),
                     file=recipe[0][0], key=next(iter(problems)))


def parse(argv: list[str], importable: bool = True) -> CommandLine:
    """Split ``argv`` into the recipe, the run options and the overrides of the recipe's keys.

    importable : make modules beside the recipe importable from now on
    """
    from speechbrain.utils.run_opts import RunOptions

    parser, precisions = _run_options_parser()
    words, switched_off = _without_switch_values(argv, parser)
    known, rest = parser.parse_known_args(words)
    options = {**vars(known), **dict.fromkeys(switched_off, False)}
    path = locate(options.pop("param_file"))
    if importable:
        make_importable(path)
    check = not options.pop("no_check", False)
    if not check:  # the check reports a wrong one with all other mistakes
        for name, choices in precisions.items():
            if options.get(name, "auto") not in choices:
                _raise(f"--{name}: choose one of {', '.join(choices)}, not {options[name]!r}")
    run_opts = RunOptions(**options, param_file=str(path), overridden_args=set(options) | {"param_file"})
    overrides = with_full_keys(parse_overrides(rest), files.keys(files.chain(path, Findings())))
    return CommandLine(path, run_opts, overrides, check)


def _run_options_parser() -> tuple[argparse.ArgumentParser, dict[str, list[str]]]:
    """SpeechBrain's parser of run options, changed for sbkit's recipes, and the choices of each option of a precision.

    Written for SpeechBrain 1.1.2. What is changed here is private: its ``RunOptions._create_parser``, and the actions
    of argparse that this makes. tests/recipe/test_run_options.py fails if a later version has another parser.
    """
    from speechbrain.utils.run_opts import RunOptions

    parser = RunOptions._create_parser()
    parser.allow_abbrev = False  # --debug_b is a typo, not --debug_batches
    parser.error = _raise
    parser.add_argument("--no-check", "--no_check", dest="no_check", action="store_true")
    precisions: dict[str, list[str]] = {}
    for action in parser._actions:
        action.default = argparse.SUPPRESS  # without the option, the recipe's value counts
        if action.dest == "optimizer_step_limit":
            action.type = int
        if "precision" in action.dest:
            precisions[action.dest] = ["auto", *action.choices]
            action.choices = None  # the check reports a wrong one with all other mistakes
    return parser, precisions


def command_options(argv: list[str], hint: str, flags: Sequence[str] = (), repeated: Sequence[str] = (),
                    **options: Callable[[str], object]) -> tuple[argparse.Namespace, list[str]]:
    """Split a command's own ``--name value`` and ``--flag`` from its other arguments.

    hint : added to the message about one that can't be read
    repeated : the names of options that may be given several times, whose values are a list of texts
    options : a parser for the value of each, ``as_`` for ``--as``; None if it isn't given
    """
    def refuse(message: str) -> NoReturn:
        raise SbkitError("bad-option", message, hint=hint)

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.error = refuse  # type: ignore[method-assign]
    for name, read in options.items():
        parser.add_argument(f"--{name.rstrip('_')}", dest=name, type=read)
    for name in repeated:
        parser.add_argument(f"--{name}", action="append", default=[])
    for flag in flags:
        parser.add_argument(f"--{flag}", action="store_true")
    from sbkit.recipe import names

    names.COMMAND_OPTIONS[1:] = [*(name.rstrip("_") for name in options), *repeated, *flags]
    words, _ = _without_switch_values(argv, parser)
    return parser.parse_known_args(words)


def _without_switch_values(argv: Sequence[str], parser: argparse.ArgumentParser) -> tuple[list[str], list[str]]:
    """The words without the values of switches, and the names of those that are switched off.

    ``--debug true`` becomes ``--debug``, and ``--debug false`` is left out: argparse's switches take no values.
    """
    switches = {name: action.dest for action in parser._actions if action.nargs == 0 for name in action.option_strings}
    words: list[str] = []
    off: list[str] = []
    for word in argv:
        if not words or words[-1] not in switches or word.lower() not in ("true", "false"):
            words.append(word)
        elif word.lower() == "false":
            off.append(switches[words.pop()])
    return words, off


def make_importable(recipe: Path) -> None:
    """Make modules importable that are beside a recipe, above its folder, or in the working directory.

    SpeechBrain's recipes name classes in such files (``custom_model.py`` above ``hparams/``).
    """
    folders = Path.cwd(), recipe.parent, recipe.parent.parent
    sys.path += [name for name in dict.fromkeys(str(folder.resolve()) for folder in folders) if name not in sys.path]


def _raise(message: str) -> None:
    if message.endswith("required: param_file"):
        raise SbkitError("not-a-recipe", "no recipe given",
                         hint="name it first: hparams/ctc.yaml [--key value ...]; --help says more")
    for theirs, plain in {"invalid int value:": "write a whole number, such as 5, not",
                        "invalid float value:": "write a number, such as 0.5, not",
                        "ignored explicit argument": "it is a switch, which takes no value; write it without"}.items():
        message = message.replace(theirs, plain)
    raise SbkitError("bad-option", message, hint="--help says more")


def _builds(path: Path) -> bool:
    """Whether a YAML file builds something, as recipes do."""
    try:
        return re.search(r"[ \n]!(new|name|include)", path.read_text(encoding="utf-8", errors="replace")) is not None
    except OSError:
        return False


def locate(name: str) -> Path:
    """The path of a recipe, as given or else relative to the folder of the script that was started."""
    if name.endswith(".py"):
        raise SbkitError("not-a-recipe", f"{name} is a script, not a recipe", file=name,
                         hint="name the recipe first, as sbkit train RECIPE.yaml; start a script with python")
    candidates = [Path(name), Path(sys.argv[0]).resolve().parent / name]
    for path in candidates:
        if path.is_file():
            return path
    for path in candidates:
        if path.is_dir():
            _refuse_folder(name, path)
    _refuse_missing(name)


def _refuse_folder(name: str, folder: Path) -> NoReturn:
    recipes = sorted(str(path) for path in (*folder.glob("*.y*ml"), *folder.glob("*/*.y*ml")) if _builds(path))
    if recipes:
        hint = f"name one of its recipes: {listed(recipes)}"
    else:
        hint = f"a corpus comes after the recipe: --data_folder {name}; sbkit new FOLDER writes recipes to start from"
    raise SbkitError("not-a-recipe", f"{name} is a folder, not a recipe", hint=hint, file=name)


def _refuse_missing(name: str) -> NoReturn:
    """Refuse a recipe that isn't there, with one of a similar name, or those that are where it was looked for."""
    from sbkit.recipe import starter

    where = Path(name).parent
    stem = Path(name).stem
    beside = [str(path) for path in (where.glob("*.y*ml") if where.is_dir() else where.parent.glob("*/*.y*ml"))]
    near_stem = did_you_mean(stem, [Path(path).stem for path in beside], 0.75)  # an equal folder isn't near
    near = did_you_mean(name, [path for path in beside if Path(path).stem == near_stem], cutoff=0)
    if near:
        hint = f"did you mean {near}?"
    elif beside and where.name == "hparams":
        hint = f"there are {listed(sorted(beside))}"
    else:
        task = f" --task {stem}" if stem in starter.tasks() else ""
        hint = f"the working directory is {os.getcwd()}; sbkit new FOLDER{task} writes recipes to start from"
    raise SbkitError("no-such-path", f"there is no recipe {name}", hint=hint, file=name)


def parse_overrides(words: list[str]) -> dict[str, Any]:
    """Parse ``--a 1 --b.c=x --flag`` into a tree of values, which are read as in YAML.

    >>> parse_overrides(["--lr", "1e-3", "--a.b=x=y", "--flag"])
    {'lr': 0.001, 'a': {'b': 'x=y'}, 'flag': True}
    >>> parse_overrides(["--betas", "[0.9,", "0.98]"])
    {'betas': [0.9, 0.98]}
    """
    tree: dict[str, Any] = {}
    position = 0
    while position < len(words):
        word = words[position]
        if not word.startswith("--") or len(word) < 3:
            raise SbkitError("bad-option", f"cannot read the argument {word!r}", value=word,
                             hint="overrides are written --key value, and switches such as --debug without one")
        key, equals, text = word[2:].partition("=")
        position += 1
        if not equals:
            pieces: list[str] = []
            while position < len(words) and not words[position].startswith("--"):
                if pieces and not pieces[0].startswith(_OPENS):
                    raise SbkitError("bad-option", key=key, value=words[position], message=f"cannot read the argument "
                                     f"{words[position]!r} after --{key} {pieces[0]}",
                                     hint="overrides are written --key value, and a value with spaces in quotes")
                pieces.append(words[position])
                position += 1
            text = " ".join(pieces)
        node = tree
        *parents, last = key.split(".")
        for parent in parents:
            node = node.setdefault(parent, {})
            if not isinstance(node, dict):
                raise SbkitError("conflicting-options", f"--{key} sets a part of {parent}, which --{parent} replaces",
                                 key=key, hint="leave one of them out")
        if last in node:
            _warn_of_repetition(key)
        node[last] = read_value(text) if equals or pieces else NoValue(True)
    return tree


@functools.cache  # the words of a command are parsed several times
def _warn_of_repetition(key: str) -> None:
    logger.warning("--%s is given twice: the last one is used", key)


def without(words: Iterable[str], keys: Container[str]) -> list[str]:
    """The words without these options or parts of them, and their values.

    >>> without(["a.yaml", "--lr", "1", "--data=x", "--seed", "3"], {"lr", "data"})
    ['a.yaml', '--seed', '3']
    """
    left: list[str] = []
    is_left_out = False
    for word in words:
        if word.startswith("--"):
            parts = word[2:].partition("=")[0].split(".")
            is_left_out = any(".".join(parts[:count]) in keys for count in range(1, len(parts) + 1))
        if not is_left_out:
            left.append(word)
    return left


def read_value(text: str) -> object:
    """Read a value as in YAML, including tags and references; 1e-3 is a number and (2, 2) a tuple."""
    from ruamel.yaml import YAML
    from ruamel.yaml.comments import TaggedScalar
    from ruamel.yaml.error import YAMLError
    from ruamel.yaml.tag import Tag

    if _FLOAT.fullmatch(text):
        return float(text)
    if text.startswith("(") and text.endswith(")"):  # without the tag, HyperPyYAML's second load makes it a text
        return TaggedScalar(text, tag=Tag(suffix="!tuple"))
    try:
        value: object = YAML().load(f"value: {text}\n")["value"]
    except YAMLError:
        if text.startswith(("{", "[", "!")) and sum(map(text.count, "{[")) != sum(map(text.count, "}]")):
            raise SbkitError("bad-option", f"{text}: a bracket is not closed, or closed twice", value=text,
                             hint="write the value in quotes for the shell") from None
        return text
    if isinstance(value, dict) and any(":" in str(key) for key, child in value.items() if child is None):
        raise SbkitError("bad-option", f"{text}: there is no space after a colon", value=text,
                         hint="write {name: value}, in quotes for the shell")
    return value
