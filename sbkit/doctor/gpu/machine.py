"""The available cards, as seen by a separate process: this one must not touch them, since it forks others."""

from __future__ import annotations

from dataclasses import dataclass

from sbkit.doctor import examination, probe
from sbkit.doctor.finding import Scope
from sbkit.errors import SbkitError

GIB = 2**30


@dataclass(frozen=True)
class Machine:
    """The machine that the checks run on."""

    name: str
    device: str
    cards: int
    gib: float | None
    """Memory of the first card in GiB."""

    @classmethod
    def look(cls, rehearse: bool) -> Machine:
        """Find the cards, or use a CPU that stands in for two of them."""
        if rehearse:
            return cls("a CPU that stands in for two cards", "cpu", 2, None)
        cards = probe.asked("torch").get("cards", {}).get("cards", [])
        if not cards:
            raise SbkitError("torch finds no CUDA card on this machine", exit_code=1,
                             hint="sbkit doctor says why; --rehearse runs the same checks small, on the CPU")
        names = [card["name"] for card in cards]
        shown = ", ".join(f"{names.count(name)} x {name}" for name in dict.fromkeys(names))
        return cls(shown, "cuda:0", len(cards), cards[0]["total"] / GIB)


def lines() -> list[tuple[str, str]]:
    """Return hardware and versions for the report: the doctor's table."""
    return [(each.what, each.found) for each in examination.examine(Scope())]
