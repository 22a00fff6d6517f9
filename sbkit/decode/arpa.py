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
from typing import NamedTuple

import numpy as np

from sbkit.decode.file_errors import unreadable
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
            words = [_words(model, level.word[part])]
            rows = level.context[part]
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


_AGAIN = "download or estimate it again"


def check_exists(path: str | Path) -> None:
    """Refuse a model that isn't there, without reading it."""
    if not Path(path).exists():
        raise SbkitError("no-such-path", f"{path}: there is no such language model",
                         hint="sbkit lm estimates one from text", file=path)
    if Path(path).is_dir():
        raise SbkitError("no-such-path", f"{path} is a folder, and a language model is a file in ARPA's format",
                         hint="name the file, such as words.arpa or words.arpa.gz; sbkit lm estimates one from text",
                         file=path)


def read(path: str | Path) -> NGram:
    """Read a model, ``.gz`` or plain; raises ``SbkitError`` for a damaged file."""
    path = Path(path)
    check_exists(path)
    try:
        data = untrusted.unpack(path, _MAX_BYTES)
    except EOFError:
        raise SbkitError("damaged-lm", f"{path} is truncated: its compressed data ends too early", hint=_AGAIN,
                         file=path) from None
    except OSError as error:
        raise unreadable(path, error) from None
    begin = data.find(b"\\data\\")
    if begin < 0:
        hint = "such a file has a section \\data\\"
        if data.startswith(b"mmap lm http://kheafield.com/code"):
            hint = "it is KenLM's binary: use the ARPA file that it was made from"
        raise SbkitError("damaged-lm", f"{path} is not an ARPA language model", hint=hint, file=path)

    levels: list[Level] = []
    words: dict[bytes, int] = {}
    position = begin
    for order, count in enumerate(_counts(path, data, begin), start=1):
        start = data.find(b"\n\\%d-grams:" % order, position)
        if start < 0:
            raise SbkitError("damaged-lm", f"{path} is truncated: its section \\{order}-grams: is missing, and "
                             f"\\data\\ says that there are {count} {order}-grams", hint=_AGAIN, file=path)
        position = data.index(b":", start) + 1
        end = data.find(b"\n\\", position)
        section = partial(_line_blocks, data, position, end if end >= 0 else len(data))
        lines = sum(map(len, section()))
        if lines != count:
            what = "is truncated" if lines < count else "is inconsistent"
            raise SbkitError("damaged-lm", f"{path} {what}: its section \\{order}-grams: has {lines} n-grams, and "
                             f"\\data\\ says {count}", hint=_AGAIN, file=path)
        levels.append(_level(path, order, section, words, levels))
    if end < 0 or not data.startswith(b"\n\\end\\", end):
        raise SbkitError("damaged-lm", f"{path} is truncated: it has no \\end\\", hint=_AGAIN, file=path)
    try:
        return NGram([word.decode("utf-8") for word in words], levels)
    except UnicodeDecodeError as error:  # such a word could never match a transcript
        raise SbkitError("not-utf8", f"{path}: the word {shown(error.object.decode('utf-8', 'replace'))} is not UTF-8",
                         hint="convert the file to UTF-8, for example with iconv -f latin1 -t utf-8",
                         file=path) from None


def _counts(path: Path, data: bytes, begin: int) -> list[int]:
    """Read how many n-grams of each order the section \\data\\ promises."""
    end = data.find(b"\n\\1-grams:", begin)
    header = data[begin:end] if end >= 0 else data[begin:]
    counts = [(int(order), int(count)) for order, count in _COUNT.findall(header)]
    if not 0 < len(counts) <= MAX_ORDER or [order for order, _ in counts] != list(range(1, len(counts) + 1)):
        raise SbkitError("damaged-lm", f"{path}: its \\data\\ section doesn't say how many n-grams of each order there "
                         "are", hint=_AGAIN, file=path)
    return [count for _, count in counts]


def _line_blocks(data: bytes, begin: int, end: int) -> Iterator[list[bytes]]:
    """Yield the lines between two positions in blocks: as objects, lines take several times the memory of the text."""
    while True:
        newline = data.find(b"\n", min(begin + _BLOCK_BYTES, end), end)
        stop = newline + 1 if newline >= 0 else end
        yield list(filter(bytes.strip, data[begin:stop].splitlines()))
        if stop == end:
            return
        begin = stop


