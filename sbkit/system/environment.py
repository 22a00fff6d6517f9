"""The environment of a run: whether torch and torchaudio fit together, versions and hardware."""

from __future__ import annotations

import contextlib
import functools
import os
import platform
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from importlib import metadata

from sbkit.errors import SbkitError, shown
from sbkit.system.cores import usable_cores

#: What pip installs; setup.cfg has the same range.
TORCH = "'torch>=2.10,<2.12' 'torchaudio>=2.10,<2.11.1'"
_OLDEST_TORCH = (2, 10)
_PACKAGES = ("sbkit", "torch", "torchaudio", "speechbrain", "hyperpyyaml", "datasets", "sentencepiece", "numpy")


def version_of(package: str) -> str | None:
    """Return a package's version without importing it; None if it is not installed."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def onnxruntimes() -> dict[str, str]:
    """Return the installed builds of ONNX Runtime with their versions. They overwrite each other in the folder that is
    imported, so more than one is a broken installation."""
    versions_in: dict[str, dict[str, str]] = {}  # folder of the module -> package -> version
    for distribution in metadata.distributions():  # in the order in which Python looks for modules
        modules = distribution.read_text("top_level.txt")
        if modules:
            has_module = "onnxruntime" in modules.split()
        else:
            has_module = distribution.name in ("onnxruntime", "onnxruntime-gpu")
        if has_module:
            folder = os.path.realpath(str(distribution.locate_file("onnxruntime")))
            versions_in.setdefault(folder, {})[distribution.name] = distribution.version
    imported = next(iter(versions_in.values()), {})
    return dict(sorted(imported.items()))


def check_torch(torch: str | None = None, torchaudio: str | None = None) -> None:
    """Raise if torch is too old to read files from others, or torchaudio of another minor release, whose binaries do
    not load together. Without versions, those installed are checked; with torch's alone, only torch."""
    if torch is None:
        torch, torchaudio = version_of("torch"), version_of("torchaudio")
        if torch is None or torchaudio is None:
            raise SbkitError("missing-package", f"{'torch' if torch is None else 'torchaudio'} is not installed",
                             hint=f"pip install {TORCH}")
    if _minor(torch) < _OLDEST_TORCH:
        raise SbkitError("wrong-version",
                         f"torch {torch} is too old: before 2.10, a file of weights can corrupt memory",
                         hint=f"pip install {TORCH}: checkpoints stay valid")
    # torchaudio 2.11.1 takes a function that torch 2.11.0 doesn't have.
    if torchaudio is not None and (_minor(torch) != _minor(torchaudio) or re.match(r"2\.11\.[1-9]", torchaudio)):
        wanted = ".".join(map(str, _minor(torch)))
        raise SbkitError(
            "torchaudio-mismatch",
            f"torch {torch} and torchaudio {torchaudio} are of different releases and cannot be loaded together",
            hint=f"pip install 'torchaudio=={wanted}.0' (or {TORCH})",
        )


def _minor(version: str) -> tuple[int, int]:
    numbers = re.match(r"(\d+)\.(\d+)", version)
    if numbers is None:
        raise SbkitError("wrong-version",
                         f"the version {shown(version)} of torch or torchaudio doesn't begin with two numbers",
                         hint=f"pip install {TORCH}, or give your build a version such as 2.11.0+own", value=version)
    return int(numbers[1]), int(numbers[2])


def describe() -> dict[str, str]:
    """Collect versions and hardware, for the start of a run, its report and a bundle."""
    facts = {"python": platform.python_version(), "system": f"{platform.system()} {platform.machine()}"}
    facts |= {name: version_of(name) or "not installed" for name in _PACKAGES}
    cores = usable_cores()
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as lines:
            cpu = next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):  # such as an ARM machine's, which has no names
        cpu = platform.processor() or "cpu"
    facts["cpu"] = f"{cpu}, {cores} core{'' if cores == 1 else 's'}"
    import torch

    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        facts["gpu"] = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
    return facts


@functools.cache
def packages() -> list[str]:
    """Return the installed packages with their versions, in alphabetical order."""
    distributions = [distribution.metadata for distribution in metadata.distributions()]
    installed = {str(fields["Name"]): fields["Version"] for fields in distributions}
    return [f"{name}=={installed[name]}" for name in sorted(installed, key=str.lower)]


def inventory() -> str:
    """Compose SpeechBrain's ``env.log`` for this interpreter's packages; the ``pip`` on the PATH may belong to another
    interpreter or be missing, and takes seconds."""
    import torch

    git = ""
    with contextlib.suppress(OSError):  # git isn't installed
        git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    card = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    parts = ["SpeechBrain system description", f"Python version:\n{sys.version}",
             "\n".join(["Installed Python packages:", *packages()]), f"Git revision:\n{git or 'none'}",
             card if torch.cuda.is_available() else "CUDA not available"]
    return f"\n{'=' * 30}\n".join(parts) + "\n"


def command() -> str:
    """Return the command that started this process, to repeat it in the same folder; torchrun's part is rebuilt."""
    args = [word for word in sys.orig_argv[1:] if word != "-u"]
    if args and os.path.basename(args[0]) == "sbkit":
        args[0] = "sbkit"
    launcher = [] if args[:1] == ["sbkit"] else ["python"]
    if "TORCHELASTIC_RUN_ID" in os.environ:
        nodes = os.environ.get("GROUP_WORLD_SIZE", "1")
        launcher = ["torchrun", *(["--nnodes", nodes] if nodes != "1" else []),
                    "--nproc_per_node", os.environ.get("LOCAL_WORLD_SIZE", "1")]
        if args[:1] == ["sbkit"]:
            launcher += ["-m"]
    return shlex.join([*launcher, *args])


def training_command(args: Sequence[str], processes: int = 1) -> list[str]:
    """Return the command that runs ``sbkit train`` with these arguments in ``processes`` processes of this machine."""
    launcher = ["-m", "torch.distributed.run", f"--nproc_per_node={processes}"] if processes > 1 else []
    return [sys.executable, *launcher, "-m", "sbkit", "train", *args]
