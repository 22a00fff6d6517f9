"""``sbkit doctor``: what this machine offers, and what keeps sbkit from running well, each with what to do.

Run as a module with ``torch`` or ``onnxruntime``, it prints what that library says of itself: a broken library may
crash its process, so each is imported in a separate one.
"""

from __future__ import annotations

import contextlib
import json
import locale
import os
import platform
import re
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

from sbkit.errors import SbkitError, summary
from sbkit.rehearsal.cards import runs_on
from sbkit.system import disk, helper_process, memory, processes
from sbkit.system.compiled import installed_compiler
from sbkit.system.console import counted
from sbkit.system.cores import usable_cores
from sbkit.system.environment import TORCH, check_torch, onnxruntimes, version_of

#: Time limit in seconds for a library to describe itself: a cold start from a network folder is slow.
_LIBRARY_SECONDS = 120
#: Time limits for nvidia-smi, and for each of the checks in ``examine``.
SMI_SECONDS, CHECK_SECONDS = 10, 30
#: Where NVIDIA's driver says its version without nvidia-smi.
DRIVER = Path("/proc/driver/nvidia/version")
#: The oldest driver on Linux for each CUDA, by NVIDIA's compatibility table.
_OLDEST = {"13": "580", "12": "525", "11": "450"}
#: Versions of Python whose forked processes may wait forever for a lock of a torch thread (CPython's issue 112275).
_VERSIONS_THAT_HANG = ("~=3.10.0, <3.10.15", "~=3.11.0, <3.11.10")
#: Below these amounts there is a warning: of free memory, shared memory (a few batches of a script's own data workers)
#: and disk in bytes, and of open files.
_MEMORY, _SHARED_MEMORY, _DISK, _OPEN_FILES = 4 << 30, 2 << 30, 5 << 30, 4096
_SHARED = "/dev/shm"


class MachineFinding(NamedTuple):
    """What was examined, what was found, and what to do about it: a fix makes it a warning or an error.

    code : names the problem, see ``sbkit explain``; without a fix there is none
    """

    what: str
    found: str
    code: str = ""
    fix: str = ""
    is_error: bool = False

    @property
    def verdict(self) -> str:
        if self.is_error:
            return "error"
        return "warning" if self.fix else "ok"


def _warned(what: str, found: str, code: str, fix: str) -> MachineFinding:
    """Return a warning, or what is ok if there is no fix."""
    return MachineFinding(what, found, code, fix) if fix else MachineFinding(what, found)


def examine() -> list[MachineFinding]:
    """Run all checks; one that fails, or never ends, is a warning."""
    findings: list[MachineFinding] = []

    def run_check(check: Callable[[], Iterator[MachineFinding]]) -> None:
        try:
            findings.extend(check())
        except Exception as error:  # anything may be broken; that is what the doctor is for
            findings.append(MachineFinding(check.__name__.strip("_"), f"unknown: {summary(error)}", "check-failed",
                                           "the other lines don't depend on it"))

    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, ("torch", "onnxruntime")))  # at the same time; the checks read their answers
    for check in (_python, _packages, _torch, _cards, _onnxruntime, _compilers, _machine, _folders):
        thread = threading.Thread(target=run_check, args=[check], daemon=True)
        thread.start()
        thread.join(CHECK_SECONDS)
        if thread.is_alive():
            findings.append(MachineFinding(check.__name__.strip("_"), f"no answer within {CHECK_SECONDS} s",
                                           "check-failed", "is a network folder stuck?"))
    return list(findings)  # a copy, which a check that is still running doesn't change


def _python() -> Iterator[MachineFinding]:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    description = f"{version}, {platform.system()} {platform.release()} {platform.machine()}"
    required = metadata.metadata("sbkit")["Requires-Python"] if version_of("sbkit") else ""
    if not SpecifierSet(required).contains(version, prereleases=True):
        yield MachineFinding("Python", description, "unsupported-python",
                             f"sbkit needs {required}: recreate the environment with it", True)
    elif any(SpecifierSet(versions).contains(version) for versions in _VERSIONS_THAT_HANG):
        yield MachineFinding("Python", description, "python-fork-hangs",
                             "a forked data worker may hang at its start; 3.10.15, 3.11.10 and "
                             "3.12 have a fix: recreate the environment with one of them")
    else:
        yield MachineFinding("Python", description)


