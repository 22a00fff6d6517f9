"""Writes the pages of docs/reference that are made from the code: ``make docs``. A test says if they are old."""

from __future__ import annotations

import argparse
import inspect
import re
import textwrap
from collections.abc import Container
from pathlib import Path
from typing import Any, NamedTuple

from sbkit import cli
from sbkit.recipe.keys import Declared, Keys
from sbkit.recipe.run_options import RUN_OPTIONS
from sbkit.recipe.signatures import locate
from sbkit.tasks.codec.keys import CodecKeys
from sbkit.tasks.ctc.keys import CTCKeys
from sbkit.tasks.enhance.keys import EnhancementKeys
from sbkit.tasks.keys import RecogniserKeys, TaskKeys
from sbkit.tasks.recognise.keys import EncoderKeys
from sbkit.tasks.speaker.keys import SpeakerKeys
from sbkit.tasks.transducer.keys import TransducerKeys
from sbkit.tasks.tts.keys import TTSKeys
from sbkit.train.keys import ScriptKeys, TrainKeys

FOLDER = Path(__file__).parents[1] / "docs" / "reference"


class Chapter(NamedTuple):
    """A section of the page: the keys that one class declares."""

    title: str
    keys: type[Keys]
    of: str


CHAPTERS = (
    Chapter("Every Brain", TrainKeys, "Every `sbkit.Brain` reads these, also in a script of your own."),
    Chapter("A script of your own", ScriptKeys, "A `sbkit.Brain` that is not a task also reads this one; a task always "
                                                "divides evaluation among ranks."),
    Chapter("Every task", TaskKeys, "A recipe that names a task under `brain`, as `sbkit train` requires, has those "
                                    "above and these."),
    Chapter("Recognisers", RecogniserKeys, "Tasks that recognise words have those above and these."),
    Chapter("Encoders", EncoderKeys, "Recognisers with an encoder have those above and these."),
    Chapter("CTC", CTCKeys, "`brain: !name:sbkit.tasks.ctc.CTC` has those above and these."),
    Chapter("Transducer", TransducerKeys,
            "`brain: !name:sbkit.tasks.transducer.Transducer` has those of recognisers and encoders and these."),
    Chapter("Codec", CodecKeys, "`brain: !name:sbkit.tasks.codec.Codec` has those of every task and these."),
    Chapter("Speakers", SpeakerKeys,
            "`brain: !name:sbkit.tasks.speaker.Verification` has those of every task and these."),
    Chapter("Enhancement", EnhancementKeys,
            "`brain: !name:sbkit.tasks.enhance.Enhancement` has those of every task and these."),
    Chapter("Voice", TTSKeys, "`brain: !name:sbkit.tasks.tts.TTS` has those of every task and these."),
)

#: Classes that recipes build, whose arguments are listed.
CLASSES = (
    "sbkit.data.corpus.Corpus", "sbkit.data.mixture.Mixture", "sbkit.data.text.TextRules",
    "sbkit.data.nonspeech.NonSpeech", "sbkit.data.tokens.Tokenizer", "sbkit.data.plan.Batching",
    "sbkit.data.augment.AddNoise", "sbkit.data.augment.ApplyCodec", "sbkit.nn.spec_augment.SpecAugment",
    "sbkit.train.schedule.Schedule", "sbkit.train.muon.Muon", "sbkit.train.averaging.EMA",
    "sbkit.nn.pretrained.encoder.Encoder", "sbkit.nn.adapters.LoRA", "sbkit.nn.adapters.Houlsby",
    "sbkit.nn.chunks.Chunks", "sbkit.nn.transducer.TransducerHead", "sbkit.nn.kaldi.FilterBank",
    "sbkit.nn.global_norm.GlobalNorm",
)

