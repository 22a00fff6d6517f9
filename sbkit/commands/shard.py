"""``sbkit shard``: pack a manifest's recordings into tar shards that training reads directly."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import add_schemes, count
from sbkit.errors import SbkitError
from sbkit.system.console import counted


def add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("manifest", metavar="MANIFEST.csv")
    parser.add_argument("out", metavar="OUT")
    parser.add_argument("--encode", choices=["flac", "wav", "wav16k"],
                        help="decode once, to mono (default: copy the files unchanged)")
    parser.add_argument("--sample-rate", type=count, default=16_000, metavar="HZ",
                        help="sample rate of the decoded audio: the model's (16000)")
    parser.add_argument("--shard-size-mb", type=float, default=512)
    parser.add_argument("--data-root", help="what $data_root in the manifest stands for")
    parser.add_argument("--workers", type=int, default=2)
    add_schemes(parser)


def run(args: argparse.Namespace) -> int:
    from sbkit.data.manifest import Manifest
    from sbkit.data.presence import check_opened
    from sbkit.data.remote import Remote, check_schemes
    from sbkit.data.shards import write_shards

    source = Path(args.manifest)
    out = Path(args.out)
    if (out / f"{source.stem}.csv").resolve() == source.resolve():
        raise SbkitError("output-is-input", f"the manifest of the shards would overwrite {source}",
                         hint="choose another folder", file=source)
    rows = Manifest.read(source, args.data_root, remote=Remote(check_schemes("--schemes", args.schemes)))
    check_opened(rows.wavs, rows.remote, source)
    manifest = write_shards(
        rows, out, name=source.stem, shard_size_mb=args.shard_size_mb,
        encode=args.encode, sample_rate=args.sample_rate, workers=args.workers,
    )
    print(f"{counted(len(manifest), 'utterance')}, {manifest.hours:.2f} hours: {out / source.stem}.csv")
    return 0
