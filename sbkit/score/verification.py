"""Error rates of verification: whether two recordings are of one speaker, by a score that is higher if they are."""

from __future__ import annotations

from collections.abc import Sequence
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
    targets = int(of_one.sum())
    others = int((times - of_one).sum())
    if not targets or not others:
        return Rates(np.nan, np.nan, np.nan)

    # Errors at each threshold: at first nothing is accepted, then all trials with each score or more.
    order = np.argsort(-scores, kind="stable")
    is_last_of_score = np.append(np.diff(scores[order]) != 0, True)
    thresholds = np.concatenate([[np.inf], np.asarray(scores, np.float64)[order][is_last_of_score]])
    accepted = np.concatenate([[0], np.cumsum(times[order])[is_last_of_score]])
    accepted_targets = np.concatenate([[0], np.cumsum(of_one[order])[is_last_of_score]])
    misses = targets - accepted_targets
    false_alarms = accepted - accepted_targets

    # The first with as many false alarms, never the one that accepts nothing. Counts compare exactly, and shares don't.
    after = int(np.argmax(false_alarms * targets >= misses * others))
    gaps = misses / targets - false_alarms / others
    share = gaps[after - 1] / (gaps[after - 1] - gaps[after])
    false_alarms_at_eer = false_alarms[after - 1] + share * (false_alarms[after] - false_alarms[after - 1])
    cost = p_target * misses / targets + (1 - p_target) * false_alarms / others
    return Rates(100 * float(false_alarms_at_eer) / others, float(cost.min()) / min(p_target, 1 - p_target),
                 float(thresholds[after]))


def all_pairs(speakers: Sequence[str]) -> Trials:
    """Make trials of all pairs of recordings ``[N]`` whose speakers are known; of at most ``MAX_RECORDINGS``, evenly
    spread."""
    named = np.flatnonzero(np.array([bool(speaker) for speaker in speakers], bool))
    if len(named) > MAX_RECORDINGS:
        named = named[np.linspace(0, len(named) - 1, MAX_RECORDINGS).astype(int)]
    rows, columns = np.triu_indices(len(named), 1)
    first = named[rows]
    second = named[columns]
    _, speaker_ids = np.unique(np.asarray(speakers, object).astype(str), return_inverse=True)
    return Trials(first, second, speaker_ids[first] == speaker_ids[second])


def read_list(path: str | Path) -> list[tuple[bool, str, str]]:
    """Read a list of trials in VoxCeleb's format: lines of 1 (one speaker) or 0, and two recordings."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise SbkitError("no-such-path", f"trials: {path}: no such file", file=path) from None
    except OSError as error:
        raise SbkitError("not-readable", f"trials: {path} cannot be read ({error.strerror or error})",
                         file=path) from None
    except UnicodeDecodeError as error:
        raise SbkitError("not-utf8", f"trials: {path} is not UTF-8 ({error})", hint="save it as UTF-8",
                         file=path) from None
    trials = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words:
            continue
        if len(words) != 3 or words[0] not in ("0", "1"):
            raise SbkitError("malformed-row", f"trials: {path}, line {number} is {shown(line)}",
                             hint="expected 1 or 0 and two recordings: 1 id10270/x6uYqmx31kE/00001.wav "
                                  "id10270/8jEAjG6SegY/00008.wav", file=path, line=number, value=line)
        trials.append((words[0] == "1", words[1], words[2]))
    if not trials:
        raise SbkitError("no-utterances", f"trials: {path} is empty", file=path)
    return trials


def from_list(trials: Sequence[tuple[bool, str, str]], ids: Sequence[str]) -> tuple[Trials, int]:
    """Find the recordings of a list among ids, with or without a suffix; returns the trials that have both, and how
    many others there are."""
    place = {name: number for number, name in enumerate(ids)}

    def find(name: str) -> int:
        return place.get(name, place.get(name.rpartition(".")[0], -1))

    first = np.array([find(name) for _, name, _ in trials], int)
    second = np.array([find(name) for _, _, name in trials], int)
    same = np.array([same for same, _, _ in trials], bool)
    has_both = (first >= 0) & (second >= 0)
    return Trials(first[has_both], second[has_both], same[has_both]), int((~has_both).sum())
