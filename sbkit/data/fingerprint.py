"""Finds recordings by their sound, though they were re-encoded, resampled, made louder or cut, in linear time.

A fingerprint is the robust hash of Haitsma and Kalker ("A Highly Robust Audio Fingerprinting System", ISMIR 2002): for
a third of a second at a time, 32 bits say in which of 33 bands between 300 and 2,000 Hz the energy rises more than in
the next one. A copy has some of them exactly, which a sorted list finds, and most bits of all others, which proves it.
Another voice has half of the bits, and so has the same one when it says the same once more.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

#: Sample rate of the signals that are compared.
RATE = 6_000
#: Samples of a frame, and from one to the next, in what is searched; what is looked up has one in so many of them.
WINDOW, HOP, STRIDE = 2_048, 64, 4
#: Frames between the two whose energies are compared.
_APART = 8
_BITS = 32
_EDGES = np.round(np.geomspace(300, 2_000, _BITS + 2) * WINDOW / RATE).astype(int)
_SHAPE = np.hanning(WINDOW).astype(np.float32)
_VALUE = np.left_shift(np.uint32(1), np.arange(_BITS, dtype=np.uint32))
#: A frame is quiet, and isn't compared, if its energy is below this share of the loudest one's.
_QUIET = 1e-3
#: Bits of a frame that are tried both ways, those that a little noise would change.
_DOUBTFUL = 4
#: Frames that are transformed at once.
_BLOCK = 512
#: Frames (of those that are looked up) that must agree: so many, and this share of the shorter recording.
_LEAST_FRAMES, _LEAST_SHARE = 12, 0.5
#: The share of bits that may differ. Of copies at the lowest rates of MP3 and Opus 0.19 did, with noise 10 dB below the
#: speech 0.19; of one speaker who says the same words again in the same rhythm, 0.24 at least.
_MOST_ERRORS = 0.2
#: So many frames with the same hash are looked at, which keeps the time linear.
_COMMON = 64
#: Positions that are compared bit by bit: those that most hashes speak for.
_TRIED = 8


def fingerprint(signal: np.ndarray, stride: int = 1) -> np.ndarray:
    """The fingerprint of a signal [S] at ``RATE``, uint32 [2, T]: bits, and which of these are doubtful (0: quiet).

    stride : 1 for a recording that is searched, ``STRIDE`` for one that is looked up
    """
    if len(signal) < WINDOW + HOP * _APART:
        return np.zeros((2, 0), np.uint32)
    energy = np.concatenate(list(_energies(np.ascontiguousarray(signal, np.float32), HOP * stride)))
    falls = energy[:, :-1] - energy[:, 1:]
    apart = _APART // stride
    rises = falls[apart:] - falls[:-apart]
    pairs = energy[:, :-1] + energy[:, 1:]
    doubtful = np.argpartition(np.abs(rises) / (pairs[apart:] + pairs[:-apart] + 1e-20), _DOUBTFUL, axis=1)
    bits = ((rises > 0) * _VALUE).sum(1, dtype=np.uint32)
    mask = _VALUE[doubtful[:, :_DOUBTFUL]].sum(1, dtype=np.uint32)
    loudness = energy[apart:].sum(1)
    mask[loudness <= _QUIET * loudness.max()] = 0
    return np.stack([bits, mask])


def _energies(signal: np.ndarray, hop: int) -> Iterator[np.ndarray]:
    """The energy of each frame in each band, [T, 33], in blocks of frames."""
    frames = np.lib.stride_tricks.sliding_window_view(signal, WINDOW)[::hop]
    for start in range(0, len(frames), _BLOCK):
        spectrum = np.fft.rfft(frames[start : start + _BLOCK] * _SHAPE)
        power = spectrum.real[:, : _EDGES[-1]] ** 2 + spectrum.imag[:, : _EDGES[-1]] ** 2
        yield np.add.reduceat(power, _EDGES[:-1], axis=1)


class Index:
    """Fingerprints that are searched: 12 bytes a frame, 4 MB an hour."""

    def __init__(self) -> None:
        self._prints: list[np.ndarray] = []
        self._sorted = False

    def __len__(self) -> int:
        return len(self._prints)

    def add(self, found: np.ndarray) -> None:
        """Add a fingerprint of stride 1; they are numbered from 0 on."""
        self._prints.append(found)
        self._sorted = False

    def find(self, wanted: np.ndarray) -> int | None:
        """The number of the recording that is a copy of one with this fingerprint, of stride ``STRIDE``; None if none
        is, or if fewer than 0.5 s can be compared."""
        loud = np.flatnonzero(wanted[1])
        if len(loud) < _LEAST_FRAMES or not self._prints:
            return None
        self._sort()
        bits = wanted[0, loud]
        row, offset = self._likely(bits, wanted[1, loud], loud)
        for number, shift in zip(row.tolist(), offset.tolist(), strict=True):
            start, end = self._starts[number : number + 2].tolist()
            at = start + shift + STRIDE * loud
            there = np.flatnonzero((at >= start) & (at < end))
            there = there[self._mask[at[there]] > 0]
            least = _LEAST_SHARE * min(len(loud), self._loud[number] / STRIDE)
            if len(there) < max(_LEAST_FRAMES, least):
                continue
            if np.unpackbits((bits[there] ^ self._bits[at[there]]).view(np.uint8)).mean() < _MOST_ERRORS:
                return number
        return None

    def _sort(self) -> None:
        if self._sorted:
            return
        self._starts = np.cumsum([0, *(found.shape[1] for found in self._prints)])
        self._bits, self._mask = np.concatenate(self._prints, axis=1)
        self._loud = [int((found[1] > 0).sum()) for found in self._prints]
        loud = np.flatnonzero(self._mask).astype(np.int32)
        self._frames = loud[np.argsort(self._bits[loud], kind="stable")]
        self._keys = self._bits[self._frames]
        self._sorted = True

    def _likely(self, bits: np.ndarray, mask: np.ndarray, at: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Recordings, and by how many frames what is looked up begins later, for which most hashes speak."""
        tried = bits[None]
        for _ in range(_DOUBTFUL):
            lowest = mask & (~mask + np.uint32(1))
            tried, mask = np.concatenate([tried, tried ^ lowest]), mask ^ lowest
        first, last = (np.searchsorted(self._keys, tried.ravel(), side) for side in ("left", "right"))
        counts = np.minimum(last - first, _COMMON)
        ends = np.cumsum(counts)
        frame = self._frames[np.arange(ends[-1]) + np.repeat(first - ends + counts, counts)]
        number = np.searchsorted(self._starts, frame, "right") - 1
        offset = frame - self._starts[number] - STRIDE * np.repeat(np.tile(at, len(tried)), counts)
        place, votes = np.unique(np.stack([number, offset]), axis=1, return_counts=True)
        return tuple(place[:, np.argsort(-votes, kind="stable")[:_TRIED]])