_HEAD = """# Keys of a recipe

Made by `make docs` from the declarations in the code; edit those, not this page.

A recipe's keys are read once, when it is loaded. A value out of range is refused, with its line, by `sbkit check` and
before a run begins. A key that is neither listed here nor a run option is the recipe's own: others refer to it
(`!ref <d_model>`), or the task reads it. A key that nothing reads and nothing refers to has no effect, and gets a
warning. On the command line, `--KEY VALUE` sets a key that the recipe has or that is listed here, and
`--KEY.ARGUMENT VALUE` an argument of the object that the recipe builds there.

"Object" is an object that the recipe builds with `!new:`, or a class that it names with `!name:`; the arguments of the
most common are [below](#arguments-of-objects), and `python -m pydoc sbkit.data.augment` prints those of others.
[extend](../how-to/extend.md) has tasks with their own keys.
"""

_OPTIONS = """
## Run options

These are SpeechBrain's; [its documentation](https://speechbrain.readthedocs.io/en/latest/API/speechbrain.core.html)
describes them. A recipe may have them as keys; the command line takes precedence:
{options}.

`grad_accumulation_factor` is for scripts: in a task's recipe `batching: step_seconds` is the size of an update.
sbkit adds `precision: auto` and `eval_precision: auto` (bf16 if the device supports it, otherwise
fp32) and `--no-check` (start without checking the recipe).
"""


_COMMANDS = """# Commands

Made by `make docs` from what `sbkit COMMAND --help` prints; edit that, not this page.
"""


_PYTHON = """# Python

Made by `make docs` from docstrings; edit those, not this page. What trains is `sbkit.Brain`, a `speechbrain.core.Brain`
([a script moved](../tutorials/speechbrain.md)), and a task ([your own](../tutorials/own-task.md)).
"""


