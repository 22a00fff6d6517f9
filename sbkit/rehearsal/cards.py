"""GPUs by their data sheets: memory, multiprocessors, power; recipe/speed.py has their speed."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from sbkit.errors import SbkitError
from sbkit.recipe.report import did_you_mean

GIB = 1 << 30
# Maximum shared memory of a block in bytes, and threads of a multiprocessor, by compute capability, from the CUDA C++
# Programming Guide.
_SHARED = {(7, 0): 96 << 10, (7, 5): 64 << 10, (8, 0): 163 << 10, (8, 6): 99 << 10, (8, 9): 99 << 10,
           (9, 0): 227 << 10, (10, 0): 227 << 10, (12, 0): 99 << 10}
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536}


@dataclass(frozen=True)
class Card:
    """A GPU by its data sheet.

    gib : memory, as CUDA reports it
    capability : compute capability, major and minor
    watts : maximum power
    """

    name: str
    gib: float
    multiprocessors: int
    capability: tuple[int, int]
    watts: int

    @property
    def memory(self) -> int:
        """The memory in bytes."""
        return int(self.gib * GIB)

    @property
    def shared_memory(self) -> int:
        """The maximum shared memory of a block in bytes."""
        return _SHARED[self.capability]

    @property
    def threads(self) -> int:
        """The maximum number of threads of a multiprocessor."""
        return _THREADS.get(self.capability, 2048)


#: By the name on the command line.
CARDS: dict[str, Card] = {
    "V100": Card("Tesla V100-SXM2-16GB", 15.77, 80, (7, 0), 300),
    "T4": Card("Tesla T4", 14.56, 40, (7, 5), 70),
    "A100-40": Card("NVIDIA A100-SXM4-40GB", 39.49, 108, (8, 0), 400),
    "A100-80": Card("NVIDIA A100-SXM4-80GB", 79.25, 108, (8, 0), 400),
    "A10": Card("NVIDIA A10", 22.06, 72, (8, 6), 150),
    "A6000": Card("NVIDIA RTX A6000", 47.53, 84, (8, 6), 300),
    "RTX 3090": Card("NVIDIA GeForce RTX 3090", 23.56, 82, (8, 6), 350),
    "L4": Card("NVIDIA L4", 22.03, 58, (8, 9), 72),
    "L40S": Card("NVIDIA L40S", 44.39, 142, (8, 9), 350),
    "RTX 4090": Card("NVIDIA GeForce RTX 4090", 23.53, 128, (8, 9), 450),
    "H100": Card("NVIDIA H100 80GB HBM3", 79.18, 132, (9, 0), 700),
    "H200": Card("NVIDIA H200", 139.81, 132, (9, 0), 700),
    "B200": Card("NVIDIA B200", 178.35, 148, (10, 0), 1000),
    "RTX 5090": Card("NVIDIA GeForce RTX 5090", 31.36, 170, (12, 0), 575),
}


def parse_cards(text: str) -> tuple[int, Card]:
    """Parse a number of cards and their name; case, spaces and hyphens don't matter.

    >>> count, card = parse_cards("8xH100")
    >>> count, card.name, parse_cards("rtx4090")[0]
    (8, 'NVIDIA H100 80GB HBM3', 1)
    """
    by_name = {_plain(name): card for name, card in CARDS.items()}
    match = re.fullmatch(r"(?:([0-9]+)\s*[xX×*]\s*)?(.+)", text.strip())
    card = match and by_name.get(_plain(match[2]))
    if match is None or card is None:
        near = did_you_mean(match[2], CARDS) if match is not None else ""
        raise SbkitError("unknown-gpu", f"'{text}' is not a known GPU", hint=(f"did you mean {near}? " if near else "")
                         + f"write for example 8xH100; known are {', '.join(CARDS)}", value=text)
    count = int(match[1] or 1)
    if not 1 <= count <= MAX_CARDS:
        raise SbkitError("bad-value",
                         f"'{text}' asks for {count} GPUs",
                         hint=f"1 to {MAX_CARDS} of one machine can be simulated",
                         value=text)
    return count, card


def runs_on(kernels: Iterable[str], capability: tuple[int, int]) -> bool:
    """Return whether kernels compiled for these architectures run on a card of this compute capability.

    Machine code (``sm_``) runs on later minor versions, PTX (``compute_``) on all later ones, and kernels for one
    architecture (``sm_90a``) on no other.

    >>> runs_on(["sm_80", "sm_90"], (8, 6)), runs_on(["sm_80", "sm_90"], (7, 0)), runs_on(["compute_70"], (9, 0))
    (True, False, True)
    """
    for kind, number, suffix in re.findall(r"\b(sm|compute)_(\d+)([af]?)\b", " ".join(kernels)):
        compiled_for = divmod(int(number), 10)
        if compiled_for == capability:
            return True
        is_later = compiled_for <= capability and suffix != "a"
        if is_later and (kind == "compute" or compiled_for[0] == capability[0]):
            return True
    return False


#: The most GPUs of one machine.
MAX_CARDS = 64


def _plain(name: str) -> str:
    return re.sub(r"[\s_-]", "", name).lower()
