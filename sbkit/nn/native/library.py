"""Compiles and loads ``kernels.c``: two seconds at the first start on a machine, kept for the next ones.

Where there is no C compiler, or torch's OpenMP can't be found, everything runs as it does without: the same numbers,
rounded elsewhere, in more time. ``SBKIT_KERNELS=0`` turns them off.
"""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import re
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_float, c_int, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch

from sbkit.cache import cache_folder

SOURCES = [Path(__file__).with_name(name) for name in ("kernels.c", "rows.h", "frames.h")]
#: Columns of a row that the kernels hold at most.
WIDEST = 8192
#: No -ffast-math: NaN and infinity have to come out as what they are.
FLAGS = ["-O3", "-march=native", "-std=gnu11", "-fno-math-errno", "-fno-trapping-math", "-fno-thread-jumps", "-fopenmp",
         "-fPIC", "-fvisibility=hidden", f"-DWIDEST={WIDEST}"]
if platform.machine() == "x86_64":
    FLAGS.append("-mprefer-vector-width=512")
_SECONDS = 120


class Dropout(Structure):
    """As in kernels.c."""

    _fields_ = [("one", c_void_p), ("other", c_void_p), ("odd", c_int32), ("lowest", c_int32), ("factor", c_float)]


_SIZES = [c_int64, c_int64, c_int]  # rows, columns, threads
_DROP = POINTER(Dropout)
_ARGUMENTS: dict[str, list[Any]] = {
    "norm_forward": [c_void_p, c_int, c_void_p, c_void_p, c_float, c_int, c_float, _DROP, *[c_void_p] * 3],
    "norm_backward": [*[c_void_p] * 2, c_int, c_void_p, c_void_p, c_int, c_float, _DROP, *[c_void_p] * 5],
    "silu_forward": [c_void_p, c_void_p, _DROP, c_void_p],
    "silu_backward": [*[c_void_p] * 3, _DROP, c_void_p],
    "add_forward": [*[c_void_p] * 3, c_float, c_void_p, _DROP, c_void_p],
    "add_backward": [c_void_p, c_float, c_void_p, _DROP, c_void_p, c_void_p],
    "glu_forward": [c_void_p] * 4,
    "glu_backward": [c_void_p] * 6,
    "depthwise_forward": [*[c_void_p] * 4, c_int, c_int64],
    "depthwise_backward": [*[c_void_p] * 5, c_int, c_int64],
    "heads_forward": [*[c_void_p] * 3, c_float, *[c_void_p] * 3, c_int64, c_int64],
    "heads_backward": [*[c_void_p] * 5, c_float, c_void_p, c_int64, c_int64],
    "softmax_forward": [c_void_p, c_void_p, _DROP, c_void_p, c_int64],
    "softmax_backward": [c_void_p, c_void_p, _DROP, c_void_p],
}
_SUFFIX = {torch.float32: "f32", torch.bfloat16: "bf16"}

_functions: dict[tuple[str, torch.dtype], Any] = {}


class Unavailable(Exception):
    """Why this machine does without the kernels."""


def load() -> str | None:
    """Make :func:`call` work in this process; says why not where it can't."""
    if _functions:
        return None
    try:
        library = ctypes.CDLL(str(_built()))
    except (Unavailable, OSError, subprocess.SubprocessError) as error:
        return str(error)
    for name, arguments in _ARGUMENTS.items():
        for dtype, suffix in _SUFFIX.items():
            function = getattr(library, f"{name}_{suffix}")
            function.argtypes, function.restype = [*arguments, *_SIZES], None
            _functions[name, dtype] = function
    return None


def unload() -> None:
    """Back to what runs without them."""
    _functions.clear()


def loaded() -> bool:
    return bool(_functions)


def call(name: str, dtype: torch.dtype, *arguments: Any) -> None:
    """Run a kernel for activations of ``dtype``; tensors, contiguous all, are given by their addresses."""
    _functions[name, dtype](*[x.data_ptr() if isinstance(x, torch.Tensor) else x for x in arguments])


def _built() -> Path:
    """The compiled library, out of the cache or new."""
    if os.environ.get("SBKIT_KERNELS", "1") == "0":
        raise Unavailable("SBKIT_KERNELS=0")
    if platform.system() != "Linux":
        raise Unavailable(f"they are made for Linux, not {platform.system()}")
    compiler = next(filter(None, map(shutil.which, [os.environ.get("CC") or "gcc", "gcc", "cc", "clang"])), None)
    if compiler is None:
        raise Unavailable("there is no C compiler (gcc, cc or clang) on this machine")
    runtime = _openmp()
    version = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=_SECONDS).stdout
    parts = [*(source.read_text(encoding="utf-8") for source in SOURCES), version, *FLAGS, str(runtime), _processor()]
    path = _folder() / f"kernels-{hashlib.sha256('|'.join(parts).encode()).hexdigest()[:24]}.so"
    if not path.exists():
        _compile(compiler, runtime, path)
    return path


def _compile(compiler: str, runtime: Path, path: Path) -> None:
    """Linked with the OpenMP that torch has loaded: another one's threads would fight with torch's for the cores."""
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        objects, library = Path(folder) / "kernels.o", Path(folder) / "kernels.so"
        for command in ([compiler, *FLAGS, "-c", str(SOURCES[0]), "-o", str(objects)],
                        [compiler, "-shared", str(objects), str(runtime), "-o", str(library)]):
            done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS)
            if done.returncode:
                lines = [line for line in done.stderr.splitlines() if "error" in line] or done.stderr.splitlines()
                raise Unavailable(f"{Path(compiler).name} failed: {lines[0] if lines else done.returncode}")
        os.replace(library, path)  # whole or not at all, whoever else compiles it now


def _openmp() -> Path:
    """The OpenMP library in this process, which torch brought."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        path = Path(line.split(maxsplit=5)[-1])
        if re.match(r"lib(gomp|iomp5|omp)\b.*\.so", path.name):
            return path
    raise Unavailable("torch's OpenMP library was not found")


def _processor() -> str:
    """What ``-march=native`` depends on: a home folder may be shared by machines that differ."""
    lines = Path("/proc/cpuinfo").read_text().split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model name", "flags", "Features", "CPU part")))


def _folder() -> Path:
    """Where compiled code is kept: nobody else may write there, since it is run."""
    folder = cache_folder() / "kernels"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    state = folder.stat()
    if state.st_uid != os.getuid() or state.st_mode & 0o022:
        raise Unavailable(f"others may write to {folder}, so nothing from there is run")
    return folder
