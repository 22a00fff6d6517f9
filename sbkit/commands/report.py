"""``sbkit report``: write a page about a run: its curves, its errors, what to fix next."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_schemes, require_run


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("run", metavar="RUN", type=Path,
                        help="the output folder of a run, or RUN/evaluations/...")
    parser.add_argument("--against", metavar="OTHER", type=Path,
                        help="another run on the same test set, to compare with")
    parser.add_argument("--to", dest="out", metavar="FILE", type=Path,
                        help="where the page goes (default: RUN/report.html, or RUN/report-against-OTHER.html)")
    parser.add_argument("--utterances", type=int, default=24, metavar="N",
                        help="number of utterances to show of each kind")
    parser.add_argument("--audio-mb", type=float, default=8.0, metavar="MB",
                        help="megabytes that recordings may add to the page")
    add_schemes(parser)


def run(args: argparse.Namespace) -> int:
    require_run(args.run)
    from sbkit.data.remote import Remote, check_schemes
    from sbkit.score.report import write_report

    remote = Remote(check_schemes("--schemes", args.schemes))
    print(write_report(args.run, against=args.against, out=args.out, utterances=args.utterances,
                       audio_megabytes=args.audio_mb, remote=remote, log=print))
    return 0
