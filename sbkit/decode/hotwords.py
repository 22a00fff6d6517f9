"""Hot words: phrases that a search should prefer; each letter adds its share of the boost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sbkit.decode import hashing
from sbkit.errors import SbkitError

DEFAULT_BOOST = 5.0  # natural logarithm
_STATE = np.uint64(0xA24BAED4963EE407)


def phrase_boosts(given: Mapping[str, float] | Iterable[str] | None,
                  boost: float = DEFAULT_BOOST) -> dict[str, float]:
    """Return the boost of each phrase; ``boost`` is the default."""
    check_no_text(given)
    return dict(given) if isinstance(given, Mapping) else {normalise_phrase(each): boost for each in given or ()}


def check_no_text(given: object) -> None:
    """Raise if hot words are one text instead of a list: its letters would be the words."""
    if isinstance(given, str):
        raise SbkitError(f"the hot words are the text {given!r}, but must be a list of words",
                         hint=f"put it in a list: [{given!r}]")


def normalise_phrase(given: str) -> str:
    """Return a phrase with single spaces between its words."""
    if not isinstance(given, str):
        raise SbkitError(f"a hot word is {given!r}, but must be a text", hint="boosts are given as {'ada lovelace': 6}")
    if not (phrase := " ".join(given.split())):
        raise SbkitError("a hot word is empty", hint="leave it out, or write the word")
    return phrase


class HotWords:
    """Boosts a phrase while it is being spelled; the boost is taken back if the phrase isn't completed.

    A state stands for the complete words of a phrase; 0 means none.

    boosts : the boost of each phrase (natural logarithm): 5 makes it 150 times as likely
    """

    def __init__(self, boosts: Mapping[str, float]):
        self.boosts = {normalise_phrase(phrase): float(boost) for phrase, boost in boosts.items()}
        for phrase, boost in self.boosts.items():
            if not boost > 0:
                raise SbkitError(f"the hot word {phrase!r} has the boost {boost:g}",
                                 hint="give words a positive boost, such as 5")
        self.words = list(dict.fromkeys(word for phrase in self.boosts for word in phrase.split()))
        self.max_boost = max([0.0, *self.boosts.values()])
        states: dict[tuple[str, ...], int] = {(): 0}
        earned = [0.0]  # boost earned in each state
        prefixes: dict[int, float] = {}  # (state, prefix of a word) -> earned
        ended: dict[int, tuple[int, float]] = {}  # (state, word) -> state after, boost kept
        for phrase, boost in self.boosts.items():
            words = phrase.split()
            size, spelled = sum(len(word.encode()) for word in words), 0
            for number, word in enumerate(words):
                before, after = states[tuple(words[:number])], tuple(words[:number + 1])
                hashes = hashing.prefixes([word.encode()])[0]
                keys = self._keys(np.full(len(hashes), before), hashes).tolist()
                for letters, key in enumerate(keys, start=spelled + 1):
                    prefixes[key] = max(prefixes.get(key, 0.0), boost * letters / size)
                spelled += len(keys)
                last = number + 1 == len(words)
                if not last and after not in states:
                    states[after] = len(earned)
                    earned.append(0.0)
                if not last:
                    earned[states[after]] = max(earned[states[after]], boost * spelled / size)
                to, gain = ended.get(keys[-1], (0, 0.0))
                ended[keys[-1]] = (to, max(gain, boost)) if last else (states[after], gain)
        self._earned = np.array(earned)
        self._prefixes = _table(prefixes, np.float64)
        self._to = _table({key: to for key, (to, _) in ended.items()}, np.int64)
        self._gain = _table({key: gain for key, (_, gain) in ended.items()}, np.float64)

    def __bool__(self) -> bool:
        return bool(self.boosts)

    @staticmethod
    def _keys(states: np.ndarray, words: np.ndarray) -> np.ndarray:
        return words + states.astype(np.uint64) * _STATE

    def expect(self, states: np.ndarray, words: np.ndarray) -> np.ndarray:
        """The boost so far of word prefixes [N] after states [N]; hash 0 means no word."""
        boost = np.maximum(self._prefixes.get(self._keys(states, words), 0.0), self._prefixes.get(words, 0.0))
        return np.where(words == 0, self._earned[states], boost)

    def complete(self, states: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The boost that complete words [N] keep after states [N], and the states after them."""
        keys = self._keys(states, words)
        gain = np.maximum(self._gain.get(keys, 0.0), self._gain.get(words, 0.0))
        further = self._to.get(keys, 0)
        return gain, np.where(further > 0, further, self._to.get(words, 0))


def _table(values: dict[int, float], kind: type) -> hashing.HashTable:
    return hashing.HashTable(np.array(list(values), np.uint64), np.array(list(values.values()), kind))
