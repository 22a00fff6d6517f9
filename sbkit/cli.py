"""The command line: finds the command and runs it. Each command is one file, imported when it is called."""

from __future__ import annotations

import argparse
import atexit
import contextlib
import difflib
import gc
import importlib
import json
import os
import re
import signal
import sys
import textwrap
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

import sbkit
from sbkit.errors import SbkitError
from sbkit.system import console, disk

RECIPE_HELP = """usage: sbkit {command} RECIPE.yaml [--key value ...]
{what}

Any key of the YAML can be overridden: --d_model 256 --number_of_epochs 3 --data_folder /data/cv/fr
SpeechBrain's run options work too: --device --precision --debug --test_only --noprogressbar
--ckpt_interval_minutes --grad_accumulation_factor --max_grad_norm --compile --profile_training ...
--no-check starts a run without checking its recipe.

A recipe is code: what it names is imported and called, even by check. For a recipe you don't trust: check --no-run."""

#: Former names of commands, and of options of a command; they work, and a line says the present one.
FORMER_COMMANDS = {"replay": "rerun"}
FORMER_OPTIONS = {
    "check": {"on": "as"}, "evaluate": {"on": "data-folder", "out": "to"}, "report": {"out": "to"}, "lm": {"out": "to"},
    "transcribe": {"output": "to"}, "run": {"output": "to"}, "import": {"corpus": "data-folder"},
    "doctor": {"data": "data-folder"}, "reproduce": {"source": "data-folder", "to": "output-folder"}}
#: Commands that take a recipe and overrides, as SpeechBrain's scripts do; argparse never sees their arguments.
RECIPE_COMMANDS = {
    "train": "train, test and report",
    "show": "print the recipe as one file, with where each value comes from",
    "check": "report everything wrong with a recipe, what it costs and what fits in memory",
    "tune": "find the largest batch that fits, by trying; cached per model, device and precision",
    "prepare": "prepare the corpus and the tokenizer only, and report what was left out and why",
    "clean": "list training rows whose labels are probably wrong, using models not trained on them",
}
COMMANDS = {
    "new": "write a starter folder: a task's recipes, train.py and a README",
    "demo-data": "synthesise a small corpus in Common Voice's layout",
    "shard": "pack a manifest's recordings into tar shards that training reads directly",
    "evaluate": "score any checkpoint of a run on any corpus",
    "info": "say what a run or a bundle is: its model, corpus, results and age",
    "lm": "estimate a language model from text, for a search with --lm",
    "report": "write a page about a run: its curves, its errors, what to fix next",
    "improve": "train a run on with what people corrected, and publish the model if it got better",
    "rollback": "put the bundle back that improve replaced; again puts the improved one back",
    "reproduce": "train a finished run again from its reproduce.json, and compare rows, losses and figures",
    "rerun": "compute a non-finite step again, layer by layer",
    "export": "export a run as a bundle that others can use",
    "push": "put a bundle on the Hugging Face Hub",
    "import": "make a bundle from a CTC model that was trained elsewhere",
    "transcribe": "transcribe recordings with an exported bundle",
    "label": "make a corpus from untranscribed recordings: a bundle's transcripts that are probably right",
    "listen": "transcribe live speech from the microphone or standard input",
    "speak": "speak a text with an exported voice",
    "enhance": "remove noise from recordings with an exported enhancer",
    "tokenize": "turn a corpus into codes with an exported codec",
    "resynthesize": "turn codes back into audio files with an exported codec",
    "run": "run an exported model that outputs tensors, such as speaker embeddings, on recordings",
    "serve": "serve bundles through an OpenAI-style API, a live WebSocket and a web page",
    "doctor": "report what this machine offers, and what keeps sbkit from running well",
}


