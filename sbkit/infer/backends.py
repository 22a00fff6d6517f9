"""Backends that run a bundle's model: ONNX Runtime, and torch.export with or without a compiler."""

from __future__ import annotations

import json
import warnings
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from sbkit.errors import SbkitError
from sbkit.export import layout
from sbkit.infer import device as devices
from sbkit.infer.device import DeviceChoice, Placement
from sbkit.infer.worker import Worker
from sbkit.system.cores import keep_to_usable_cores, threads_to_ask_for, usable_cores

if TYPE_CHECKING:
    import torch

#: Modes of torch.compile; those with CUDA graphs work only within the thread that runs the result.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_SHAPES = 64  # number of shapes that a module may be compiled for before torch gives up


class Backend(Protocol):
    """Runs batches; created and called within the worker thread."""

    running: Placement
    width: int | None
    """Size of the output, if the file gives it."""

    def __call__(self, signals: np.ndarray, lengths: np.ndarray) -> Sequence[np.ndarray]:
        """Map signals [B, S] and lengths [B] to outputs; a recogniser's are [B, T, V] and frame counts [B]."""


class Onnx:
    """Runs a model with ONNX Runtime; imports neither torch nor speechbrain."""

    def __init__(self, path: Path, model: str, wanted: DeviceChoice, threads: int | None,
                 outputs: Sequence[str] = layout.OUTPUTS):
        threads = threads or threads_to_ask_for()
        where, why = devices.for_eight_bits(wanted) if model == layout.INT8 else (wanted, "")
        self._session, device, note = devices.open_session(str(path), where, threads)
        names = [each.name for each in self._session.get_inputs()], [each.name for each in self._session.get_outputs()]
        if names != (list(layout.INPUTS), list(outputs)):
            raise SbkitError(f"{path} takes {names[0]} and gives {names[1]}; a bundle's model takes "
                             f"{list(layout.INPUTS)} and gives {list(outputs)}")
        width = self._session.get_outputs()[0].shape[-1]
        self.width = width if isinstance(width, int) else None
        self.running = Placement(
            wanted.text, device, self._session.get_providers()[0], model, path.name, threads or usable_cores(),
            {"onnxruntime": devices.runtime_version()}, why or note)

    def __call__(self, signals: np.ndarray, lengths: np.ndarray) -> Sequence[np.ndarray]:
        return self._session.run(None, dict(zip(layout.INPUTS, (signals, lengths), strict=True)))


class Torch:
    """Runs a ``torch.export`` program, optionally compiled.

    A program is code: load only bundles that you trust. Files that could contain a pickle are refused unread.
    """

    width: int | None = None

    def __init__(self, path: Path, model: str, wanted: DeviceChoice, threads: int | None, worker: Worker,
                 compile_mode: str | None):
        refuse_pickles(path)
        import torch

        from sbkit.nn import attention_kernel

        device, note = _torch_device(wanted)
        attention_kernel.leave_cudnn()
        if threads:
            torch.set_num_threads(threads)
        else:
            keep_to_usable_cores()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only buffers, which nobody writes to
            module = moved(torch.export.load(path), device).module()
        self._torch, self._device = torch, device
        self._module = compiled(module, compile_mode, worker) if compile_mode else module
        self.running = Placement(
            wanted.text, str(device), f"torch.compile {compile_mode}" if compile_mode else "torch.export", model,
            path.name, torch.get_num_threads(), {"torch": str(torch.__version__)}, note)

    def __call__(self, signals: np.ndarray, lengths: np.ndarray) -> Sequence[np.ndarray]:
        torch = self._torch
        with torch.inference_mode():
            found = self._module(torch.from_numpy(signals).to(self._device), torch.from_numpy(lengths).to(self._device))
            # Copied here: with CUDA graphs the next run overwrites what this one returned.
            found = found if isinstance(found, tuple) else (found,)
            return [each.detach().to("cpu", copy=True).numpy() for each in found]


def moved(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """Move a program to another device than it was traced on: weights, constants, and devices named by its nodes.

    ``module().to(device)`` would move only the weights. torch's own pass before 2.9 leaves out nested modules.
    """
    import torch
    from torch.export.passes import move_to_device_pass

    program = move_to_device_pass(program, str(device))
    kinds = {value.type for part in program.graph_module.modules() if isinstance(part, torch.fx.GraphModule)
             for node in part.graph.nodes for value in (*node.args, *node.kwargs.values())
             if isinstance(value, torch.device)}
    if kinds - {device.type}:
        raise SbkitError(f"torch {torch.__version__} leaves part of the model on {', '.join(kinds - {device.type})}",
                         hint="pip install 'torch>=2.9,<2.12', or use --model onnx")
    return program


def compiled(module: torch.nn.Module, mode: str, worker: Worker) -> Callable[..., Any]:
    """Compile a module with ``torch.compile``, only within the worker thread."""
    if mode not in COMPILE_MODES:
        raise SbkitError(f"unknown compile mode {mode!r}", hint=f"use {', '.join(COMPILE_MODES)}")
    if not worker.inside():
        raise SbkitError(f"can't compile with {mode} outside the thread that runs the model: "
                         "CUDA graphs recorded in one thread can't be replayed in another",
                         hint="let the engine do it: sbkit.infer.load(bundle, model='torch', compile=...)")
    import torch
    from torch._inductor import cudagraph_trees  # its per-thread state belongs to the thread that imports it first

    if mode in _WITH_CUDA_GRAPHS:
        try:
            cudagraph_trees.get_container(0)
        except (AssertionError, AttributeError):
            raise SbkitError(f"can't compile with {mode}: another thread has already used torch's compiler",
                             hint="load the bundle before anything else compiles, or in a separate process") from None
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _SHAPES)
    return torch.compile(module, mode=mode, dynamic=False)


def _torch_device(wanted: DeviceChoice) -> tuple[torch.device, str]:
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if wanted.explicit_gpu and wanted.index >= count:
        raise SbkitError(f"{wanted.text} was requested, but torch {torch.__version__} sees {count} CUDA devices",
                         hint="nvidia-smi lists them; --device cpu needs no GPU")
    if wanted.kind == "cpu" or not count:
        return torch.device("cpu"), "" if wanted.kind == "cpu" else "torch sees no CUDA device"
    return torch.device("cuda", wanted.index), ""


def refuse_pickles(path: Path) -> None:
    """Refuse a .pt2 file that contains anything that loading would unpickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.partition("/")[2]
                if name.endswith("_config.json"):
                    payload = json.loads(archive.read(entry))
                    if any(each.get("use_pickle", True) for each in payload["config"].values()):
                        raise SbkitError(f"{path}: {name} refers to pickles", hint="export the run again")
                elif not _harmless(name, entry.file_size):
                    raise SbkitError(f"{path} contains {name}, which may be a pickle", hint="export the run again")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise SbkitError(f"{path} can't be read: {error}", hint="is the file complete? export the run again") from None


def _harmless(name: str, size: int) -> bool:
    if name.startswith("data/sample_inputs/"):
        return size == 0
    parent, _, base = name.rpartition("/")
    if parent in ("data/weights", "data/constants"):
        return base.startswith(("weight_", "tensor_"))
    return parent in ("models", ".data") or name in ("archive_format", "archive_version", "byteorder", "version")
