"""NVIDIA's driver and cards: whether torch can use them, what they are, and what slows them down."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

from sbkit.doctor import probe
from sbkit.doctor.finding import IN_THE_WAY, NOTE, MachineFinding, note_if
from sbkit.rehearsal.cards import runs_on
from sbkit.system.environment import TORCH

_SECONDS = 10
_DRIVER = Path("/proc/driver/nvidia/version")
#: The oldest driver on Linux for each CUDA, by NVIDIA's compatibility table.
_OLDEST = {"13": "580", "12": "525", "11": "450"}
_CARD = ("index", "name", "memory.total", "memory.used", "ecc.errors.uncorrected.volatile.total", "mig.mode.current",
         "persistence_mode", "temperature.gpu", "clocks.sm", "clocks.max.sm", "power.limit", "power.default_limit")
#: Reasons for a throttled clock, as named by ``nvidia-smi -q -d PERFORMANCE``; idling doesn't count.
_SLOWED = {"HW Slowdown": "the board", "HW Thermal Slowdown": "heat", "SW Thermal Slowdown": "heat",
           "HW Power Brake Slowdown": "the machine's power supply", "SW Power Cap": "its power limit",
           "SW Power Capping": "its power limit"}


def driver() -> Iterator[MachineFinding]:
    """Check that there is a driver, new enough for this torch."""
    torch = probe.inspect_library("torch").get("torch", {})
    text = _smi()
    version = re.search(r"Driver Version: *([\d.]+)", text)
    if version is None:
        with contextlib.suppress(OSError):  # without nvidia-smi
            version = re.search(r"Kernel Module[^\d]*([\d.]+)", _DRIVER.read_text(errors="replace"))
    newest = re.search(r"CUDA Version: *([\d.]+)", text)
    if version is None:
        yield note_if(torch.get("cuda"), "NVIDIA driver", "none: training and models run on the CPU",
                      "if there is a card, install its driver; a container needs --gpus all")
        return
    found = f"{version[1]}" + (f", for CUDA up to {newest[1]}" if newest else "")
    if torch.get("available"):
        yield MachineFinding("NVIDIA driver", found)
    elif torch and not torch["cuda"]:
        yield MachineFinding("NVIDIA driver", f"{found}; this torch is built without CUDA", IN_THE_WAY,
                             f"install a torch with CUDA: pip uninstall -y torch torchaudio; pip install {TORCH}")
    elif torch:
        hidden, cuda = os.environ.get("CUDA_VISIBLE_DEVICES"), torch["cuda"]
        oldest = _OLDEST.get(cuda.split(".")[0], "0")
        if hidden is not None and not re.search(r"\d|GPU|MIG", hidden):
            yield MachineFinding("NVIDIA driver", f"{found}; CUDA_VISIBLE_DEVICES={hidden!r} hides all cards", NOTE,
                                 "unset CUDA_VISIBLE_DEVICES")
        elif int(version[1].split(".")[0]) < int(oldest):
            yield MachineFinding(
                "NVIDIA driver", f"{found}; torch is built for CUDA {cuda}, which needs {oldest} or newer", IN_THE_WAY,
                f"update the driver to {oldest}, or install a torch for an older CUDA: pip install {TORCH} "
                "--index-url https://download.pytorch.org/whl/cu126")
        else:
            yield MachineFinding(
                "NVIDIA driver", f"{found}; torch finds no card that works", IN_THE_WAY,
                "does nvidia-smi list cards? a container needs --gpus all; after an update of the driver: reboot")


def cards() -> Iterator[MachineFinding]:
    """Describe each card that torch sees."""
    facts = probe.inspect_library("torch").get("cards", {})
    if "error" in facts:
        yield MachineFinding("cards", f"torch can't use them: {facts['error']}", IN_THE_WAY,
                             "does nvidia-smi list them?")
    for index, card in enumerate(facts.get("cards", [])):
        major, minor = card["capability"]
        found = (f"{card['name']}, {card['free'] / 2**30:.1f} of {card['total'] / 2**30:.1f} GiB free, "
                 f"compute capability {major}.{minor}")
        built = [each for each in facts["architectures"] if "_" in each]  # not ROCm's, such as gfx90a
        if built and not runs_on(built, (major, minor)):
            yield MachineFinding(f"cuda:{index}", f"{found}; this torch is not built for it", IN_THE_WAY,
                                 f"install one built for it: this is built for {', '.join(built)}")
        else:
            yield note_if(card["free"] < 0.9 * card["total"], f"cuda:{index}", found,
                          "another process uses its memory: nvidia-smi lists it")
    if facts.get("without_peer_access"):
        pairs = ", ".join(f"{a} and {b}" for a, b in facts["without_peer_access"])
        yield MachineFinding("between cards", f"no direct access between {pairs}: NCCL copies through the host", NOTE,
                             "nvidia-smi topo -m shows how they are connected")


def attention() -> Iterator[MachineFinding]:
    """Report which attention kernel torch uses for some head sizes."""
    facts = probe.inspect_library("torch").get("attention", {})
    if "error" in facts:
        yield MachineFinding("attention", f"unknown: {facts['error']}", NOTE)
    for index, card in enumerate(facts.get("cards", [])):
        heads_by_kernel = [f"{name} for heads of {', '.join(map(str, heads))}" for name,
                           heads in card["kernels"].items()]
        yield MachineFinding("attention", f"cuda:{index} in {card['precision']}, masked: {'; '.join(heads_by_kernel)} "
                                   "(sbkit pads heads to what is fused)")


def health() -> Iterator[MachineFinding]:
    """Report nvidia-smi's facts about each card: memory errors, slices, persistence, power and heat."""
    for row in _smi(f"--query-gpu={','.join(_CARD)}", "--format=csv,noheader,nounits").splitlines():
        values = [value.strip() for value in row.split(",")]
        if len(values) != len(_CARD):
            continue
        card = dict(zip(_CARD, values, strict=True))
        words = {"Enabled": "on", "Disabled": "off"}
        facts = [f"{card['temperature.gpu']} °C", f"SM clock {card['clocks.sm']} of {card['clocks.max.sm']} MHz",
                 f"persistence {words.get(card['persistence_mode'], 'unknown')}",
                 f"MIG {words.get(card['mig.mode.current'], 'unknown')}"]
        fixes = []
        errors = card["ecc.errors.uncorrected.volatile.total"]
        facts.append(f"ECC errors {errors}" if errors.isdecimal() else "no ECC")
        if errors.isdecimal() and int(errors):
            fixes.append("its memory has errors: restart the machine, and have the card checked if they return")
        if card["mig.mode.current"] == "Enabled":
            fixes.append("MIG slices can't talk to each other by NCCL: train on one slice, or turn MIG off")
        with contextlib.suppress(ValueError):  # some cards don't tell
            if float(card["power.limit"]) < 0.98 * float(card["power.default_limit"]):
                fixes.append(f"its power limit is {card['power.limit']} W of {card['power.default_limit']}")
        yield note_if(fixes, f"card {card['index']}", ", ".join(facts), "; ".join(fixes))


