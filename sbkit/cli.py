"""The command line: words to a command. Each stands in a file of its own, imported when it is called."""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import json
import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from sbkit.errors import SbkitError
from sbkit.system import disk

RECIPE_HELP = """usage: sbkit {command} RECIPE.yaml [--key value ...]
{what}

Any key of the YAML can be overridden: --d_model 256 --number_of_epochs 3 --data_folder /data/cv/fr
Beside them SpeechBrain's run options work: --device --precision --debug --test_only --noprogressbar
--ckpt_interval_minutes --grad_accumulation_factor --max_grad_norm --compile --profile_training ...
--no-check starts a run without the check of its recipe.

A recipe is code: what it names is imported and called, by check too. For one that you don't trust: check --no-run."""

#: Commands that take a recipe and overrides, as SpeechBrain's scripts do. argparse below never sees these words.
RECIPE_COMMANDS = {
    "train": "Train, test and report",
    "check": "Say all that is wrong with a recipe, what it costs and what fits",
    "tune": "Find the largest batch that fits, by trying; remembered per model, device and precision (--fresh)",
    "prepare": "Only prepare the corpus and the tokenizer, and say what was left out and why",
}
COMMANDS = {
    "new": "a folder to start in: a task's recipes, train.py and a page that tells how to go on",
    "demo-data": "synthesise a small corpus in Common Voice's layout",
    "shard": "pack a manifest's recordings into tar shards that train directly",
    "evaluate": "score any checkpoint of a run on any corpus",
    "lm": "estimate a language model from text, for a search with --lm",
    "report": "one page about a run: its curves, its errors, what to fix next",
    "replay": "run a step that was not finite again, layer by layer",
    "export": "make a bundle of a run that others can use",
    "transcribe": "what is said in recordings, by an exported bundle",
    "serve": "bundles behind an OpenAI-shaped API, a live WebSocket and a page",
    "doctor": "what this machine offers and what stands in the way",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        with disk.told(os.environ.get("TMPDIR", "/tmp"), "the output or a temporary file"):  # others are told before
            return _dispatch(argv)
    except SbkitError as error:
        if "--debug" in argv:
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":  # every rank meets the same mistake; one of them says it
            print(f"error: {error}", file=sys.stderr)
        _tell_torchrun(error)
        return error.exit_code
    except KeyboardInterrupt:  # outside of training's steps, which save a checkpoint first
        if "--debug" in argv:
            traceback.print_exc()
        if os.environ.get("RANK", "0") == "0":
            print("\nstopped by Ctrl-C; the same command does what is missing", file=sys.stderr)
        return 128 + signal.SIGINT
    except BrokenPipeError:  # `sbkit ... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _tell_torchrun(error: SbkitError) -> None:
    """torchrun ends with a page of its own about processes that failed; this puts the reason into its last lines."""
    if file := os.environ.get("TORCHELASTIC_ERROR_FILE"):
        text = f"error: {error}"
        extra = {"py_callstack": text, "timestamp": str(int(time.time()))}
        with contextlib.suppress(OSError):  # a full disk may be what it tells of
            Path(file).write_text(json.dumps({"message": {"message": text, "extraInfo": extra}}), encoding="utf-8")


def _dispatch(argv: list[str]) -> int:
    command, words = (argv or [""])[0], argv[1:]
    if command not in RECIPE_COMMANDS:
        args = _parser(argv).parse_args(argv)
        return args.call(args)
    module = _module(command)
    if "-h" in words or "--help" in words:
        print(RECIPE_HELP.format(command=command, what=module.HELP))
        return 0
    return module.run(words)


def _module(command: str) -> Any:
    """The file of a command; it says what the command takes (``HELP``, or ``add``) and runs it (``run``)."""
    return importlib.import_module(f"sbkit.commands.{command.replace('-', '_')}")


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and what may have been meant."""

    def parse_known_args(  # type: ignore[override]  # argparse overloads it by the class of the namespace
            self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None,
    ) -> tuple[argparse.Namespace, list[str]]:
        """Nothing is left to the parser above, which knows none of this command's options."""
        known, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [word for action in self._actions for word in action.option_strings]
            self._refuse(f"unrecognized arguments: {' '.join(unknown)}", unknown[0].partition("=")[0], options)
        return known, unknown

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)", message)
        self._refuse(message, *(choice[1], re.findall(r"[\w-]+", choice[2])) if choice else ("", []))

    def _refuse(self, message: str, word: str, options: list[str]) -> NoReturn:
        near = difflib.get_close_matches(word, options, n=1)
        raise SbkitError(message, hint=(f"did you mean {near[0]}? " if near else "") + f"see {self.prog} --help")


def _parser(argv: Sequence[str]) -> argparse.ArgumentParser:
    """What understands these words: of other commands it knows no more than that they are there."""
    parser = _Parser(prog="sbkit", description="Train speech models from recipes and ship them.")
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, what in RECIPE_COMMANDS.items():
        commands.add_parser(name, help=what, add_help=False)
    called = next((word for word in argv if word in COMMANDS), None)
    for name, what in COMMANDS.items():
        command = commands.add_parser(name, help=what)
        if name == called:
            module = _module(name)
            module.add(command)
            command.set_defaults(call=module.run)
            command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


if __name__ == "__main__":
    sys.exit(main())