def _packages() -> Iterator[MachineFinding]:
    """Those that sbkit requires, by its metadata."""
    from packaging.requirements import Requirement

    if version_of("sbkit") is None:
        yield MachineFinding("packages", "sbkit is imported from its folder and not installed, so its requirements are "
                             "unknown", "not-installed", "pip install -e . in its folder, or make install")
        return
    requirements = [Requirement(line) for line in metadata.requires("sbkit") or [] if "extra ==" not in line]
    met = []
    for requirement in requirements:
        version = version_of(requirement.name)
        if version is not None and requirement.specifier.contains(version, prereleases=True):
            met.append(f"{requirement.name} {version}")
        else:
            code = "missing-package" if version is None else "wrong-version"
            yield MachineFinding(requirement.name, version or "not installed", code, f"pip install '{requirement}'",
                                 True)
    without_torch = ", ".join(name for name in met if not name.startswith("torch"))  # which has lines of its own
    yield MachineFinding("packages", f"sbkit {version_of('sbkit')}; {len(met)} of its {len(requirements)} requirements "
                         f"are met: {without_torch}")


def _torch() -> Iterator[MachineFinding]:
    """Torch and torchaudio: whether they fit together, and can be imported."""
    try:
        check_torch()
    except SbkitError as error:
        yield MachineFinding("torch pair", error.message, error.code, error.hint or "", True)
    answers = ask("torch")
    torch, audio = answers["torch"], answers["torchaudio"]
    if "error" in torch:
        yield MachineFinding("torch", f"{version_of('torch') or 'it'} can't be imported: {torch['error']}",
                             "broken-package", f"reinstall it: pip install --force-reinstall {TORCH}", True)
        return
    if torch["cuda"]:
        backend = f"CUDA {torch['cuda']}"
    elif torch["hip"]:
        backend = f"ROCm {torch['hip']}"
    else:
        backend = "the CPU only"
    yield MachineFinding("torch", f"{torch['version']}, built for {backend}")
    if "error" in audio:
        yield MachineFinding("torchaudio", f"{version_of('torchaudio')} doesn't work: {audio['error']}",
                             "broken-package",
                             "install the one that belongs to this torch: pip install --force-reinstall --no-deps "
                             f"'torchaudio=={'.'.join(torch['version'].split('.')[:2])}.0'", True)
    else:
        yield MachineFinding("torchaudio", audio["version"])


def _cards() -> Iterator[MachineFinding]:
    """NVIDIA's driver, and the cards that torch sees."""
    yield _driver()
    seen = ask("torch")["cards"]
    for index, card in enumerate(seen.get("cards", [])):
        major, minor = card["capability"]
        description = (f"{card['name']}, {card['free'] / 2**30:.1f} of {card['total'] / 2**30:.1f} GiB free, "
                       f"compute capability {major}.{minor}")
        built_for = [name for name in seen["architectures"] if "_" in name]  # not ROCm's, such as gfx90a
        if built_for and not runs_on(built_for, (major, minor)):
            yield MachineFinding(f"cuda:{index}", f"{description}; this torch is not built for it",
                                 "no-kernels",
                                 f"install one built for it: this is built for {', '.join(built_for)}", True)
        else:
            is_shared = card["free"] < 0.9 * card["total"]
            yield _warned(f"cuda:{index}", description, "gpu-in-use",
                          "another process uses its memory: nvidia-smi lists it" if is_shared else "")


