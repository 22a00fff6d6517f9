"""Runs all checks of a machine, and formats them as a table for the terminal or as JSON."""

from __future__ import annotations

import json
import locale
import os
import platform
import resource
import sys
import sysconfig
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from functools import partial
from importlib import metadata
from pathlib import Path

from sbkit.doctor import cards, folders, probe
from sbkit.doctor.finding import IN_THE_WAY, NOTE, Check, MachineFinding, note_if, run_check
from sbkit.errors import SbkitError
from sbkit.recipe import finished_runs, price
from sbkit.system import memory
from sbkit.system.compiled import installed_compiler
from sbkit.system.console import counted
from sbkit.system.cores import usable_cores
from sbkit.system.environment import TORCH, check_torch, onnxruntimes, version_of

_PAIR = ("torch", "torchaudio")
#: Python's versions whose forked processes may wait forever for a lock of a torch thread (CPython's issue 112275).
_HANGS = ("~=3.10.0, <3.10.15", "~=3.11.0, <3.11.10")


def python() -> Iterator[MachineFinding]:
    from packaging.specifiers import SpecifierSet

    found = f"{platform.python_version()}, {platform.system()} {platform.release()} {platform.machine()}"
    wanted = metadata.metadata("sbkit")["Requires-Python"] if version_of("sbkit") else ""
    if any(SpecifierSet(each).contains(platform.python_version()) for each in _HANGS):
        yield MachineFinding("Python", found, NOTE, "a forked data worker may hang at its start; 3.10.15, 3.11.10 and "
                             "3.12 have a fix: make PYTHON=python3.12 install")
    elif SpecifierSet(wanted).contains(platform.python_version(), prereleases=True):
        yield MachineFinding("Python", found)
    else:
        yield MachineFinding("Python", found, IN_THE_WAY, f"sbkit needs {wanted}: make PYTHON=python3.12 install")


def needed() -> Iterator[MachineFinding]:
    """Check the packages that sbkit requires besides torch and torchaudio, by its metadata."""
    from packaging.requirements import Requirement

    try:
        lines = metadata.requires("sbkit") or []
    except metadata.PackageNotFoundError:
        yield MachineFinding("packages", "sbkit is imported from its folder and not installed, so its requirements are "
                             "unknown", NOTE, "pip install -e . in its folder, or make install")
        return
    wanted = [Requirement(line) for line in lines if "extra ==" not in line]
    fits = []
    for each in wanted:
        version = version_of(each.name)
        if version is not None and each.specifier.contains(version, prereleases=True):
            fits.append(f"{each.name} {version}")
        else:
            yield MachineFinding(each.name, version or "not installed", IN_THE_WAY, f"pip install '{each}'")
    yield MachineFinding("packages",
                         f"sbkit {version_of('sbkit')}; {len(fits)} of its {len(wanted)} requirements are met: "
                              + ", ".join(name for name in fits if name.split()[0] not in _PAIR))


def torch_pair() -> Iterator[MachineFinding]:
    """Check that torch and torchaudio can be imported together."""
    try:
        check_torch()
    except SbkitError as error:
        yield MachineFinding("torch pair", error.message, IN_THE_WAY, error.hint or "")
    facts = probe.inspect_library("torch")
    torch = facts.get("torch", {})
    if "error" in torch or not torch:
        yield MachineFinding("torch",
                             f"{version_of('torch')} can't be imported: {torch.get('error') or facts['ended']}",
                             IN_THE_WAY, f"reinstall it: pip install --force-reinstall {TORCH}")
        return
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU only"
    yield MachineFinding("torch", f"{torch['version']}, built for {built}")
    audio = facts.get("torchaudio", {})
    if "error" in audio or not audio:
        yield MachineFinding("torchaudio",
                             f"{version_of('torchaudio')} doesn't work: {audio.get('error') or facts['ended']}",
                             IN_THE_WAY, "install the one that belongs to this torch: pip install --force-reinstall "
                                  f"--no-deps 'torchaudio=={'.'.join(torch['version'].split('.')[:2])}.0'")
    else:
        yield MachineFinding("torchaudio", audio["version"])


