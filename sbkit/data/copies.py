"""Finds recordings of one split that are copies of another's: the same bytes under two names, or the same sound."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any

import numpy as np

from sbkit.data.audio import AudioError, read_bytes, read_utterance, split_member
from sbkit.data.fingerprint import RATE, STRIDE, Index, fingerprint
from sbkit.data.manifest import Column
from sbkit.data.measure import ask
from sbkit.data.remote import NOWHERE, Remote
from sbkit.system import untrusted
from sbkit.system.cores import usable_cores

#: From the middle of a file; all of it is read only where another has the same size and block.
_BLOCK = 4096
#: Recordings that one process decodes at once, and for how many it is worth starting.
CHUNK, WORTH_PROCESSES = 32, 64
# Fewer rows take no time, so they get no progress bar.
_WORTH_A_BAR = 1000


class Copies:
    """The recordings of splits, each compared with those of the splits before it.

    Arguments
    ---------
    by_sound : decode all and compare fingerprints; otherwise only files of the same bytes are found, of which one block
        is read
    journal : a file that stores what was found, so that a preparation continues where it was stopped
    """

    def __init__(self, by_sound: bool, *, workers: int | None = None, remote: Remote = NOWHERE,
                 journal: Path | None = None, show_progress: bool = True):
        self.by_sound, self.workers, self.remote, self.journal = by_sound, workers, remote, journal
        self.show_progress = show_progress
        self._index, self._names = Index(), list[str]()
        self._blocks: dict[tuple[str, float], list[tuple[str, str]]] = {}

    def search(self, split: str, ids: Column, wavs: Column, starts: np.ndarray, durations: np.ndarray, *,
               keep: bool) -> tuple[dict[int, str], dict[int, str]]:
        """Compare the N rows of a split with those of the splits before; ``keep`` them for the splits after it.

        Returns
        -------
        found : for each row that is a copy, of which one: "test: ID"
        causes : for each row that can't be decoded, why
        """
        found = self._same_bytes(split, ids, wavs, starts, keep)
        causes: dict[int, str] = {}
        if not self.by_sound:
            return found, causes
        rows = [i for i in range(len(ids)) if i not in found]
        stride = 1 if keep else STRIDE
        sounds: dict[int, np.ndarray] = {}

        def compare(answer: list[list[int]]) -> list[Any]:  # what JSON can hold, unless these are kept
            sound = np.array(answer, np.uint32)
            number = self._index.find(sound[:, :: STRIDE // stride])
            return ["" if number is None else self._names[number], sound if keep else 0]

        for j, answer in ask("sbkit.data.copies:sound_of", [[wavs[i], float(starts[i]), float(durations[i])]
                                                            for i in rows],
                             (stride,), workers=self.workers or usable_cores(), remote=self.remote, chunk=CHUNK,
                             worth_processes=WORTH_PROCESSES, journal=None if keep else self.journal, then=compare,
                             what=f"{split}: copies", show_progress=self.show_progress and len(rows) >= _WORTH_A_BAR):
            if isinstance(answer, str):
                causes[rows[j]] = answer
                continue
            name, sound = answer
            if name:
                found[rows[j]] = name
            if keep:
                sounds[rows[j]] = sound
        for i in sorted(sounds):
            self._index.add(sounds[i])
            self._names.append(f"{split}: {ids[i]}")
        return found, causes

    def _same_bytes(self, split: str, ids: Column, wavs: Column, starts: np.ndarray, keep: bool) -> dict[int, str]:
        files = list(dict.fromkeys(wavs))
        blocks: dict[str, str] = {}
        for j, answer in ask("sbkit.data.copies:block_of", files, workers=self.workers, remote=self.remote,
                             what=f"{split}: bytes", show_progress=self.show_progress and len(files) >= _WORTH_A_BAR):
            if not isinstance(answer, str):  # why it can't be read is found when it is measured or decoded
                blocks.update((files[j], block) for block in answer)
        found, new = {}, []
        for i, (id_, wav, start) in enumerate(zip(ids, wavs, starts.tolist(), strict=True)):
            if wav not in blocks:
                continue
            place = blocks[wav], start
            name = next((name for name, other in self._blocks.get(place, ()) if self._equal(wav, other)), None)
            if name is not None:
                found[i] = name
            elif keep:
                new.append((place, (f"{split}: {id_}", wav)))
        for place, entry in new:
            self._blocks.setdefault(place, []).append(entry)
        return found

    def _equal(self, wav: str, other: str) -> bool:
        try:
            return read_bytes(wav, self.remote) == read_bytes(other, self.remote)
        except AudioError:
            return False


def block_of(wav: str, remote: Remote) -> list[str] | str:
    """The size of a recording's file and a hash of a block in its middle; none of a URL; or why it can't be read."""
    path, offset, size = split_member(wav)
    if "://" in path:
        return []
    try:
        with untrusted.open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size if size is None else size
            data = os.pread(file.fileno(), _BLOCK, offset + max(0, size - _BLOCK) // 2)
    except OSError as error:
        return str(error)
    return [f"{size} {hashlib.blake2b(data, digest_size=16).hexdigest()}"]


def sound_of(row: tuple[str, float, float], remote: Remote, stride: int) -> list[list[int]] | str:
    """The fingerprint of a recording's stretch from a start on, for a duration; or why it can't be decoded."""
    wav, start, duration = row
    try:
        return fingerprint(read_utterance(wav, start, duration, sample_rate=RATE, remote=remote), stride).tolist()
    except AudioError as error:
        return error.cause
