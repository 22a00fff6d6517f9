"""Hot words: phrases that a search should prefer; each letter adds its share of the boost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np

from sbkit.decode import hashing
from sbkit.errors import SbkitError

DEFAULT_BOOST = 5.0  # natural logarithm
_STATE = np.uint64(0xA24BAED4963EE407)


def phrase_boosts(phrases: Mapping[str, float] | Iterable[str] | None,
                  boost: float = DEFAULT_BOOST) -> dict[str, float]:
    """Return the boost of each phrase; ``boost`` is the default."""
    check_no_text(phrases)
    if isinstance(phrases, Mapping):
        return dict(phrases)
    return {normalise_phrase(phrase): boost for phrase in phrases or ()}


def check_no_text(phrases: object) -> None:
    """Raise if hot words are one text instead of a list: its letters would be the words."""
    if isinstance(phrases, str):
        raise SbkitError("bad-hot-word", f"the hot words are the text {phrases!r}, but must be a list of words",
                         hint=f"put it in a list: [{phrases!r}]")


def normalise_phrase(phrase: str) -> str:
    """Return a phrase with single spaces between its words."""
    if not isinstance(phrase, str):
        raise SbkitError("bad-hot-word", f"a hot word is {phrase!r}, but must be a text",
                         hint="boosts are given as {'ada lovelace': 6}")
    normalised = " ".join(phrase.split())
    if not normalised:
        raise SbkitError("bad-hot-word", "a hot word is empty", hint="leave it out, or write the word")
    return normalised


class HotWords:
    """Boosts a phrase while it is being spelled; the boost is taken back if the phrase isn't completed.

    A state stands for the complete words of a phrase; 0 means none.

    boosts : the boost of each phrase (natural logarithm): 5 makes it 150 times as likely
    """

    def __init__(self, boosts: Mapping[str, float]):
        self.boosts = {normalise_phrase(phrase): float(boost) for phrase, boost in boosts.items()}
        for phrase, boost in self.boosts.items():
            if not boost > 0:
                raise SbkitError("bad-hot-word", f"the hot word {phrase!r} has the boost {boost:g}",
                                 hint="give words a positive boost, such as 5")
        self.words = list(dict.fromkeys(word for phrase in self.boosts for word in phrase.split()))
        self.max_boost = max([0.0, *self.boosts.values()])
        self._tabulate()

    def _tabulate(self) -> None:
        """Build the tables that :meth:`expect` and :meth:`complete` look up.

        Their keys are a state and a word, or a prefix of one, in one hash.
        """
        states: dict[tuple[str, ...], int] = {(): 0}
        state_boost = [0.0]  # the boost so far in each state
        prefix_boost: dict[int, float] = {}  # that of a state and a prefix of its next word
        next_state: dict[int, int] = {}  # of a state and its next word, 0 where a phrase is complete
        complete_boost: dict[int, float] = {}  # of a state and its next word, 0 where no phrase is complete
        for phrase, boost in self.boosts.items():
            words = phrase.split()
            size = sum(len(word.encode()) for word in words)
            spelled = 0  # bytes of the phrase so far
            for number, word in enumerate(words):
                state = states[tuple(words[:number])]
                hashes = hashing.prefixes([word.encode()])[0]
                keys = self._keys(np.full(len(hashes), state), hashes).tolist()
                for letters, key in enumerate(keys, start=spelled + 1):
                    prefix_boost[key] = max(prefix_boost.get(key, 0.0), boost * letters / size)
                spelled += len(keys)

                word_key = keys[-1]
                next_state.setdefault(word_key, 0)
                complete_boost.setdefault(word_key, 0.0)
                if number + 1 == len(words):
                    complete_boost[word_key] = max(complete_boost[word_key], boost)
                    continue
                words_so_far = tuple(words[:number + 1])
                if words_so_far not in states:
                    states[words_so_far] = len(state_boost)
                    state_boost.append(0.0)
                after = states[words_so_far]
                state_boost[after] = max(state_boost[after], boost * spelled / size)
                next_state[word_key] = after

        self._state_boost = np.array(state_boost)
        self._prefix_boost = _table(prefix_boost, np.float64)
        self._next_state = _table(next_state, np.int64)
        self._complete_boost = _table(complete_boost, np.float64)

    def __bool__(self) -> bool:
        return bool(self.boosts)

    @staticmethod
    def _keys(states: np.ndarray, words: np.ndarray) -> np.ndarray:
        return words + states.astype(np.uint64) * _STATE

    def expect(self, states: np.ndarray, words: np.ndarray) -> np.ndarray:
        """The boost so far of word prefixes [N] after states [N]; hash 0 means no word."""
        # A word may go on with the state's phrase or begin another: in state 0, a key is the word's own hash.
        boost = np.maximum(self._prefix_boost.get(self._keys(states, words), 0.0), self._prefix_boost.get(words, 0.0))
        return np.where(words == 0, self._state_boost[states], boost)

    def complete(self, states: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The boost that complete words [N] keep after states [N], and the states after them."""
        keys = self._keys(states, words)
        gain = np.maximum(self._complete_boost.get(keys, 0.0), self._complete_boost.get(words, 0.0))
        further = self._next_state.get(keys, 0)
        return gain, np.where(further > 0, further, self._next_state.get(words, 0))


def _table(values: Mapping[int, float], dtype: type) -> hashing.HashTable:
    return hashing.HashTable(np.array(list(values), np.uint64), np.array(list(values.values()), dtype))
