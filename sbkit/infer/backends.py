"""Backends that run a bundle's model: ONNX Runtime, and torch.export with or without a compiler."""

from __future__ import annotations

import functools
import json
import threading
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import numpy as np

from sbkit.errors import SbkitError, first_line, shown
from sbkit.export import layout
from sbkit.infer.device import DeviceChoice, DeviceUnavailable, Placement, open_on
from sbkit.infer.onnx_session import Interface, open_session
from sbkit.system.cores import limit_torch_threads, thread_limit

if TYPE_CHECKING:
    import torch

#: A program's module, compiled or not.
Program = Callable[..., Any]
#: Modes of torch.compile; those with CUDA graphs work only in the thread that runs the module.
COMPILE_MODES = ("default", "reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs")
_WITH_CUDA_GRAPHS = ("reduce-overhead", "max-autotune")
_SHAPES = 64  # shapes that a module may be compiled for before torch gives up


def open_graph(path: Path, model: str, device: DeviceChoice, threads: int | None, interface: Interface,
               compile_mode: str | None = None, spin: bool = True) -> Backend:
    """Open a graph of a bundle on the requested device, or raise. All graphs are opened here, in the thread that runs
    them.

    model : the file's format, ``onnx``, ``int8`` or ``torch``
    interface : the graph's inputs and outputs; its examples are run on the device as a test
    spin : as for ``open_session``
    """
    if model == layout.TORCH:
        return Torch(path, model, device, threads, interface, compile_mode)
    return Onnx(path, model, device, threads, interface, spin)


class Onnx:
    """Runs a model with ONNX Runtime, created and called within the worker; imports neither torch nor speechbrain."""

    def __init__(self, path: Path, model: str, wanted: DeviceChoice, threads: int | None, interface: Interface,
                 spin: bool = True):
        threads = threads or thread_limit()
        choice = wanted
        int8_note = ""
        if model == layout.INT8:
            # ONNX Runtime has no CUDA kernels for 8-bit products: DynamicQuantizeLinear has none at all, and
            # MatMulInteger none for the unsigned bytes that it outputs. So with CUDA each product would be computed on
            # the CPU, with copies to and from it.
            if wanted.kind == "cuda":
                raise SbkitError("conflicting-options", f"{wanted.text} was requested, but ONNX Runtime computes 8-bit "
                                 "products only on the CPU", hint="use --model onnx on a GPU, or --device cpu")
            if wanted.kind == "auto":
                int8_note = "8-bit products run only on the CPU"
            choice = DeviceChoice(wanted.text, "cpu")
        (self._session, running), reason = open_on(
            choice, lambda gpu: open_session(path, gpu, threads, interface, spin))
        notes = [note for note in (int8_note or reason, running.note) if note]
        self.running = replace(running, requested=wanted.text, model=model, note="; ".join(notes))
        self._names = list(interface.inputs)
        self.metadata: Mapping[str, str] = self._session.get_modelmeta().custom_metadata_map
        """The file's own metadata."""

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        """Map the graph's inputs to its outputs, both in order."""
        return self._session.run(None, dict(zip(self._names, inputs, strict=True)))

    def free(self) -> None:
        """Do nothing: the session's arena is reused by later runs, and shrinks only during a run."""


class Torch:
    """Runs a ``torch.export`` program, optionally compiled, with the interface of ``Onnx``.

    A program is code: load only bundles that you trust. Files that may contain a pickle are not loaded.
    """

    metadata: Mapping[str, str] = MappingProxyType({})

    def __init__(self, path: Path, model: str, wanted: DeviceChoice, threads: int | None, interface: Interface,
                 compile_mode: str | None):
        check_no_pickles(path)
        import torch

        from sbkit.nn import attention_kernel, tf32

        attention_kernel.leave_cudnn()
        tf32.allow_tf32(False)  # as for ONNX Runtime
        _keep_fake_tensors_alive()
        if threads:
            torch.set_num_threads(threads)
        else:
            limit_torch_threads()
        self._torch = torch
        (module, self._device), reason = open_on(wanted, lambda gpu: self._load(path, gpu, interface))
        self._module: Program = module
        provider = "torch.export"
        if compile_mode:
            self._module = compile_module(module, compile_mode)
            provider = f"torch.compile {compile_mode}"
        self.running = Placement(wanted.text, str(self._device), provider, model, path.name, torch.get_num_threads(),
                                 {"torch": str(torch.__version__)}, reason)

    def __call__(self, *inputs: np.ndarray) -> Sequence[np.ndarray]:
        # Copied because with CUDA graphs the next run overwrites these outputs.
        outputs = self._run(self._module, self._device, inputs)
        return [output.detach().to("cpu", copy=True).numpy() for output in outputs]

    def free(self) -> None:
        """Return the memory that torch's allocator keeps."""
        if self._device.type == "cuda":
            self._torch.cuda.empty_cache()

    def _run(self, module: Program, device: torch.device, inputs: Sequence[np.ndarray]) -> tuple[torch.Tensor, ...]:
        with self._torch.inference_mode():
            outputs = module(*(self._torch.from_numpy(array).to(device) for array in inputs))
        return outputs if isinstance(outputs, tuple) else (outputs,)

    def _load(self, path: Path, gpu: int | None, interface: Interface) -> tuple[torch.nn.Module, torch.device]:
        """Load the program onto a device, run it once, and check that it ran there."""
        device = torch_device(gpu)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about read-only buffers, which are never written
            try:
                program = self._torch.export.load(path)
            except Exception as error:
                raise SbkitError("damaged-bundle", f"{path} can't be loaded: {first_line(error)}",
                                 hint="is the file complete? export it again", file=path) from error
        try:
            module = move_program(program, device).module()
            outputs = self._run(module, device, list(interface.inputs.values()))
            for output in outputs:
                output.to("cpu")  # raises if a kernel failed
        except DeviceUnavailable:
            raise
        except Exception as error:
            if gpu is None:
                raise SbkitError("damaged-bundle", f"{path} can't be run: {first_line(error)}", hint="export it again",
                                 file=path) from error
            raise DeviceUnavailable(f"a test inference of {path.name} failed on the GPU: "
                                    f"{first_line(error)}") from error
        devices = {str(tensor.device) for tensor in (*module.parameters(), *module.buffers(), *outputs)}
        if devices != {str(device)}:
            raise DeviceUnavailable(f"torch {self._torch.__version__} has parts of {path.name} on "
                                    f"{' and '.join(sorted(devices))}")
        return module, device


