"""Compiles and loads ``kernels.c``, which takes two seconds once per machine; the result is cached.

Without a C compiler, or if torch's OpenMP can't be found, layers run in torch: slower, with equal results except for
rounding. ``SBKIT_KERNELS=0`` turns the kernels off.
"""

from __future__ import annotations

import ctypes
import os
import platform
from ctypes import POINTER, Structure, c_double, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch._subclasses import FakeTensor

from sbkit.errors import SbkitError
from sbkit.system.compiled import Unavailable, cached_library, find_compiler, run_compiler

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "rows.h", "frames.h", "update.h")]
#: Most columns that the kernels take.
WIDEST = 8192
#: Values of a tensor that a thread updates at a time.
BLOCK = 4096
#: Without -ffast-math, which would break NaN and infinity.
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps", "-fopenmp",
         "-fPIC", "-fvisibility=hidden", f"-DWIDEST={WIDEST}", f"-DBLOCK={BLOCK}"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")


class DropoutStruct(Structure):
    """The struct of the same name in kernels.c."""

    _fields_ = [("one", c_void_p), ("other", c_void_p), ("odd", c_int32), ("lowest", c_int32), ("factor", c_float)]


#: A kernel's arguments in the order of its C function: the name there, and the type.
Arguments = dict[str, Any]

_P = c_void_p  # the address of a tensor's values, or null
_DROP = POINTER(DropoutStruct)
# What kernels over rows take, before the numbers of rows, columns and threads.
_OF_ROWS: dict[str, Arguments] = {
    "norm_forward": {"x": _P, "narrow": c_int, "gain": _P, "shift": _P, "eps": c_float, "smooth": c_int,
                     "slope": c_float, "dropout": _DROP, "out": _P, "mean": _P, "rstd": _P},
    "norm_backward": {"grad": _P, "x": _P, "narrow": c_int, "gain": _P, "shift": _P, "smooth": c_int, "slope": c_float,
                      "dropout": _DROP, "mean": _P, "rstd": _P, "add": _P, "to": _P, "sums": _P},
    "silu_forward": {"x": _P, "bias": _P, "dropout": _DROP, "out": _P},
    "silu_backward": {"grad": _P, "x": _P, "bias": _P, "dropout": _DROP, "sums": _P},
    "add_forward": {"x": _P, "branch": _P, "bias": _P, "weight": c_float, "skip": _P, "dropout": _DROP, "out": _P},
    "add_backward": {"grad": _P, "weight": c_float, "skip": _P, "dropout": _DROP, "to": _P, "sums": _P},
    "glu_forward": {"x": _P, "bias": _P, "skip": _P, "out": _P},
    "glu_backward": {"grad": _P, "x": _P, "bias": _P, "skip": _P, "to": _P, "sums": _P},
    "depthwise_forward": {"x": _P, "kernel": _P, "bias": _P, "out": _P, "taps": c_int, "chunk": c_int64,
                          "frames": c_int64},
    "depthwise_backward": {"grad": _P, "x": _P, "kernel": _P, "to": _P, "sums": _P, "taps": c_int, "chunk": c_int64,
                           "frames": c_int64},
    "softmax_forward": {"scores": _P, "position_scores": _P, "skip": _P, "pairs": _P, "dropout": _DROP, "out": _P,
                        "heads": c_int64},
    "softmax_backward": {"grad": _P, "weights": _P, "dropout": _DROP, "out": _P, "position_scores": _P,
                         "heads": c_int64},
}
# The same of kernels that split rows into heads, before the numbers of rows, columns of a head, and threads.
_OF_HEADS: dict[str, Arguments] = {
    "heads_forward": {"x": _P, "cosines": _P, "sines": _P, "scale": c_float, "query": _P, "key": _P, "value": _P,
                      "heads": c_int64, "frames": c_int64},
    "heads_backward": {"query": _P, "key": _P, "value": _P, "cosines": _P, "sines": _P, "scale": c_float, "to": _P,
                       "heads": c_int64, "frames": c_int64},
    "relative_forward": {"x": _P, "bias_u": _P, "bias_v": _P, "scale": c_float, "query": _P, "query_v": _P, "key": _P,
                         "value": _P, "heads": c_int64, "frames": c_int64},
    "relative_backward": {"query": _P, "query_v": _P, "key": _P, "value": _P, "scale": c_float, "to": _P, "sums": _P,
                          "heads": c_int64, "frames": c_int64},
}
# What kernels over lists of tensors take, before what says how these are divided into blocks.
_OF_TENSORS: dict[str, Arguments] = {
    "sum_squares": {"tensors": _P, "out": _P},
    "momentum": {"grads": _P, "moments": _P, "ahead": _P, "divisor": c_float, "momentum": c_double, "tiny": c_double,
                 "sums": _P},
    "move": {"weights": _P, "updates": _P, "factors": _P, "directions": _P, "keep": c_float, "step": c_float},
    "adamw": {"weights": _P, "grads": _P, "means": _P, "variances": _P, "steps": _P, "divisor": c_float,
              "lr": c_double, "beta1": c_double, "beta2": c_double, "decay": c_double, "eps": c_double},
}
_ROWS: Arguments = {"rows": c_int64, "columns": c_int64, "threads": c_int}
_HEADS: Arguments = {"rows": c_int64, "size": c_int64, "threads": c_int}
_BLOCKS: Arguments = {"lengths": _P, "starts": _P, "count": c_int64, "threads": c_int}
#: All kernels by name.
KERNELS: dict[str, Arguments] = {
    **{kernel: {**arguments, **_ROWS} for kernel, arguments in _OF_ROWS.items()},
    **{kernel: {**arguments, **_HEADS} for kernel, arguments in _OF_HEADS.items()},
    **{kernel: {**arguments, **_BLOCKS} for kernel, arguments in _OF_TENSORS.items()}}
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}

