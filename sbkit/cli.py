"""The command line: words to calls. Each command imports what it needs when it is called."""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Sequence

from sbkit.errors import SbkitError


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; a mistake of the user's is one line on stderr and exit code 2."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(argv)
    except SbkitError as error:
        if "--debug" in argv:
            traceback.print_exc()
        # Every rank meets the same mistake; one of them says it.
        if os.environ.get("RANK", "0") == "0" or not getattr(error, "everywhere", True):
            print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # `sbkit … | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _dispatch(argv: list[str]) -> int:
    if argv[:1] == ["train"]:  # its flags are SpeechBrain's and the recipe's: argparse below never sees them
        if argv[1:2] in (["-h"], ["--help"]):
            print(_TRAIN_HELP)
            return 0
        from sbkit import run

        return run.train(argv[1:])
    args = _parser().parse_args(argv)
    return args.call(args)


_TRAIN_HELP = """usage: torchrun train.py RECIPE.yaml [--key value ...]     (also: sbkit train RECIPE.yaml ...)

Any key of the YAML can be overridden: --d_model 256 --number_of_epochs 3 --data_folder /data/cv/fr
Beside them SpeechBrain's run options work: --device --precision --debug --test_only --noprogressbar
--ckpt_interval_minutes --grad_accumulation_factor --max_grad_norm --compile --profile_training ...
--no-check skips the check of the recipe before the run."""


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="sbkit", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    parser.error = lambda message: _usage(parser, message)

    commands.add_parser("train", help="train a model from a recipe (sbkit train --help)", add_help=False)

    demo = commands.add_parser("demo-data", help="synthesise a small corpus in Common Voice's layout")
    demo.add_argument("out", metavar="OUT")
    demo.add_argument("--hours", type=float, default=1.0)
    demo.add_argument("--language", default="en", help="any language that espeak-ng speaks")
    demo.add_argument("--seed", type=int, default=1234)
    demo.add_argument("--workers", type=int, help="processes (default: one a core)")
    demo.set_defaults(call=_demo_data)

    for command in commands.choices.values():
        command.add_argument("--debug", action="store_true", help="show the traceback of an error")
    return parser


def _usage(parser: argparse.ArgumentParser, message: str) -> None:
    raise SbkitError(message, hint=f"{parser.prog} --help lists the commands")


def _demo_data(args: argparse.Namespace) -> int:
    from pathlib import Path

    from sbkit.data.demo import make_demo_corpus

    folder = make_demo_corpus(
        Path(args.out), hours=args.hours, language=args.language, seed=args.seed, workers=args.workers
    )
    print(f"{folder}  (train on it: torchrun train.py hparams/ctc.yaml --data_folder {folder})")
    return 0


if __name__ == "__main__":
    sys.exit(main())
