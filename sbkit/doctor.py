"""``sbkit doctor``: what this machine offers, and what keeps sbkit from running well, each with what to do.

Run as a module with ``torch`` or ``onnxruntime``, it prints what that library says of itself: a broken one may crash
its process, so each is asked in its own.
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

#: Seconds that a library may take to say what it is, since a cold start from a network folder is slow; nvidia-smi; and
#: all else that is looked at together.
_SECONDS, SMI_SECONDS, LOOK_SECONDS = 120, 10, 30
#: Where NVIDIA's driver says its version without nvidia-smi.
DRIVER = Path("/proc/driver/nvidia/version")
#: The oldest driver on Linux for each CUDA, by NVIDIA's compatibility table.
_OLDEST = {"13": "580", "12": "525", "11": "450"}
#: Python's versions whose forked processes may wait forever for a lock of a torch thread (CPython's issue 112275).
_HANGS = ("~=3.10.0, <3.10.15", "~=3.11.0, <3.11.10")
#: Less free memory, shared memory (a few batches of a script's own data workers) or disk, or fewer open files, is a
#: note.
_MEMORY, _SHARED_MEMORY, _DISK, _OPEN_FILES = 4 << 30, 2 << 30, 5 << 30, 4096
_SHARED = "/dev/shm"


class MachineFinding(NamedTuple):
    """What was looked at, what was found, and what to do about it: a note, or what is in the way."""

    what: str
    found: str
    fix: str = ""
    in_the_way: bool = False

    @property
    def verdict(self) -> str:
        return "in the way" if self.in_the_way else "note" if self.fix else "ok"


def examine() -> list[MachineFinding]:
    """Look at everything; a look that fails, or never ends, is a note."""
    found: list[MachineFinding] = []

    def look_at(look: Callable[[], Iterator[MachineFinding]]) -> None:
        try:
            found.extend(look())
        except Exception as error:  # anything may be broken; that is what the doctor is for
            found.append(MachineFinding(look.__name__.strip("_"), f"unknown: {summary(error)}",
                                        "the other lines don't depend on it"))

    with ThreadPoolExecutor() as pool:
        list(pool.map(ask, ("torch", "onnxruntime")))
    for look in (_python, _packages, _torch, _cards, _onnxruntime, _compilers, _machine, _folders):
        thread = threading.Thread(target=look_at, args=[look], daemon=True)
        thread.start()
        thread.join(LOOK_SECONDS)
        if thread.is_alive():
            found.append(MachineFinding(look.__name__.strip("_"), f"no answer within {LOOK_SECONDS} s",
                                        "is a network folder stuck?"))
    return list(found)


def _python() -> Iterator[MachineFinding]:
    from packaging.specifiers import SpecifierSet

    version = platform.python_version()
    found = f"{version}, {platform.system()} {platform.release()} {platform.machine()}"
    wanted = metadata.metadata("sbkit")["Requires-Python"] if version_of("sbkit") else ""
    if not SpecifierSet(wanted).contains(version, prereleases=True):
        yield MachineFinding("Python", found, f"sbkit needs {wanted}: make the environment anew with it", True)
    else:
        hangs = any(SpecifierSet(each).contains(version) for each in _HANGS)
        yield MachineFinding("Python", found, "a forked data worker may hang at its start; 3.10.15, 3.11.10 and 3.12 "
                             "have a fix: make the environment anew with one of them" if hangs else "")


def _packages() -> Iterator[MachineFinding]:
    """Those that sbkit requires, by its metadata."""
    from packaging.requirements import Requirement

    if version_of("sbkit") is None:
        yield MachineFinding("packages", "sbkit is imported from its folder and not installed, so its requirements are "
                             "unknown", "pip install -e . in its folder, or make install")
        return
    wanted = [Requirement(line) for line in metadata.requires("sbkit") or [] if "extra ==" not in line]
    fits = []
    for each in wanted:
        version = version_of(each.name)
        if version is not None and each.specifier.contains(version, prereleases=True):
            fits.append(f"{each.name} {version}")
        else:
            yield MachineFinding(each.name, version or "not installed", f"pip install '{each}'", True)
    yield MachineFinding("packages", f"sbkit {version_of('sbkit')}; {len(fits)} of its {len(wanted)} requirements are "
                         "met: " + ", ".join(name for name in fits if not name.startswith("torch")))


def _torch() -> Iterator[MachineFinding]:
    """Torch and torchaudio: whether they fit together, and can be imported."""
    try:
        check_torch()
    except SbkitError as error:
        yield MachineFinding("torch pair", error.message, error.hint or "", True)
    said = ask("torch")
    torch, audio = said["torch"], said["torchaudio"]
    if "error" in torch:
        yield MachineFinding("torch", f"{version_of('torch') or 'it'} can't be imported: {torch['error']}",
                             f"reinstall it: pip install --force-reinstall {TORCH}", True)
        return
    built = f"CUDA {torch['cuda']}" if torch["cuda"] else f"ROCm {torch['hip']}" if torch["hip"] else "the CPU only"
    yield MachineFinding("torch", f"{torch['version']}, built for {built}")
    if "error" in audio:
        yield MachineFinding("torchaudio", f"{version_of('torchaudio')} doesn't work: {audio['error']}",
                             "install the one that belongs to this torch: pip install --force-reinstall --no-deps "
                             f"'torchaudio=={'.'.join(torch['version'].split('.')[:2])}.0'", True)
    else:
        yield MachineFinding("torchaudio", audio["version"])


def _cards() -> Iterator[MachineFinding]:
    """NVIDIA's driver, and the cards that torch sees."""
    torch, seen, program = ask("torch")["torch"], ask("torch")["cards"], shutil.which("nvidia-smi")
    text = driver = ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):  # a stuck driver never answers
        text = "" if program is None else subprocess.run(
            [program], capture_output=True, text=True, errors="replace", timeout=SMI_SECONDS).stdout
    with contextlib.suppress(OSError):
        driver = DRIVER.read_text(errors="replace")
    version = re.search(r"Driver Version: *([\d.]+)", text) or re.search(r"Kernel Module[^\d]*([\d.]+)", driver)
    newest = re.search(r"CUDA Version: *([\d.]+)", text)
    cuda, hidden = torch.get("cuda"), os.environ.get("CUDA_VISIBLE_DEVICES")
    found = (version[1] if version else "version unknown") + (f", for CUDA up to {newest[1]}" if newest else "")
    if "error" in torch:
        yield MachineFinding("NVIDIA driver", found if version else "none was found")
    elif seen.get("cards"):
        yield MachineFinding("NVIDIA driver", found)
    elif "error" in seen:
        yield MachineFinding("NVIDIA driver", f"{found}; torch can't use the cards: {seen['error']}",
                             "does nvidia-smi list them, and does another process hold them?", True)
    elif version is None and program is not None:
        said = text[:200].strip() or "no answer"
        yield MachineFinding("NVIDIA driver", f"nvidia-smi doesn't say its version: {said}",
                             "reinstall the driver, or reboot after an update; a container needs --gpus all")
    elif version is None:
        yield MachineFinding("NVIDIA driver", "none: training and models run on the CPU", "if there is a card, install "
                             "its driver; a container needs --gpus all" if cuda else "")
    elif not cuda:
        yield MachineFinding("NVIDIA driver", f"{found}; this torch is built without CUDA",
                             f"install a torch with CUDA: pip uninstall -y torch torchaudio; pip install {TORCH}", True)
    elif hidden is not None and not re.search(r"(?<!-)\b\d|GPU|MIG", hidden):
        yield MachineFinding("NVIDIA driver", f"{found}; CUDA_VISIBLE_DEVICES={hidden!r} hides all cards",
                             "unset CUDA_VISIBLE_DEVICES")
    elif int(version[1].split(".")[0]) < int(oldest := _OLDEST.get(cuda.split(".")[0], "0")):
        yield MachineFinding("NVIDIA driver", f"{found}; torch is built for CUDA {cuda}, which needs {oldest} or newer",
                             f"update the driver to {oldest}, or install a torch for an older CUDA: pip install "
                             f"{TORCH} --index-url https://download.pytorch.org/whl/cu126", True)
    else:
        yield MachineFinding("NVIDIA driver", f"{found}; torch finds no card that works", "does nvidia-smi list cards? "
                             "a container needs --gpus all; after an update of the driver: reboot", True)
    for index, card in enumerate(seen.get("cards", [])):
        major, minor = card["capability"]
        found = (f"{card['name']}, {card['free'] / 2**30:.1f} of {card['total'] / 2**30:.1f} GiB free, "
                 f"compute capability {major}.{minor}")
        built = [each for each in seen["architectures"] if "_" in each]  # not ROCm's, such as gfx90a
        if built and not runs_on(built, (major, minor)):
            yield MachineFinding(f"cuda:{index}", f"{found}; this torch is not built for it",
                                 f"install one built for it: this is built for {', '.join(built)}", True)
        else:
            yield MachineFinding(f"cuda:{index}", found, "another process uses its memory: nvidia-smi lists it"
                                 if card["free"] < 0.9 * card["total"] else "")


