"""Finds recordings of one split that are copies of another's: the same bytes under two names, or the same audio."""

from __future__ import annotations

import contextlib
import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.data.audio import AudioError, read_bytes, read_utterance, split_member
from sbkit.data.manifest import Column
from sbkit.data.measure import Cause, run_job
from sbkit.data.remote import NO_REMOTE, Remote
from sbkit.system import untrusted
from sbkit.system.cores import usable_cores

#: Sample rate of the signals that are compared.
RATE = 6_000
#: Samples of a frame, and between frames of the index; a query has every ``STRIDE``-th frame.
WINDOW = 2_048
HOP = 64
STRIDE = 4
#: Frames between the two whose energies are compared.
_FRAME_DISTANCE = 8
_BITS = 32
_EDGES = np.round(np.geomspace(300, 2_000, _BITS + 2) * WINDOW / RATE).astype(int)
_SHAPE = np.hanning(WINDOW).astype(np.float32)
_VALUE = np.left_shift(np.uint32(1), np.arange(_BITS, dtype=np.uint32))
#: A frame whose energy is below this share of the loudest one's is quiet, and isn't compared.
_QUIET = 1e-3
#: Bits of a frame that a little noise would change: both values are tried.
_DOUBTFUL = 4
#: Frames that are transformed at once.
_FRAMES_AT_ONCE = 512
#: Frames of a query that must be comparable: this number, and this share of the shorter recording.
_MIN_FRAMES = 12
_MIN_SHARE = 0.5
#: The share of bits that may differ. It was 0.19 for copies at the lowest rates of MP3 and Opus, 0.19 with noise 10 dB
#: below the speech, and at least 0.24 for a speaker who repeats the same words in the same rhythm.
_MAX_BIT_ERRORS = 0.2
#: At most this many frames with the same hash are compared, which keeps the time linear.
_MAX_SAME_HASH = 64
#: Positions that are compared bit by bit: those with the most matching hashes.
_CANDIDATES = 8


def fingerprint(signal: np.ndarray, stride: int = 1) -> np.ndarray:
    """The fingerprint of a signal [S] at ``RATE``, uint32 [2, T]: bits, and which of these are doubtful (0: quiet).

    stride : 1 for a recording of the index, ``STRIDE`` for a query
    """
    if len(signal) < WINDOW + HOP * _FRAME_DISTANCE:
        return np.zeros((2, 0), np.uint32)
    # The energy of each frame in each band, [T, 33], in blocks of frames.
    frames = np.lib.stride_tricks.sliding_window_view(np.ascontiguousarray(signal, np.float32), WINDOW)[::HOP * stride]
    blocks = []
    for start in range(0, len(frames), _FRAMES_AT_ONCE):
        spectrum = np.fft.rfft(frames[start : start + _FRAMES_AT_ONCE] * _SHAPE)
        power = spectrum.real[:, : _EDGES[-1]] ** 2 + spectrum.imag[:, : _EDGES[-1]] ** 2
        blocks.append(np.add.reduceat(power, _EDGES[:-1], axis=1))
    energy = np.concatenate(blocks)
    falls = energy[:, :-1] - energy[:, 1:]
    distance = _FRAME_DISTANCE // stride
    rises = falls[distance:] - falls[:-distance]
    pairs = energy[:, :-1] + energy[:, 1:]
    doubtful = np.argpartition(np.abs(rises) / (pairs[distance:] + pairs[:-distance] + 1e-20), _DOUBTFUL, axis=1)
    bits = ((rises > 0) * _VALUE).sum(1, dtype=np.uint32)
    mask = _VALUE[doubtful[:, :_DOUBTFUL]].sum(1, dtype=np.uint32)
    loudness = energy[distance:].sum(1)
    mask[loudness <= _QUIET * loudness.max()] = 0
    return np.stack([bits, mask])