def _driver() -> MachineFinding:
    """NVIDIA's driver: its version, and why torch finds no card with it."""
    torch, seen = ask("torch")["torch"], ask("torch")["cards"]
    program = shutil.which("nvidia-smi")
    smi = ""
    if program is not None:
        with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # a stuck driver never answers
            smi = subprocess.run([program], capture_output=True, text=True, errors="replace",
                                 timeout=SMI_SECONDS).stdout
    module = ""
    with contextlib.suppress(OSError):
        module = DRIVER.read_text(errors="replace")
    version = re.search(r"Driver Version: *([\d.]+)", smi) or re.search(r"Kernel Module[^\d]*([\d.]+)", module)
    newest_cuda = re.search(r"CUDA Version: *([\d.]+)", smi)
    description = version[1] if version else "version unknown"
    if newest_cuda:
        description += f", for CUDA up to {newest_cuda[1]}"

    what = "NVIDIA driver"
    cuda = torch.get("cuda")
    hidden = os.environ.get("CUDA_VISIBLE_DEVICES")
    if "error" in torch:
        return MachineFinding(what, description if version else "none was found")
    if seen.get("cards"):
        return MachineFinding(what, description)
    if "error" in seen:
        return MachineFinding(what, f"{description}; torch can't use the cards: {seen['error']}",
                              "broken-device", "does nvidia-smi list them, and does another process hold them?", True)
    if version is None and program is not None:
        return MachineFinding(what, f"nvidia-smi doesn't say its version: {smi[:200].strip() or 'no answer'}",
                              "no-driver",
                              "reinstall the driver, or reboot after an update; a container needs --gpus all")
    if version is None:
        return _warned(what, "none: training and models run on the CPU", "no-driver",
                       "if there is a card, install its driver; a container needs --gpus all" if cuda else "")
    if not cuda:
        return MachineFinding(what, f"{description}; this torch is built without CUDA",
                              "torch-without-cuda",
                              f"install a torch with CUDA: pip uninstall -y torch torchaudio; pip install {TORCH}",
                              True)
    if hidden is not None and not re.search(r"(?<!-)\b\d|GPU|MIG", hidden):
        return MachineFinding(what, f"{description}; CUDA_VISIBLE_DEVICES={hidden!r} hides all cards", "hidden-gpus",
                              "unset CUDA_VISIBLE_DEVICES")
    oldest = _OLDEST.get(cuda.split(".")[0], "0")
    if int(version[1].split(".")[0]) < int(oldest):
        return MachineFinding(what, f"{description}; torch is built for CUDA {cuda}, which needs {oldest} or newer",
                              "old-driver",
                              f"update the driver to {oldest}, or install a torch for an older CUDA: pip install "
                              f"{TORCH} --index-url https://download.pytorch.org/whl/cu126", True)
    return MachineFinding(what, f"{description}; torch finds no card that works", "broken-device",
                          "does nvidia-smi list cards? a container needs --gpus all; after an update of the driver: "
                          "reboot", True)


def _onnxruntime() -> Iterator[MachineFinding]:
    builds = [f"{name} {version}" for name, version in onnxruntimes().items()]
    answer = ask("onnxruntime")["onnxruntime"]
    if not builds:
        yield MachineFinding("onnxruntime", "not installed: only ONNX models need it", "missing-package",
                             "pip install onnxruntime (for CUDA: onnxruntime-gpu)")
    elif len(builds) > 1:
        yield MachineFinding("onnxruntime", f"{' and '.join(builds)}: each overwrote files of the other",
                             "two-onnxruntimes",
                             f"pip uninstall -y {' '.join(onnxruntimes())}, then install the one you want", True)
    elif "error" in answer:
        yield MachineFinding("onnxruntime", f"{builds[0]} can't be imported: {answer['error']}",
                             "broken-package",
                             f"reinstall it: pip install --force-reinstall {' '.join(onnxruntimes())}", True)
    else:
        misses_gpu = ask("torch")["cards"].get("cards") and "CUDAExecutionProvider" not in answer["providers"]
        names = ", ".join(name.removesuffix("ExecutionProvider") for name in answer["providers"])
        yield _warned("onnxruntime", f"{builds[0]}, built for {names}", "onnxruntime-without-gpu",
                      "ONNX models run on the CPU; for the GPU: pip uninstall -y onnxruntime; pip install "
                      "onnxruntime-gpu" if misses_gpu else "")


