"""Chooses the format of a bundle's model to run, and checks its file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import util
from pathlib import Path

from sbkit.errors import SbkitError, shown
from sbkit.export import layout
from sbkit.system import untrusted

AUTO = "auto"
_NEEDS = {layout.ONNX: "onnxruntime", layout.INT8: "onnxruntime", layout.TORCH: "torch"}


@dataclass(frozen=True, kw_only=True)
class ModelRequest:
    """A command's options for the model to run, as for ``BundleEngine``."""

    model: str = AUTO
    device: str = AUTO
    threads: int | None = None


def choose(folder: Path, models: Mapping[str, str], model: str, kind: str = "model") -> str:
    """Return the format to run.

    folder : the bundle
    models : the file of each format that it has
    model : the requested format; ``auto``: the first that an installed package runs, except ``torch``, because
        opening a torch.export program can run its author's code
    kind : the model's name in messages
    """
    available = [name for name in layout.TRACED if name in models]
    usable = [name for name in available if util.find_spec(_NEEDS[name])]
    if model == AUTO:
        safe = [name for name in usable if name != layout.TORCH]
        if not safe and available == [layout.TORCH]:
            raise SbkitError("torch-only-bundle", f"{folder} has its {kind} only as a torch.export program "
                             f"({models[layout.TORCH]}), which can run any code",
                             hint="if you trust its author, choose it: --model torch, or model='torch' in Python",
                             file=folder, key="model")
        if not safe:
            raise SbkitError("missing-package", f"no installed package can run the {kind} in {folder} "
                             f"({', '.join(available) or 'it has none'})", hint="pip install onnxruntime", file=folder)
        return safe[0]
    if model not in layout.TRACED:
        raise SbkitError("bad-value", f"there is no model format {shown(model)}",
                         hint=f"use {', '.join((AUTO, *layout.TRACED))}", key="model", value=model)
    if model not in available:
        raise SbkitError("missing-format", f"{folder} has no {model} {kind}",
                         hint=f"it has {', '.join(available) or 'none'}", file=folder, key="model", value=model)
    if model not in usable:
        raise SbkitError("missing-package", f"the {model} {kind} needs the package {_NEEDS[model]}",
                         hint=f"pip install {_NEEDS[model]}")
    return model


def check_file(path: Path, config: layout.Bundle) -> None:
    """Raise if a model's file is missing or truncated, before a library complains about protobufs or waits for a pipe;
    the same of its external weights, if it has any."""
    _check_file(path, config)
    weights = layout.external_weights(path)
    if weights.name in config.files or os.path.lexists(weights):
        _check_file(weights, config)


def _check_file(path: Path, config: layout.Bundle) -> None:
    expected = config.files.get(path.name, {}).get("bytes")
    try:
        with untrusted.open_regular(path) as file:
            actual = os.fstat(file.fileno()).st_size
    except OSError as error:
        problem = "is missing" if isinstance(error, FileNotFoundError) else f"cannot be read: {error.strerror}"
        raise SbkitError("damaged-bundle", f"{path} {problem}", hint="copy the bundle again", file=path) from None
    if expected is not None and actual != expected:
        raise SbkitError("damaged-bundle", f"{path} has {actual} bytes, but the export wrote {expected}",
                         hint="copy the bundle again", file=path)
