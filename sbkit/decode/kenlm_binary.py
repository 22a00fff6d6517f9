"""KenLM's binary language models, memory-mapped from disk and written without KenLM.

Only the default layout of ``build_binary`` ("probing") is supported: hash tables that are searched in memory-mapped
files, so that a model of gigabytes opens instantly and is shared by all processes of a machine.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from sbkit.decode.arpa import decode_word
from sbkit.decode.language_model import BEGIN, END, LN10, MAX_ORDER, UNKNOWN, LanguageModel
from sbkit.decode.ngram import NGram
from sbkit.errors import SbkitError
from sbkit.system import untrusted
from sbkit.system.console import atomic_write

_MAGIC = b"mmap lm http://kheafield.com/code format version 5\n\0"
_SANITY = np.dtype([("magic", "S56"), ("floats", "<f4", 3), ("words", "<u4", 3), ("one", "<u8")])
_FIXED = np.dtype({"names": ["order", "multiplier", "kind", "has_words", "version"],
                   "formats": ["u1", "<f4", "<u4", "u1", "<u4"], "offsets": [0, 4, 8, 12, 16], "itemsize": 20})
_WORD = np.dtype([("key", "<u8"), ("id", "<u4")])
_UNIGRAM = np.dtype([("log10", "<f4"), ("backoff", "<f4")])
_MIDDLE = np.dtype([("key", "<u8"), ("log10", "<f4"), ("backoff", "<f4")])
_LONGEST = np.dtype([("key", "<u8"), ("log10", "<f4")])
_MULTIPLIER = 1.5  # slots per entry in tables that are written here
#: Maximum slots per entry, and maximum consecutive occupied slots: with KenLM's multiplier of 1.5, a table of a billion
#: n-grams has about 300.
_MAX_MULTIPLIER, _MAX_STEPS = 100, 10_000
_BLOCK = 1 << 20
_KINDS = ("probing", "rest probing", "trie", "quantized trie", "array trie", "quantized array trie")


def is_kenlm_binary(path: str | Path) -> bool:
    """Whether a file is in KenLM's binary format."""
    with untrusted.open_regular(path) as file:
        return file.read(8) == _MAGIC[:8]


def _slots(entries: int, multiplier: float) -> int:
    return max(entries + 1, int(np.float32(multiplier) * np.float32(entries)))


def combine(key: np.ndarray, word: np.ndarray) -> np.ndarray:
    """The key of an n-gram with one more word in front; a single word's key is its number."""
    one_more = (word.astype(np.uint64) + np.uint64(1)) * np.uint64(17894857484156487943)
    return key * np.uint64(8978948897894561157) ^ one_more