def clocks() -> Iterator[MachineFinding]:
    """Report whether a clock is throttled now, or was since the driver was loaded, which slowed earlier runs."""
    text = _smi("-q", "-d", "PERFORMANCE")
    for index, part in enumerate(re.split(r"^GPU \S+$", text, flags=re.MULTILINE)[1:]):
        now = {_SLOWED[name] for name, state in re.findall(r"^ +([\w ]+?) +: (Active|Not Active)$", part, re.MULTILINE)
               if name in _SLOWED and state == "Active"}
        past = {_SLOWED[name]: int(micros) / 1e6
                for name, micros in re.findall(r"^ +([\w ]+?) +: (\d+) us$", part, re.MULTILINE)
                if name in _SLOWED and int(micros) > 60e6}
        throttled = [f"throttled now by {each}" for each in sorted(now)]
        throttled += [f"was throttled by {each} for {seconds / 60:.0f} min" for each, seconds in sorted(past.items())]
        yield note_if(throttled, f"clock of card {index}", "; ".join(throttled) or "not throttled",
                      "cooling, power supply or power limit (nvidia-smi -q -d POWER) limit its speed")


def libraries() -> Iterator[MachineFinding]:
    """Report the versions of cuDNN and NCCL that come with this torch."""
    facts = probe.inspect_library("torch").get("libraries", {})
    if "error" in facts:
        yield MachineFinding("cuDNN, NCCL", f"unknown: {facts['error']}", NOTE)
    elif facts.get("cudnn") or facts.get("nccl"):
        cudnn, nccl = facts["cudnn"], facts["nccl"]
        versions = [f"cuDNN {cudnn // 10000}.{cudnn // 100 % 100}.{cudnn % 100}"] if cudnn else []
        versions += [f"NCCL {'.'.join(map(str, nccl))}"] if nccl else []
        yield MachineFinding("CUDA libraries", ", ".join(versions))


def _smi(*words: str) -> str:
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    done = subprocess.run([program, *words], capture_output=True, text=True, errors="replace", timeout=_SECONDS)
    return done.stdout if done.returncode == 0 else ""
