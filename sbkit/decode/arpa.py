"""Reads and writes ARPA, the text format of n-gram language models."""

from __future__ import annotations

import gzip
import io
import itertools
import math
import re
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from sbkit.decode.ngram import MAX_ORDER, Level, NGram
from sbkit.decode.workspace import chunks
from sbkit.errors import SbkitError, shown
from sbkit.system import untrusted
from sbkit.system.console import atomic_write

_BLOCK_BYTES = 1 << 22
#: Maximum size of the text.
_MAX_BYTES = 1 << 33
_MAX_LOG10 = 1e-4  # of a probability: some tools round to slightly above 0
_COUNT = re.compile(rb"ngram[ \t]+(\d{1,18})[ \t]*=[ \t]*(\d{1,18})(?!\d)")


def write(model: NGram, path: str | Path) -> None:
    """Write a model; a name that ends in ``.gz`` compresses it. The write is atomic."""
    path = Path(path)
    with atomic_write(path, "wb") as file:
        packed = gzip.GzipFile(filename="", fileobj=file, mode="wb", mtime=0) if path.suffix == ".gz" else file
        text = io.TextIOWrapper(packed, encoding="utf-8", newline="")
        text.writelines(_lines(model))
        text.flush()
        text.detach()
        if packed is not file:
            packed.close()


def _lines(model: NGram) -> Iterator[str]:
    yield "\\data\\\n"
    yield from (f"ngram {order}={count}\n" for order, count in enumerate(model.counts, start=1))
    for order, level in enumerate(model.levels, start=1):
        yield f"\n\\{order}-grams:\n"
        for part in chunks(len(level.word)):
            # The words of each n-gram, from its last one to its first: in memory only for a chunk of them.
            words, rows = [_words(model, level.word[part])], level.context[part]
            for below in reversed(model.levels[:order - 1]):
                words.append(_words(model, below.word[rows]))
                rows = below.context[rows]
            texts = map(" ".join, zip(*reversed(words), strict=True))
            probabilities = level.log10[part].tolist()
            if order == model.order:
                yield from (f"{p:.7g}\t{text}\n" for p, text in zip(probabilities, texts, strict=True))
            else:
                columns = zip(probabilities, texts, level.backoff[part].tolist(), strict=True)
                yield from (f"{p:.7g}\t{text}\t{backoff:.7g}\n" for p, text, backoff in columns)
    yield "\n\\end\\\n"


def _words(model: NGram, ids: np.ndarray) -> Iterator[str]:
    return map(model.words.__getitem__, ids.tolist())


def read(path: str | Path) -> NGram:
    """Read a model, ``.gz`` or plain; raises ``SbkitError`` for a damaged file."""
    path = Path(path)
    try:
        data = untrusted.unpack(path, _MAX_BYTES)
    except FileNotFoundError:
        raise SbkitError(f"{path}: there is no such language model",
                         hint="sbkit lm estimates one from text") from None
    except EOFError:
        raise SbkitError(f"{path} is truncated: its compressed data ends too early",
                         hint="download it again or write it again") from None
    except OSError as error:
        raise SbkitError(f"{path}: cannot be read ({error.strerror or error})") from None
    begin = data.find(b"\\data\\")
    if begin < 0:
        binary = data.startswith(b"mmap lm http://kheafield.com/code")
        raise SbkitError(f"{path} is not an ARPA language model",
                         hint="it is KenLM's binary: use the ARPA file that it was made from" if binary
                         else "such a file has a section \\data\\")
    first = data.find(b"\n\\1-grams:", begin) + 1 or -1  # where its section begins; -1: it is missing
    header = data[begin:first if first >= 0 else len(data)]
    counts = [(int(order), int(count)) for order, count in _COUNT.findall(header)]
    if not 0 < len(counts) <= MAX_ORDER or [order for order, _ in counts] != list(range(1, len(counts) + 1)):
        raise SbkitError(f"{path}: its \\data\\ section doesn't say how many n-grams of each order there are",
                         hint="is the file complete?")
    levels: list[Level] = []
    words: dict[bytes, int] = {}
    at = begin
    for order, count in counts:
        start = data.find(b"\n\\%d-grams:" % order, at) + 1 or -1
        if start < 0:
            raise SbkitError(f"{path} is truncated: its section \\{order}-grams: is missing, and \\data\\ says that "
                             f"there are {count} {order}-grams", hint="download it again or write it again")
        at = data.index(b":", start) + 1
        end = data.find(b"\n\\", at)
        section = partial(_line_blocks, data, at, end if end >= 0 else len(data))
        found = sum(map(len, section()))
        if found != count:
            what = "is truncated" if found < count else "is inconsistent"
            raise SbkitError(f"{path} {what}: its section \\{order}-grams: has {found} n-grams, and \\data\\ says "
                             f"{count}", hint="download it again or write it again")
        levels.append(_level(path, order, section, words, levels))
    if end < 0 or not data.startswith(b"\n\\end\\", end):
        raise SbkitError(f"{path} is truncated: it has no \\end\\", hint="download it again or write it again")
    try:
        return NGram([word.decode("utf-8") for word in words], levels)
    except UnicodeDecodeError as error:  # such a word could never match a transcript
        raise SbkitError(f"{path}: the word {shown(error.object.decode('utf-8', 'replace'))} is not UTF-8",
                         hint="convert the file to UTF-8, for example with iconv -f latin1 -t utf-8") from None