#: The commands as the help lists them.
GROUPS = {
    "data": ("demo-data", "prepare", "shard", "clean", "label", "tokenize", "resynthesize"),
    "train": ("new", "show", "check", "tune", "train", "improve", "rerun", "reproduce", "doctor"),
    "evaluate": ("info", "evaluate", "report", "lm"),
    "ship": ("export", "import", "push", "transcribe", "listen", "speak", "enhance", "run", "serve",
             "rollback"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user error is one line on stderr and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console.open_missing_streams()
    atexit.register(gc.freeze)  # the process ends a second sooner if what is left isn't searched for cycles
    try:
        with disk.disk_errors_as_user_error(os.environ.get("TMPDIR", "/tmp"), "the output or a temporary file"):
            return dispatch(argv)
    except SbkitError as error:
        if "--debug" in argv:
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":  # every rank has the same error; one reports it
            console.write_error(f"error: {error}")
        _report_to_torchrun(error)
        return error.exit_code
    except KeyboardInterrupt:  # outside training steps, which save a checkpoint first
        if "--debug" in argv:
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":
            print("\nstopped by Ctrl-C; run the same command to continue", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `sbkit ... | head`
        console.silence(sys.stdout.fileno())
        return 1


def _report_to_torchrun(error: SbkitError) -> None:
    """Put the reason into the last lines of torchrun's report about failed processes."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = f"error: {error}"
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # the error itself may be a full disk
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def dispatch(argv: list[str]) -> int:
    """Run the command that the arguments name, and return its exit code."""
    if not argv:
        parser_for(argv).print_help()
        return 2
    command, rest = FORMER_COMMANDS.get(argv[0], argv[0]), argv[1:]
    if command != argv[0]:
        print(f"sbkit {argv[0]} is now called sbkit {command}", file=sys.stderr)
    if command not in RECIPE_COMMANDS:
        args = parser_for([command, *rest]).parse_args([command, *rest])
        return args.call(args)
    module = command_module(command)
    if "-h" in rest or "--help" in rest:
        print(RECIPE_HELP.format(command=command, what=module.HELP))
        return 0
    from sbkit.recipe import arguments

    return module.run(arguments.read_words(rest, module.OPTIONS, FORMER_OPTIONS.get(command, {}), command != "check",
                                           task=command not in ("check", "show")))


def command_module(command: str) -> ModuleType:
    """The module of a command: ``HELP`` or ``add`` describes its arguments, ``run`` runs it."""
    return importlib.import_module(f"sbkit.commands.{command.replace('-', '_')}")


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with a suggestion; it takes no abbreviated options, so ``--chunk``
    of one command isn't read as ``--chunk-seconds`` of another."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False)
        self.former: dict[str, str] = {}
        """Former names of options, without ``--`` and with hyphens."""

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by the class of the namespace
            self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse unknown options here: the parent parser doesn't know this command's options."""
        known, unknown = super().parse_known_args([*map(self._spelled, args or ())], namespace)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            self._refuse(f"unrecognized arguments: {' '.join(unknown)}", unknown[0].partition("=")[0], options)
        return known, unknown

    def _spelled(self, word: str) -> str:
        """An option as this parser has it: hyphens and underscores are the same, and a former name is understood."""
        name, equals, value = word.partition("=")
        options = {each[2:].replace("_", "-"): each for action in self._actions for each in action.option_strings
                   if each.startswith("--")}
        plain = name[2:].replace("_", "-") if name.startswith("--") else ""
        if plain in self.former and plain not in options:
            print(f"{name} is now called {options[self.former[plain]]}", file=sys.stderr)
            plain = self.former[plain]
        return f"{options[plain]}{equals}{value}" if plain in options else word

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        self._refuse(message, *(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ("", []))

    def _refuse(self, message: str, word: str, options: list[str]) -> NoReturn:
        near = difflib.get_close_matches(word, options, n=1)
        raise SbkitError(message, hint=(f"did you mean {near[0]}? " if near else "") + f"see {self.prog} --help")


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these arguments; only the command that they name is imported, the others are just listed."""
    what = {**RECIPE_COMMANDS, **COMMANDS}
    groups = "\n\n".join("\n".join([f"{group}:", *(
        textwrap.fill(what[name], 100, initial_indent=f"  {name:13}", subsequent_indent=15 * " ") for name in names)])
        for group, names in GROUPS.items())
    parser = _Parser(prog="sbkit", description="Train speech models from recipes and ship them.", epilog=groups,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"sbkit {sbkit.__version__}")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name in RECIPE_COMMANDS:
        commands.add_parser(name, add_help=False)
    called = next((word for word in argv if word in COMMANDS), None)
    for name in COMMANDS:
        command = commands.add_parser(name)
        if name == called:
            module = command_module(name)
            module.add(command)
            command.former = FORMER_OPTIONS.get(name, {})
            command.set_defaults(call=module.run)
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
