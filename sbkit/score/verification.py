"""Error rates of verification: whether two recordings are of one speaker, by a score that is higher if they are."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sbkit.errors import SbkitError, shown

#: The share of trials of one speaker that minDCF assumes, as VoxCeleb's challenges do; a miss costs as much as a false
#: alarm.
P_TARGET = 0.01
#: Trials are made from at most this many recordings, which give 2 million.
MAX_RECORDINGS = 2000


class Trials(NamedTuple):
    """N pairs of recordings, by their places in a list, and whether they are of one speaker."""

    first: np.ndarray
    second: np.ndarray
    same: np.ndarray


class Rates(NamedTuple):
    """The numbers of a set of trials."""

    eer: float
    """Per cent: the share of errors where as many trials of one speaker are refused as of two are accepted."""
    min_dcf: float
    """The cost of the best threshold; 1 is that of refusing, or accepting, all trials."""
    threshold: float
    """The score from which accepting gives that many errors of both kinds."""


def rates(scores: np.ndarray, same: np.ndarray, p_target: float = P_TARGET, times: np.ndarray | None = None) -> Rates:
    """Compute the rates of trials, ``[N]`` scores and whether each is of one speaker; nan without both kinds.

    The thresholds are all scores, and between two of them errors are interpolated.

    times : how often each trial counts, ``[N]`` integers

    >>> rates(np.array([0.9, 0.8, 0.3, 0.1]), np.array([True, True, False, False]))
    Rates(eer=0.0, min_dcf=0.0, threshold=0.8)
    """
    times = np.ones(len(scores), np.int64) if times is None else times
    of_one = times * np.asarray(same, bool)
    targets, others = int(of_one.sum()), int((times - of_one).sum())
    if not targets or not others:
        return Rates(np.nan, np.nan, np.nan)
    order = np.argsort(-scores, kind="stable")
    thresholds, ends = np.asarray(scores, np.float64)[order], np.append(np.diff(scores[order]) != 0, True)
    accepted, all_accepted = (np.concatenate([[0], np.cumsum(each[order])[ends]]) for each in (of_one, times))
    missed, false = targets - accepted, all_accepted - accepted
    thresholds = np.concatenate([[np.inf], thresholds[ends]])
    cost = p_target * missed / targets + (1 - p_target) * false / others
    # The first with as many false alarms, never the one that accepts nothing. Counts compare exactly, and shares don't.
    after = int(np.argmax(false * targets >= missed * others))
    gaps = missed / targets - false / others
    share = gaps[after - 1] / (gaps[after - 1] - gaps[after])
    return Rates(100 * float(false[after - 1] + share * (false[after] - false[after - 1])) / others,
                 float(cost.min()) / min(p_target, 1 - p_target), float(thresholds[after]))


def all_pairs(speakers: Sequence[str]) -> Trials:
    """Make trials of all pairs of recordings ``[N]`` whose speakers are known; of at most ``MAX_RECORDINGS``, evenly
    spread."""
    known = np.flatnonzero(np.array([bool(each) for each in speakers], bool))
    if len(known) > MAX_RECORDINGS:
        known = known[np.linspace(0, len(known) - 1, MAX_RECORDINGS).astype(int)]
    first, second = (known[side] for side in np.triu_indices(len(known), 1))
    names = np.unique(np.asarray(speakers, object).astype(str), return_inverse=True)[1]
    return Trials(first, second, names[first] == names[second])


def read_list(path: str | Path) -> list[tuple[bool, str, str]]:
    """Read a list of trials in VoxCeleb's format: lines of 1 (one speaker) or 0, and two recordings."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise SbkitError(f"trials: {path} cannot be read ({getattr(error, 'strerror', None) or error})") from None
    found = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 3 or words[0] not in ("0", "1"):
            raise SbkitError(f"trials: {path}, line {number} is {shown(line)}",
                             hint="expected 1 or 0 and two recordings: 1 id10270/x6uYqmx31kE/00001.wav "
                                  "id10270/8jEAjG6SegY/00008.wav")
        found.append((words[0] == "1", words[1], words[2]))
    if not found:
        raise SbkitError(f"trials: {path} is empty")
    return found


def from_list(trials: Sequence[tuple[bool, str, str]], ids: Sequence[str]) -> tuple[Trials, int]:
    """Find the recordings of a list among ids, with or without a suffix; returns the trials that have both, and how
    many others there are."""
    place: Mapping[str, int] = {name: number for number, name in enumerate(ids)}

    every = np.array([(*(place.get(name, place.get(name.rpartition(".")[0], -1)) for name in pair), same)
                      for same, *pair in trials], int).reshape(-1, 3)
    found = (every[:, :2] >= 0).all(1)
    first, second, same = every[found].T
    return Trials(first, second, same.astype(bool)), int((~found).sum())