class Index:
    """An index of fingerprints: 12 bytes per frame, 4 MB per hour."""

    def __init__(self) -> None:
        self._prints: list[np.ndarray] = []
        self._sorted = False

    def add(self, fingerprint: np.ndarray) -> None:
        """Add a fingerprint of stride 1; numbers start at 0."""
        self._prints.append(fingerprint)
        self._sorted = False

    def find(self, query: np.ndarray) -> int | None:
        """Return the number of the recording that this fingerprint of stride ``STRIDE`` is a copy of; None if it is of
        none, or if less than 0.5 s can be compared."""
        loud = np.flatnonzero(query[1])
        if len(loud) < _MIN_FRAMES or not self._prints:
            return None
        if not self._sorted:
            self._starts = np.cumsum([0, *(frames.shape[1] for frames in self._prints)])
            self._bits, self._mask = np.concatenate(self._prints, axis=1)
            self._loud = [int((mask > 0).sum()) for _, mask in self._prints]
            indexed = np.flatnonzero(self._mask).astype(np.int32)
            self._frames = indexed[np.argsort(self._bits[indexed], kind="stable")]
            self._keys = self._bits[self._frames]
            self._sorted = True
        bits = query[0, loud]
        mask = query[1, loud]
        tried = bits[None]  # with every value of the doubtful bits
        for _ in range(_DOUBTFUL):
            lowest = mask & (~mask + np.uint32(1))
            tried = np.concatenate([tried, tried ^ lowest])
            mask = mask ^ lowest
        # Of each hash, the first _MAX_SAME_HASH frames of the index that have it.
        first = np.searchsorted(self._keys, tried.ravel(), "left")
        end = np.searchsorted(self._keys, tried.ravel(), "right")
        counts = np.minimum(end - first, _MAX_SAME_HASH)
        ends = np.cumsum(counts)
        frame = self._frames[np.arange(ends[-1]) + np.repeat(first - ends + counts, counts)]
        recording = np.searchsorted(self._starts, frame, "right") - 1
        offset = frame - self._starts[recording] - STRIDE * np.repeat(np.tile(loud, len(tried)), counts)
        # The recordings, and the offsets of the query in frames, with the most matching hashes.
        place, votes = np.unique(np.stack([recording, offset]), axis=1, return_counts=True)
        for number, shift in place[:, np.argsort(-votes, kind="stable")[:_CANDIDATES]].T.tolist():
            start, end = self._starts[number : number + 2].tolist()
            at = start + shift + STRIDE * loud
            comparable = np.flatnonzero((at >= start) & (at < end))
            comparable = comparable[self._mask[at[comparable]] > 0]
            least = _MIN_SHARE * min(len(loud), self._loud[number] / STRIDE)
            if len(comparable) < max(_MIN_FRAMES, least):
                continue
            if np.unpackbits((bits[comparable] ^ self._bits[at[comparable]]).view(np.uint8)).mean() < _MAX_BIT_ERRORS:
                return number
        return None


#: Bytes from the middle of a file; the whole file is read only if another has the same size and block.
_BLOCK = 4096
#: Recordings that a process decodes per request, and from how many on processes are started.
CHUNK = 32
WORTH_PROCESSES = 64


