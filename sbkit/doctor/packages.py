"""Checks of Python, the packages that sbkit needs, torch with torchaudio, ONNX Runtime, and compilers."""

from __future__ import annotations

import os
import platform
import shutil
import sysconfig
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Any

from sbkit.doctor import probe
from sbkit.doctor.finding import IN_THE_WAY, NOTE, MachineFinding, Scope
from sbkit.errors import SbkitError
from sbkit.system.environment import check_torch_pair, onnxruntimes, version_of

_PAIR = ("torch", "torchaudio")


def python(scope: Scope) -> Iterator[MachineFinding]:
    """Check the Python version."""
    from packaging.specifiers import SpecifierSet

    found = f"{platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    wanted = metadata.metadata("sbkit")["Requires-Python"]
    if SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        yield MachineFinding("Python", found)
    else:
        yield MachineFinding("Python", found, IN_THE_WAY, f"sbkit needs {wanted}: make PYTHON=python3.12 install")


def needed(scope: Scope) -> Iterator[MachineFinding]:
    """Check the packages that sbkit requires besides torch and torchaudio, by its metadata."""
    from packaging.requirements import Requirement

    wanted = [Requirement(line) for line in metadata.requires("sbkit") or [] if "extra ==" not in line]
    fits = []
    for each in wanted:
        version = version_of(each.name)
        if version is not None and each.specifier.contains(version, prereleases=True):
            fits.append(f"{each.name} {version}")
        else:
            yield MachineFinding(each.name, version or "not installed", IN_THE_WAY, f"pip install '{each}'")
    yield MachineFinding("packages",
                         f"sbkit {version_of('sbkit')}; {len(fits)} of the {len(wanted)} that it needs fit: "
                              + ", ".join(name for name in fits if name.split()[0] not in _PAIR))


def torch_pair(scope: Scope) -> Iterator[MachineFinding]:
    """Check that torch and torchaudio can be imported together."""
    facts = probe.inspect_library("torch")
    yield from _pair(facts)
    torch = facts.get("torch", {})
    if "error" in torch or not torch:
        yield MachineFinding("torch",
                             f"{version_of('torch')} can't be imported: {torch.get('error') or facts['ended']}",
                             IN_THE_WAY, "reinstall it: pip install --force-reinstall 'torch>=2.7,<2.12' "
                                  "'torchaudio>=2.7,<2.12'")
        return
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU only"
    yield MachineFinding("torch", f"{torch['version']}, built for {built}")
    audio = facts.get("torchaudio", {})
    if "error" in audio or not audio:
        yield MachineFinding("torchaudio",
                             f"{version_of('torchaudio')} doesn't work: {audio.get('error') or facts['ended']}",
                             IN_THE_WAY, "install the one that belongs to this torch: pip install --force-reinstall "
                                  f"--no-deps 'torchaudio=={'.'.join(torch['version'].split('.')[:2])}.*'")
    else:
        yield MachineFinding("torchaudio", audio["version"])


def _pair(facts: dict[str, Any]) -> Iterator[MachineFinding]:
    try:
        check_torch_pair()
    except SbkitError as error:
        yield MachineFinding("torch pair", error.message, IN_THE_WAY, error.hint or "")


def onnxruntime(scope: Scope) -> Iterator[MachineFinding]:
    """Check which build is installed, and for which devices."""
    builds = [f"{name} {version}" for name, version in onnxruntimes().items()]
    if not builds:
        yield MachineFinding("onnxruntime", "not installed: only ONNX models need it", NOTE,
                             "pip install onnxruntime (for CUDA: onnxruntime-gpu)")
    elif len(builds) > 1:
        yield MachineFinding("onnxruntime", f"{' and '.join(builds)}: each overwrote files of the other", IN_THE_WAY,
                             f"pip uninstall -y {' '.join(onnxruntimes())}, then install the one you want")
    else:
        facts = probe.inspect_library("onnxruntime")
        found = facts.get("onnxruntime", {})
        if "error" in found or not found:
            yield MachineFinding("onnxruntime",
                                 f"{builds[0]} can't be imported: {found.get('error') or facts['ended']}",
                                 IN_THE_WAY, "reinstall it: pip install --force-reinstall onnxruntime")
            return
        names = ", ".join(name.removesuffix("ExecutionProvider") for name in found["providers"])
        cards = probe.inspect_library("torch").get("cards", {}).get("cards")
        unused = cards and "CUDAExecutionProvider" not in found["providers"]
        yield MachineFinding("onnxruntime", f"{builds[0]}, built for {names}", NOTE if unused else "ok",
                             "ONNX models run on the CPU; for the GPU: pip uninstall -y onnxruntime; "
                             "pip install onnxruntime-gpu" if unused else "")


def compilers(scope: Scope) -> Iterator[MachineFinding]:
    """Check the C compiler for CPU kernels, and what Triton needs for GPU kernels."""
    wanted = [os.environ.get("CC") or "gcc", "gcc", "cc", "clang"]
    compiler = next(filter(None, map(shutil.which, wanted)), None)
    why_not = probe.inspect_library("torch").get("kernels", {})
    why_not = why_not.get("error") or why_not.get("why_not")
    fix = "apt install gcc" if compiler is None else "training on a CPU works without, but slower"
    yield MachineFinding("C compiler", compiler or "none (gcc, cc or clang)", "ok" if compiler else NOTE,
                         "" if compiler else fix)
    yield MachineFinding("CPU kernels", f"not used: {why_not}" if why_not else "compiled and loaded",
                         NOTE if why_not else "ok", fix if why_not else "")
    triton, header = version_of("triton"), Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [what for what, there in (("triton", triton), ("a C compiler", compiler), ("Python.h", header.is_file()))
               if not there]
    fixes = {"triton": "pip install triton", "a C compiler": "apt install gcc", "Python.h": "apt install python3-dev"}
    yield MachineFinding("Triton", (triton or "not installed") + (f"; {', '.join(missing)} missing" if missing else ""),
                         NOTE if missing else "ok",
                         "GPU kernels and --compile need it: " + "; ".join(fixes[each] for each in missing)
                         if missing else "")