Backend = Onnx | Torch


def move_program(program: torch.export.ExportedProgram, device: torch.device) -> torch.export.ExportedProgram:
    """Move a program to a device: weights, constants, and devices in its nodes.

    ``module().to(device)`` would move only the weights.
    """
    import torch
    from torch.export.passes import move_to_device_pass

    program = move_to_device_pass(program, str(device))
    other_devices = set()
    for module in program.graph_module.modules():
        if isinstance(module, torch.fx.GraphModule):
            for node in module.graph.nodes:
                for value in (*node.args, *node.kwargs.values()):
                    if isinstance(value, torch.device) and value.type != device.type:
                        other_devices.add(value.type)
    if other_devices:
        raise DeviceUnavailable(f"torch {torch.__version__} leaves a part of the model on {', '.join(other_devices)}",
                                hint="use --model onnx")
    return program


def compile_module(module: torch.nn.Module, mode: str) -> Callable[..., Any]:
    """Compile a module with ``torch.compile``, in the thread that will run it."""
    if mode not in COMPILE_MODES:
        raise SbkitError("bad-value", f"there is no compile mode {shown(mode)}", hint=f"use {', '.join(COMPILE_MODES)}",
                         key="compile", value=mode)
    import torch
    from torch._inductor import cudagraph_trees

    if mode in _WITH_CUDA_GRAPHS and not hasattr(cudagraph_trees.local, "tree_manager_containers"):
        # torch makes the state of CUDA graphs in the thread that imports them first, and in no other.
        cudagraph_trees.local.tree_manager_containers = {}
        cudagraph_trees.local.tree_manager_locks = defaultdict(threading.Lock)
    torch._dynamo.config.recompile_limit = max(torch._dynamo.config.recompile_limit, _SHAPES)
    return torch.compile(module, mode=mode, dynamic=False)


@functools.cache
def _keep_fake_tensors_alive() -> None:
    """Use torch's fake tensors first in a thread that never ends.

    If the thread that used them first has ended, torch 2.11 crashes in a later load or backward of any thread.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    def stay() -> None:
        try:
            with FakeTensorMode():
                pass
        finally:  # also after an error, so that the caller doesn't hang
            used.set()
        threading.Event().wait()

    used = threading.Event()
    threading.Thread(target=stay, name="sbkit-fake-tensors", daemon=True).start()
    used.wait()


def torch_device(gpu: int | None) -> torch.device:
    """Return torch's device for a GPU's number, or the CPU for None; raises ``DeviceUnavailable``."""
    import torch

    if gpu is None:
        return torch.device("cpu")
    if torch.version.cuda is None and torch.version.hip is None:
        raise DeviceUnavailable(f"this torch ({torch.__version__}) was built without CUDA",
                                hint="pytorch.org says how to install one with it; --device cpu needs no GPU")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if gpu >= count:
        raise DeviceUnavailable(f"torch {torch.__version__} sees {count or 'no'} CUDA device"
                                f"{'' if count == 1 else 's'}", hint="nvidia-smi lists them; --device cpu needs no GPU")
    return torch.device("cuda", gpu)


def check_no_pickles(path: Path) -> None:
    """Raise if a .pt2 file contains anything that loading would unpickle."""
    try:
        with zipfile.ZipFile(path) as archive:
            for entry in archive.infolist():
                name = entry.filename.partition("/")[2]
                if name.endswith("_config.json"):
                    payload = json.loads(archive.read(entry))
                    if any(entry_config.get("use_pickle", True) for entry_config in payload["config"].values()):
                        raise SbkitError("pickle-in-bundle", f"{path}: {name} refers to pickles, and a pickle can run "
                                         "any code", hint="export the run again", file=path)
                    continue
                parent, _, base = name.rpartition("/")
                if name.startswith("data/sample_inputs/"):
                    harmless = entry.file_size == 0
                elif parent in ("data/weights", "data/constants"):
                    harmless = base.startswith(("weight_", "tensor_"))
                else:
                    harmless = parent in ("models", ".data") or name in (
                        "archive_format", "archive_version", "byteorder", "version")
                if not harmless:
                    raise SbkitError("pickle-in-bundle", f"{path} contains {name}, which may be a pickle, and a pickle "
                                     "can run any code", hint="export the run again", file=path)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise SbkitError("damaged-bundle", f"{path} can't be read: {error}",
                         hint="is the file complete? export the run again", file=path) from None
