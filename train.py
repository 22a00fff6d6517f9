#!/usr/bin/env python3
"""Train a model from a YAML: torchrun train.py hparams/ctc.yaml [--key value ...]"""

import sys

from sbkit.cli import main

if __name__ == "__main__":
    sys.exit(main(["train", *sys.argv[1:]]))