def _compilers() -> Iterator[MachineFinding]:
    """The C compiler for CPU kernels, and what Triton needs for GPU kernels."""
    compiler = installed_compiler()
    fix = "" if compiler else "apt install gcc"
    yield _warned("C compiler", compiler or "none (gcc, cc or clang)", "no-compiler", fix)

    kernels = ask("torch")["kernels"]
    problem = kernels.get("error") or kernels["why_not"]
    if problem:
        yield MachineFinding("CPU kernels", f"not used: {problem}", "no-cpu-kernels",
                             fix or "training on a CPU works without it, but slower")
    else:
        yield MachineFinding("CPU kernels", "compiled and loaded")

    triton = version_of("triton")
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    is_there = {"pip install triton": triton, "apt install gcc": compiler, "apt install python3-dev": header.is_file()}
    fixes = [how for how, there in is_there.items() if not there]
    yield _warned("Triton", triton or "not installed", "no-triton",
                  "GPU kernels and --compile need it: " + "; ".join(fixes) if fixes else "")


def _machine() -> Iterator[MachineFinding]:
    """Cores, memory, open files and text encodings."""
    usable, threads = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    code = fix = ""
    if usable < 2:
        code = "few-cores"
        fix = "data workers and training share it: give the container two or more"
    elif threads.isdecimal() and int(threads) > usable:
        code = "too-many-threads"
        fix = f"more threads than cores only wait for each other: OMP_NUM_THREADS={usable}"
    yield _warned("cores", f"{usable} usable of {os.cpu_count()}"
                  + (f"; OMP_NUM_THREADS={threads}" if threads else ""), code, fix)

    free = memory.available()
    limited = "; limited for this process (ulimit -v or -d)" if memory.bounded() else ""
    yield _warned("memory", f"{_gib(free)} of {_gib(memory.total())} free{limited}", "little-memory",
                  "sbkit tune --memory finds batches that fit" if free < _MEMORY else "")

    if os.path.isdir(_SHARED):
        free = disk.free(Path(_SHARED))
        # Recipes' data workers pass on batches as files in memory, which are in no folder.
        yield _warned("shared memory", f"{_SHARED}: {_gib(free)} free", "little-shared-memory",
                      "recipes need no more; several GPUs (NCCL) and a script's own data loaders do: docker run "
                      "--shm-size=8g" if free < _SHARED_MEMORY else "")

    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    is_unlimited = soft_limit == resource.RLIM_INFINITY
    possible = hard_limit if hard_limit > 0 else 65536
    if is_unlimited or soft_limit >= _OPEN_FILES:
        fix = ""
    elif possible > soft_limit:
        fix = f"ulimit -n {min(65536, possible)}, before a run with many data workers"
    else:
        fix = "its hard limit is as low: fewer data workers, or ask who runs this machine"
    yield _warned("open files", "no limit" if is_unlimited else f"{soft_limit}", "few-open-files", fix)

    of_names = sys.getfilesystemencoding()
    of_text = locale.getpreferredencoding(False)
    others = {of_names.lower(), of_text.lower()} - {"utf-8", "utf8"}
    yield _warned("locale", f"file names {of_names}, text {of_text}", "locale-not-utf8",
                  "export LANG=C.UTF-8 PYTHONUTF8=1: names and transcripts are UTF-8" if others else "")


def _folders() -> Iterator[MachineFinding]:
    """Where sbkit and what it uses write: a checkpoint needs three times its model's size."""
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    for what, folder, fix, is_needed in (
            ("output", Path("results"), "give --output_folder another folder", True),
            ("sbkit's cache", disk.cache_folder(), "export SBKIT_CACHE=FOLDER", True),
            ("Hugging Face", Path(hub), "export HF_HOME=FOLDER", False),
            ("temporary", Path(tempfile.gettempdir()), "export TMPDIR=FOLDER", True)):
        shown = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
        try:
            with tempfile.TemporaryFile(dir=disk.nearest_folder(folder)):  # os.access says yes of a read-only disk
                free = disk.free(folder)
        except OSError as error:
            yield MachineFinding(what, f"{shown} can't be written: {error.strerror}", "not-writable", fix, is_needed)
        else:
            yield _warned(what, f"{shown}, {_gib(free)} free", "little-disk",
                          f"make room, or {fix}" if free < _DISK else "")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def as_json(findings: Sequence[MachineFinding]) -> str:
    """Format the findings as JSON, for programs."""
    rows = [{"what": finding.what, "found": finding.found, "verdict": finding.verdict,
             "code": finding.code, "fix": finding.fix} for finding in findings]
    errors = sum(finding.is_error for finding in findings)
    return json.dumps({"findings": rows, "errors": errors}, indent=1, ensure_ascii=False)


