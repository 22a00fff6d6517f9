"""The results of a comparison on disk, one file per run, and the speeds and estimates that follow from them."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from sbkit.errors import SbkitError
from sbkit.system.console import atomic_write

SYSTEMS = ("sbkit", "stock", "nemo")
#: Before anything was measured: audio seconds per second on two cores in fp32, and seconds of a run besides training.
GUESSED_SPEED = {"sbkit": 150.0, "stock": 70.0, "nemo": 60.0}
GUESSED_REST = 60.0


@dataclass(frozen=True)
class Cell:
    """One run: a system on a corpus, with a seed and a number of epochs."""

    corpus: str
    system: str
    seed: int
    epochs: int

    @property
    def name(self) -> str:
        return f"{self.corpus}.{self.system}.{self.epochs}-epochs.seed-{self.seed}"


@dataclass(frozen=True)
class Length:
    """The length of a run, in epochs or in minutes of training."""

    epochs: int | None = None
    minutes: float | None = None

    def __str__(self) -> str:
        if self.epochs is None:
            return f"{self.minutes:g} min"
        return f"{self.epochs} epoch{'' if self.epochs == 1 else 's'}"


@dataclass(frozen=True)
class Asked:
    """A run as the command line describes it; minutes are converted to epochs when its turn comes."""

    corpus: str
    system: str
    seed: int
    length: Length


def matrix(corpora: Sequence[str], systems: Sequence[str], seeds: Sequence[int], lengths: Sequence[Length],
           ) -> Iterator[Asked]:
    """List all runs in their order: the whole table with the first seed first, and systems in turn."""
    for seed in seeds:
        for corpus in corpora:
            for length in sorted(lengths, key=lambda one: (one.epochs is None, one.epochs or one.minutes)):
                for system in systems:
                    yield Asked(corpus, system, seed, length)


class Results:
    """A folder of results, all measured with the same options.

    Arguments
    ---------
    out : the comparison's folder
    options : device, precision, threads and keys of the recipe; a result with others is refused
    """

    def __init__(self, out: Path, options: dict[str, Any]):
        self.folder, self.options = out / "results", options
        self._fits_file = out / "fits.json"

    def get(self, cell: Cell) -> dict[str, Any] | None:
        """Return the result of a run; None if it is missing."""
        path = self.folder / f"{cell.name}.json"
        return self._read(path) if path.is_file() else None

    def put(self, cell: Cell, facts: dict[str, Any]) -> None:
        with atomic_write(self.folder / f"{cell.name}.json") as file:
            json.dump({**asdict(cell), "options": self.options, **facts}, file, indent=1, ensure_ascii=False)

    def of(self, corpus: str | None = None, system: str | None = None, epochs: int | None = None,
           ) -> list[dict[str, Any]]:
        """Return all results, or those of a corpus, a system and a number of epochs."""
        wanted = {"corpus": corpus, "system": system, "epochs": epochs}
        found = [self._read(path) for path in sorted(self.folder.glob("*.json"))]
        return [one for one in found if all(value in (None, one[key]) for key, value in wanted.items())]

    def _read(self, path: Path) -> dict[str, Any]:
        found = json.loads(path.read_text(encoding="utf-8"))
        if found["options"] != self.options:
            raise SbkitError(f"{path} was measured with other options: {found['options']}, now {self.options}",
                             hint="choose another --out for these, or remove the results")
        return found

    def epoch_seconds(self, corpus: str, system: str) -> float | None:
        """Return the median seconds of training in an epoch.

        The first epoch of a run compiles and warms up, so it only counts if there is no other.
        """
        runs = [one["epoch_seconds"] for one in self.of(corpus, system)]
        found = [seconds for run in runs for seconds in run[1:]] or [seconds for run in runs for seconds in run]
        return statistics.median(found) if found else None

    def fit(self, corpus: str, system: str, minutes: float) -> int | None:
        """Return the number of epochs that comes closest to these minutes; None if the system has not run yet.

        Once found, it stays the same for all seeds.
        """
        length = Length(minutes=minutes)
        epochs, seconds = self.fitted(corpus, system, length), self.epoch_seconds(corpus, system)
        if epochs is None and seconds is not None:
            epochs = max(1, round(60 * minutes / seconds))
            found = {**self._fits(), _fit_name(corpus, system, length): {"epochs": epochs, "epoch_seconds": seconds}}
            with atomic_write(self._fits_file) as file:
                json.dump(found, file, indent=1)
        return epochs

    def fitted(self, corpus: str, system: str, length: Length) -> int | None:
        """Return the epochs of a length; None if its minutes have not been converted yet."""
        if length.epochs is not None:
            return length.epochs
        return self._fits().get(_fit_name(corpus, system, length), {}).get("epochs")

    def _fits(self) -> dict[str, dict[str, Any]]:
        return json.loads(self._fits_file.read_text(encoding="utf-8")) if self._fits_file.is_file() else {}

    def estimate(self, asked: Asked, train_seconds: float | None) -> tuple[float, bool] | None:
        """Estimate the minutes of a whole run, and whether that is measured; None if the corpus's size is unknown."""
        epoch = self.epoch_seconds(asked.corpus, asked.system)
        rests = [one["wall_seconds"] - sum(one["epoch_seconds"]) for one in self.of(asked.corpus, asked.system)]
        rest = statistics.median(rests) if rests else GUESSED_REST
        if asked.length.minutes is not None:
            return asked.length.minutes + rest / 60, epoch is not None
        each = epoch
        if each is None and train_seconds is not None:
            each = train_seconds / GUESSED_SPEED[asked.system]
        if each is None or asked.length.epochs is None:
            return None
        return (asked.length.epochs * each + rest) / 60, epoch is not None


def _fit_name(corpus: str, system: str, length: Length) -> str:
    return f"{corpus}.{system}.{length.minutes:g}-minutes"
