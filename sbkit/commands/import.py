"""``sbkit import``: make a bundle from a CTC model that was trained elsewhere."""

from __future__ import annotations

import argparse
from pathlib import Path

from sbkit.commands.options import above, count, request_of, several_of


def add(parser: argparse.ArgumentParser) -> None:
    parser.epilog = ("The hyperparams.yaml of a SpeechBrain model is code, which is imported and called only with "
                     "--trust-code; a model of transformers is data.")
    parser.add_argument("source", metavar="SOURCE", help="a model of transformers, or one for SpeechBrain's "
                        "EncoderASR: a folder, or owner/name or owner/name@revision on the Hugging Face Hub")
    parser.add_argument("--to", metavar="BUNDLE", type=Path, required=True, help="the folder to create")
    parser.add_argument("--data_folder", "--data", dest="corpus",
                        help="compare on its test split instead of noise: any value of data_folder")
    parser.add_argument("--language", help="the language of model and corpus, named in the bundle")
    parser.add_argument("--formats", type=several_of("onnx", "int8", "torch"), metavar="A,B",
                        help="any of onnx,int8,torch (default: all)")
    parser.add_argument("--clips", type=count, default=40, help="number of recordings to compare on (40)")
    parser.add_argument("--tolerance", type=above, metavar="D", default=0.005,
                        help="largest allowed difference of a log-probability from the model's own code (0.005)")
    parser.add_argument("--trust-code", action="store_true", help="run the hyperparams.yaml of a SpeechBrain "
                        "model")
    parser.add_argument("--force", action="store_true", help="replace an existing bundle")


def run(args: argparse.Namespace) -> int:
    from sbkit.system.environment import check_torch

    check_torch()
    from sbkit.export.imported import ImportRequest, import_model

    return import_model(request_of(ImportRequest, args))
