"""The expected interface of a graph, and ONNX Runtime sessions, tested by running once on the requested device."""

from __future__ import annotations

import mmap
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from sbkit.errors import SbkitError, first_line
from sbkit.export import layout
from sbkit.infer.device import DeviceUnavailable, Placement
from sbkit.system.cores import usable_cores
from sbkit.system.environment import onnxruntimes


@dataclass(frozen=True)
class Interface:
    """A graph's inputs in order, each with an example to test it with, and its outputs."""

    inputs: Mapping[str, np.ndarray]
    outputs: Sequence[str]

    def check(self, path: Path, inputs: Sequence[str], outputs: Sequence[str]) -> None:
        if (list(inputs), list(outputs)) != (list(self.inputs), list(self.outputs)):
            raise SbkitError("mismatched-bundle", f"{path} has the inputs {list(inputs)} and outputs {list(outputs)} "
                             f"instead of {list(self.inputs)} and {list(self.outputs)}",
                             hint="do its files come from the same export?", file=path)


CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
#: cuDNN picks algorithms by heuristics instead of trying all for each new length. TF32 is off because it would round
#: the quiet bands of the features, which are part of the graph, to 10 bits.
_CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC", "use_tf32": "0"}
_RECORD_PROVIDERS = "session.record_ep_graph_assignment_info"  # ignored before 1.24
_LIBRARIES = ("are the CUDA and cuDNN libraries of this onnxruntime-gpu installed? "
              "pip install 'onnxruntime-gpu[cuda,cudnn]' installs them")

#: From this version on, ONNX Runtime reads weights only from files in the model's folder.
_CHECKS_WEIGHTS = (1, 24)
#: Finds names of such files: after a string of 8 bytes, whose length protobuf accepts as 08, 88 00, 88 80 00 and so on.
_WEIGHT_FILE = re.compile(rb"(?:\x08|\x88\x80*\x00)location")

Session = Any  # onnxruntime.InferenceSession, which has no types


def open_session(path: Path, gpu: int | None, threads: int | None, interface: Interface, spin: bool = True
                 ) -> tuple[Session, Placement]:
    """Open a session on a device and run it once; returns it, and how it runs.

    gpu : its number; None: the CPU
    spin : threads busy-wait for each other, which is fastest for one run and doubles the CPU time of many small ones

    The session's device is checked before and after the run: a provider whose libraries are missing is still listed as
    available, and a session with it runs on the CPU without an error. Operators are counted because a session may have
    the provider and run nothing on it.
    """
    builds = list(onnxruntimes())
    if len(builds) > 1:
        raise SbkitError("two-onnxruntimes", f"{' and '.join(builds)} are both installed, and each overwrote files of "
                         "the other", hint=f"pip uninstall -y {' '.join(builds)}, then install the one you want")
    import onnxruntime

    if not hasattr(onnxruntime, "InferenceSession"):
        raise SbkitError("broken-package", "onnxruntime is installed incompletely: another build of it was removed",
                         hint=f"pip install --force-reinstall {builds[0] if builds else 'onnxruntime'}")
    runtime = onnxruntime
    if gpu is not None:
        if CUDA not in runtime.get_available_providers():
            build = next(iter(onnxruntimes()), "onnxruntime")
            raise DeviceUnavailable(f"this {build} ({runtime.__version__}) has no CUDA",
                                    hint=f"choose the device cpu, or where there is a GPU: pip uninstall -y {build}; "
                                         "pip install onnxruntime-gpu")
        if hasattr(runtime, "preload_dlls"):
            runtime.preload_dlls()  # CUDA and cuDNN from pip, which the loader doesn't find
    settings = runtime.SessionOptions()
    settings.log_severity_level = 3
    settings.add_session_config_entry(_RECORD_PROVIDERS, "1")
    if threads:
        settings.intra_op_num_threads = threads
    if not spin:
        settings.add_session_config_entry("session.intra_op.allow_spinning", "0")
    session = _new_session(runtime, path, gpu, settings)
    _check_device(session, gpu)
    interface.check(path, [node.name for node in session.get_inputs()], [node.name for node in session.get_outputs()])
    try:
        session.run(None, dict(interface.inputs))
    except Exception as error:
        if gpu is not None:
            raise DeviceUnavailable(f"a test inference of {path.name} failed on the GPU: {first_line(error)}",
                                    hint=_LIBRARIES) from error
        raise SbkitError("damaged-bundle", f"{path} can't be run: {first_line(error)}", hint="export it again",
                         file=path) from error
    _check_device(session, gpu)
    operators = _count_operators(session)
    note = ""
    if gpu is not None:
        if operators and CUDA not in operators:
            raise DeviceUnavailable(f"onnxruntime runs all operators of {path.name} on {' and '.join(operators)}",
                                    hint="it has no CUDA kernels for them; choose the device cpu")
        if session.get_provider_options()[CUDA].get("use_tf32") != "0":
            note = f"onnxruntime {runtime.__version__} computes with TF32 (10 bits), which can't be turned off"
    device = "cpu" if gpu is None else f"cuda:{gpu}"
    return session, Placement(device, device, session.get_providers()[0], layout.ONNX, path.name,
                              threads or usable_cores(), {"onnxruntime": runtime.__version__}, note, operators)


def _count_operators(session: Session) -> dict[str, int]:
    """The number of operators that each provider runs, the largest first; none before 1.24, which doesn't say."""
    if not hasattr(session, "get_provider_graph_assignment_info"):
        return {}
    counts: Counter[str] = Counter()
    for graph in session.get_provider_graph_assignment_info():
        counts.update(graph.ep_name for _ in graph.get_nodes())
    return dict(counts.most_common())


def _new_session(runtime: ModuleType, path: Path, gpu: int | None,
                 settings: Any) -> Session:  # onnxruntime.SessionOptions
    providers: list[Any] = [CPU]  # names, or pairs of a name and options
    if gpu is not None:
        providers.insert(0, (CUDA, {"device_id": str(gpu), **_CUDA_OPTIONS}))
    version = tuple(map(int, runtime.__version__.split(".")[:2]))
    if version < _CHECKS_WEIGHTS and path.stat().st_size:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            if _WEIGHT_FILE.search(data):
                raise SbkitError("wrong-version", f"{path} has its weights in other files, and onnxruntime "
                                 f"{runtime.__version__} would read any file of this machine that a model names",
                                 hint="pip install 'onnxruntime>=1.24', which takes Python 3.11 or later", file=path)
    try:
        return runtime.InferenceSession(str(path), settings, providers=providers, enable_fallback=0)
    except Exception as error:
        if gpu is not None:
            raise DeviceUnavailable(f"{path.name} can't be opened on the GPU: {first_line(error)}") from error
        raise SbkitError("damaged-bundle", f"{path} can't be loaded: {first_line(error)}",
                         hint="is the file complete? export it again", file=path) from error


def _check_device(session: Session, gpu: int | None) -> None:
    """Raise if a session doesn't run on the requested device."""
    provider = session.get_providers()[0]
    if gpu is None:
        if provider != CPU:
            raise SbkitError("device-unavailable", f"the CPU was requested, but onnxruntime chose {provider}",
                             hint="install the package onnxruntime instead of this build")
        return
    if provider != CUDA:
        raise DeviceUnavailable(f"onnxruntime fell back to {provider}", hint=_LIBRARIES)
    number = session.get_provider_options()[CUDA].get("device_id")
    if number != str(gpu):
        raise DeviceUnavailable(f"onnxruntime chose cuda:{number}", hint="nvidia-smi lists the GPUs of this machine")
