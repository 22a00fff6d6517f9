"""``sbkit demo-data``: synthesise a small corpus in Common Voice's layout."""

from __future__ import annotations

import argparse
from pathlib import Path


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("out", metavar="OUT", help="folder to write the corpus to")
    parser.add_argument("--hours", type=float, default=1.0, help="hours of speech, about, in all splits (default: 1)")
    parser.add_argument("--language", default="en", help="any language of espeak-ng (default: en)")
    parser.add_argument("--seed", type=int, default=1234, help="seed of its sentences and voices (default: 1234)")
    parser.add_argument("--workers", type=int, help="number of processes (default: one per core)")


def run(args: argparse.Namespace) -> int:
    from sbkit.data.demo import make_demo_corpus

    folder = make_demo_corpus(
        Path(args.out), hours=args.hours, language=args.language, seed=args.seed, workers=args.workers
    )
    print(f"{folder}  (train on it: sbkit train hparams/ctc.yaml --data_folder {folder} "
          f"--language {args.language})")
    return 0
