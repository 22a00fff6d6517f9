"""Probes torch and onnxruntime in separate processes, because a broken one may crash its process.

This module, run with the word ``torch``, prints a line of JSON for each part that works: ``[part, facts]``.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from typing import Any

from sbkit.errors import summary
from sbkit.system import helper_process, processes

#: Time limit; a cold start of torch from a network folder is slow.
_SECONDS = 120
#: Head sizes: those of recipes, and one that no fused kernel supports unpadded.
_HEADS = (32, 36, 64, 80, 128)


@cache
def inspect_library(library: str) -> dict[str, Any]:
    """Return each part's facts, or ``{"error": ...}``; a missing part was not reached, and ``ended`` says why."""
    command = [*helper_process.command(__name__), library]
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_SECONDS,
                              env=helper_process.environment())
        output, ended = done.stdout, ""
        if done.returncode < 0:
            ended = f"the process that imported it was ended by {processes.ended_by(-done.returncode)}"
        elif done.returncode:
            ended = (done.stderr.strip().splitlines() or ["it ended without a message"])[-1]
    except subprocess.TimeoutExpired as late:
        output, ended = (late.stdout or b"").decode(errors="replace"), f"no answer within {_SECONDS} s"
    lines = (json.loads(line) for line in output.splitlines() if line.startswith('["'))
    return {"ended": ended, **dict(lines)}


def _torch() -> dict[str, Any]:
    import torch

    return {"version": torch.__version__, "cuda": torch.version.cuda, "hip": torch.version.hip,
            "available": torch.cuda.is_available(), "threads": torch.get_num_threads()}


def _cards() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        return {"cards": []}
    cards = []
    for index in range(torch.cuda.device_count()):
        card = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        cards.append({"name": card.name, "capability": [card.major, card.minor], "total": total, "free": free})
    peers = [[a, b] for a in range(len(cards)) for b in range(len(cards))
             if a < b and not torch.cuda.can_device_access_peer(a, b)]
    return {"cards": cards, "architectures": torch.cuda.get_arch_list(), "without_peer_access": peers}


def _attention() -> dict[str, Any]:
    """Find the attention kernel of each card for some head sizes, with a mask, in its half precision."""
    import torch

    from sbkit.nn import attention_kernel

    cudnn, found = os.environ.get(attention_kernel.CUDNN) == "1", []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        capability = torch.cuda.get_device_capability(index)
        half = torch.bfloat16 if capability >= (8, 0) else torch.float16
        kernels = {head: attention_kernel.kernel(capability, half, head, cudnn=cudnn) for head in _HEADS}
        found.append({"precision": "bf16" if half == torch.bfloat16 else "fp16",
                      "kernels": {kernel.name: [head for head in kernels if kernels[head].name == kernel.name]
                                  for kernel in kernels.values()}})
    return {"cards": found}


def _libraries() -> dict[str, Any]:
    import torch

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    return {"cudnn": torch.backends.cudnn.version(), "nccl": list(torch.cuda.nccl.version()) if nccl else None}


def _torchaudio() -> dict[str, Any]:
    import torchaudio

    torchaudio.functional.melscale_fbanks(201, 0.0, 8000.0, 80, 16000)
    return {"version": torchaudio.__version__}


def _kernels() -> dict[str, Any]:
    from sbkit.nn.native import library

    return {"why_not": library.load()}


def _onnxruntime() -> dict[str, Any]:
    import onnxruntime

    return {"version": onnxruntime.__version__, "providers": onnxruntime.get_available_providers()}


_PARTS: dict[str, dict[str, Callable[[], dict[str, Any]]]] = {
    "torch": {"torch": _torch, "cards": _cards, "attention": _attention, "libraries": _libraries, "kernels": _kernels,
              "torchaudio": _torchaudio},
    "onnxruntime": {"onnxruntime": _onnxruntime},
}

LIBRARIES = tuple(_PARTS)


def main(library: str) -> None:
    """Print each part's facts as soon as they are known."""
    for part, describe in _PARTS[library].items():
        try:
            facts = describe()
        except Exception as error:
            facts = {"error": summary(error)}
        print(json.dumps([part, facts]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