class KenLM(LanguageModel):
    """A model in KenLM's format.

    A state is a row [2 order - 1] of int32: the number of words in the history, these words, latest first, and the bits
    of their back-offs. So the model itself keeps no state.
    """

    def __init__(self, path: str | Path):
        self.path = Path(path)
        data = np.memmap(self.path, dtype=np.uint8, mode="r")
        if len(data) < _SANITY.itemsize + _FIXED.itemsize:
            raise self._truncated()
        sanity = data[:_SANITY.itemsize].view(_SANITY)[0]
        if sanity["magic"] != _MAGIC.rstrip(b"\0") or sanity["one"] != 1 or sanity["floats"].tolist() != [0, 1, -0.5]:
            raise SbkitError(f"{self.path}: it was written by another version of KenLM, or on another type of machine",
                             hint="build it again from the ARPA file, or use the ARPA file")
        at = _SANITY.itemsize + _FIXED.itemsize
        fixed = data[_SANITY.itemsize:at].view(_FIXED)[0]
        kind, order = int(fixed["kind"]), int(fixed["order"])
        if kind:
            raise SbkitError(f"{self.path} is a KenLM {_KINDS[min(kind, 5)]} model, and only probing ones can be read",
                             hint="run build_binary without 'trie', or use the ARPA file")
        if not fixed["has_words"]:
            raise SbkitError(f"{self.path}: the vocabulary is not in the file",
                             hint="build it again with the vocabulary, or use the ARPA file")
        multiplier = float(fixed["multiplier"])
        if not 2 <= order <= MAX_ORDER or not 1 <= multiplier <= _MAX_MULTIPLIER:
            raise SbkitError(f"{self.path}: its header has the order {order} and the probing multiplier "
                             f"{multiplier:g}, which can't be right", hint="download it again or build it again")
        if at + 8 * order > len(data):
            raise self._truncated()
        self.counts = data[at:at + 8 * order].view("<u8").tolist()
        if not 0 < self.counts[0] <= max(self.counts) <= len(data):
            raise self._truncated()
        at = -(-(at + 8 * order) // 8) * 8 + 8 + _slots(self.counts[0], multiplier) * _WORD.itemsize
        tables = []
        sizes = [self.counts[0] + 1, *(_slots(count, multiplier) for count in self.counts[1:])]
        kinds = [_UNIGRAM, *[_MIDDLE] * (order - 2), _LONGEST]
        for size, cell in zip(sizes, kinds, strict=True):
            end = at + size * cell.itemsize
            if end > len(data):
                raise self._truncated()
            tables.append(data[at:end].view(cell))
            at = end
        self._unigrams, self._tables = tables[0], tables[1:]
        for table in self._tables:
            self._probe(table["key"], np.zeros(1, np.uint64))  # finds a free slot
        words = self._read_words(data[at:])
        self.words = [decode_word(self.path, word) for word in words]
        self.ids = {word: i for i, word in enumerate(self.words)}
        self.unknown, self.end = 0, self.ids.get(END, 0)
        self.empty = np.zeros(2 * order - 1, np.int32)
        self.start, begin = self.empty.copy(), self.ids.get(BEGIN)
        if begin is not None:
            self.start[:2] = 1, begin
            self.start[order:].view(np.float32)[0] = self._unigrams["backoff"][begin]

    def _read_words(self, data: np.ndarray) -> list[bytes]:
        """Split the bytes after the tables into words; checks them for runs of zeros before they are copied."""
        hint = "download it again or build it again"
        for at in range(0, len(data), _BLOCK):
            block = data[at:at + _BLOCK + 1]
            if not (block[1:] | block[:-1]).all():
                raise SbkitError(f"{self.path} is too long, or damaged: it has zeros where words should be", hint=hint)
        *words, rest = data.tobytes().split(b"\0", self.counts[0] + 1)
        if not words or words[0] != UNKNOWN.encode() or len(words) < self.counts[0]:
            raise self._truncated()
        if rest:
            raise SbkitError(f"{self.path} is damaged: its last {len(rest)} bytes are not words", hint=hint)
        return words

    def _truncated(self) -> SbkitError:
        return SbkitError(f"{self.path} is truncated: its header describes more than its {self.path.stat().st_size} "
                          "bytes", hint="download it again or build it again")

    def score(self, states: np.ndarray, words: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        lengths, contexts = states[:, 0], states[:, 1:self.order]
        before = np.ascontiguousarray(states[:, self.order:]).view(np.float32)
        unigram = self._unigrams[words]
        log10 = -np.abs(unigram["log10"])  # the sign is a flag in this format
        backoffs = np.zeros((len(words), self.order - 1), np.float32)
        backoffs[:, 0] = unigram["backoff"]
        matched = np.ones(len(words), np.int64)
        usable = _has_longer(unigram["backoff"]).astype(np.int64)  # length of the next history
        key, alive = words.astype(np.uint64), np.arange(len(words))
        for k in range(self.order - 1):
            alive = alive[lengths[alive] > k]
            if not len(alive):
                break
            key_here = combine(key[alive], contexts[alive, k])
            table = self._tables[k]
            found = self._probe(table["key"], key_here)
            hit = found >= 0
            alive, found, key_here = alive[hit], found[hit], key_here[hit]
            key[alive] = key_here
            log10[alive] = -np.abs(table["log10"][found])
            matched[alive] = k + 2
            if k + 2 < self.order:
                backoff = table["backoff"][found]
                backoffs[alive, k + 1] = backoff
                usable[alive[_has_longer(backoff)]] = k + 2
        for k in range(self.order - 1):
            charged = (k >= matched - 1) & (k < lengths)
            log10 = log10 + np.where(charged, before[:, k], np.float32(0))
        after = np.empty((len(words), 2 * self.order - 1), np.int32)
        after[:, 0], after[:, 1], after[:, 2:self.order] = usable, words, contexts[:, :-1]
        after[:, self.order:] = backoffs.view(np.int32)
        beyond = np.arange(self.order - 1) >= usable[:, None]
        after[:, 1:][np.concatenate([beyond, beyond], axis=1)] = 0  # so that equal histories have equal states
        if not (log10 < np.inf).all():  # False for NaN
            raise SbkitError(f"{self.path} is damaged: it has probabilities that are not numbers",
                             hint="download it again or build it again")
        return log10 * np.float32(LN10), after

    def _probe(self, keys: np.ndarray, wanted: np.ndarray) -> np.ndarray:
        """Find the rows of keys in a table with linear probing, -1 if missing."""
        size = np.uint64(len(keys))
        at = (wanted % size).astype(np.int64)
        rows = np.full(len(wanted), -1, np.int64)
        todo = np.arange(len(wanted))
        for _ in range(_MAX_STEPS):
            if not len(todo):
                return rows
            stored = keys[at[todo]]
            hit = stored == wanted[todo]
            rows[todo[hit]] = at[todo[hit]]
            todo = todo[~hit & (stored != 0)]
            at[todo] = (at[todo] + 1) % len(keys)
        raise SbkitError(f"{self.path} is damaged: {_MAX_STEPS:,} slots of a table are occupied in a row",
                         hint="download it again or build it again")


def _has_longer(backoff: np.ndarray) -> np.ndarray:
    """Whether longer n-grams begin with this one: then its backoff isn't minus zero."""
    return ~((backoff == 0) & np.signbit(backoff))


def write(model: NGram, path: str | Path) -> None:
    """Write a model that KenLM, and software built on it, can read. The write is atomic."""
    if model.order < 2:
        raise SbkitError("KenLM's format needs an order of at least 2")
    # KenLM gives the unknown word number 0.
    order = np.array([model.unknown, *(i for i in range(len(model.words)) if i != model.unknown)])
    number = np.empty(len(order), np.uint64)
    number[order] = np.arange(len(order), dtype=np.uint64)
    words = [model.words[i].encode() for i in order]
    tables, ngrams = [], number[:, None]  # the words of each n-gram of a level
    for k, level in enumerate(model.levels):
        longer = model.levels[k + 1] if k + 1 < model.order else None
        values = np.zeros(len(level.word), _MIDDLE if longer is not None else _LONGEST)
        values["log10"] = -np.abs(level.log10)
        if longer is not None:
            # The signs of zeros and of probabilities encode whether longer n-grams begin or end with this one.
            is_context = np.zeros(len(level.word), bool)
            is_context[longer.context] = True
            values["backoff"] = np.where(level.backoff != 0, level.backoff, np.where(is_context, 0.0, -0.0))
            ended = model.suffixes(k + 1)
            if (ended < 0).any():
                raise SbkitError("the model has n-grams without the shorter ones they end with, as some tools prune "
                                 "them", hint="KenLM's own build_binary can write it")
            values["log10"][ended] = np.abs(values["log10"][ended])
        if k:
            ngrams = np.concatenate([ngrams[level.context], number[level.word][:, None]], axis=1)
            key = ngrams[:, -1]
            for before in range(k - 1, -1, -1):
                key = combine(key, ngrams[:, before])
            values["key"] = key
            tables.append(_table(values, len(values)))
        else:
            unigrams = np.zeros(len(words) + 1, _UNIGRAM)
            for name in ("log10", "backoff"):
                unigrams[name][:-1] = values[name][order]
            tables.append(unigrams)
    vocabulary = np.zeros(len(words) - 1, _WORD)
    vocabulary["key"], vocabulary["id"] = _murmur(words[1:]), np.arange(1, len(words))
    sanity = np.zeros(1, _SANITY)
    sanity["magic"], sanity["floats"], sanity["one"] = _MAGIC, (0, 1, -0.5), 1
    sanity["words"] = (1, 0xFFFFFFFF, 0)
    fixed = np.zeros(1, _FIXED)
    fixed["order"], fixed["multiplier"], fixed["has_words"] = model.order, _MULTIPLIER, 1
    header = sanity.tobytes() + fixed.tobytes() + np.array(model.counts, "<u8").tobytes()
    with atomic_write(path, "wb") as file:
        file.write(header + bytes(-len(header) % 8))
        file.write(np.array([0, len(words)], "<u4").tobytes())
        file.write(_table(vocabulary, len(words)).tobytes())
        for table in tables:
            file.write(table.tobytes())
        file.write(b"".join(word + b"\0" for word in words))


def _table(entries: np.ndarray, count: int) -> np.ndarray:
    """Build a hash table with linear probing: an entry is in the first free slot from key modulo size on."""
    size = _slots(count, _MULTIPLIER)
    table = np.zeros(size, entries.dtype)
    ideal = (entries["key"] % np.uint64(size)).astype(np.int64)
    order = np.argsort(ideal, kind="stable")
    steps = np.arange(len(order))
    place = np.maximum.accumulate(ideal[order] - steps) + steps
    over = int((place >= size).sum())  # wrap around
    table[place[:len(place) - over]] = entries[order[:len(order) - over]]
    if over:
        table[np.flatnonzero(table["key"] == 0)[:over]] = entries[order[len(order) - over:]]
    return table


def _murmur(words: list[bytes]) -> np.ndarray:
    """The MurmurHash64A of each word, by which KenLM looks up its number."""
    prime = np.uint64(0xC6A4A7935BD1E995)
    lengths = np.array([len(word) for word in words], np.int64)
    width = int(lengths.max(initial=0)) // 8 + 1
    blocks = np.array(words, dtype=f"S{8 * width}").view("<u8").reshape(len(words), width)
    hashes = lengths.astype(np.uint64) * prime
    for i in range(width):
        block = blocks[:, i] * prime
        block = (block ^ (block >> np.uint64(47))) * prime
        hashes = np.where(lengths >= 8 * (i + 1), (hashes ^ block) * prime, hashes)
    rest = np.take_along_axis(blocks, (lengths // 8)[:, None], axis=1)[:, 0]
    hashes = np.where(lengths % 8 > 0, (hashes ^ rest) * prime, hashes)
    hashes = (hashes ^ (hashes >> np.uint64(47))) * prime
    return hashes ^ (hashes >> np.uint64(47))