def _onnxruntime() -> Iterator[MachineFinding]:
    builds = [f"{name} {version}" for name, version in onnxruntimes().items()]
    said = ask("onnxruntime")["onnxruntime"]
    if not builds:
        yield MachineFinding("onnxruntime", "not installed: only ONNX models need it",
                             "pip install onnxruntime (for CUDA: onnxruntime-gpu)")
    elif len(builds) > 1:
        yield MachineFinding("onnxruntime", f"{' and '.join(builds)}: each overwrote files of the other",
                             f"pip uninstall -y {' '.join(onnxruntimes())}, then install the one you want", True)
    elif "error" in said:
        yield MachineFinding("onnxruntime", f"{builds[0]} can't be imported: {said['error']}",
                             f"reinstall it: pip install --force-reinstall {' '.join(onnxruntimes())}", True)
    else:
        unused = ask("torch")["cards"].get("cards") and "CUDAExecutionProvider" not in said["providers"]
        names = ", ".join(name.removesuffix("ExecutionProvider") for name in said["providers"])
        yield MachineFinding("onnxruntime", f"{builds[0]}, built for {names}", "ONNX models run on the CPU; for the "
                             "GPU: pip uninstall -y onnxruntime; pip install onnxruntime-gpu" if unused else "")


def _compilers() -> Iterator[MachineFinding]:
    """The C compiler for CPU kernels, and what Triton needs for GPU kernels."""
    compiler, kernels = installed_compiler(), ask("torch")["kernels"]
    why_not, fix = kernels.get("error") or kernels["why_not"], "" if compiler else "apt install gcc"
    yield MachineFinding("C compiler", compiler or "none (gcc, cc or clang)", fix)
    yield MachineFinding("CPU kernels", f"not used: {why_not}" if why_not else "compiled and loaded",
                         (fix or "training on a CPU works without it, but slower") if why_not else "")
    triton, header = version_of("triton"), Path(sysconfig.get_paths()["include"]) / "Python.h"
    fixes = [how for how, there in (("pip install triton", triton), ("apt install gcc", compiler),
                                    ("apt install python3-dev", header.is_file())) if not there]
    yield MachineFinding("Triton", triton or "not installed",
                         "GPU kernels and --compile need it: " + "; ".join(fixes) if fixes else "")


