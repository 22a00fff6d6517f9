"""``sbkit train RECIPE.yaml [--key value ...]``: train, test and report."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sbkit.runs import start

if TYPE_CHECKING:
    from sbkit.infer.bundles import BundleLoader

HELP = (
    "On several devices: torchrun --nproc_per_node=8 train.py RECIPE.yaml ...\n"
    "The same command resumes a run. Only one run at a time may use an output_folder."
)


def run(argv: list[str]) -> int:
    return start.run(argv, _bundles)


def _bundles() -> BundleLoader:
    from sbkit.infer.bundles import BundleLoader

    return BundleLoader()
