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
--ckpt_interval_minutes --max_grad_norm --compile --profile_training ...
--no-check starts a run without checking its recipe.

A recipe is code: what it names is imported and called, even by check. For a recipe you don't trust: check --no-run."""

#: The commands as the help lists them; what they do is the docstring of each one's file.
GROUPS = {
    "data": ("demo-data", "prepare", "shard", "clean", "label", "tokenize", "resynthesize"),
    "train": ("new", "show", "check", "tune", "train", "improve", "rerun", "doctor", "explain"),
    "evaluate": ("info", "evaluate", "report", "lm"),
    "ship": ("export", "import", "push", "transcribe", "listen", "speak", "enhance", "run", "serve",
             "rollback"),
}
COMMANDS = [name for names in GROUPS.values() for name in names]
_COMMAND = "COMMAND"  # what stands for one in the help


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a user error is one line on stderr and exit code 2, with ``--json`` also JSON on stdout."""
    argv = list(sys.argv[1:] if argv is None else argv)
    console.open_missing_streams()
    console.log_messages()
    # Where other work has a core, threads of torch would wait for each other in loops that keep that one from going on:
    # training took 12 times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    atexit.register(gc.freeze)  # the process ends a second sooner if what is left isn't searched for cycles
    try:
        with disk.disk_errors_as_user_error(os.environ.get("TMPDIR", "/tmp"), "the output or a temporary file"):
            return dispatch(argv)
    except SbkitError as error:
        if "--debug" in argv and argv[0] != "train":  # there it is SpeechBrain's option for a few batches
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":  # every rank has the same error; one reports it
            console.write_error(error.shown)
            if "--json" in argv:
                _print_as_json(error)
        if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):  # torchrun's report ends with what it says
            text = error.shown
            extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
            with contextlib.suppress(OSError):  # the error itself may be a full disk
                Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")
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


def _print_as_json(error: SbkitError) -> None:
    """Print the error that ends a command in one line for programs; a reader that is gone is no further error."""
    try:
        print(json.dumps({"error": error.as_json()}, ensure_ascii=False), flush=True)
    except BrokenPipeError:
        console.silence(sys.stdout.fileno())


def dispatch(argv: list[str]) -> int:
    """Run the command that the arguments name, and return its exit code."""
    if not argv:
        parser_for(argv).print_help()
        return 2
    command, rest = argv[0], argv[1:]
    if command not in COMMANDS or not takes_recipe(command):
        args = parser_for(argv).parse_args(argv)
        return args.call(args)
    module = command_module(command)
    if "-h" in rest or "--help" in rest:
        print(RECIPE_HELP.format(command=command, what=recipe_help(command)))
        return 0
    from sbkit.recipe import arguments

    return module.run(arguments.read_words(
        rest, getattr(module, "OPTIONS", ()), keys=command != "check", task=command not in ("check", "show")))


def command_module(command: str) -> ModuleType:
    """The module of a command; what it has is said in ``sbkit/commands/__init__.py``."""
    return importlib.import_module(f"sbkit.commands.{command.replace('-', '_')}")


def takes_recipe(command: str) -> bool:
    """Whether a command takes a recipe and overrides, as SpeechBrain's scripts do, which argparse never sees."""
    return not hasattr(command_module(command), "add")


def summary(command: str) -> str:
    """What a command does: the first sentence of its docstring, without its name and the full stop."""
    first = (command_module(command).__doc__ or "").partition("\n\n")[0]
    return " ".join(first.split()).partition("``: ")[2].removesuffix(".")


def recipe_help(command: str) -> str:
    """What a command that takes a recipe says about itself."""
    what = summary(command)
    return f"{what[:1].upper()}{what[1:]}.\n{getattr(command_module(command), 'HELP', '')}".rstrip()