def _level(path: Path, order: int, section: Callable[[], Iterator[list[bytes]]], words: dict[bytes, int],
           below: list[Level]) -> Level:
    """Read the n-grams of an order, sorted; the first order fills the vocabulary."""
    blocks = [_columns(path, order, lines, words) for lines in section()]

    def shown_line(number: int) -> str:
        line = next(itertools.islice(itertools.chain.from_iterable(section()), number, None))
        return shown(line.decode("utf-8", "replace"))

    log10 = np.concatenate([block.log10 for block in blocks])
    backoff = np.concatenate([block.backoff for block in blocks])
    ids = np.concatenate([block.ids for block in blocks])
    if order == 1:
        return Level(np.zeros(len(ids), np.int32), np.arange(len(ids), dtype=np.int32), log10, backoff)

    # The row of each n-gram's first words in the level below, found word by word through all levels below.
    size = np.int64(len(words))
    context = ids[:, 0]
    for level, word in zip(below[1:], ids[:, 1:-1].T, strict=True):
        if len(level.word):
            known = level.context * size + level.word
            wanted = context * size + word
            rows = np.minimum(np.searchsorted(known, wanted), len(known) - 1)
            context = np.where(known[rows] == wanted, rows, -1)
        else:
            context = np.full(len(word), -1, dtype=np.int64)
        missing = np.flatnonzero(context < 0)
        if len(missing):
            raise SbkitError("damaged-lm", f"{path}: the {order}-gram {shown_line(int(missing[0]))} begins with a "
                             f"{order - 1}-gram that the file lacks", hint=_AGAIN, file=path)

    keys = context * size + ids[:, -1]
    by_key = np.argsort(keys, kind="stable")
    keys = keys[by_key]
    repeated = np.flatnonzero(keys[1:] == keys[:-1])
    if len(repeated):
        raise SbkitError("damaged-lm", f"{path}: the {order}-gram {shown_line(int(by_key[repeated[0] + 1]))} occurs "
                         "twice", hint=_AGAIN, file=path)
    return Level(context[by_key].astype(np.int32), ids[by_key, -1].astype(np.int32), log10[by_key], backoff[by_key])


class _Block(NamedTuple):
    """Some lines of a section."""

    log10: np.ndarray  # [N]
    backoff: np.ndarray  # [N]
    ids: np.ndarray  # of their words, [N] of single words and [N, order] of others


def _columns(path: Path, order: int, lines: list[bytes], words: dict[bytes, int]) -> _Block:
    """Parse lines of a section; those of the first order fill the vocabulary."""
    fields = b" ".join(lines).split()
    width, odd = divmod(len(fields), len(lines)) if lines else (order + 1, 0)
    if odd or width not in (order + 1, order + 2):
        fields = _fields_with_backoffs(path, order, lines)
        width = order + 2
    try:
        log10 = np.array(fields[::width], dtype=np.float32)
        if width == order + 2:
            backoff = np.array(fields[width - 1::width], dtype=np.float32)
        else:
            backoff = np.zeros(len(lines), np.float32)
    except ValueError:
        log10 = backoff = np.full(len(lines), np.nan)
    if not ((log10 < _MAX_LOG10).all() and (backoff < np.inf).all()):  # False for NaN
        invalid = next((line for line in lines if not _has_valid_numbers(line.split(), order)), lines[0])
        raise SbkitError("damaged-lm", f"{path}: the line {shown(invalid.decode('utf-8', 'replace'))} is not a "
                         f"{order}-gram with its log10 probability (at most 0) and back-off", hint=_AGAIN, file=path)
    if order == 1:
        before = len(words)
        for word in fields[1::width]:
            words.setdefault(word, len(words))
        if len(words) - before != len(lines):
            raise SbkitError("damaged-lm", f"{path}: a word occurs twice among the 1-grams", hint=_AGAIN, file=path)
        return _Block(log10, backoff, np.arange(before, len(words)))
    try:
        ids = [list(map(words.__getitem__, fields[i::width])) for i in range(1, order + 1)]
    except KeyError as error:
        word = error.args[0].decode("utf-8", "replace")
        raise SbkitError("damaged-lm", f"{path}: the word {shown(word)} is in a {order}-gram, but not among the "
                         "1-grams", hint=_AGAIN, file=path) from None
    return _Block(log10, backoff, np.array(ids, dtype=np.int64).T.reshape(-1, order))


def _fields_with_backoffs(path: Path, order: int, lines: list[bytes]) -> list[bytes]:
    """Split lines of which some lack a backoff, because some tools omit one of zero."""
    fields: list[bytes] = []
    for line in lines:
        row = line.split()
        if len(row) == order + 1:
            row.append(b"0")
        elif len(row) != order + 2:
            raise SbkitError("damaged-lm", f"{path}: the line {shown(b' '.join(row).decode('utf-8', 'replace'))} is "
                             f"not a {order}-gram with its probability", hint=_AGAIN, file=path)
        fields += row
    return fields


def _has_valid_numbers(row: list[bytes], order: int) -> bool:
    try:
        has_backoff = len(row) != order + 1
        return float(row[0]) < _MAX_LOG10 and (not has_backoff or float(row[-1]) < math.inf)
    except ValueError:
        return False
