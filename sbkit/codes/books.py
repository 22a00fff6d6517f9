"""Codebooks of a codec: their number and sizes, and the check that ids are in them."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from sbkit.errors import SbkitError, first_line, shown

#: Far more than any codec has: limits what a damaged file can make us allocate.
MAX_BOOKS, MAX_ENTRIES, MAX_RATE = 256, 1 << 24, 1 << 20


class InvalidCode(SbkitError):
    """An id that is not in its codebook.

    position : the index of its frame, after that of its utterance if there are several: ``(7,)`` or ``(2, 7)``
    level : the number of its codebook, from 0
    id : the id
    """

    def __init__(self, message: str, position: tuple[int, ...] = (), level: int = 0, id: int = 0, *,
                 hint: str | None = None):
        super().__init__("code-out-of-range", message, hint=hint, value=id)
        self.position, self.level, self.id = position, level, id


@dataclass(frozen=True)
class Books:
    """The codebooks of a codec, one for each level.

    sizes : number of entries of each, without special tokens; an embedding for one has exactly as many rows
    frame_rate : frames per second
    sample_rate : of the audio
    codec : sha256 of the codec's weights and everything else that defines its codes, in hexadecimal
    """

    sizes: tuple[int, ...]
    frame_rate: float
    sample_rate: int
    codec: str

    def __post_init__(self) -> None:
        if not 0 < len(self.sizes) <= MAX_BOOKS or not all(_whole(size, MAX_ENTRIES) for size in self.sizes):
            raise SbkitError("bad-value", f"the sizes of codebooks must be 1 to {MAX_BOOKS} whole numbers of 1 to "
                             f"{MAX_ENTRIES}, not {shown(self.sizes)}", key="sizes", value=self.sizes)
        object.__setattr__(self, "sizes", tuple(map(int, self.sizes)))
        rate = self.frame_rate
        if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 < rate <= MAX_RATE:
            raise SbkitError("bad-value", f"frame_rate must be a number above 0 and at most {MAX_RATE}, not "
                             f"{shown(rate)}", key="frame_rate", value=rate)
        if not _whole(self.sample_rate, 1 << 31):
            raise SbkitError("bad-value", f"sample_rate must be a whole number above 0, not {shown(self.sample_rate)}",
                             key="sample_rate", value=self.sample_rate)
        if not isinstance(self.codec, str) or not re.fullmatch(r"[0-9a-f]{64}", self.codec):
            raise SbkitError("bad-value", f"codec must be a sha256 in hexadecimal, not {shown(self.codec)}",
                             key="codec", value=self.codec)

    @property
    def bit_rate(self) -> float:
        """Bits per second, if all entries are equally likely."""
        return self.frame_rate * sum(math.log2(size) for size in self.sizes)

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest type that holds every id."""
        return np.min_scalar_type(max(self.sizes) - 1)

    def check(self, codes: ArrayLike, where: str) -> np.ndarray:
        """Return codes [T, Q] or [B, T, Q] as int64, or raise if one is not in its codebook; nothing is clamped.

        codes : whole numbers; padding is checked, too
        where : the origin of the codes, for messages: a file, a request

        Raises ``InvalidCode`` for the first id that isn't in its codebook.
        """
        try:
            ids = _as_array(codes)
        except (TypeError, ValueError) as error:
            raise SbkitError("bad-codes", f"{where}: codes must be an array of whole numbers: "
                             f"{first_line(error)}") from error
        if ids.ndim not in (2, 3) or ids.shape[-1] != len(self.sizes):
            raise SbkitError("bad-codes", f"{where}: codes must be [frames, {len(self.sizes)}], one per codebook, not "
                             f"{list(ids.shape)}")
        if ids.dtype.kind not in "iu" and not _are_whole(ids):
            raise SbkitError("bad-codes", f"{where}: codes must be whole numbers, not {ids.dtype}")
        wrong = (ids < 0) | (ids >= np.array(self.sizes))
        if wrong.any():
            raise self._error(ids, wrong, where)
        return ids.astype(np.int64)

    def _error(self, ids: np.ndarray, wrong: np.ndarray, where: str) -> InvalidCode:
        """Return an error that names the first of the wrong ids."""
        index = tuple(map(int, np.argwhere(wrong)[0]))
        *position, level = index
        place = f"frame {position[-1]}" if len(position) == 1 else f"utterance {position[0]}, frame {position[1]}"
        id = int(ids[index])
        others = int(wrong.sum()) - 1
        more = f" ({others} more are out of range)" if others else ""
        return InvalidCode(
            f"{where}: {place}, level {level}: id {id} is not in a codebook of {self.sizes[level]} entries{more}",
            tuple(position), level, id, hint="are they from this codec? special tokens are not codes")

    def require(self, other: Books, where: str) -> None:
        """Raise if ``other``, read from ``where``, are other codebooks than these."""
        differences = []
        for field in fields(self):
            expected = getattr(self, field.name)
            actual = getattr(other, field.name)
            if actual != expected:
                differences.append(f"{field.name} {_shortened(actual)} instead of {_shortened(expected)}")
        if differences:
            raise SbkitError("other-codec", f"{where} has codes of another codec: {', '.join(differences)}",
                             hint="create them again with this codec, or use the codec that created them")

    def to_dict(self) -> dict[str, Any]:
        """Return the codebooks as JSON data."""
        return asdict(self) | {"sizes": list(self.sizes)}

    @classmethod
    def from_dict(cls, values: object, where: str) -> Books:
        """Read codebooks from JSON data; raises if it is invalid."""
        names = [field.name for field in fields(cls)]
        if not isinstance(values, Mapping) or sorted(values) != sorted(names) or not isinstance(values["sizes"], list):
            raise SbkitError("damaged-codes", f"{where} does not describe codebooks: it must have {', '.join(names)}")
        try:
            return cls(**{**values, "sizes": tuple(values["sizes"])})
        except SbkitError as error:
            raise SbkitError("damaged-codes", f"{where}: {error.message}", key=error.key,
                             value=error.value) from error


def _whole(value: object, maximum: int) -> bool:
    return isinstance(value, (int, np.integer)) and not isinstance(value, bool) and 0 < int(value) <= maximum


def _as_array(codes: ArrayLike) -> np.ndarray:
    """Return codes as an array; numbers beyond 2**63 stay Python's, because numpy would round them to floats."""
    array = np.asarray(codes)
    if array.dtype.kind == "f" and not isinstance(codes, np.ndarray):
        exact = np.asarray(codes, object)
        if _are_whole(exact):
            return exact
    return array


def _are_whole(values: np.ndarray) -> bool:
    """Whether an array of Python objects has only integers, which may be too large for other types."""
    return values.dtype == object and all(type(value) is int for value in values.ravel())


def _shortened(value: object) -> str:
    """Return a codebook's value for a message: the first digits of a hash."""
    return f"{value[:12]}..." if isinstance(value, str) else str(value)