class Copies:
    """The recordings of splits, each compared with those of the splits before it.

    by_sound : decode all and compare fingerprints; otherwise only files with the same bytes are found
    journal : a file that stores results, so that a preparation continues where it was stopped
    """

    def __init__(self, by_sound: bool, *, workers: int | None = None, remote: Remote = NO_REMOTE,
                 journal: Path | None = None, show_progress: bool = True):
        self.by_sound = by_sound
        self.workers = workers
        self.remote = remote
        self.journal = journal
        self.show_progress = show_progress
        self._index = Index()
        self._names = list[str]()
        self._blocks: dict[tuple[str, float], list[tuple[str, str]]] = {}

    def search(self, split: str, ids: Column, wavs: Column, starts: np.ndarray, durations: np.ndarray, *,
               keep: bool) -> tuple[dict[int, str], dict[int, Cause]]:
        """Compare the N rows of a split with those of the splits before; ``keep`` them for the splits after it.

        Returns
        -------
        originals : for each row that is a copy, its original: "test: ID"
        causes : for each row that can't be decoded, the reason
        """
        originals = self._same_bytes(split, ids, wavs, starts, keep)
        causes: dict[int, Cause] = {}
        if not self.by_sound:
            return originals, causes
        rows = [i for i in range(len(ids)) if i not in originals]
        stride = 1 if keep else STRIDE
        sounds: dict[int, np.ndarray] = {}

        def compare(answer: list[list[int]]) -> list[Any]:  # plain data for the journal, unless fingerprints are kept
            sound = np.array(answer, np.uint32)
            number = self._index.find(sound[:, :: STRIDE // stride])
            return ["" if number is None else self._names[number], sound if keep else 0]

        segments = [[wavs[i], float(starts[i]), float(durations[i])] for i in rows]
        for j, answer in run_job("sbkit.data.copies:fingerprint_of", segments, (stride,), chunk=CHUNK,
                                 workers=self.workers or usable_cores(), remote=self.remote,
                                 worth_processes=WORTH_PROCESSES, journal=None if keep else self.journal, then=compare,
                                 what=f"{split}: copies", show_progress=self.show_progress):
            if isinstance(answer, dict):
                causes[rows[j]] = Cause(**answer)
                continue
            name, sound = answer
            if name:
                originals[rows[j]] = name
            if keep:
                sounds[rows[j]] = sound
        for i in sorted(sounds):
            self._index.add(sounds[i])
            self._names.append(f"{split}: {ids[i]}")
        return originals, causes

    def _same_bytes(self, split: str, ids: Column, wavs: Column, starts: np.ndarray, keep: bool) -> dict[int, str]:
        files = list(dict.fromkeys(wavs))
        blocks: dict[str, str] = {}
        for j, answer in run_job("sbkit.data.copies:block_hash", files, workers=self.workers, remote=self.remote,
                                 what=f"{split}: bytes", show_progress=self.show_progress):
            if not isinstance(answer, dict):  # unreadable files are reported when they are measured or decoded
                blocks.update((files[j], block) for block in answer)
        originals: dict[int, str] = {}
        new = []
        for i, (id_, wav, start) in enumerate(zip(ids, wavs, starts.tolist(), strict=True)):
            if wav not in blocks:
                continue
            place = blocks[wav], start
            for name, other in self._blocks.get(place, ()):
                with contextlib.suppress(AudioError):  # it is reported when it is measured or decoded
                    if read_bytes(wav, self.remote) == read_bytes(other, self.remote):
                        originals[i] = name
                        break
            else:
                if keep:
                    new.append((place, (f"{split}: {id_}", wav)))
        for place, entry in new:
            self._blocks.setdefault(place, []).append(entry)
        return originals


def block_hash(wav: str, remote: Remote) -> list[str] | dict[str, str]:
    """The size of a recording's file and a hash of a block in its middle; empty for a URL; or why it can't be read."""
    path, offset, size = split_member(wav)
    if "://" in path:
        return []
    try:
        with untrusted.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            data = os.pread(file.fileno(), _BLOCK, offset + max(0, size - _BLOCK) // 2)
    except OSError as error:
        return Cause("not-readable", error.strerror or str(error))._asdict()
    return [f"{size} {hashlib.blake2b(data, digest_size=16).hexdigest()}"]


def fingerprint_of(row: tuple[str, float, float], remote: Remote, stride: int) -> list[list[int]] | dict[str, str]:
    """The fingerprint of a recording's segment, given by start and duration; or why it can't be decoded."""
    wav, start, duration = row
    try:
        return fingerprint(read_utterance(wav, start, duration, sample_rate=RATE, remote=remote), stride).tolist()
    except AudioError as error:
        return Cause.of(error)._asdict()