def onnxruntime() -> Iterator[MachineFinding]:
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
        yield note_if(unused, "onnxruntime", f"{builds[0]}, built for {names}",
                      "ONNX models run on the CPU; for the GPU: pip uninstall -y onnxruntime; pip install "
                      "onnxruntime-gpu")


def compilers() -> Iterator[MachineFinding]:
    """Check the C compiler for CPU kernels, and what Triton needs for GPU kernels."""
    compiler = installed_compiler()
    why_not = probe.inspect_library("torch").get("kernels", {})
    why_not = why_not.get("error") or why_not.get("why_not")
    fix = "apt install gcc" if compiler is None else "training on a CPU works without it, but slower"
    yield note_if(compiler is None, "C compiler", compiler or "none (gcc, cc or clang)", fix)
    yield note_if(why_not, "CPU kernels", f"not used: {why_not}" if why_not else "compiled and loaded", fix)
    triton, header = version_of("triton"), Path(sysconfig.get_paths()["include"]) / "Python.h"
    missing = [what for what, there in (("triton", triton), ("a C compiler", compiler), ("Python.h", header.is_file()))
               if not there]
    fixes = {"triton": "pip install triton", "a C compiler": "apt install gcc", "Python.h": "apt install python3-dev"}
    found = (triton or "not installed") + (f"; {', '.join(missing)} missing" if missing else "")
    yield note_if(missing, "Triton", found,
                  "GPU kernels and --compile need it: " + "; ".join(fixes[each] for each in missing))


SHARED_MEMORY = "/dev/shm"
#: Bytes that a few batches of a few data workers need.
_LOW_SHARED_MEMORY = 2 << 30
_LOW_MEMORY = 4 << 30
_MIN_OPEN_FILES = 4096


def cores() -> Iterator[MachineFinding]:
    """Check the usable cores, and how many threads libraries would start by default."""
    usable, seen = usable_cores(), os.cpu_count() or 1
    found = f"{usable} usable"
    found += f" of {seen}: affinity or a container's quota limits them" if usable < seen else ""
    threads = os.environ.get("OMP_NUM_THREADS")
    found += f"; OMP_NUM_THREADS={threads}" if threads else ""
    if usable < 2:
        yield MachineFinding("cores", found, NOTE, "data workers and training share it: give the container two or more")
    elif threads and threads.isdecimal() and int(threads) > usable:
        yield MachineFinding("cores", found, NOTE, f"threads would wait for each other: OMP_NUM_THREADS={usable}")
    else:
        yield MachineFinding("cores", found)


def main_memory() -> Iterator[MachineFinding]:
    """Check free and total memory within the container's limit, and this process's own limit."""
    total, free = memory.total(), memory.available()
    found = f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"
    found += "; limited for this process (ulimit -v or -d)" if memory.bounded() else ""
    yield note_if(free < _LOW_MEMORY, "memory", found, "sbkit tune --memory finds batches that fit")


def shared_memory() -> Iterator[MachineFinding]:
    """Check the shared memory, through which data workers pass batches."""
    if not os.path.isdir(SHARED_MEMORY):
        yield MachineFinding("shared memory", f"no {SHARED_MEMORY} on this system")
        return
    state = os.statvfs(SHARED_MEMORY)
    free, total = state.f_bavail * state.f_frsize, state.f_blocks * state.f_frsize
    yield note_if(free < _LOW_SHARED_MEMORY, "shared memory",
                  f"{SHARED_MEMORY}: {free / 2**30:.2f} of {total / 2**30:.2f} GiB free",
                  "fewer batches are read ahead: docker run --shm-size=8g, or fewer workers")


