"""``sbkit export``: export a run as a bundle that others can use."""

from __future__ import annotations

import argparse
import contextlib
import sys
from pathlib import Path

from sbkit.commands.options import (
    RUNS_SCRIPT,
    above,
    add_average,
    add_json,
    count,
    print_json,
    request_of,
    require_run,
    several_of,
    share,
)
from sbkit.score.weights import BEST, ChosenWeights
from sbkit.system.console import stored_json


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = RUNS_SCRIPT
    parser.add_argument("run", metavar="RUN", type=Path, help="the output folder of a run")
    parser.add_argument("--to", metavar="BUNDLE", type=Path, required=True, help="the folder to create")
    parser.add_argument("--checkpoint", default=BEST, help="best, last, or the name of a checkpoint (default: best)")
    add_average(parser, "export the mean of the N best (or last) checkpoints")
    parser.add_argument("--mean", type=share, metavar="SHARE",
                        help="export the mean of the trained weights, which count SHARE (0 to 1), and those that the "
                             "run began with: 0.75 keeps three quarters of what was learnt")
    parser.add_argument("--accept-worse", action="store_true",
                        help="export a model although it got worse on the corpus of replay")
    parser.add_argument("--formats", type=several_of("onnx", "int8", "torch", "speechbrain"), metavar="A,B",
                        help="any of onnx,int8,torch,speechbrain (default: all)")
    parser.add_argument("--target", help="also write models for another program: sherpa, or one of your own task's")
    parser.add_argument("--chunk", type=count, metavar="MS",
                        help="chunk size of sherpa-onnx's streaming model, in milliseconds (640)")
    parser.add_argument("--clips", type=count, default=40, help="number of test utterances to compare the formats on")
    # Whisper base in ONNX differs by 0.0011 on short prompts, with the same words.
    parser.add_argument("--tolerance", type=above, metavar="D", default=0.005,
                        help="largest allowed difference of an output from the checkpoint's (0.005)")
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")
    add_json(parser)


def run(args: argparse.Namespace) -> int:
    require_run(args.run)
    from sbkit.system.environment import check_torch

    check_torch()
    from sbkit.compat.script_record import is_of_script
    from sbkit.export.bundle import ExportRequest, export
    from sbkit.infer.bundles import BundleLoader

    weights = ChosenWeights(args.checkpoint, args.average, args.mean)
    request = request_of(ExportRequest, args, weights=weights)
    if is_of_script(args.run):
        from sbkit.tasks.ctc.script import export_run

        run_export = export_run
    else:
        run_export = export
    if not args.json:
        return run_export(request, BundleLoader())
    with contextlib.redirect_stdout(sys.stderr):
        code = run_export(request, BundleLoader())
    print_json(_facts_of(args.to))
    return code


def _facts_of(bundle: Path) -> dict[str, object]:
    """Return what an export says of its bundle, for JSON: what ``sbkit info`` says, and the comparison."""
    from sbkit.commands import info
    from sbkit.export import layout

    return {**info.facts_of(bundle), "parity": stored_json(bundle / layout.PARITY)}
