"""A bad batch on the disk: a folder of micro-batches, the report about them, and once in a run the weights.

    bad_batches/step-N-rank-R/    batches.pt             micro-batches, with the state of random generators before each
                                  bad_batch.json         what the report found
                                  model.safetensors      the weights, of the first such step of a run alone
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import pickle
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from speechbrain.dataio.batch import PaddedBatch
from torch import nn
from torch.serialization import get_unsafe_globals_in_checkpoint

from sbkit.data.publish import FolderKind, publish, temporary_folder
from sbkit.errors import SbkitError, first_line
from sbkit.recipe.report import listed
from sbkit.score.run_files import BAD_BATCHES
from sbkit.system import untrusted
from sbkit.train.batches import KeptBatch
from sbkit.train.checkpoint.files import write_state

logger = logging.getLogger(__name__)

#: The format that a report's file says it has.
FORMAT = "sbkit bad batch"
_MAX_WEIGHTS = 4 << 30  # bytes; weights of larger models are only in checkpoints
_BATCHES, _REPORT, _WEIGHTS = "batches.pt", "bad_batch.json", "model.safetensors"
#: Names of the folder and the report that earlier versions wrote.
_FORMER_FOLDER, _FORMER_REPORT = "culprits", "culprit.json"
_FOLDER = FolderKind("a saved bad batch", _REPORT, FORMAT, lambda values: (_BATCHES, _WEIGHTS))
_IMPORTED = ("sbkit.", "speechbrain.")  # modules that may be imported for a class of a saved batch


# ------------------------------------------------------------ writing


def save(folder: Path, batches: Mapping[int, KeptBatch], content: Mapping[str, Any], weights: nn.Module | None) -> bool:
    """Save micro-batches by their numbers, the content of the report's file, and weights unless another folder has any.

    Returns whether they are saved: a full disk, or a batch that can't be pickled, loses them, with a warning.
    """
    try:
        with temporary_folder(folder, _FOLDER) as temporary:
            write_state([{"micro": number, **kept._asdict()} for number, kept in batches.items()],
                        temporary / _BATCHES)
            if weights is not None and not any(folder.parent.glob(f"*/{_WEIGHTS}")):
                _save_weights(weights, temporary / _WEIGHTS)
            with open(temporary / _REPORT, "w", encoding="utf-8") as out:
                json.dump(content, out, indent=1)
            publish(temporary, folder, _FOLDER, force=True)  # over that of an earlier attempt at the same step
    except (SbkitError, OSError, TypeError, AttributeError, pickle.PicklingError) as error:
        logger.warning("The bad batch of step %s is not saved: %s", content["step"],
                       error.message if isinstance(error, SbkitError) else first_line(error))
        return False
    return True


def _save_weights(modules: nn.Module, path: Path) -> None:
    tensors = _tensors_of(modules)
    if sum(tensor.nbytes for tensor in tensors.values()) <= _MAX_WEIGHTS:
        save_file({name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}, path)


def _tensors_of(modules: nn.Module) -> dict[str, torch.Tensor]:
    return dict([*modules.named_parameters(), *modules.named_buffers()])


# ------------------------------------------------------------ reading


def find_saved(folder: str | os.PathLike[str]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of a report, the given one or the newest of a run, and its content."""
    folder = Path(folder)
    parents = ("", "step-*/", f"{BAD_BATCHES}/step-*/", f"{_FORMER_FOLDER}/step-*/")
    reports = [path for parent in parents for path in _reports(folder, parent)]
    if not reports and not folder.is_dir():
        raise SbkitError("no-such-path",
                         f"{folder} does not exist",
                         hint="name the output_folder of a run, or a bad batch in it",
                         file=folder)
    if not reports:
        raise SbkitError("no-bad-batch",
                         f"{folder} holds no bad batch (looked for {BAD_BATCHES}/step-N-rank-R/{_REPORT})",
                         hint="a run saves one when a loss or gradient is not finite", file=folder)
    newest = max(reports, key=lambda path: (path.stat().st_mtime, path.parent.name))
    try:
        return newest.parent, json.loads(newest.read_text(encoding="utf-8"))
    except ValueError as error:
        raise SbkitError("damaged-file", f"{newest} is damaged: {error}", file=newest) from error


def _reports(folder: Path, parent: str) -> list[Path]:
    """Return the files of reports in the folders below ``folder`` that match a pattern, which is empty or ends in /."""
    return [path for name in (_REPORT, _FORMER_REPORT) for path in folder.glob(parent + name)]


def weights_of(folder: Path, step: int) -> Path | None:
    """Return the file of the weights of a step; steps that were skipped right before it had the same ones."""
    while _reports(folder.parent, f"step-{step}-rank-*/"):
        weight_files = sorted(folder.parent.glob(f"step-{step}-rank-*/{_WEIGHTS}"))
        if weight_files:
            return weight_files[0]
        step -= 1
    return None


def load_weights(modules: nn.Module, path: Path) -> None:
    """Give modules the weights and buffers of a bad batch; those of another model are an error."""
    saved = load_file(path)
    tensors = _tensors_of(modules)
    differing = [name for name in {*saved, *tensors}
                 if name not in saved or name not in tensors or saved[name].shape != tensors[name].shape]
    if differing:
        raise SbkitError("other-model", f"the bad batch belongs to another model: {listed(sorted(differing))} differ",
                         hint="replay it with the hyperparams.yaml of its run")
    with torch.no_grad():
        for name, tensor in tensors.items():
            tensor.copy_(saved[name])


def batches_of(folder: Path, device: torch.device | str) -> list[tuple[int, KeptBatch]]:
    """Read the micro-batches of a bad batch, each with its number in the step."""
    kept_batches = []
    for entry in load_batches(folder / _BATCHES, device):
        generators = {name: tensor.cpu() for name, tensor in (entry["rng"] or {}).items()}
        kept_batches.append((entry["micro"], KeptBatch(entry["batch"], generators or None)))
    return kept_batches


def load_batches(path: Path, device: torch.device | str) -> list[dict[str, Any]]:
    """Read the micro-batches: the file can make nothing but tensors, plain values and batches of known classes."""
    classes: list[Any] = []
    try:
        for name in get_unsafe_globals_in_checkpoint(path):
            module, _, attribute = name.rpartition(".")
            if module not in sys.modules and not module.startswith(_IMPORTED):
                raise SbkitError("unsafe-file", f"the saved batch is a {attribute} of {module}, which is not imported",
                                 hint="replay it with the script that trained the run", file=path)
            kind = getattr(importlib.import_module(module), attribute, None)
            if not _is_batch_class(kind):
                raise SbkitError("unsafe-file", f"the saved batch holds a {name}, which is not a batch class",
                                 hint="load only batches that a run of yours has saved",
                                 file=path)
            classes.append(kind)
        with torch.serialization.safe_globals(classes):
            batches: list[dict[str, Any]] = untrusted.load_tensors(path, device)
            return batches
    except SbkitError:
        raise
    except Exception as error:  # torch raises all kinds for a damaged file
        raise SbkitError("damaged-file",
                         f"{path} can't be read: {first_line(error)}",
                         hint="was it written by this sbkit?",
                         file=path) from error


def _is_batch_class(kind: object) -> bool:
    if not isinstance(kind, type):
        return False
    is_named_tuple = issubclass(kind, tuple) and hasattr(kind, "_fields")
    return dataclasses.is_dataclass(kind) or issubclass(kind, PaddedBatch) or is_named_tuple