def _machine() -> Iterator[MachineFinding]:
    """Cores, memory, open files and texts."""
    usable, threads = usable_cores(), os.environ.get("OMP_NUM_THREADS", "")
    found = f"{usable} usable of {os.cpu_count()}" + (f"; OMP_NUM_THREADS={threads}" if threads else "")
    yield MachineFinding("cores", found, "data workers and training share it: give the container two or more"
                         if usable < 2 else f"threads would wait for each other: OMP_NUM_THREADS={usable}"
                         if threads.isdecimal() and int(threads) > usable else "")
    free = memory.available()
    found = f"{_gib(free)} of {_gib(memory.total())} free"
    found += "; limited for this process (ulimit -v or -d)" if memory.bounded() else ""
    yield MachineFinding("memory", found, "sbkit tune --memory finds batches that fit" if free < _MEMORY else "")
    if os.path.isdir(_SHARED):
        free = disk.free(Path(_SHARED))
        # Recipes' data workers pass on batches as files in memory, which are in no folder.
        yield MachineFinding("shared memory", f"{_SHARED}: {_gib(free)} free", "recipes need no more; several GPUs "
                             "(NCCL) and a script's own data loaders do: docker run --shm-size=8g"
                             if free < _SHARED_MEMORY else "")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    few, more = soft != resource.RLIM_INFINITY and soft < _OPEN_FILES, hard if hard > 0 else 65536
    how = f"ulimit -n {min(65536, more)}, before a run with many data workers" if more > soft else \
        "its hard limit is as low: fewer data workers, or ask who runs this machine"
    yield MachineFinding("open files", "no limit" if soft == resource.RLIM_INFINITY else f"{soft}", how if few else "")
    names, text = sys.getfilesystemencoding(), locale.getpreferredencoding(False)
    wrong = {names.lower(), text.lower()} - {"utf-8", "utf8"}
    yield MachineFinding("locale", f"file names {names}, text {text}", "export LANG=C.UTF-8 PYTHONUTF8=1: names and "
                         "transcripts are UTF-8" if wrong else "")


