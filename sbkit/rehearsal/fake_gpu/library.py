"""Compiles the fake GPU for the installed torch, with stubs for all functions that it does not implement."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import platform
import re
from pathlib import Path

from sbkit.errors import SbkitError
from sbkit.system.compiled import Unavailable, cached_library, find_compiler, run_compiler

_HERE = Path(__file__).parent
SOURCES = sorted([*_HERE.glob("*.cpp"), *_HERE.glob("*.h"), *_HERE.glob("crt/*.h")])
# libstdc++ is linked statically: this library is loaded first, and torch may need a newer libstdc++.
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-fvisibility=hidden", "-shared", "-Wl,-soname,libcuda.so.1",
         "-Wl,--exclude-libs,ALL", "-static-libgcc"]
_LIBRARIES = ["-Wl,-Bstatic", "-lstdc++", "-Wl,-Bdynamic", "-lpthread", "-ldl", "-lm"]
# Functions that work in the real libraries without a driver are not replaced.
_STUBBED = re.compile(r"(?:cu(?!File)[A-Z]|cuda[A-Z]|cublas|cudnn|cufft|curand|cusolver|cusparse|nccl)\w+")
_REAL = re.compile(r"Get(?:\w*Version|Property|ErrorString|ErrorName|StatusString|StatusName|LastErrorString)$")
# Functions of the runtime that do nothing here.
_ACCEPTED = re.compile(r"cuda(?:MemPool|Profiler|DeviceEnablePeer|GraphDebug|MemcpyToSymbol)\w*|cuda\w*SetLimit")
# The rest of CUDA's functions, and those that return computed sizes to the host; each library has its error code.
_REFUSED = re.compile(r"cu(?:da)?[A-Z]\w+|cusolver(?!\w*(?:Create|Destroy|Set))\w+|cudnnSetRNNDescriptor\w*")
_NOT_SUPPORTED = {"cusolver": 9, "cudnn": 3000}
_IDLE = re.compile(r"Create|Destroy|Get|Set|Init|Finalize|Query|Plan|Register|Group|ufferSize|WorkspaceSize|_buffer")


def build() -> Path:
    """Return the path of the library that replaces CUDA, compiled once for each torch.

    Load it before all others (``LD_PRELOAD``). It also replaces the driver, ``libcuda.so.1``.
    """
    if platform.system() != "Linux":
        raise SbkitError("no-fake-gpu", f"the fake GPU works only on Linux, not {platform.system()}",
                         hint="rehearse on a Linux machine; it needs no GPU")
    place = importlib.util.find_spec("torch")
    torch = Path(place.origin).parent if place is not None and place.origin is not None else None
    if torch is None or not (torch / "lib" / "libtorch_cuda.so").exists():
        raise SbkitError("no-fake-gpu", "a CUDA build of torch is needed, but this one was built for CPUs only",
                         hint="on Linux, pip install torch takes a CUDA build from PyPI; it needs no GPU")
    include = next((folder.parent for folder in sorted(torch.parent.glob("nvidia/*/include/cuda_runtime_api.h"))), None)
    if include is None:
        raise SbkitError("no-fake-gpu", "CUDA's headers, which torch's wheels bring, were not found",
                         hint="reinstall torch with pip, or install nvidia-cuda-runtime in the release of its CUDA")
    try:
        compiler = find_compiler()
        version = run_compiler([compiler, "--version"])
        state = (torch / "lib" / "libtorch_cuda.so").stat()
        parts = [*(source.read_text(encoding="utf-8") for source in [*SOURCES, Path(__file__)]), version,
                 importlib.metadata.version("torch"), str(include), f"{state.st_size} {state.st_mtime_ns}"]
        return cached_library(parts, lambda folder: _compile(compiler, torch / "lib", include, folder))
    except Unavailable as problem:
        raise SbkitError("no-compiler", f"the fake GPU can't be compiled: {problem}",
                         hint="apt install g++ on Debian and Ubuntu, gcc-c++ on Fedora") from None


def _compile(compiler: str, torch: Path, include: Path, folder: Path) -> Path:
    symbols = run_compiler(["nm", "-D", "--undefined-only", *map(str, sorted(torch.glob("*.so")))])
    names = {line.split()[-1].split("@")[0] for line in symbols.splitlines() if line.strip()}
    names |= set(re.findall(r"\bcu[A-Z]\w+(?=\()|\bcu[A-Z]\w+_v\d\b", (include / "cuda.h").read_text(encoding="utf-8")))
    lines = ["#include <cstdlib>",  # without CUDA's headers, which declare other arguments
             "namespace card { void lacks(const char*); void launch_library(); }",
             '#define STUB extern "C" __attribute__((weak, visibility("default"))) int']
    for name in sorted(name for name in names if _STUBBED.fullmatch(name) and not _REAL.search(name)):
        if _ACCEPTED.fullmatch(name):
            body = "() { return 0; }"
        elif _REFUSED.fullmatch(name):
            code = next((code for library, code in _NOT_SUPPORTED.items() if name.startswith(library)), 801)
            body = f'() {{ card::lacks("{name}"); return {code}; }}'
        elif "Create" in name and not name.startswith("nccl"):
            body = "(void** made) { *made = calloc(1, 512); return 0; }"
        else:
            body = "() { return 0; }" if _IDLE.search(name) else '() { card::launch_library(); return 0; }'
        lines.append(f"STUB {name}{body}")
    types = (include / "driver_types.h").read_text(encoding="utf-8")
    errors = re.search(r"enum __device_builtin__ cudaError\s*\{(.*?)\};", types, re.S)
    codes = dict(re.findall(r"\bcuda(?:Error)?(\w+)\s*=\s*(\d+)", errors[1] if errors else ""))
    texts = {code: re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name).lower() for name, code in codes.items()}
    texts |= {"2": "out of memory"}  # as torch shows it
    cases = "".join(f'case {code}: return "{text}"; ' for code, text in texts.items())
    lines.append("namespace card { const char* error_text(int code) { "
                 f'switch (code) {{ {cases}}} return "error"; }} }}')
    (folder / "stubs.cpp").write_text("\n".join(lines) + "\n", encoding="utf-8")
    sources = [str(source) for source in SOURCES if source.suffix == ".cpp"]
    run_compiler([compiler, *FLAGS, f"-I{_HERE}", f"-I{include}", *sources, str(folder / "stubs.cpp"),
                  "-o", str(folder / "card.so"), *_LIBRARIES])
    return folder / "card.so"