_functions: dict[tuple[str, torch.dtype], Any] = {}
_decided = False  # whether this process has loaded them, failed to, or unloaded them


def load() -> str | None:
    """Load the kernels, after which :func:`call` works; returns the reason if they can't be used, otherwise None."""
    global _decided
    _decided = True
    if _functions:
        return None
    try:
        if os.environ.get("SBKIT_KERNELS", "1") == "0":
            raise Unavailable("SBKIT_KERNELS=0")
        if platform.system() != "Linux":
            raise Unavailable(f"they are written for Linux, not {platform.system()}")
        compiler, runtime = find_compiler(), openmp()
        version = run_compiler([compiler, "--version"])
        # What -march=native depends on, since different machines may share a home folder.
        lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
        parts = [*(source.read_text(encoding="utf-8") for source in SOURCES), version, *FLAGS, str(runtime),
                 "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))]
        library = ctypes.CDLL(str(cached_library(parts, lambda folder: _compile(compiler, runtime, folder))))
        functions = {}
        for name, arguments in KERNELS.items():
            for dtype, suffix in _SUFFIX.items():
                function = getattr(library, f"{name}_{suffix}")
                function.argtypes = list(arguments.values())
                function.restype = None
                functions[name, dtype] = function
    except Exception as error:  # the kernels are optional, so no failure may end a run
        return str(error) or type(error).__name__
    _functions.update(functions)
    return None


def unload() -> None:
    """Stop using the kernels, so that layers run in torch again."""
    global _decided
    _decided = True
    _functions.clear()


def forget() -> None:
    """Be as in a process that has neither loaded the kernels nor tried to."""
    global _decided
    _decided = False
    _functions.clear()


def decided() -> bool:
    """Return whether this process has loaded the kernels, failed to, or unloaded them."""
    return _decided


def loaded() -> bool:
    return bool(_functions)


def call(kernel: str, dtype: torch.dtype, /, **arguments: Any) -> None:
    """Run a kernel for activations of ``dtype``.

    arguments : all those of its C function, by the names that they have there; of a tensor it gets the address
    """
    names = KERNELS[kernel]
    assert arguments.keys() == names.keys(), f"{kernel} takes {', '.join(names)}, and got {', '.join(arguments)}"
    in_order = []
    for name in names:
        x = arguments[name]
        if isinstance(x, torch.Tensor):
            if not x.is_cpu or not x.is_contiguous() or x.dtype not in (dtype, torch.float32, torch.uint8):
                raise TypeError(f"no kernel takes a tensor on {x.device} in {x.dtype} with strides {x.stride()}")
            if isinstance(x, FakeTensor):  # its address would end the process
                raise SbkitError("fake-tensor",
                                 "a step got a fake tensor, left over from when the run counted its work at "
                                 "the start",
                                 hint="your own code keeps tensors from one forward to the next, in a list or an "
                                 "object; keep them in a registered buffer, or in an attribute of the Brain")
            x = x.data_ptr()
        in_order.append(x)
    _functions[kernel, dtype](*in_order)


def _compile(compiler: str, runtime: Path, folder: Path) -> Path:
    """Compile the library, linked with torch's OpenMP, since another one's threads would compete with torch's."""
    objects, library = folder / "kernels.o", folder / "kernels.so"
    run_compiler([compiler, *FLAGS, "-c", str(SOURCES[0]), "-o", str(objects)])
    run_compiler([compiler, "-shared", str(objects), str(runtime), "-o", str(library)])
    return library


def openmp() -> Path:
    """Find the OpenMP library that torch calls; other packages may have loaded further ones into this process."""
    called = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so")).omp_get_max_threads
    address = ctypes.cast(called, c_void_p).value or 0
    for line in Path("/proc/self/maps").read_text().splitlines():
        place, *_, path = line.split(maxsplit=5)
        first, end = (int(bound, 16) for bound in place.split("-"))
        if first <= address < end:
            return Path(path)
    raise Unavailable("torch's OpenMP library was not found")