def _folders() -> Iterator[MachineFinding]:
    """Where sbkit and what it uses write: a checkpoint needs three times its model's size."""
    hub = os.environ.get("HF_HOME") or Path.home() / ".cache" / "huggingface"
    for what, folder, otherwise in (("output", Path("results"), "give --output_folder another folder"),
                                    ("sbkit's cache", disk.cache_folder(), "export SBKIT_CACHE=FOLDER"),
                                    ("Hugging Face", Path(hub), "export HF_HOME=FOLDER"),
                                    ("temporary", Path(tempfile.gettempdir()), "export TMPDIR=FOLDER")):
        shown = f"~/{folder.relative_to(Path.home())}" if folder.is_relative_to(Path.home()) else str(folder)
        nearest = disk.nearest_folder(folder)
        try:
            with tempfile.TemporaryFile(dir=nearest):  # of a read-only disk, os.access knows nothing
                free = disk.free(folder)
        except OSError as error:
            yield MachineFinding(what, f"{shown} can't be written: {error.strerror}", otherwise, "HF_" not in otherwise)
        else:
            yield MachineFinding(what, f"{shown}, {_gib(free)} free",
                                 f"make room, or {otherwise}" if free < _DISK else "")


def _gib(size: float) -> str:
    return f"{size / 2**30:.1f} GiB"


def as_json(found: Sequence[MachineFinding]) -> str:
    findings = [{"what": each.what, "found": each.found, "verdict": each.verdict, "fix": each.fix} for each in found]
    return json.dumps({"findings": findings, "in_the_way": sum(each.in_the_way for each in found)}, indent=1,
                      ensure_ascii=False)


def as_table(found: Sequence[MachineFinding], width: int = 80) -> str:
    """Format the findings as a table, with what to do below those that are not ok."""
    first, second = (max(map(len, texts)) for texts in zip(*((each.verdict, each.what) for each in found), strict=True))
    room = max(30, min(width, 120) - first - second - 4)
    lines = []
    for each in found:
        texts = textwrap.wrap(each.found, room) or [""]
        texts += textwrap.wrap(f"-> {each.fix}", room, subsequent_indent="   ") if each.fix else []
        lines.append(f"{each.verdict:{first}}  {each.what:{second}}  {texts[0]}")
        lines += [f"{'':{first + second + 4}}{text}" for text in texts[1:]]
    stands, notes = (sum(each.verdict == verdict for each in found) for verdict in ("in the way", "note"))
    return "\n".join([*lines, "", f"{stands or 'nothing is'} in the way of sbkit"
                      + (f", {counted(notes, 'note')}" if notes else "")])


# ---------------------------------------------------------------- in a process of its own


@cache
def ask(library: str) -> dict[str, dict[str, Any]]:
    """What each part of a library says of itself, or ``{"error": why it can't}``."""
    try:
        done = subprocess.run([*helper_process.command(__name__), library], capture_output=True, text=True,
                              errors="replace", timeout=_SECONDS, env=helper_process.environment())
        ended = f"its process was ended by {processes.ended_by(-done.returncode)}" if done.returncode < 0 else \
            (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
        output = done.stdout
    except subprocess.TimeoutExpired as late:
        output, ended = (late.stdout or b"").decode(errors="replace"), f"no answer within {_SECONDS} s"
    said: dict[str, dict[str, Any]] = {}
    for line in output.splitlines():
        with contextlib.suppress(ValueError):  # a library may print, too, or its process end within a line
            part, said[part] = json.loads(line) if line.startswith('["') else ("", {})
    return {part: said.get(part, {"error": ended}) for part in _PARTS[library]}


def _say(part: str) -> dict[str, Any]:
    if part == "torch":
        import torch

        return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip}
    if part == "cards":
        import torch

        cards = []
        for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
            card, (free, total) = torch.cuda.get_device_properties(index), torch.cuda.mem_get_info(index)
            cards.append({"name": card.name, "capability": [card.major, card.minor], "total": total, "free": free})
        return {"architectures": torch.cuda.get_arch_list(), "cards": cards}
    if part == "torchaudio":
        import torchaudio

        torchaudio.functional.melscale_fbanks(201, 0.0, 8000.0, 80, 16000)
        return {"version": torchaudio.__version__}
    if part == "kernels":
        from sbkit.nn.native import library

        return {"why_not": library.load()}
    import onnxruntime

    return {"providers": onnxruntime.get_available_providers()}


#: Cards come last: a driver that ends the process must not be taken for a broken torchaudio.
_PARTS = {"torch": ("torch", "kernels", "torchaudio", "cards"), "onnxruntime": ("onnxruntime",)}

if __name__ == "__main__":
    for each in _PARTS[sys.argv[1]]:
        try:
            answer = _say(each)
        except Exception as error:
            answer = {"error": summary(error)}
        print("\n" + json.dumps([each, answer]), flush=True)