def open_files() -> Iterator[MachineFinding]:
    """Check the limit of open files; each batch on its way from a worker uses some."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    more = min(65536, hard) if hard != resource.RLIM_INFINITY else 65536
    shown = ["no limit" if limit == resource.RLIM_INFINITY else str(limit) for limit in (soft, hard)]
    yield note_if(soft != resource.RLIM_INFINITY and soft < _MIN_OPEN_FILES, "open files",
                  f"{shown[0]} (at most {shown[1]})", f"ulimit -n {more}, before a run with many data workers")


def language() -> Iterator[MachineFinding]:
    """Check that file names and texts use UTF-8."""
    names, text = sys.getfilesystemencoding(), locale.getpreferredencoding(False)
    wrong = {names.lower(), text.lower()} - {"utf-8", "utf8"}
    yield note_if(wrong, "locale", f"file names {names}, text {text}",
                  "export LANG=C.UTF-8 PYTHONUTF8=1: names and transcripts are UTF-8")


def predictions() -> Iterator[MachineFinding]:
    """Report how accurate ``sbkit check --price`` has been about this machine's finished runs."""
    found, right = price.summary(finished_runs.read())
    yield note_if(not right, "predictions", found,
                  f"they should be within {price.ALLOWED_ERROR:.0%}: until more runs have finished, expect the upper "
                  "end of the interval, and add --measure")


#: The checks of a machine in the order of the table, with their names in case they fail.
CHECKS: tuple[tuple[str, Check], ...] = (
    ("Python", python), ("packages", needed), ("torch", torch_pair),
    ("NVIDIA driver", cards.driver), ("cards", cards.cards), ("attention", cards.attention),
    ("CUDA libraries", cards.libraries), ("health of cards", cards.health), ("clock of cards", cards.clocks),
    ("onnxruntime", onnxruntime), ("compilers", compilers), ("cores", cores),
    ("memory", main_memory), ("shared memory", shared_memory), ("open files", open_files),
    ("locale", language), ("caches", folders.caches),
)
_MAX_WIDTH = 120


def examine(data: Path | None = None, run: Path | None = None) -> list[MachineFinding]:
    """Run all checks, with those of a corpus and of a run; torch and onnxruntime are probed first, in parallel."""
    with ThreadPoolExecutor() as pool:
        list(pool.map(probe.inspect_library, probe.LIBRARIES))
    checks: list[tuple[str, Check]] = [
        *CHECKS, ("output", partial(folders.output, run or Path("results"))), ("predictions", predictions)]
    if data is not None:
        checks.insert(-2, ("data", partial(folders.data, data)))
    if run is not None:
        checks.insert(-1, ("clock", partial(folders.time_stamps, run)))
    return [finding for what, check in checks for finding in run_check(what, check)]


def in_the_way(found: Sequence[MachineFinding]) -> bool:
    return _count(found, IN_THE_WAY) > 0


def as_json(found: Sequence[MachineFinding]) -> str:
    return json.dumps({"findings": [asdict(each) for each in found], "in_the_way": _count(found, IN_THE_WAY)}, indent=1,
                      ensure_ascii=False)


def as_table(found: Sequence[MachineFinding], width: int = 80) -> str:
    """Format the findings as a table, with what to do below those that are not ok."""
    first = max(len(each.verdict) for each in found)
    second = max(len(each.what) for each in found)
    room = max(30, min(width, _MAX_WIDTH) - first - second - 4)
    lines = []
    for each in found:
        texts = textwrap.wrap(each.found, room) or [""]
        texts += textwrap.wrap(f"-> {each.fix}", room, subsequent_indent="   ") if each.fix else []
        lines.append(f"{each.verdict:{first}}  {each.what:{second}}  {texts[0]}")
        lines += [f"{'':{first + second + 4}}{text}" for text in texts[1:]]
    stands, notes = _count(found, IN_THE_WAY), _count(found, NOTE)
    summary = f"{stands or 'nothing is'} in the way of sbkit" + (f", {counted(notes, 'note')}" if notes else "")
    return "\n".join([*lines, "", summary])


def _count(found: Sequence[MachineFinding], verdict: str) -> int:
    return sum(each.verdict == verdict for each in found)