def keys_page() -> str:
    """Return the text of the page of keys."""
    parts = [_HEAD]
    for title, keys, of in CHAPTERS:
        own = [declared for declared in keys.declared().values() if declared.by == keys.__name__]
        rows = [["key", "type", "range", "default", "what it is"], ["---"] * 5, *map(_row, own)]
        parts.append(f"\n## {title}\n\n{of}\n\n" + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    parts.append(_OPTIONS.format(options=_wrapped([f"`{name}`" for name in sorted(RUN_OPTIONS)])))
    parts.append("\n## Arguments of objects\n")
    for name in CLASSES:
        known = inspect.signature(locate(name)).parameters
        doc = inspect.getdoc(locate(name)) or ""
        parts.append(f"\n### {name.rpartition('.')[2]}\n\n`{name}`: {_text(doc.partition(chr(10) * 2)[0])}\n\n"
                     "| argument | default | what it is |\n| --- | --- | --- |\n")
        for names, said, more in re.findall(r"^(\w+(?:, \w+)*) ?: ?(.*)((?:\n    .*)*)", doc, re.M):
            given = [each for each in names.split(", ") if each in known]
            if given:
                of_type = "" if re.match(r"\s+[A-Z]", more) and len(said) < 25 else said  # as numpy's style has it
                defaults = dict.fromkeys("needed" if known[each].default is inspect.Parameter.empty else
                                         _default(known[each].default) for each in given)
                parts.append(f"| {', '.join(f'`{each}`' for each in given)} | {', '.join(defaults)} | "
                             f"{_text(of_type + ' ' + more)} |\n")
    return "".join(parts)


def commands_page() -> str:
    """Return the text of the page of commands."""
    every = cli.RECIPE_HELP.partition("\n\n")[2].format(command="", what="")
    parts = [_COMMANDS, "\nEach command that takes a recipe says too:\n\n", textwrap.indent(every, "    "), "\n"]
    for group, names in cli.GROUPS.items():
        parts.append(f"\n## {group.capitalize()}\n")
        for name in names:
            parts.append(f"\n### {name}\n\n")
            if cli.takes_recipe(name):
                parts.append(f"`sbkit {name} RECIPE --KEY VALUE`\n\n{_text(cli.recipe_help(name))}\n")
                continue
            parser = cli.parser_for([name])
            [commands] = [each for each in parser._actions if isinstance(each, argparse._SubParsersAction)]
            command = commands.choices[name]
            actions = [each for each in command._actions if each.dest not in ("help", "debug")
                       and each.help != argparse.SUPPRESS]
            words = [_words(each) for each in actions if each.required and each.nargs not in ("*", "?")]
            what = cli.summary(name)
            parts.append(f"`{' '.join(['sbkit', name, *words])}`\n\n{what[0].upper()}{what[1:]}.\n\n"
                         "| argument | what it is |\n| --- | --- |\n")
            parts += [f"| `{_words(each).replace('|', ' or ')}` | {_text(_help(each))} |\n" for each in actions]
    return "".join(parts)


def python_page() -> str:
    """Return the text of the page of classes and functions."""
    parts = [_PYTHON]
    for package in ("sbkit.infer", "sbkit.codes"):
        parts.append(f"\n## {package}\n\n{_text(inspect.getdoc(locate(package)) or '')}\n")
        for name in locate(package).__all__:
            value = locate(f"{package}.{name}")
            what = (inspect.getdoc(value) or "").partition("\n\n")[0]
            parts.append(f"\n### {package.rpartition('.')[2]}.{name}\n\n`{name}{_arguments(value)}`: {_text(what)}\n")
            members, rows = dict[str, Any](), []
            for base in reversed(value.__mro__) if inspect.isclass(value) else ():
                members |= vars(base) if base.__module__.startswith("sbkit") else {}
            for each, known in members.items():
                function = getattr(known, "__func__", getattr(known, "fget", known))
                said = _text((inspect.getdoc(function) or "").partition("\n\n")[0]) if callable(function) else ""
                if said and each[0] != "_" and not inspect.isclass(known):
                    rows.append(f"| `{each}{'' if isinstance(known, property) else _arguments(function)}` | {said} |\n")
            if rows:
                parts += ["\n| member | what it is |\n| --- | --- |\n", *rows]
    return "".join(parts)


def _arguments(function: Any) -> str:  # a class or a function
    """Its arguments, with defaults that can be written."""
    if inspect.isclass(function) and issubclass(function, BaseException):
        return ""
    words = []
    for each in inspect.signature(function).parameters.values():
        known = each.default is None or isinstance(each.default, (bool, int, float, str))
        default = "" if each.default is inspect.Parameter.empty else f"={each.default!r}" if known else "=..."
        words += ["*"] if each.kind is each.KEYWORD_ONLY and "*" not in words else []
        words += [f"{each.name}{default}"] if each.name not in ("self", "cls") else []
    return f"({', '.join(words)})"


def _words(action: argparse.Action) -> str:
    """An argument as one types it."""
    value = action.metavar or (f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    several = {"*": f"[{value} ...]", "+": f"{value} [{value} ...]", "?": f"[{value}]", 0: ""}
    value = value if action.nargs is None else several.get(action.nargs, value)
    return " ".join(filter(None, [", ".join(action.option_strings), value]))


def _help(action: argparse.Action) -> str:
    return (action.help or "") % vars(action)


def _text(text: str) -> str:
    """A docstring or help in one line of a table."""
    text = re.sub(r":\w+:`([^`]*)`", r"`\1`", text.replace("``", "`"))
    text = re.sub(r"\s+", " ", text).strip().replace("|", "\\|")
    return re.sub(r"`[^`]*`|<", lambda found: "&lt;" if found[0] == "<" else found[0], text)


def _row(key: Declared) -> list[str]:
    kind = " or ".join(dict.fromkeys("object" if part == "Any" else part for part in key.kind.split(" | ")
                                     if part != "None")) + (" or null" if "None" in key.kind.split(" | ") else "")
    return [f"`{key.name}`", kind, _range(key.allowed), "needed" if key.needed else _default(key.default), key.what]


def _range(allowed: Container[object] | None) -> str:
    if allowed is None:
        return ""
    return str(allowed).removeprefix("a whole number").removeprefix("a number").strip(" ,")


def _default(value: object) -> str:
    shown = {None: "null", True: "true", False: "false"}
    value = list(value) if isinstance(value, tuple) else value
    return f"{shown[value] if value is None or isinstance(value, bool) else value}"


def _wrapped(words: list[str], width: int = 118) -> str:
    lines = [""]
    for word in words:
        word = word + ("," if word != words[-1] else "")
        if len(lines[-1]) + len(word) + 1 > width:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


if __name__ == "__main__":
    for name, page in (("keys", keys_page), ("commands", commands_page), ("python", python_page)):
        (FOLDER / f"{name}.md").write_text(page(), encoding="utf-8")