def _line_blocks(data: bytes, at: int, end: int) -> Iterator[list[bytes]]:
    """Yield the lines between two positions in blocks: as objects, lines take several times the memory of the text."""
    while True:
        stop = data.find(b"\n", min(at + _BLOCK_BYTES, end), end) + 1 or end
        yield list(filter(bytes.strip, data[at:stop].splitlines()))
        if (at := stop) == end:
            return


def _level(path: Path, order: int, section: Callable[[], Iterator[list[bytes]]], words: dict[bytes, int],
           below: list[Level]) -> Level:
    """Read the n-grams of an order, sorted; the first order fills the vocabulary."""
    columns = [_columns(path, order, lines, words) for lines in section()]

    def shown_line(number: int) -> str:
        line = next(itertools.islice(itertools.chain.from_iterable(section()), number, None))
        return shown(line.decode("utf-8", "replace"))

    log10, backoff, ids = (np.concatenate([column[part] for column in columns]) for part in range(3))
    if order == 1:
        return Level(np.zeros(len(ids), np.int32), np.arange(len(ids), dtype=np.int32), log10, backoff)
    size, row = np.int64(len(words)), ids[:, 0]
    for level, word in zip(below[1:], ids[:, 1:-1].T, strict=True):
        if len(level.word):
            known, wanted = level.context * size + level.word, row * size + word
            at = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            row = np.where(known[at] == wanted, at, -1)
        else:
            row = np.full(len(word), -1, dtype=np.int64)
        if (row < 0).any():
            raise SbkitError(f"{path}: the {order}-gram {shown_line(int(np.flatnonzero(row < 0)[0]))} begins with "
                             f"a {order - 1}-gram that the file lacks")
    keys = row * size + ids[:, -1]
    order_of = np.argsort(keys, kind="stable")
    keys = keys[order_of]
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if len(repeated):
        raise SbkitError(f"{path}: the {order}-gram {shown_line(int(order_of[repeated[0] + 1]))} occurs twice")
    return Level(row[order_of].astype(np.int32), ids[order_of, -1].astype(np.int32), log10[order_of],
                 backoff[order_of])


def _columns(path: Path, order: int, lines: list[bytes], words: dict[bytes, int]) -> tuple[np.ndarray, ...]:
    """Parse lines into probabilities [N], backoffs [N] and word ids [N] or [N, order]."""
    fields = b" ".join(lines).split()
    width, odd = divmod(len(fields), len(lines)) if lines else (order + 1, 0)
    if odd or width not in (order + 1, order + 2):
        # Some tools omit a backoff of zero.
        rows = [line.split() for line in lines]
        for row in rows:
            if len(row) == order + 1:
                row.append(b"0")
            elif len(row) != order + 2:
                raise SbkitError(f"{path}: the line {shown(b' '.join(row).decode('utf-8', 'replace'))} is not a "
                                 f"{order}-gram with its probability")
        fields, width = [field for row in rows for field in row], order + 2
    try:
        log10 = np.array(fields[::width], dtype=np.float32)
        backoff = np.array(fields[width - 1::width], dtype=np.float32) if width == order + 2 \
            else np.zeros(len(lines), np.float32)
    except ValueError:
        log10 = backoff = np.full(len(lines), np.nan)
    if not ((log10 < _MAX_LOG10).all() and (backoff < np.inf).all()):  # False for NaN
        for line in lines:
            row = line.split()
            try:
                if not float(row[0]) < _MAX_LOG10 or (len(row) != order + 1 and not float(row[-1]) < math.inf):
                    break
            except ValueError:
                break
        else:
            line = lines[0]
        raise SbkitError(f"{path}: the line {shown(line.decode('utf-8', 'replace'))} is not a {order}-gram with its "
                         "log10 probability (at most 0) and back-off", hint="download it again or write it again")
    if order == 1:
        before = len(words)
        for word in fields[1::width]:
            words.setdefault(word, len(words))
        if len(words) - before != len(lines):
            raise SbkitError(f"{path}: a word occurs twice among the 1-grams")
        return log10, backoff, np.arange(before, len(words))
    try:
        ids = [list(map(words.__getitem__, fields[i::width])) for i in range(1, order + 1)]
    except KeyError as error:
        word = error.args[0].decode("utf-8", "replace")
        raise SbkitError(f"{path}: the word {shown(word)} is in a {order}-gram, but not among the 1-grams") from None
    return log10, backoff, np.array(ids, dtype=np.int64).T.reshape(-1, order)