class _Parser(argparse.ArgumentParser):
    """A parser that reports an error in one line, with a suggestion; it takes no abbreviated options, so ``--chunk``
    of one command isn't read as ``--chunk-seconds`` of another."""

    def __init__(self, **options: Any):
        super().__init__(**options, allow_abbrev=False, exit_on_error=False)

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by the class of the namespace
            self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Parse, and refuse unknown options here: the parent parser doesn't know this command's options."""
        try:
            known, unknown = super().parse_known_args([*map(self._spelled, args or ())], namespace)
        except argparse.ArgumentError as error:
            if error.argument_name is None:  # so later Pythons say that arguments are missing, instead of by ``error``
                self.error(error.message)
            from sbkit.commands.options import UnknownChoice

            of_type = error.__context__  # what the argument's type raised
            word, choices = (of_type.word, of_type.choices) if isinstance(of_type, UnknownChoice) else ("", ())
            self._refuse("bad-option", str(error), word, choices, error.argument_name)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            option = unknown[0].partition("=")[0]
            self._refuse("unknown-option", f"unrecognized arguments: {' '.join(unknown)}", option, options, option)
        return known, unknown

    def _spelled(self, word: str) -> str:
        """An option as this parser has it: hyphens and underscores are the same."""
        name, equals, value = word.partition("=")
        options = {each[2:].replace("_", "-"): each for action in self._actions for each in action.option_strings
                   if each.startswith("--")}
        plain = name[2:].replace("_", "-") if name.startswith("--") else ""
        return f"{options[plain]}{equals}{value}" if plain in options else word

    @property
    def _see_help(self) -> str:
        return f"see {self.prog} --help"

    def error(self, message: str) -> NoReturn:
        """Refuse a command line that lacks arguments; mistakes in one argument are exceptions, as ``exit_on_error`` is
        false."""
        needed = " ".join(f"{' '.join(action.option_strings[:1])} {action.metavar}".strip()
                          for action in self._actions if action.required)
        raise SbkitError("missing-option", message, hint=f"write {self.prog} {needed}; {self._see_help}")

    def _check_value(self, action: argparse.Action, value: Any) -> None:  # what the argument's type made of a word
        """Suggest a choice near to one that there isn't; argparse's exception has neither."""
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            choices = [str(choice) for choice in action.choices or ()]
            if action.metavar == _COMMAND:
                self._refuse("unknown-command", f"there is no command {value}", str(value), choices, None, value)
            self._refuse("bad-option", str(error), str(value), choices, error.argument_name, value)

    def _refuse(self, code: str, message: str, word: str, options: Sequence[str], argument: str | None,
                value: object = None) -> NoReturn:
        """Refuse a word, and suggest the nearest of the options.

        argument, value : the option that the word belongs to, and its value
        """
        from sbkit.recipe.elsewhere import NAMED_ELSEWHERE

        ours = self._spelled("--" + NAMED_ELSEWHERE.get(word.lstrip("-").replace("-", "_"), ""))
        near = [ours] if ours in options else difflib.get_close_matches(word, options, n=1)
        raise SbkitError(code, message, hint=(f"did you mean {near[0]}? " if near else "") + self._see_help,
                         key=argument, value=value)


def parser_for(argv: Sequence[str]) -> argparse.ArgumentParser:
    """The parser for these arguments; if they name a command, it alone is imported."""
    called = next((word for word in argv if word in COMMANDS), None)
    groups = "\n\n".join("\n".join([f"{group}:", *(textwrap.fill(
        summary(name), 100, initial_indent=f"  {name:13}", subsequent_indent=15 * " ") for name in names)])
        for group, names in GROUPS.items() if called is None)  # for a list of them, all commands are imported
    parser = _Parser(prog="sbkit", description="Train speech models from recipes and ship them.", epilog=groups,
                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"sbkit {sbkit.__version__}")
    commands = parser.add_subparsers(metavar=_COMMAND, required=True)
    for name in COMMANDS:
        command = commands.add_parser(name)
        if name == called and not takes_recipe(name):
            module = command_module(name)
            module.add(command)
            command.set_defaults(call=module.run)
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