def as_table(findings: Sequence[MachineFinding], width: int = 80) -> str:
    """Format the findings as a table, with what to do below those that are not ok."""
    verdict_width = max(len(finding.verdict) for finding in findings)
    what_width = max(len(finding.what) for finding in findings)
    text_width = max(30, min(width, 120) - verdict_width - what_width - 4)
    lines = []
    for finding in findings:
        texts = textwrap.wrap(finding.found, text_width, break_on_hyphens=False) or [""]
        if finding.fix:
            texts += textwrap.wrap(f"-> {finding.fix} [{finding.code}]", text_width, subsequent_indent="   ",
                                   break_on_hyphens=False)  # a command or a code is to be copied
        lines.append(f"{finding.verdict:{verdict_width}}  {finding.what:{what_width}}  {texts[0]}")
        lines += [f"{'':{verdict_width + what_width + 4}}{text}" for text in texts[1:]]
    verdicts = [finding.verdict for finding in findings]
    errors = verdicts.count("error")
    warnings = verdicts.count("warning")
    total = counted(errors, "error") if errors else "no errors"
    if warnings:
        total += f", {counted(warnings, 'warning')}"
    return "\n".join([*lines, "", total])


# ---------------------------------------------------------------- in a separate process


@cache
def ask(library: str) -> dict[str, dict[str, Any]]:
    """Return what each part of a library says of itself, or ``{"error": why it can't}``."""
    try:
        process = subprocess.run([*helper_process.command(__name__), library], capture_output=True, text=True,
                                 errors="replace", timeout=_LIBRARY_SECONDS, env=helper_process.environment())
    except subprocess.TimeoutExpired as late:
        output = (late.stdout or b"").decode(errors="replace")
        problem = f"no answer within {_LIBRARY_SECONDS} s"
    else:
        output = process.stdout
        if process.returncode < 0:
            problem = f"its process was ended by {processes.ended_by(-process.returncode)}"
        else:
            problem = (process.stderr.strip().splitlines() or ["it ended without a message"])[-1]
    answers: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        if not line.startswith('["'):  # a library may print, too
            continue
        with contextlib.suppress(ValueError):  # the process ended within this line
            part, answer = json.loads(line)
            answers[part] = answer
    return {part: answers.get(part, {"error": problem}) for part in _PARTS[library]}


def _describe(part: str) -> dict[str, Any]:
    """Return what a part of a library says of itself, in the process that imports it."""
    if part == "torch":
        import torch

        return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if part == "cards":
        import torch

        cards = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            card = torch.cuda.get_device_properties(index)
            free, total = torch.cuda.mem_get_info(index)
            cards.append({"name": card.name, "capability": [card.major, card.minor], "total": total, "free": free})
        return {"architectures": torch.cuda.get_arch_list(), "cards": cards}
    if part == "torchaudio":
        import torchaudio

        torchaudio.functional.melscale_fbanks(201, 0.0, 8000.0, 80, 16000)  # fails where its binaries don't load
        return {"version": torchaudio.__version__}
    if part == "kernels":
        from sbkit.nn.native import library

        return {"why_not": library.load()}
    assert part == "onnxruntime", part
    import onnxruntime

    return {"providers": onnxruntime.get_available_providers()}


#: Cards come last: a driver that ends the process must not be taken for a broken torchaudio.
_PARTS = {"torch": ("torch", "kernels", "torchaudio", "cards"), "onnxruntime": ("onnxruntime",)}

if __name__ == "__main__":
    for part in _PARTS[sys.argv[1]]:
        try:
            answer = _describe(part)
        except Exception as error:
            answer = {"error": summary(error)}
        print("\n" + json.dumps([part, answer]), flush=True)
